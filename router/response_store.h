/* Answers of the Responses API that are kept for later requests: in memory, as text, within a limit
 * of bytes and one of answers. When either is reached the oldest go. An answer is kept as what it
 * added to its conversation and holds the answer it continues, so a conversation is stored once
 * however long it gets, and one that goes on survives the eviction or deletion of its beginnings. Each
 * belongs to whoever asked: to others it does not exist.
 *
 * Used by the loop and by the thread pool: every call is safe in any thread. */
#ifndef TD_ROUTER_RESPONSE_STORE_H
#define TD_ROUTER_RESPONSE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_RESPONSE_ID_MAX = 40, TD_RESPONSE_OWNER_MAX = 64 };

/* Does not change while it is held. */
struct td_stored {
    struct td_stored *previous; /* the answer it continues; held by this one; NULL: none */
    char *input;                /* JSON array: the items of its request */
    char *document;             /* JSON object: the response */
    size_t input_n, document_n;
    uint64_t conversation_n; /* bytes of all texts from the first answer to this one */
    /* the store's */
    char id[TD_RESPONSE_ID_MAX];
    char owner[TD_RESPONSE_OWNER_MAX];
    uint32_t holders;
    struct td_stored *newer, *older, *chain;
};

struct td_response_store;

/* `bytes` bounds texts and entries together, `count` answers that can be found; both >= 1. */
TD_MUST_USE td_status td_response_store_create(uint64_t bytes, uint32_t count,
                                               struct td_response_store **ret,
                                               struct td_error *err);
/* Nobody holds an answer any more. NULL is fine. */
void td_response_store_destroy(struct td_response_store *s);

/* NULL: no such answer of this owner, or not any more. Given back with td_response_store_drop. */
struct td_stored *td_response_store_hold(struct td_response_store *s, const char *owner,
                                         const char *id);
/* NULL is fine. */
void td_response_store_drop(struct td_response_store *s, struct td_stored *e);
/* Copies what it is given; holds `previous` (may be NULL) itself. TD_NO_MEMORY; TD_TOO_LONG: the
 * conversation alone is larger than the limit. Nothing is kept then. */
TD_MUST_USE td_status td_response_store_put(struct td_response_store *s, const char *owner,
                                            const char *id, struct td_stored *previous,
                                            const char *input, size_t input_n, const char *document,
                                            size_t document_n);
/* False: no such answer of this owner. */
bool td_response_store_delete(struct td_response_store *s, const char *owner, const char *id);

struct td_response_store_counts {
    uint64_t bytes;   /* in use, those of answers that are only continued included */
    uint32_t kept;    /* can be found */
    uint64_t evicted; /* so far, for lack of room */
};
void td_response_store_counts(struct td_response_store *s, struct td_response_store_counts *ret);

#endif
