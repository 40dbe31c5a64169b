/* `return_indexer_topk`: what the indexer selected for each token of one choice, as the JSON that
 * chunks and documents carry:
 *
 *   "tandem": {"indexer_topk": [{"token_index": 0, "position": 4508, "layers": [
 *       {"layer": 2, "entries": [0, 7, 8], "ranges": [[0, 3], [28, 35]]}, ...]}, ...]}
 *
 * Token i of an answer to N prompt tokens was sampled at position N + i - 1; entries are those that
 * this position attended, ascending. Entry w covers tokens 4w to 4w + 3 (its values also draw on
 * the four before); ranges are what the entries cover, first and last token, neighbours as one. */
#ifndef TD_ROUTER_TOPK_JSON_H
#define TD_ROUTER_TOPK_JSON_H

#include "common/base/sampling.h"
#include "router/json_write.h"

/* Most bytes of JSON about one token with `entries` entries in all layers. */
uint64_t td_topk_token_bytes(uint32_t entries);

struct td_topk_json {
    uint32_t n_prompt;        /* tokens */
    uint32_t next;            /* index of the next token */
    struct td_json_out ready; /* of tokens delivered, not yet written */
    struct td_json_out held;  /* of tokens that wait for token 0 */
};

void td_topk_free(struct td_topk_json *t);
/* The next token of the answer, with what was selected for it; NULL: that came by td_topk_hold, or
 * from a worker that knows no selections. */
void td_topk_add(struct td_topk_json *t, const struct td_selection *s);
/* Of token `index`, which will be delivered later. `first`: what was held before is void. */
void td_topk_hold(struct td_topk_json *t, bool first, uint32_t index, const struct td_selection *s);
/* The field "tandem" with what is ready, which is empty then. Without memory w->failed is set. */
void td_topk_write(struct td_topk_json *t, struct td_json_out *w);

#endif
