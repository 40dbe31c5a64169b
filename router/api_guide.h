/* What a request wants of its tokens that has a size of its own (td_guide): from its JSON and its
 * prompt, made in the thread pool, kept as long as the request. */
#ifndef TD_ROUTER_API_GUIDE_H
#define TD_ROUTER_API_GUIDE_H

#include "common/text/bytes.h"
#include "common/text/ids.h"
#include "router/api_params.h"

/* Zeroed is empty. */
struct td_api_guide {
    struct td_guide guide;
    void *memory; /* what it points to */
};

/* `logit_bias` of `root`, the prompt's ids where the repetition penalty of `p` needs them, and the
 * grammar (borrowed, n = 0: none). Sets
 * p->sampling.guide when there is anything. 400 by name; 503 without memory. */
TD_MUST_USE td_status td_api_guide_make(const json_t *root, struct td_api_params *p,
                                        const struct td_ids *prompt, int32_t vocab,
                                        const struct td_bytes *grammar, struct td_api_guide *ret,
                                        struct td_api_error *e);
void td_api_guide_free(struct td_api_guide *g);

#endif
