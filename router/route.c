/* Which endpoint a request is for, and the answers that belong to none. */
#include <stdio.h>
#include <string.h>

#include "common/base/put.h"
#include "router/api_anthropic.h"
#include "router/serve_parts.h"

void td_api_send(struct td_serve *s, struct td_http_conn *c, int status, const char *type) {
    if (s->scratch.failed) {
        struct td_api_error e;
        (void)td_api_no_memory(&e);
        td_api_error_reply(c, &e, &s->scratch);
        return;
    }
    td_http_reply(c, status, type, s->scratch.p, s->scratch.n);
}

static void models(struct td_serve *s, struct td_http_conn *c) {
    td_api_models(s, c, NULL);
}

static void model(struct td_serve *s, struct td_http_conn *c, const char *name,
                  const struct td_api_key *key) {
    (void)key;
    td_api_models(s, c, name);
}

struct route {
    const char *path; /* '*' is one segment, a last "**" all the rest */
    const char *methods;
    enum td_api_kind kind;
    void (*answer)(struct td_serve *s, struct td_http_conn *c);
    void (*answer_rest)(struct td_serve *s, struct td_http_conn *c, const char *rest,
                        const struct td_api_key *key);
    /* neither: it generates, as `kind` */
    enum td_access_kind access;
};

#define GET "GET, HEAD"
static const struct route routes[] = {
    {"/v1/chat/completions", "POST", TD_API_CHAT, NULL, NULL, TD_ACCESS_KEY},
    {"/v1/completions", "POST", TD_API_COMPLETIONS, NULL, NULL, TD_ACCESS_KEY},
    {"/v1/responses", "POST", TD_API_RESPONSES, NULL, NULL, TD_ACCESS_KEY},
    {"/v1/responses/*", GET ", DELETE", 0, NULL, td_api_stored, TD_ACCESS_KEY},
    {"/v1/responses/*/input_items", GET, 0, NULL, td_api_stored_items, TD_ACCESS_KEY},
    {"/v1/models", GET, 0, models, NULL, TD_ACCESS_KEY},
    {"/v1/models/**", GET, 0, NULL, model, TD_ACCESS_KEY},
    {"/v1/messages", "POST", TD_API_MESSAGES, NULL, NULL, TD_ACCESS_KEY},
    {"/v1/messages/count_tokens", "POST", 0, td_api_count_tokens, NULL, TD_ACCESS_KEY},
    {"/tokenize", "POST", 0, td_api_tokenize, NULL, TD_ACCESS_KEY},
    {"/detokenize", "POST", 0, td_api_detokenize, NULL, TD_ACCESS_KEY},
    {"/v1/cluster", GET, 0, td_api_cluster, NULL, TD_ACCESS_WATCH},
    {"/v1/cluster/drain", "POST", 0, td_api_drain, NULL, TD_ACCESS_WATCH},
    {"/v1/cluster/resume", "POST", 0, td_api_resume, NULL, TD_ACCESS_WATCH},
    {"/health", GET, 0, td_api_health, NULL, TD_ACCESS_OPEN},
    {"/ready", GET, 0, td_api_ready, NULL, TD_ACCESS_OPEN},
    {"/metrics", GET, 0, td_api_metrics, NULL, TD_ACCESS_WATCH},
    {"/openapi.json", GET, 0, td_api_openapi, NULL, TD_ACCESS_OPEN},
};

/* The client's own id when it is a plain one, else ours; it goes out with the answer. */
static void request_id(struct td_serve *s, struct td_http_conn *c, char out[TD_REQUEST_ID_MAX]) {
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
    const char *given = td_http_header(c, "x-request-id");
    size_t n = given ? strlen(given) : 0;
    if (n > 0 && n < TD_REQUEST_ID_MAX && strspn(given, plain) == n) {
        *td_put(out, given) = 0;
    } else {
        char *at = td_put_hex(td_put(out, "req-"), s->epoch & 0xffffffff, 8);
        *td_put_hex(at, ++s->next_request, 8) = 0;
    }
    td_http_add_header(c, "X-Request-Id", out);
}

static void refuse(struct td_serve *s, struct td_http_conn *c, int status, const char *code,
                   const char *fmt, const char *a, const char *b) {
    struct td_api_error e;
    char text[300];
    snprintf(text, sizeof text, "%s%.100s%s%.100s", fmt, a, *b ? " " : "", b);
    (void)td_api_refuse(&e, status, code, NULL, "%s", text);
    td_api_error_reply(c, &e, &s->scratch);
}

static void not_allowed(struct td_serve *s, struct td_http_conn *c, const char *allow) {
    td_http_add_header(c, "Allow", allow);
    refuse(s, c, 405, "method_not_allowed", "method not allowed: ", td_http_method(c),
           td_http_path(c));
}

/* Of a list "A, B". */
static bool allowed(const char *methods, const char *method) {
    size_t n = strlen(method);
    for (const char *at = methods; (at = strstr(at, method)); at += n)
        if ((at == methods || at[-1] == ' ') && (at[n] == 0 || at[n] == ',')) return true;
    return false;
}

/* *ret_rest: what the star of the pattern stands for begins there. */
static bool matches(const char *pattern, const char *path, const char **ret_rest) {
    size_t n = strcspn(pattern, "*");
    *ret_rest = path + n;
    if (!pattern[n]) return strcmp(pattern, path) == 0;
    if (strncmp(pattern, path, n) != 0 || !path[n]) return false;
    if (pattern[n + 1] == '*') return true;
    size_t segment = strcspn(path + n, "/");
    return segment > 0 && strcmp(pattern + n + 1, path + n + segment) == 0;
}

static void refuse_access(struct td_serve *s, struct td_http_conn *c, const char *path,
                          const struct td_api_error *e) {
    static const char messages[] = "/v1/messages";
    td_http_add_header(c, "WWW-Authenticate", "Bearer");
    if (strncmp(path, messages, sizeof messages - 1) == 0)
        td_api_anthropic_error_reply(c, e, &s->scratch);
    else
        td_api_error_reply(c, e, &s->scratch);
}

static void answer(struct td_serve *s, struct td_http_conn *c, const struct route *r,
                   const char *rest, const char *id) {
    struct td_api_error e;
    struct td_api_key *key;
    if (td_access_preflight(&s->access, c, r->methods)) return;
    if (!allowed(r->methods, td_http_method(c)))
        not_allowed(s, c, r->methods);
    else if (td_access_check(&s->access, c, r->access, &key, &e) != TD_OK)
        refuse_access(s, c, r->path, &e);
    else if (r->answer_rest)
        r->answer_rest(s, c, rest, key);
    else if (r->answer)
        r->answer(s, c);
    else
        td_request_start(s, c, r->kind, id, key);
}

void td_route(void *serve, struct td_http_conn *c) {
    struct td_serve *s = serve;
    char id[TD_REQUEST_ID_MAX];
    const char *path = td_http_path(c), *rest;
    request_id(s, c, id);
    td_access_share(&s->access, c);
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        if (!matches(routes[i].path, path, &rest)) continue;
        answer(s, c, &routes[i], rest, id);
        return;
    }
    refuse(s, c, 404, "not_found", "no such endpoint: ", td_http_method(c), path);
}

void td_route_refused(void *serve, struct td_http_conn *c, int status, const char *sentence) {
    struct td_serve *s = serve;
    char id[TD_REQUEST_ID_MAX];
    struct td_api_error e;
    request_id(s, c, id);
    td_access_share(&s->access, c);
    (void)td_api_refuse(&e, status, status == 413 ? "body_too_large" : NULL, NULL, "%s", sentence);
    e.retry_after_s = status == 503;
    td_api_error_reply(c, &e, &s->scratch);
}
