/* The Responses API on the same machinery: a request's JSON, behind the conversation that it
 * continues, becomes that of a chat request, so that there is one reading of conversations, tools
 * and limits. What has no counterpart is refused by its own name. Answers: answer_responses.c. */
#ifndef TD_ROUTER_API_RESPONSES_H
#define TD_ROUTER_API_RESPONSES_H

#include "router/api_params.h"
#include "router/json_request.h"
#include "router/response_store.h"

/* What its answer carries beside the text; made by the reading, used by the writing. */
/* Where answers are kept, for a request. */
struct td_kept {
    struct td_response_store *store; /* NULL: nowhere */
    const char *owner;               /* whose request it is; "": everybody's, where there are no keys */
    uint64_t most;                   /* bytes of a conversation that may be continued */
};

struct td_responses {
    struct td_response_store *store; /* where the answer shall be kept; NULL: nowhere */
    struct td_response_store *held;  /* of `previous` */
    char owner[TD_RESPONSE_OWNER_MAX];
    struct td_stored *previous;      /* held; the answer that it continues, or NULL */
    char *input;                     /* owned: JSON array of the request's items, each with an id */
    size_t input_n;
    struct td_json_out echo; /* the request's settings: `"key":value,...` */
    bool summary;            /* the reasoning is given as its own summary */
    /* of a stream */
    uint64_t sequence;   /* of the next event */
    uint32_t call;       /* that is open */
    uint32_t n_logprobs; /* tokens whose logprobs were written */
};

void td_responses_free(struct td_responses *r);

/* The chat request that says the same; the caller releases it.
 * *ret [id: the answer's] is to be freed, also after a failure when it is not NULL. 400 by name,
 * 404 for an answer that is not kept, 503 without memory. Any thread. */
TD_MUST_USE td_status td_api_responses_read(const json_t *root, const struct td_kept *kept,
                                            const char *id, json_t **ret_chat,
                                            struct td_responses **ret, struct td_api_error *e);
/* After the chat request was read: notes the settings that hold. 503 without memory. */
TD_MUST_USE td_status td_api_responses_echo(struct td_responses *r, const json_t *root,
                                            const struct td_api_params *p, struct td_api_error *e);
/* An error of the chat request by the names of this API. */
void td_api_responses_rename(struct td_api_error *e);

/* ---- response_items.c ---- */

/* Appends the chat messages that the items (a JSON array with ids, as below) mean. */
TD_MUST_USE td_status td_response_items_read(const json_t *items, json_t *messages,
                                             struct td_api_error *e);
/* The field `name` (a string or an array) as an array of items, each with an id made of `id`. */
TD_MUST_USE td_status td_response_items_make(const struct td_fields *f, const char *name,
                                             const char *id, json_t **ret);

#endif
