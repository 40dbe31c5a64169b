/* Reading and using the cluster key. */
#include "common/auth/key.h"

#include <ctype.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <stdlib.h>
#include <string.h>

#include "common/auth/secret.h"

struct td_cluster_key {
    EVP_MAC_CTX *keyed; /* after init with the key; duplicated for each use */
};

static const char how[] = "make one with: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; "
                          "and copy it to every host";

td_status td_cluster_key_make(const void *bytes, size_t len, struct td_cluster_key **ret_key,
                              struct td_error *err) {
    if (len < TD_KEY_MIN || len > TD_KEY_MAX)
        return td_fail(err, TD_INVALID, "cluster key: expected %d to %d bytes, found %zu",
                       TD_KEY_MIN, TD_KEY_MAX, len);
    struct td_cluster_key *key = calloc(1, sizeof *key);
    if (!key) return td_fail(err, TD_NO_MEMORY, "no memory for the cluster key");
    char digest[] = "SHA256";
    OSSL_PARAM params[] = {OSSL_PARAM_utf8_string("digest", digest, sizeof digest - 1),
                           OSSL_PARAM_END};
    EVP_MAC *hmac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    if (hmac) key->keyed = EVP_MAC_CTX_new(hmac);
    EVP_MAC_free(hmac);
    if (!key->keyed || EVP_MAC_init(key->keyed, bytes, len, params) != 1) {
        td_cluster_key_free(key);
        return td_fail(err, TD_INTERNAL, "cluster key: OpenSSL offers no HMAC-SHA256");
    }
    *ret_key = key;
    return TD_OK;
}

void td_cluster_key_free(struct td_cluster_key *key) {
    if (!key) return;
    EVP_MAC_CTX_free(key->keyed); /* cleanses the key */
    free(key);
}

td_status td_cluster_key_load(const char *path, struct td_cluster_key **ret_key,
                              struct td_error *err) {
    uint8_t bytes[TD_KEY_MAX + 1];
    size_t n = 0;
    td_status st = td_secret_read("cluster_key_file", path, how, bytes, sizeof bytes, &n, err);
    while (n > 0 && n <= TD_KEY_MAX && isspace(bytes[n - 1]))
        n--;
    if (st == TD_OK && (n < TD_KEY_MIN || n > TD_KEY_MAX))
        st = td_fail(err, TD_CONFIG,
                     "cluster_key_file %s: expected a key of %d to %d bytes, found %zu%s; %s", path,
                     TD_KEY_MIN, TD_KEY_MAX, n, n > TD_KEY_MAX ? " or more" : "", how);
    if (st == TD_OK) st = td_cluster_key_make(bytes, n, ret_key, err);
    td_secret_wipe(bytes, sizeof bytes);
    return st;
}

td_status td_cluster_key_mac(const struct td_cluster_key *key, const char *label, const void *bytes,
                             size_t len, uint8_t mac[TD_MAC_BYTES]) {
    size_t out = 0;
    EVP_MAC_CTX *c = EVP_MAC_CTX_dup(key->keyed);
    bool ok = c && EVP_MAC_update(c, (const unsigned char *)label, strlen(label) + 1) == 1 &&
              EVP_MAC_update(c, bytes, len) == 1 &&
              EVP_MAC_final(c, mac, &out, TD_MAC_BYTES) == 1 && out == TD_MAC_BYTES;
    EVP_MAC_CTX_free(c);
    return ok ? TD_OK : TD_INTERNAL;
}
