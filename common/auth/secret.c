/* Reading and comparing secrets. The arithmetic is OpenSSL's. */
#include "common/auth/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

td_status td_secret_allowed(const char *setting, const char *path, const struct stat *st, uid_t as,
                            struct td_error *err) {
    if (!S_ISREG(st->st_mode))
        return td_fail(err, TD_CONFIG, "%s %s: expected a regular file", setting, path);
    if (st->st_uid != as && st->st_uid != 0)
        return td_fail(err, TD_CONFIG, "%s %s: expected a file of user %u or root, found user %u",
                       setting, path, (unsigned)as, (unsigned)st->st_uid);
    if (st->st_mode & (S_IWGRP | S_IRWXO))
        return td_fail(err, TD_CONFIG,
                       "%s %s: expected mode 0600 or 0640, found %04o: others could read or change "
                       "what is in it (chmod 600, and make new keys if it was shared)",
                       setting, path, (unsigned)st->st_mode & 07777u);
    return TD_OK;
}

static td_status check(const char *setting, const char *path, int fd, struct td_error *err) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return td_fail(err, TD_CONFIG, "%s %s: %s", setting, path, strerror(errno));
    return td_secret_allowed(setting, path, &st, geteuid(), err);
}

td_status td_secret_read(const char *setting, const char *path, const char *how, uint8_t *bytes,
                         size_t cap, size_t *ret_n, struct td_error *err) {
    size_t n = 0;
    ssize_t got = 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return td_fail(err, TD_CONFIG, "%s %s: %s; %s", setting, path, strerror(errno), how);
    td_status st = check(setting, path, fd, err);
    while (st == TD_OK && n < cap && got != 0) {
        got = read(fd, bytes + n, cap - n);
        if (got > 0) n += (size_t)got;
        if (got < 0 && errno != EINTR)
            st = td_fail(err, TD_CONFIG, "%s %s: %s", setting, path, strerror(errno));
    }
    close(fd);
    *ret_n = n;
    return st;
}

void td_secret_wipe(void *bytes, size_t len) {
    OPENSSL_cleanse(bytes, len);
}

td_status td_secret_digest(const void *bytes, size_t len, uint8_t digest[TD_DIGEST_BYTES]) {
    return EVP_Digest(bytes, len, digest, NULL, EVP_sha256(), NULL) == 1 ? TD_OK : TD_INTERNAL;
}

bool td_secret_equal(const void *a, const void *b, size_t len) {
    return CRYPTO_memcmp(a, b, len) == 0;
}
