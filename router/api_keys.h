/* Clients' keys: who may ask, and how much. A pure table: text and times go in, verdicts come out.
 *
 * A line per key: NAME KEY [requests=N] [per_minute=N]; # begins a comment. NAME is what logs and
 * metrics say. `requests` bounds what runs of a key at a time; of `per_minute` a whole minute's
 * worth may come at once, after that one each 60/N seconds. Of keys only digests are kept. */
#ifndef TD_ROUTER_API_KEYS_H
#define TD_ROUTER_API_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/auth/secret.h"
#include "common/base/list.h"
#include "router/json_write.h"

enum {
    TD_API_KEY_MIN = 16, /* characters of a key */
    TD_API_KEY_MAX = 256,
    TD_API_KEY_NAME_MAX = 64, /* with its terminator */
    TD_API_KEYS_MAX = 4096,
    TD_API_KEYS_BYTES = 1 << 20, /* of the file */
};

struct td_api_keys;

/* One key; lives while a request holds it, also when it has left the file meanwhile. */
struct td_api_key {
    struct td_link link;
    char name[TD_API_KEY_NAME_MAX];
    uint8_t digest[TD_DIGEST_BYTES];
    uint32_t requests_max, per_minute_max; /* 0: no limit */
    uint32_t running;
    bool removed;        /* freed when nothing runs */
    uint64_t full_at_ns; /* when a whole minute's worth is free again */
    uint64_t taken, refused;
};

/* No key yet: nobody is let in. */
TD_MUST_USE td_status td_api_keys_create(struct td_api_keys **ret, struct td_error *err);
/* NULL is fine. No request may hold a key. */
void td_api_keys_destroy(struct td_api_keys *k);

/* Takes the keys of `text` [n] instead of those before; a key of the same name keeps its counts.
 * `source` is for sentences. CONFIG with file and line (never the key itself): malformed, a name or
 * key twice, no key at all; nothing has changed then. */
TD_MUST_USE td_status td_api_keys_read(struct td_api_keys *k, const char *source, const char *text,
                                       size_t n, struct td_error *err);
/* The same from router.api_keys_file, which must be as td_secret_read wants it. */
TD_MUST_USE td_status td_api_keys_load(struct td_api_keys *k, const char *path,
                                       struct td_error *err);
uint32_t td_api_keys_count(const struct td_api_keys *k);

/* The key that a client presents, or NULL. Takes as long whichever it is, and if it is none. */
struct td_api_key *td_api_keys_find(const struct td_api_keys *k, const char *presented);

/* Whom what a request leaves behind belongs to: the key's name, so that a key that is changed under its
 * name goes on; "" without a key. */
static inline const char *td_api_key_owner(const struct td_api_key *key) {
    return key ? key->name : "";
}

/* One more request of this key begins; td_api_key_give when it ends. BUSY with a sentence and the
 * seconds after which it makes sense to try again: a limit is reached. */
TD_MUST_USE td_status td_api_key_take(struct td_api_key *key, uint64_t now_ns,
                                      uint32_t *ret_retry_s, struct td_error *err);
void td_api_key_give(struct td_api_key *key);

/* Appends their metrics. */
void td_api_keys_metrics(const struct td_api_keys *k, struct td_json_out *w);

#endif
