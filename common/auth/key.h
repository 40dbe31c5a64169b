/* The cluster key: a secret that every process of a cluster holds when they talk over a network,
 * and the one thing done with it, HMAC-SHA256. The arithmetic is OpenSSL's. */
#ifndef TD_COMMON_AUTH_KEY_H
#define TD_COMMON_AUTH_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum {
    TD_KEY_MIN = 32, /* bytes of the file, white space at its end not counted */
    TD_KEY_MAX = 4096,
    TD_MAC_BYTES = 32,
};

struct td_cluster_key;

/* CONFIG, with a sentence that says what to do: the file is too short or too long, or refused by
 * td_secret_read. */
TD_MUST_USE td_status td_cluster_key_load(const char *path, struct td_cluster_key **ret_key,
                                          struct td_error *err);
/* From bytes, for tests and machines under test. INVALID: too short or too long. */
TD_MUST_USE td_status td_cluster_key_make(const void *bytes, size_t len,
                                          struct td_cluster_key **ret_key, struct td_error *err);
/* Wipes it. NULL is fine. */
void td_cluster_key_free(struct td_cluster_key *key);

/* mac = HMAC-SHA256(key, label, 0 byte, bytes[len]). The label keeps proofs of different meaning
 * apart. One thread at a time per key. INTERNAL: the library failed. */
TD_MUST_USE td_status td_cluster_key_mac(const struct td_cluster_key *key, const char *label,
                                         const void *bytes, size_t len, uint8_t mac[TD_MAC_BYTES]);

#endif
