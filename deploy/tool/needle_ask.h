/* One needle prompt to a running cluster: built, sent as a user would send it, judged. */
#ifndef TD_DEPLOY_TOOL_NEEDLE_ASK_H
#define TD_DEPLOY_TOOL_NEEDLE_ASK_H

#include <stdbool.h>

#include "common/text/tokenizer.h"
#include "deploy/tool/client.h"
#include "deploy/tool/needle_text.h"

struct td_needle_target {
    const char *url;
    char model[TD_CLIENT_MODEL_MAX]; /* asked of the endpoint */
    struct td_tokenizer *tokenizer;
};

/* `tokenizer_dir` NULL: the folder that the cluster says it serves. */
TD_MUST_USE td_status td_needle_target_init(struct td_needle_target *t, const char *url,
                                            const char *tokenizer_dir, struct td_error *err);
void td_needle_target_finish(struct td_needle_target *t);

struct td_needle_result {
    bool found; /* the whole answer is the fact, and it ended by itself */
    char question[96], expected[64];
    struct td_client_answer answer;
};

/* An error means that no answer came; a wrong answer is a result. */
TD_MUST_USE td_status td_needle_ask(const struct td_needle_target *t,
                                    const struct td_needle_spec *spec, struct td_needle_result *ret,
                                    struct td_error *err);

#endif
