/* See api_messages.h. */
#include "router/api_messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/put.h"
#include "common/text/bytes.h"

enum { PATH_BYTES = 64, INNER_BYTES = PATH_BYTES + 32 };

void *td_api_chat_own(struct td_api_chat *c, void *p, struct td_api_error *e) {
    if (p && c->n_owned == c->cap_owned) {
        size_t cap = c->cap_owned ? 2 * c->cap_owned : 16;
        void **grown = realloc(c->owned, cap * sizeof *grown);
        if (grown) {
            c->owned = grown;
            c->cap_owned = cap;
        } else {
            free(p);
            p = NULL;
        }
    }
    if (!p) {
        (void)td_api_no_memory(e);
        return NULL;
    }
    c->owned[c->n_owned++] = p;
    return p;
}

void td_api_chat_free(struct td_api_chat *c) {
    for (size_t i = 0; i < c->n_owned; i++)
        free(c->owned[i]);
    free(c->owned);
    free(c->m);
    *c = (struct td_api_chat){0};
}

/* ---- content ---- */

static const struct td_param part_params[] = {
    {"type", TD_PARAM_WORD, "text"}, {"text", TD_PARAM_READ, NULL}, {0}};

/* The text of a part. In a tool's result a part of another kind is named, since the model was
 * trained so; in a message it would be a question without its picture, and is refused. */
static td_status read_part(const struct td_fields *f, bool result, char other[64], const char **ret,
                           size_t *ret_n) {
    const char *type = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "type", &type, &n));
    if (!type) return td_field_wrong(f, "type", "\"text\"");
    if (result && strcmp(type, "text") != 0) {
        snprintf(other, 64, "[Unsupported %.40s]", type);
        *ret = other;
        *ret_n = strlen(other);
        return TD_OK;
    }
    TD_TRY(td_fields_known(f, part_params, NULL));
    *ret = NULL;
    TD_TRY(td_field_str(f, "text", ret, ret_n));
    return *ret ? TD_OK : td_field_wrong(f, "text", "a string");
}

static td_status join_parts(const struct td_fields *f, const json_t *parts, struct td_api_chat *c,
                            struct td_chat_message *m) {
    struct td_bytes joined = {0};
    char path[INNER_BYTES], found[40], other[64];
    td_status st = TD_OK;
    for (size_t i = 0; st == TD_OK && i < json_array_size(parts); i++) {
        const json_t *part = json_array_get(parts, i);
        const char *text = NULL;
        size_t n = 0;
        snprintf(path, sizeof path, "%scontent[%zu]", f->path, i);
        if (!json_is_object(part)) {
            st = td_api_refuse(f->e, 400, NULL, path, "%s: expected an object, found %s", path,
                               td_request_found(part, found));
            break;
        }
        snprintf(path, sizeof path, "%scontent[%zu].", f->path, i);
        struct td_fields pf = {part, path, f->e};
        st = read_part(&pf, m->role == TD_CHAT_TOOL, other, &text, &n);
        if (i > 0) td_bytes_add(&joined, "\n\n", 2);
        if (st == TD_OK) td_bytes_add(&joined, text, n);
    }
    if (st == TD_OK && joined.failed) st = td_api_no_memory(f->e);
    if (st != TD_OK) {
        td_bytes_free(&joined);
        return st;
    }
    if (joined.n == 0) {
        td_bytes_free(&joined);
        return TD_OK;
    }
    m->content = td_api_chat_own(c, joined.p, f->e);
    m->content_n = joined.n;
    return m->content ? TD_OK : TD_INVALID;
}

static td_status read_content(const struct td_fields *f, struct td_api_chat *c,
                              struct td_chat_message *m) {
    const json_t *content = td_field(f, "content");
    if (json_is_array(content)) return join_parts(f, content, c, m);
    if (!json_is_string(content) && (content || m->role != TD_CHAT_ASSISTANT))
        return td_field_wrong(f, "content", "a string or an array of text parts");
    return td_field_str(f, "content", &m->content, &m->content_n);
}

/* ---- calls ---- */

static const struct td_param call_params[] = {{"id", TD_PARAM_READ, NULL},
                                              {"type", TD_PARAM_WORD, "function"},
                                              {"function", TD_PARAM_READ, NULL},
                                              {"index", TD_PARAM_HARMLESS, NULL},
                                              {0}};
static const struct td_param function_params[] = {
    {"name", TD_PARAM_READ, NULL}, {"arguments", TD_PARAM_READ, NULL}, {0}};

static td_status read_text(const struct td_fields *f, const char *name, struct td_chat_text *ret) {
    TD_TRY(td_field_str(f, name, &ret->p, &ret->n));
    return ret->p ? TD_OK : td_field_wrong(f, name, "a string");
}

static td_status read_call(const json_t *v, const char *path, struct td_api_error *e,
                           struct td_chat_call *call) {
    char inner[2 * INNER_BYTES], found[40];
    const json_t *function = NULL;
    if (!json_is_object(v))
        return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                             td_request_found(v, found));
    snprintf(inner, sizeof inner, "%s.", path);
    struct td_fields f = {v, inner, e};
    TD_TRY(td_fields_known(&f, call_params, NULL));
    TD_TRY(read_text(&f, "id", &call->id));
    TD_TRY(td_field_object(&f, "function", &function));
    if (!function) return td_field_wrong(&f, "function", "an object");
    snprintf(inner, sizeof inner, "%s.function.", path);
    struct td_fields g = {function, inner, e};
    TD_TRY(td_fields_known(&g, function_params, NULL));
    TD_TRY(read_text(&g, "name", &call->name));
    return read_text(&g, "arguments", &call->arguments);
}

static td_status read_calls(const struct td_fields *f, struct td_api_chat *c,
                            struct td_chat_message *m) {
    const json_t *list = NULL;
    char path[INNER_BYTES];
    TD_TRY(td_field_array(f, "tool_calls", &list));
    size_t n = json_array_size(list);
    if (n == 0) return TD_OK;
    if (m->role != TD_CHAT_ASSISTANT)
        return td_field_wrong(f, "tool_calls", "none, except on an assistant's message");
    struct td_chat_call *calls = td_api_chat_own(c, calloc(n, sizeof *calls), f->e);
    if (!calls) return TD_INVALID;
    for (size_t i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%stool_calls[%zu]", f->path, i);
        TD_TRY(read_call(json_array_get(list, i), path, f->e, &calls[i]));
    }
    m->calls = calls;
    m->n_calls = n;
    return TD_OK;
}

/* ---- messages ---- */

static const struct td_param message_params[] = {
    {"role", TD_PARAM_READ, NULL},
    {"content", TD_PARAM_READ, NULL},
    {"reasoning_content", TD_PARAM_READ, NULL},
    {"tool_calls", TD_PARAM_READ, NULL},
    {"tool_call_id", TD_PARAM_READ, NULL},
    {"name", TD_PARAM_READ, NULL},
    /* what clients send back from an answer of theirs */
    {"refusal", TD_PARAM_EMPTY, NULL},
    {"annotations", TD_PARAM_EMPTY, NULL},
    {"audio", TD_PARAM_REFUSED, NULL},
    {"function_call", TD_PARAM_REFUSED, NULL},
    {0},
};

static td_status read_role(const struct td_fields *f, enum td_chat_role *ret) {
    static const struct {
        const char *word;
        enum td_chat_role role;
    } roles[] = {
        {"system", TD_CHAT_SYSTEM}, {"developer", TD_CHAT_SYSTEM},
        {"user", TD_CHAT_USER},     {"assistant", TD_CHAT_ASSISTANT},
        {"tool", TD_CHAT_TOOL},     {"latest_reminder", TD_CHAT_REMINDER},
    };
    const char *role = NULL;
    size_t n;
    char name[96];
    TD_TRY(td_field_str(f, "role", &role, &n));
    for (size_t i = 0; role && i < sizeof roles / sizeof roles[0]; i++)
        if (strcmp(role, roles[i].word) == 0) {
            *ret = roles[i].role;
            return TD_OK;
        }
    if (role && strcmp(role, "function") == 0)
        return td_api_refuse(f->e, 400, "unsupported_value", td_field_name(f, "role", name),
                             "%s: 'function' is not supported; 'tool' is", name);
    return td_field_wrong(f, "role", "system, developer, user, assistant or tool");
}

/* A name on a tool's result repeats what its call says; on others the model cannot be told. */
static td_status check_name(const struct td_fields *f, enum td_chat_role role) {
    const char *name = NULL;
    char full[96];
    size_t n = 0;
    TD_TRY(td_field_str(f, "name", &name, &n));
    if (n == 0 || role == TD_CHAT_TOOL) return TD_OK;
    return td_api_refuse(f->e, 400, "unsupported_parameter", td_field_name(f, "name", full),
                         "%s is not supported here", full);
}

static td_status read_message(const json_t *v, const char *path, struct td_api_chat *c,
                              struct td_chat_message *m, struct td_api_error *e) {
    struct td_fields f = {v, path, e};
    TD_TRY(read_role(&f, &m->role));
    TD_TRY(td_fields_known(&f, message_params, NULL));
    TD_TRY(check_name(&f, m->role));
    TD_TRY(td_field_str(&f, "reasoning_content", &m->reasoning, &m->reasoning_n));
    if (m->reasoning_n && m->role != TD_CHAT_ASSISTANT)
        return td_field_wrong(&f, "reasoning_content", "none, except on an assistant's message");
    if (m->role == TD_CHAT_TOOL)
        TD_TRY(read_text(&f, "tool_call_id", &m->call_id));
    else if (td_field(&f, "tool_call_id"))
        return td_field_wrong(&f, "tool_call_id", "none, except on a tool's message");
    TD_TRY(read_calls(&f, c, m));
    return read_content(&f, c, m);
}

static td_status check_last(enum td_chat_role role, struct td_api_error *e) {
    static const char *const names[] = {
        [TD_CHAT_SYSTEM] = "system's",
        [TD_CHAT_ASSISTANT] = "assistant's",
        [TD_CHAT_REMINDER] = "reminder",
    };
    if (role == TD_CHAT_USER || role == TD_CHAT_TOOL) return TD_OK;
    return td_api_refuse(e, 400, NULL, "messages",
                         "messages: expected the last message to be the user's or a tool's, found "
                         "the %s",
                         names[role]);
}

static int by_id(const void *a, const void *b) {
    const struct td_chat_text *x = a, *y = b;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return x->n ? memcmp(x->p, y->p, x->n) : 0;
}

/* A result answers one of the latest calls. `ids` has room for those of any message. */
static td_status check_results(const struct td_api_chat *c, struct td_chat_text *ids,
                               struct td_api_error *e) {
    size_t n_ids = 0;
    for (size_t i = 0; i < c->n; i++) {
        const struct td_chat_message *m = &c->m[i];
        if (m->role == TD_CHAT_ASSISTANT && m->n_calls) {
            for (n_ids = 0; n_ids < m->n_calls; n_ids++)
                ids[n_ids] = m->calls[n_ids].id;
            qsort(ids, n_ids, sizeof *ids, by_id);
        }
        if (m->role != TD_CHAT_TOOL) continue;
        if (n_ids && bsearch(&m->call_id, ids, n_ids, sizeof *ids, by_id)) continue;
        char path[PATH_BYTES];
        snprintf(path, sizeof path, "messages[%zu].tool_call_id", i);
        return td_api_refuse(e, 400, NULL, path,
                             "%s: expected the id of a call in the assistant's message before, "
                             "found '%.*s'",
                             path, (int)(m->call_id.n < 64 ? m->call_id.n : 64), m->call_id.p);
    }
    return TD_OK;
}

static td_status check_calls(const struct td_api_chat *c, struct td_api_error *e) {
    size_t most = 1;
    for (size_t i = 0; i < c->n; i++)
        if (c->m[i].n_calls > most) most = c->m[i].n_calls;
    struct td_chat_text *ids = calloc(most, sizeof *ids);
    if (!ids) return td_api_no_memory(e);
    td_status st = check_results(c, ids, e);
    free(ids);
    return st;
}

/* Tools and format stand behind the leading system message; without one, behind an empty one. */
static void need_system(struct td_api_chat *c) {
    if (c->m[0].role == TD_CHAT_SYSTEM) return;
    memmove(c->m + 1, c->m, c->n * sizeof *c->m);
    c->m[0] = (struct td_chat_message){.role = TD_CHAT_SYSTEM};
    c->n++;
}

static td_status add_blocks(const struct td_fields *f, const struct td_api_params *p,
                            struct td_api_chat *c) {
    const json_t *format = td_field(f, "response_format");
    const char *type = json_string_value(json_object_get(format, "type"));
    bool told = type && strcmp(type, "text") != 0;
    if (p->calls || told) need_system(c);
    if (told) {
        char *text = td_api_chat_own(c, json_dumps(format, JSON_COMPACT), f->e);
        if (!text) return TD_INVALID;
        c->m[0].response_format = (struct td_chat_text){text, strlen(text)};
    }
    return p->calls ? td_api_tools_read(f, c, &c->m[0].tools, &c->m[0].n_tools) : TD_OK;
}

td_status td_api_chat_read(const json_t *root, const struct td_api_params *p,
                           struct td_api_chat *ret, struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    const json_t *list = NULL;
    char path[PATH_BYTES], found[40];
    *ret = (struct td_api_chat){0};
    TD_TRY(td_field_array(&f, "messages", &list));
    size_t n = json_array_size(list);
    if (n == 0) return td_field_wrong(&f, "messages", "an array of at least one message");
    ret->m = calloc(n + 1, sizeof *ret->m);
    if (!ret->m) return td_api_no_memory(e);
    for (; ret->n < n; ret->n++) {
        const json_t *v = json_array_get(list, ret->n);
        char *end = td_put(td_put_u64(td_put(path, "messages["), ret->n), "]");
        *end = 0;
        if (!json_is_object(v))
            return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                                 td_request_found(v, found));
        *td_put(end, ".") = 0;
        TD_TRY(read_message(v, path, ret, &ret->m[ret->n], e));
    }
    TD_TRY(check_last(ret->m[n - 1].role, e));
    TD_TRY(check_calls(ret, e));
    return add_blocks(&f, p, ret);
}
