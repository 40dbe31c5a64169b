/* GET and DELETE /v1/responses/ID, GET /v1/responses/ID/input_items: what the Responses API keeps.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/json_read.h"
#include "router/serve_parts.h"

enum { ITEMS_DEFAULT = 20, ITEMS_MAX = 100, VALUE_MAX = 80 };

static void refuse(struct td_serve *s, struct td_http_conn *c, int status, const char *code,
                   const char *param, const char *text) {
    struct td_api_error e;
    (void)td_api_refuse(&e, status, code, param, "%s", text);
    td_api_error_reply(c, &e, &s->scratch);
}

/* The value of `name` in a query; NULL: absent. Values here need no decoding: an id, a word or a
 * number. */
static const char *query_value(const char *query, const char *name, char out[VALUE_MAX]) {
    size_t n = strlen(name);
    while (*query) {
        size_t len = strcspn(query, "&");
        if (len > n && strncmp(query, name, n) == 0 && query[n] == '=') {
            snprintf(out, VALUE_MAX, "%.*s", (int)(len - n - 1), query + n + 1);
            return out;
        }
        query += len + (query[len] == '&');
    }
    return NULL;
}

struct page {
    size_t limit;
    bool ascending;
    char after[VALUE_MAX]; /* "": from the beginning */
};

/* False: refused. */
static bool read_page(struct td_serve *s, struct td_http_conn *c, struct page *ret) {
    char value[VALUE_MAX];
    const char *query = td_http_query(c), *v;
    *ret = (struct page){.limit = ITEMS_DEFAULT};
    if ((v = query_value(query, "limit", value))) {
        char *end;
        unsigned long n = strtoul(v, &end, 10);
        if (*end || *v < '0' || *v > '9' || n < 1 || n > ITEMS_MAX) {
            refuse(s, c, 400, NULL, "limit", "limit: expected an integer from 1 to 100");
            return false;
        }
        ret->limit = n;
    }
    if ((v = query_value(query, "order", value))) {
        ret->ascending = strcmp(v, "asc") == 0;
        if (!ret->ascending && strcmp(v, "desc") != 0) {
            refuse(s, c, 400, NULL, "order", "order: expected asc or desc");
            return false;
        }
    }
    (void)query_value(query, "after", ret->after);
    return true;
}

static const char *id_of(const json_t *items, size_t i) {
    const char *id = json_string_value(json_object_get(json_array_get(items, i), "id"));
    return id ? id : "";
}

static void write_items(struct td_json_out *w, const json_t *items, const struct page *p) {
    size_t n = json_array_size(items), from = 0;
    for (size_t i = 0; *p->after && i < n; i++)
        if (strcmp(id_of(items, p->ascending ? i : n - 1 - i), p->after) == 0) from = i + 1;
    size_t to = n - from > p->limit ? from + p->limit : n;
    td_json_open(w, '{');
    td_json_key(w, "object");
    td_json_text(w, "list");
    td_json_key(w, "data");
    td_json_open(w, '[');
    for (size_t i = from; i < to; i++) {
        char *text = json_dumps(json_array_get(items, p->ascending ? i : n - 1 - i), JSON_COMPACT);
        if (text)
            td_json_value(w, text, strlen(text));
        else
            w->failed = true;
        free(text);
    }
    td_json_close(w, ']');
    td_json_key(w, "first_id");
    if (from < to)
        td_json_text(w, id_of(items, p->ascending ? from : n - 1 - from));
    else
        td_json_null(w);
    td_json_key(w, "last_id");
    if (from < to)
        td_json_text(w, id_of(items, p->ascending ? to - 1 : n - to));
    else
        td_json_null(w);
    td_json_key(w, "has_more");
    td_json_bool(w, to < n);
    td_json_close(w, '}');
}

static void input_items(struct td_serve *s, struct td_http_conn *c, const struct td_stored *e) {
    struct page page;
    if (!read_page(s, c, &page)) return;
    json_t *items = NULL;
    td_status st = td_json_read(e->input, e->input_n, TD_JSON_STRICT, &items, NULL);
    td_json_out_reset(&s->scratch);
    write_items(&s->scratch, items, &page);
    s->scratch.failed |= st != TD_OK;
    json_decref(items);
    td_api_send(s, c, 200, "application/json");
}

static void whole(struct td_serve *s, struct td_http_conn *c, const struct td_stored *e) {
    char value[VALUE_MAX];
    const char *stream = query_value(td_http_query(c), "stream", value);
    if (stream && strcmp(stream, "false") != 0) {
        refuse(s, c, 400, "unsupported_value", "stream",
               "stream: a kept response is not streamed again; expected false");
        return;
    }
    td_json_out_reset(&s->scratch);
    td_json_raw(&s->scratch, e->document, e->document_n);
    td_api_send(s, c, 200, "application/json");
}

static void deleted(struct td_serve *s, struct td_http_conn *c, const char *owner, const char *id) {
    struct td_json_out *w = &s->scratch;
    (void)td_response_store_delete(s->responses, owner, id);
    td_json_out_reset(w);
    td_json_open(w, '{');
    td_json_key(w, "id");
    td_json_text(w, id);
    td_json_key(w, "object");
    td_json_text(w, "response");
    td_json_key(w, "deleted");
    td_json_bool(w, true);
    td_json_close(w, '}');
    td_api_send(s, c, 200, "application/json");
}

/* NULL: refused. To be dropped. */
static struct td_stored *hold(struct td_serve *s, struct td_http_conn *c, const char *owner,
                              const char *rest) {
    char id[TD_RESPONSE_ID_MAX];
    size_t n = strcspn(rest, "/");
    struct td_stored *e = NULL;
    if (n < sizeof id && s->responses) {
        snprintf(id, sizeof id, "%.*s", (int)n, rest);
        e = td_response_store_hold(s->responses, owner, id);
    }
    if (!e)
        refuse(s, c, 404, "response_not_found", "response_id",
               "no response of this id is kept here: it never was, was deleted, or made room for "
               "newer ones");
    return e;
}

void td_api_stored(struct td_serve *s, struct td_http_conn *c, const char *rest,
                   const struct td_api_key *key) {
    const char *owner = td_api_key_owner(key);
    struct td_stored *e = hold(s, c, owner, rest);
    if (!e) return;
    if (strcmp(td_http_method(c), "DELETE") == 0)
        deleted(s, c, owner, e->id);
    else
        whole(s, c, e);
    td_response_store_drop(s->responses, e);
}

void td_api_stored_items(struct td_serve *s, struct td_http_conn *c, const char *rest,
                         const struct td_api_key *key) {
    struct td_stored *e = hold(s, c, td_api_key_owner(key), rest);
    if (!e) return;
    input_items(s, c, e);
    td_response_store_drop(s->responses, e);
}
