/* libcurl underneath; server-sent events are read line by line as they come, since the time of
 * the first token is one of the answers. */
#include "deploy/tool/client.h"

#include <curl/curl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/auth/secret.h"
#include "common/base/clock.h"

enum { BODY_MAX = 64 << 20, LINE_MAX_BYTES = 1 << 20 };

static char authorization[300]; /* header; "": no key */

td_status td_client_use_key(const char *path, struct td_error *err) {
    uint8_t key[258];
    size_t n = 0;
    TD_TRY(td_secret_read("--key-file", path, "expected a file with an API key", key, sizeof key,
                          &n, err));
    while (n > 0 && key[n - 1] <= ' ')
        n--;
    for (size_t i = 0; i < n; i++)
        if (key[i] <= ' ' || key[i] > '~') n = 0;
    if (n == 0 || n == sizeof key)
        return td_fail(err, TD_CONFIG, "--key-file %s: expected one line with an API key", path);
    snprintf(authorization, sizeof authorization, "Authorization: Bearer %.*s", (int)n,
             (const char *)key);
    td_secret_wipe(key, sizeof key);
    return TD_OK;
}

static struct curl_slist *make_headers(bool json) {
    struct curl_slist *l = NULL;
    if (json) l = curl_slist_append(l, "Content-Type: application/json");
    return *authorization ? curl_slist_append(l, authorization) : l;
}

struct buffer {
    char *data;
    size_t len, cap;
};

static bool buffer_add(struct buffer *b, const char *data, size_t n, size_t max) {
    if (n > max - b->len) return false;
    if (b->len + n + 1 > b->cap) {
        size_t cap = b->cap ? b->cap : 4096;
        while (cap < b->len + n + 1)
            cap *= 2;
        char *grown = realloc(b->data, cap);
        if (!grown) return false;
        b->data = grown;
        b->cap = cap;
    }
    memcpy(b->data + b->len, data, n);
    b->len += n;
    b->data[b->len] = '\0';
    return true;
}

static size_t on_body(char *data, size_t size, size_t n, void *user) {
    return buffer_add(user, data, size * n, BODY_MAX) ? size * n : 0;
}

static void join_url(char *out, size_t cap, const char *url, const char *path) {
    size_t n = strlen(url);
    while (n && url[n - 1] == '/')
        n--;
    snprintf(out, cap, "%.*s%s", (int)n, url, path);
}

/* GET when `json` is NULL. */
static td_status ask(const char *url, const char *path, const char *json, long timeout_ms,
                     json_t **ret, long *ret_http, struct td_error *err) {
    char full[1024];
    struct curl_slist *headers = make_headers(json);
    join_url(full, sizeof full, url, path);
    CURL *c = curl_easy_init();
    if (!c) return td_fail(err, TD_NO_MEMORY, "HTTP client: out of memory");
    struct buffer body = {0};
    curl_easy_setopt(c, CURLOPT_URL, full);
    curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, timeout_ms);
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_PROXY, ""); /* never one of the environment's */
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, &body);
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    if (json) curl_easy_setopt(c, CURLOPT_POSTFIELDS, json);
    CURLcode rc = curl_easy_perform(c);
    long http = 0;
    curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &http);
    curl_easy_cleanup(c);
    curl_slist_free_all(headers);
    td_status st = TD_OK;
    if (rc != CURLE_OK)
        st = td_fail(err, TD_UNREACHABLE, "%s: %s", full, curl_easy_strerror(rc));
    else {
        json_error_t je;
        json_t *j = json_loadb(body.data ? body.data : "", body.len, 0, &je);
        if (j) {
            *ret = j;
            *ret_http = http;
        } else
            st = td_fail(err, TD_FORMAT, "%s: expected JSON, found (HTTP %ld) '%.80s'", full, http,
                         body.data ? body.data : "");
    }
    free(body.data);
    return st;
}

td_status td_client_get(const char *url, const char *path, long timeout_ms, json_t **ret,
                        long *ret_http, struct td_error *err) {
    return ask(url, path, NULL, timeout_ms, ret, ret_http, err);
}

td_status td_client_post(const char *url, const char *path, const char *json, long timeout_ms,
                         json_t **ret, long *ret_http, struct td_error *err) {
    return ask(url, path, json, timeout_ms, ret, ret_http, err);
}

const char *td_client_message(const json_t *body, long http, char buf[300]) {
    const char *m = json_string_value(json_object_get(json_object_get(body, "error"), "message"));
    if (m)
        snprintf(buf, 300, "%s", m);
    else
        snprintf(buf, 300, "HTTP %ld", http);
    return buf;
}

struct stream {
    struct td_client_answer *a;
    struct buffer line, other; /* other: a body that is no event stream, i.e. an error */
    uint64_t start_ns;
    bool done, failed;
    char error[300];
};

static void take_error(struct stream *s, const json_t *event) {
    const char *m = json_string_value(json_object_get(json_object_get(event, "error"), "message"));
    s->failed = true;
    snprintf(s->error, sizeof s->error, "%s", m ? m : "an error without a message");
}

static void take_event(struct stream *s, const json_t *event) {
    if (json_object_get(event, "error")) {
        take_error(s, event);
        return;
    }
    const json_t *choice = json_array_get(json_object_get(event, "choices"), 0);
    const char *text =
        json_string_value(json_object_get(json_object_get(choice, "delta"), "content"));
    if (text && *text) {
        if (s->a->first_s == 0) s->a->first_s = (double)(td_now_ns() - s->start_ns) / 1e9;
        size_t n = strlen(s->a->text);
        snprintf(s->a->text + n, sizeof s->a->text - n, "%s", text);
    }
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    if (finish) snprintf(s->a->finish, sizeof s->a->finish, "%s", finish);
    const json_t *usage = json_object_get(event, "usage");
    if (json_is_object(usage)) {
        s->a->prompt_tokens = (uint32_t)json_integer_value(json_object_get(usage, "prompt_tokens"));
        s->a->completion_tokens =
            (uint32_t)json_integer_value(json_object_get(usage, "completion_tokens"));
    }
}

static void take_line(struct stream *s, char *line, size_t n) {
    while (n && (line[n - 1] == '\r' || line[n - 1] == '\n'))
        line[--n] = '\0';
    if (n < 6 || memcmp(line, "data: ", 6) != 0) {
        if (n && line[0] != ':') (void)buffer_add(&s->other, line, n, BODY_MAX);
        return;
    }
    if (strcmp(line + 6, "[DONE]") == 0) {
        s->done = true;
        return;
    }
    json_t *event = json_loadb(line + 6, n - 6, 0, NULL);
    if (event) take_event(s, event);
    json_decref(event);
}

static size_t on_stream(char *data, size_t size, size_t n, void *user) {
    struct stream *s = user;
    size_t len = size * n;
    if (!buffer_add(&s->line, data, len, LINE_MAX_BYTES)) return 0;
    size_t at = 0;
    for (char *end; (end = memchr(s->line.data + at, '\n', s->line.len - at));) {
        size_t stop = (size_t)(end - s->line.data);
        *end = '\0';
        take_line(s, s->line.data + at, stop - at);
        at = stop + 1;
    }
    memmove(s->line.data, s->line.data + at, s->line.len - at);
    s->line.len -= at;
    return len;
}

static td_status judge(struct stream *s, CURLcode rc, long http, const char *url,
                       struct td_error *err) {
    /* After an error frame the connection just ends, so libcurl has something to say as well. */
    if (http == 200 && s->failed)
        return td_fail(err, TD_INTERNAL, "%s: the stream ended in an error: %s", url, s->error);
    if (rc != CURLE_OK) return td_fail(err, TD_UNREACHABLE, "%s: %s", url, curl_easy_strerror(rc));
    if (http != 200) {
        (void)buffer_add(&s->other, s->line.data ? s->line.data : "", s->line.len, BODY_MAX);
        json_t *j = json_loadb(s->other.data ? s->other.data : "", s->other.len, 0, NULL);
        if (j) take_error(s, j);
        json_decref(j);
        return td_fail(err, http == 429 || http == 503 ? TD_BUSY : TD_INVALID, "%s: HTTP %ld: %s",
                       url, http, s->failed ? s->error : "no message");
    }
    if (!s->done) return td_fail(err, TD_PEER_LOST, "%s: the stream ended without [DONE]", url);
    return TD_OK;
}

td_status td_client_model(const char *url, char ret[TD_CLIENT_MODEL_MAX], struct td_error *err) {
    json_t *j = NULL;
    long http = 0;
    TD_TRY(td_client_get(url, "/v1/models", 5000, &j, &http, err));
    const json_t *first = json_array_get(json_object_get(j, "data"), 0);
    const char *id = json_string_value(json_object_get(first, "id"));
    td_status st = TD_OK;
    if (id)
        snprintf(ret, TD_CLIENT_MODEL_MAX, "%s", id);
    else
        st = td_fail(err, TD_NOT_FOUND, "%s/v1/models lists no model (HTTP %ld)", url, http);
    json_decref(j);
    return st;
}

td_status td_client_chat(const char *url, const char *model, const char *user_text,
                         uint32_t max_tokens, struct td_client_answer *ret, struct td_error *err) {
    char full[1024];
    join_url(full, sizeof full, url, "/v1/chat/completions");
    json_t *body = json_pack("{s:s,s:[{s:s,s:s}],s:i,s:i,s:b,s:{s:b},s:{s:b}}", "model", model,
                             "messages", "role", "user", "content", user_text, "max_tokens",
                             (int)max_tokens, "temperature", 0, "stream", 1, "stream_options",
                             "include_usage", 1, "chat_template_kwargs", "thinking", 0);
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    CURL *c = curl_easy_init();
    struct curl_slist *headers = make_headers(true);
    if (!text || !c || !headers) {
        free(text);
        curl_easy_cleanup(c);
        curl_slist_free_all(headers);
        return td_fail(err, TD_INVALID, "the prompt is not UTF-8, or memory is out");
    }
    struct td_client_answer answer = {.text = ""};
    struct stream s = {.a = &answer, .start_ns = td_now_ns()};
    curl_easy_setopt(c, CURLOPT_URL, full);
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_PROXY, ""); /* never one of the environment's */
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(c, CURLOPT_POSTFIELDS, text);
    curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE, (long)strlen(text));
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_stream);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, &s);
    CURLcode rc = curl_easy_perform(c);
    answer.total_s = (double)(td_now_ns() - s.start_ns) / 1e9;
    long http = 0;
    curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &http);
    td_status st = judge(&s, rc, http, full, err);
    if (st == TD_OK) *ret = answer;
    free(s.line.data);
    free(s.other.data);
    free(text);
    curl_slist_free_all(headers);
    curl_easy_cleanup(c);
    return st;
}
