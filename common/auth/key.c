/* Reading and using the cluster key. */
#include "common/auth/key.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static td_status check_file(const char *path, const struct stat *st, struct td_error *err) {
    if (!S_ISREG(st->st_mode))
        return td_fail(err, TD_CONFIG, "cluster_key_file %s: expected a regular file", path);
    if (st->st_uid != geteuid() && st->st_uid != 0)
        return td_fail(err, TD_CONFIG,
                       "cluster_key_file %s: expected a file of user %u or root, found user %u",
                       path, (unsigned)geteuid(), (unsigned)st->st_uid);
    if (st->st_mode & (S_IWGRP | S_IRWXO))
        return td_fail(err, TD_CONFIG,
                       "cluster_key_file %s: expected mode 0600 or 0640, found %04o: others could "
                       "read or change the key (chmod 600, and make a new key if it was shared)",
                       path, (unsigned)st->st_mode & 07777u);
    return TD_OK;
}

td_status td_cluster_key_load(const char *path, struct td_cluster_key **ret_key,
                              struct td_error *err) {
    uint8_t bytes[TD_KEY_MAX + 1];
    struct stat st;
    size_t n = 0;
    ssize_t got = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return td_fail(err, TD_CONFIG, "cluster_key_file %s: %s; %s", path, strerror(errno), how);
    td_status status = TD_OK;
    if (fstat(fd, &st) != 0)
        status = td_fail(err, TD_CONFIG, "cluster_key_file %s: %s", path, strerror(errno));
    if (status == TD_OK) status = check_file(path, &st, err);
    do {
        got = status == TD_OK ? read(fd, bytes + n, sizeof bytes - n) : 0;
        if (got > 0) n += (size_t)got;
    } while (n < sizeof bytes && (got > 0 || (got < 0 && errno == EINTR)));
    if (status == TD_OK && got < 0)
        status = td_fail(err, TD_CONFIG, "cluster_key_file %s: %s", path, strerror(errno));
    close(fd);
    while (n > 0 && n <= TD_KEY_MAX && isspace(bytes[n - 1]))
        n--;
    if (status == TD_OK && (n < TD_KEY_MIN || n > TD_KEY_MAX))
        status = td_fail(err, TD_CONFIG,
                         "cluster_key_file %s: expected a key of %d to %d bytes, found %zu%s; %s",
                         path, TD_KEY_MIN, TD_KEY_MAX, n, n > TD_KEY_MAX ? " or more" : "", how);
    if (status == TD_OK) status = td_cluster_key_make(bytes, n, ret_key, err);
    OPENSSL_cleanse(bytes, sizeof bytes);
    return status;
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

bool td_secret_equal(const void *a, const void *b, size_t len) {
    return CRYPTO_memcmp(a, b, len) == 0;
}
