/* Which endpoint a request is for, and the answers that belong to none. */
#include <stdio.h>
#include <string.h>

#include "router/serve_parts.h"

void td_api_send(struct td_serve *s, struct td_http_conn *c, int status, const char *type) {
    if (s->scratch.failed) {
        struct td_api_error e;
        (void)td_api_refuse(&e, 503, NULL, NULL, "out of memory");
        td_api_error_reply(c, &e, &s->scratch);
        return;
    }
    td_http_reply(c, status, type, s->scratch.p, s->scratch.n);
}

static void models(struct td_serve *s, struct td_http_conn *c) {
    td_api_models(s, c, NULL);
}

struct route {
    const char *path; /* '*' is one segment, a last "**" all the rest */
    const char *methods;
    enum td_api_kind kind;
    void (*answer)(struct td_serve *s, struct td_http_conn *c);
    void (*answer_rest)(struct td_serve *s, struct td_http_conn *c, const char *rest);
    /* neither: it generates, as `kind` */
};

#define GET "GET, HEAD"
static const struct route routes[] = {
    {"/v1/chat/completions", "POST", TD_API_CHAT, NULL, NULL},
    {"/v1/completions", "POST", TD_API_COMPLETIONS, NULL, NULL},
    {"/v1/responses", "POST", TD_API_RESPONSES, NULL, NULL},
    {"/v1/responses/*", GET ", DELETE", 0, NULL, td_api_stored},
    {"/v1/responses/*/input_items", GET, 0, NULL, td_api_stored_items},
    {"/v1/models", GET, 0, models, NULL},
    {"/v1/models/**", GET, 0, NULL, td_api_models},
    {"/v1/messages", "POST", TD_API_MESSAGES, NULL, NULL},
    {"/v1/messages/count_tokens", "POST", 0, td_api_count_tokens, NULL},
    {"/tokenize", "POST", 0, td_api_tokenize, NULL},
    {"/detokenize", "POST", 0, td_api_detokenize, NULL},
    {"/v1/cluster", GET, 0, td_api_cluster, NULL},
    {"/v1/cluster/drain", "POST", 0, td_api_drain, NULL},
    {"/v1/cluster/resume", "POST", 0, td_api_resume, NULL},
    {"/health", GET, 0, td_api_health, NULL},
    {"/ready", GET, 0, td_api_ready, NULL},
    {"/metrics", GET, 0, td_api_metrics, NULL},
    {"/openapi.json", GET, 0, td_api_openapi, NULL},
};

/* The client's own id when it is a plain one, else ours; it goes out with the answer. */
static void request_id(struct td_serve *s, struct td_http_conn *c, char out[TD_REQUEST_ID_MAX]) {
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
    const char *given = td_http_header(c, "x-request-id");
    size_t n = given ? strlen(given) : 0;
    if (n > 0 && n < TD_REQUEST_ID_MAX && strspn(given, plain) == n)
        snprintf(out, TD_REQUEST_ID_MAX, "%s", given);
    else
        snprintf(out, TD_REQUEST_ID_MAX, "req-%08llx%08llx",
                 (unsigned long long)(s->epoch & 0xffffffff),
                 (unsigned long long)++s->next_request);
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

void td_route(void *serve, struct td_http_conn *c) {
    struct td_serve *s = serve;
    char id[TD_REQUEST_ID_MAX];
    const char *path = td_http_path(c);
    request_id(s, c, id);
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        const struct route *r = &routes[i];
        const char *rest;
        if (!matches(r->path, path, &rest)) continue;
        if (!allowed(r->methods, td_http_method(c)))
            not_allowed(s, c, r->methods);
        else if (r->answer_rest)
            r->answer_rest(s, c, rest);
        else if (r->answer)
            r->answer(s, c);
        else
            td_request_start(s, c, r->kind, id);
        return;
    }
    refuse(s, c, 404, "not_found", "no such endpoint: ", td_http_method(c), path);
}

void td_route_refused(void *serve, struct td_http_conn *c, int status, const char *sentence) {
    struct td_serve *s = serve;
    char id[TD_REQUEST_ID_MAX];
    struct td_api_error e;
    request_id(s, c, id);
    (void)td_api_refuse(&e, status, status == 413 ? "body_too_large" : NULL, NULL, "%s", sentence);
    e.retry_after_s = status == 503;
    td_api_error_reply(c, &e, &s->scratch);
}
