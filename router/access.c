/* See access.h. Browsers: https://fetch.spec.whatwg.org/#http-cors-protocol */
#include "router/access.h"

#include <string.h>
#include <strings.h>

/* ---- this host ---- */

const char *td_access_indirect(const struct td_http_conn *c) {
    static const char *const added[] = {"origin", "forwarded", "via", "x-forwarded-for",
                                        "x-real-ip"};
    if (!td_http_peer_is_local(c)) return "";
    for (size_t i = 0; i < sizeof added / sizeof *added; i++)
        if (td_http_header(c, added[i])) return added[i];
    return NULL;
}

/* ---- keys ---- */

/* What stands behind "Bearer ", or in x-api-key; NULL: neither. */
static const char *presented(const struct td_http_conn *c) {
    static const char scheme[] = "bearer ";
    const char *v = td_http_header(c, "authorization");
    if (v && strncasecmp(v, scheme, sizeof scheme - 1) == 0) {
        v += sizeof scheme - 1;
        return v + strspn(v, " ");
    }
    return td_http_header(c, "x-api-key");
}

td_status td_access_check(const struct td_access *a, const struct td_http_conn *c,
                          enum td_access_kind kind, struct td_api_key **ret_key,
                          struct td_api_error *e) {
    *ret_key = NULL;
    if (!a->keys || kind == TD_ACCESS_OPEN) return TD_OK;
    if (kind == TD_ACCESS_WATCH && !td_access_indirect(c)) return TD_OK;
    const char *key = presented(c);
    if (!key)
        return td_api_refuse(e, 401, "missing_api_key", NULL,
                             "expected an API key (Authorization: Bearer KEY, or x-api-key: KEY), "
                             "found none");
    *ret_key = td_api_keys_find(a->keys, key);
    if (*ret_key) return TD_OK;
    return td_api_refuse(e, 401, "invalid_api_key", NULL,
                         "the API key is none that this router knows");
}

/* ---- pages of browsers ---- */

/* scheme://host[:port], nothing behind it. */
static bool is_origin(const char *p, size_t n) {
    const char *mark = memmem(p, n, "://", 3);
    if (!mark || mark == p) return false;
    const char *host = mark + 3, *end = p + n;
    if (host == end) return false;
    for (; host < end; host++)
        if (*host <= ' ' || *host > '~' || *host == '/' || *host == '*') return false;
    return true;
}

static size_t next_origin(const char **at, const char **ret) {
    const char *p = *at + strspn(*at, " ,");
    size_t n = strcspn(p, ",");
    *ret = p;
    *at = p + n;
    while (n > 0 && p[n - 1] == ' ')
        n--;
    return n;
}

td_status td_access_origins_check(const char *origins, struct td_error *err) {
    const char *at = origins, *o;
    size_t n;
    if (strcmp(origins, "*") == 0) return TD_OK;
    while ((n = next_origin(&at, &o)) > 0)
        if (!is_origin(o, n))
            return td_fail(err, TD_CONFIG,
                           "router.cors_origins: expected * or origins such as "
                           "https://chat.example.org, separated by commas, found %.*s",
                           (int)(n < 100 ? n : 100), o);
    return TD_OK;
}

static bool listed(const char *origins, const char *origin) {
    const char *at = origins, *o;
    size_t n;
    while ((n = next_origin(&at, &o)) > 0)
        if (n == strlen(origin) && memcmp(o, origin, n) == 0) return true;
    return false;
}

/* What the answer may say to a page of this origin; NULL: nothing. */
static const char *shared_with(const struct td_access *a, const char *origin) {
    if (strcmp(a->origins, "*") == 0) return "*";
    return listed(a->origins, origin) ? origin : NULL;
}

void td_access_share(const struct td_access *a, struct td_http_conn *c) {
    const char *origin = td_http_header(c, "origin");
    if (!*a->origins) return;
    if (strcmp(a->origins, "*") != 0) td_http_add_header(c, "Vary", "Origin");
    const char *with = origin ? shared_with(a, origin) : NULL;
    if (!with) return;
    td_http_add_header(c, "Access-Control-Allow-Origin", with);
    td_http_add_header(c, "Access-Control-Expose-Headers",
                       "X-Request-Id, Retry-After, Server-Timing");
}

bool td_access_preflight(const struct td_access *a, struct td_http_conn *c, const char *methods) {
    const char *origin = td_http_header(c, "origin");
    const char *headers = td_http_header(c, "access-control-request-headers");
    if (strcmp(td_http_method(c), "OPTIONS") != 0 || !origin ||
        !td_http_header(c, "access-control-request-method") || !shared_with(a, origin))
        return false;
    td_http_add_header(c, "Access-Control-Allow-Methods", methods);
    if (headers) td_http_add_header(c, "Access-Control-Allow-Headers", headers);
    td_http_add_header(c, "Access-Control-Max-Age", "600");
    td_http_reply(c, 200, "text/plain", "", 0);
    return true;
}
