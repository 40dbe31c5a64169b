/* See api_keys.h. */
#include "router/api_keys.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MINUTE_NS 60000000000ull

struct td_api_keys {
    struct td_link keys;
    uint32_t n;
};

td_status td_api_keys_create(struct td_api_keys **ret, struct td_error *err) {
    struct td_api_keys *k = calloc(1, sizeof *k);
    if (!k) return td_fail(err, TD_NO_MEMORY, "clients' keys: out of memory");
    td_list_init(&k->keys);
    *ret = k;
    return TD_OK;
}

static void free_key(struct td_api_key *key) {
    td_list_remove(&key->link);
    free(key);
}

static void free_all(struct td_link *keys) {
    TD_LIST_EACH_SAFE (keys, it, tmp) {
        free_key(TD_CONTAINER(it, struct td_api_key, link));
    }
}

void td_api_keys_destroy(struct td_api_keys *k) {
    if (!k) return;
    free_all(&k->keys);
    free(k);
}

uint32_t td_api_keys_count(const struct td_api_keys *k) {
    return k->n;
}

/* ---- the file ---- */

struct reader {
    const char *source;
    unsigned line;
    struct td_link *keys;
    struct td_error *err;
};

static td_status wrong(const struct reader *r, const char *expected) {
    return td_fail(r->err, TD_CONFIG, "%s:%u: expected %s", r->source, r->line, expected);
}

/* The next word of [*at, end) that white space ends; 0 bytes: there is none. */
static size_t next_word(const char **at, const char *end, const char **ret) {
    const char *p = *at;
    while (p < end && (*p == ' ' || *p == '\t'))
        p++;
    *ret = p;
    while (p < end && *p != ' ' && *p != '\t')
        p++;
    *at = p;
    return (size_t)(p - *ret);
}

static td_status read_limit(const struct reader *r, struct td_api_key *key, const char *w,
                            size_t n) {
    static const char expected[] = "requests=N or per_minute=N with N of 1 to 1000000";
    const char *eq = memchr(w, '=', n);
    uint32_t v = 0, *to = NULL;
    size_t name = eq ? (size_t)(eq - w) : n;
    if (name == 8 && memcmp(w, "requests", name) == 0) to = &key->requests_max;
    if (name == 10 && memcmp(w, "per_minute", name) == 0) to = &key->per_minute_max;
    if (!to || !eq || n - name < 2 || n - name > 8 || *to) return wrong(r, expected);
    for (const char *p = eq + 1; p < w + n; p++) {
        if (*p < '0' || *p > '9') return wrong(r, expected);
        v = v * 10 + (uint32_t)(*p - '0');
    }
    if (v == 0 || v > 1000000) return wrong(r, expected);
    *to = v;
    return TD_OK;
}

static bool printable(const char *w, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (w[i] <= ' ' || w[i] > '~') return false;
    return true;
}

static td_status read_words(const struct reader *r, struct td_api_key *key, const char *at,
                            const char *end) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
    const char *w;
    size_t n = next_word(&at, end, &w);
    if (n >= sizeof key->name) return wrong(r, "a name of at most 63 characters, then a key");
    memcpy(key->name, w, n);
    if (strspn(key->name, plain) != n)
        return wrong(r, "a name of letters, digits and -_. in front of the key");
    n = next_word(&at, end, &w);
    if (n < TD_API_KEY_MIN || n > TD_API_KEY_MAX || !printable(w, n))
        return wrong(r, "a key of 16 to 256 printable characters behind the name (head -c 24 "
                        "/dev/urandom | base64)");
    TD_TRY(td_secret_digest(w, n, key->digest));
    while ((n = next_word(&at, end, &w)) > 0)
        TD_TRY(read_limit(r, key, w, n));
    return TD_OK;
}

static td_status check_new(const struct reader *r, const struct td_api_key *key) {
    TD_LIST_EACH (r->keys, it) {
        const struct td_api_key *other = TD_CONTAINER(it, struct td_api_key, link);
        if (strcmp(other->name, key->name) == 0) return wrong(r, "another name: this one was used");
        if (td_secret_equal(other->digest, key->digest, sizeof key->digest))
            return wrong(r, "another key: this one was used");
    }
    return TD_OK;
}

static td_status read_line(const struct reader *r, const char *at, const char *end) {
    const char *hash = memchr(at, '#', (size_t)(end - at)), *w;
    /* Only at a word's beginning: a key may hold one. */
    while (hash && hash > at && hash[-1] != ' ' && hash[-1] != '\t')
        hash = memchr(hash + 1, '#', (size_t)(end - hash - 1));
    if (hash) end = hash;
    if (end > at && end[-1] == '\r') end--;
    const char *probe = at;
    if (next_word(&probe, end, &w) == 0) return TD_OK;
    struct td_api_key *key = calloc(1, sizeof *key);
    if (!key) return td_fail(r->err, TD_NO_MEMORY, "%s: out of memory", r->source);
    td_list_init(&key->link);
    td_status st = read_words(r, key, at, end);
    if (st == TD_OK) st = check_new(r, key);
    if (st == TD_OK)
        td_list_push_back(r->keys, &key->link);
    else
        free_key(key);
    return st;
}

static td_status read_lines(const char *source, const char *text, size_t n, struct td_link *keys,
                            uint32_t *ret_n, struct td_error *err) {
    struct reader r = {.source = source, .keys = keys, .err = err};
    const char *at = text, *end = text + n;
    while (at < end) {
        const char *eol = memchr(at, '\n', (size_t)(end - at));
        if (!eol) eol = end;
        r.line++;
        TD_TRY(read_line(&r, at, eol));
        at = eol + (eol < end);
    }
    *ret_n = 0;
    TD_LIST_EACH (keys, it) {
        ++*ret_n;
    }
    if (*ret_n == 0 || *ret_n > TD_API_KEYS_MAX)
        return td_fail(err, TD_CONFIG, "%s: expected 1 to %d lines NAME KEY, found %u", source,
                       TD_API_KEYS_MAX, *ret_n);
    return TD_OK;
}

static struct td_api_key *named(struct td_link *keys, const char *name) {
    TD_LIST_EACH (keys, it) {
        struct td_api_key *key = TD_CONTAINER(it, struct td_api_key, link);
        if (!key->removed && strcmp(key->name, name) == 0) return key;
    }
    return NULL;
}

/* Requests hold keys by their address, so the old ones stay and take what is new. */
static void replace(struct td_api_keys *k, struct td_link *fresh) {
    TD_LIST_EACH_SAFE (&k->keys, it, tmp) {
        struct td_api_key *old = TD_CONTAINER(it, struct td_api_key, link);
        struct td_api_key *now = old->removed ? NULL : named(fresh, old->name);
        old->removed = !now;
        if (now) {
            memcpy(old->digest, now->digest, sizeof old->digest);
            old->requests_max = now->requests_max;
            old->per_minute_max = now->per_minute_max;
            free_key(now);
        } else if (old->running == 0) {
            free_key(old);
        }
    }
    TD_LIST_EACH_SAFE (fresh, it, tmp) {
        td_list_remove(it);
        td_list_push_back(&k->keys, it);
    }
}

td_status td_api_keys_read(struct td_api_keys *k, const char *source, const char *text, size_t n,
                           struct td_error *err) {
    struct td_link fresh;
    uint32_t count = 0;
    td_list_init(&fresh);
    td_status st = read_lines(source, text, n, &fresh, &count, err);
    if (st == TD_OK) {
        k->n = count;
        replace(k, &fresh);
    }
    free_all(&fresh);
    return st;
}

td_status td_api_keys_load(struct td_api_keys *k, const char *path, struct td_error *err) {
    size_t n = 0, cap = TD_API_KEYS_BYTES;
    char source[300];
    uint8_t *text = malloc(cap);
    if (!text) return td_fail(err, TD_NO_MEMORY, "clients' keys: out of memory");
    snprintf(source, sizeof source, "router.api_keys_file %.250s", path);
    td_status st = td_secret_read("router.api_keys_file", path,
                                  "lines NAME KEY, with a key of head -c 24 /dev/urandom | base64",
                                  text, cap, &n, err);
    if (st == TD_OK && n == cap)
        st = td_fail(err, TD_CONFIG, "%s: expected less than %zu bytes", source, cap);
    if (st == TD_OK) st = td_api_keys_read(k, source, (const char *)text, n, err);
    td_secret_wipe(text, cap);
    free(text);
    return st;
}

/* ---- use ---- */

struct td_api_key *td_api_keys_find(const struct td_api_keys *k, const char *presented) {
    uint8_t digest[TD_DIGEST_BYTES];
    struct td_api_key *found = NULL;
    size_t n = strnlen(presented, TD_API_KEY_MAX + 1);
    if (n > TD_API_KEY_MAX || td_secret_digest(presented, n, digest) != TD_OK) return NULL;
    TD_LIST_EACH (&k->keys, it) {
        struct td_api_key *key = TD_CONTAINER(it, struct td_api_key, link);
        if (td_secret_equal(key->digest, digest, sizeof digest) && !key->removed) found = key;
    }
    return found;
}

static td_status refuse(struct td_api_key *key, td_status st) {
    key->refused++;
    return st;
}

td_status td_api_key_take(struct td_api_key *key, uint64_t now_ns, uint32_t *ret_retry_s,
                          struct td_error *err) {
    if (key->requests_max && key->running >= key->requests_max) {
        *ret_retry_s = 1;
        return refuse(key,
                      td_fail(err, TD_BUSY,
                              "%u requests of key %s are in flight, its limit is %u; try again "
                              "later",
                              key->running, key->name, key->requests_max));
    }
    if (key->per_minute_max) {
        uint64_t each = MINUTE_NS / key->per_minute_max;
        uint64_t at = key->full_at_ns > now_ns ? key->full_at_ns : now_ns;
        if (at - now_ns > MINUTE_NS - each) {
            uint64_t wait = at - now_ns - (MINUTE_NS - each);
            *ret_retry_s = (uint32_t)((wait + 999999999u) / 1000000000u);
            return refuse(key, td_fail(err, TD_BUSY,
                                       "key %s has used its %u requests per minute; try again in "
                                       "%u s",
                                       key->name, key->per_minute_max, *ret_retry_s));
        }
        key->full_at_ns = at + each;
    }
    key->running++;
    key->taken++;
    return TD_OK;
}

void td_api_key_give(struct td_api_key *key) {
    if (--key->running == 0 && key->removed) free_key(key);
}

void td_api_keys_metrics(const struct td_api_keys *k, struct td_json_out *w) {
    char line[200];
    static const char head[] =
        "# HELP tandem_key_requests_total Requests by key: taken, or refused by a limit of the "
        "key.\n# TYPE tandem_key_requests_total counter\n";
    td_json_raw(w, head, sizeof head - 1);
    TD_LIST_EACH (&k->keys, it) {
        const struct td_api_key *key = TD_CONTAINER(it, struct td_api_key, link);
        if (key->removed) continue;
        int n = snprintf(line, sizeof line,
                         "tandem_key_requests_total{key=\"%s\",result=\"taken\"} %llu\n"
                         "tandem_key_requests_total{key=\"%s\",result=\"refused\"} %llu\n",
                         key->name, (unsigned long long)key->taken, key->name,
                         (unsigned long long)key->refused);
        td_json_raw(w, line, (size_t)n);
    }
}
