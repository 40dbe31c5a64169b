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
    const char *path;
    bool post;
    enum td_api_kind kind;
    void (*answer)(struct td_serve *s, struct td_http_conn *c); /* NULL: it generates, as `kind` */
};

static const struct route routes[] = {
    {"/v1/chat/completions", true, TD_API_CHAT, NULL},
    {"/v1/completions", true, TD_API_COMPLETIONS, NULL},
    {"/v1/models", false, 0, models},
    {"/v1/messages", true, TD_API_MESSAGES, NULL},
    {"/v1/messages/count_tokens", true, 0, td_api_count_tokens},
    {"/tokenize", true, 0, td_api_tokenize},
    {"/detokenize", true, 0, td_api_detokenize},
    {"/v1/cluster", false, 0, td_api_cluster},
    {"/v1/cluster/drain", true, 0, td_api_drain},
    {"/v1/cluster/resume", true, 0, td_api_resume},
    {"/health", false, 0, td_api_health},
    {"/ready", false, 0, td_api_ready},
    {"/metrics", false, 0, td_api_metrics},
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

void td_route(void *serve, struct td_http_conn *c) {
    struct td_serve *s = serve;
    char id[TD_REQUEST_ID_MAX];
    const char *path = td_http_path(c), *method = td_http_method(c);
    bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    static const char model_prefix[] = "/v1/models/";
    request_id(s, c, id);
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        if (strcmp(routes[i].path, path) != 0) continue;
        if (!(routes[i].post ? strcmp(method, "POST") == 0 : get))
            not_allowed(s, c, routes[i].post ? "POST" : "GET, HEAD");
        else if (routes[i].answer)
            routes[i].answer(s, c);
        else
            td_request_start(s, c, routes[i].kind, id);
        return;
    }
    if (strncmp(path, model_prefix, sizeof model_prefix - 1) == 0) {
        if (get)
            td_api_models(s, c, path + sizeof model_prefix - 1);
        else
            not_allowed(s, c, "GET, HEAD");
        return;
    }
    refuse(s, c, 404, "not_found", "no such endpoint: ", method, path);
}

void td_route_refused(void *serve, struct td_http_conn *c, int status, const char *sentence) {
    refuse(serve, c, status, status == 413 ? "body_too_large" : NULL, "", sentence, "");
}
