/* Conversations to token ids, and JSON to Python's form of it, for comparisons with other programs.
 *
 * usage: chat_main TOKENIZER_DIR < CONVERSATIONS    a JSON object per line; its answer is a line of
 *                                                   ids, or "error: ..."
 *        chat_main json < VALUES                    a JSON string per line that holds JSON text;
 * its answer is that text rewritten, or "error: ..." A conversation: {"thinking", "keep", "effort":
 * 0..3, "table": 0..1, "messages": [{"role": 0..5, "content", "reasoning", "call_id", "calls":
 * [[id, name, arguments]], "tools": [JSON text], "format": JSON text}]}, everything optional. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "common/text/chat.h"
#include "common/text/pyjson.h"

enum { LIST_MAX = 64 };

static struct td_chat_text text_of(const json_t *v) {
    return (struct td_chat_text){json_string_value(v), json_string_length(v)};
}

static struct td_chat_text field(const json_t *o, const char *name) {
    return text_of(json_object_get(o, name));
}

struct lists {
    struct td_chat_call calls[LIST_MAX];
    struct td_chat_text tools[LIST_MAX];
};

static void read_message(const json_t *v, struct td_chat_message *m, struct lists *l) {
    struct td_chat_text content = field(v, "content"), reasoning = field(v, "reasoning");
    const json_t *calls = json_object_get(v, "calls"), *tools = json_object_get(v, "tools");
    *m = (struct td_chat_message){
        .role = (enum td_chat_role)json_integer_value(json_object_get(v, "role")),
        .content = content.p,
        .content_n = content.n,
        .reasoning = reasoning.p,
        .reasoning_n = reasoning.n,
        .call_id = field(v, "call_id"),
        .response_format = field(v, "format"),
        .calls = l->calls,
        .tools = l->tools,
    };
    for (; m->n_calls < json_array_size(calls) && m->n_calls < LIST_MAX; m->n_calls++) {
        const json_t *c = json_array_get(calls, m->n_calls);
        l->calls[m->n_calls] =
            (struct td_chat_call){text_of(json_array_get(c, 0)), text_of(json_array_get(c, 1)),
                                  text_of(json_array_get(c, 2))};
    }
    for (; m->n_tools < json_array_size(tools) && m->n_tools < LIST_MAX; m->n_tools++) {
        l->tools[m->n_tools] = text_of(json_array_get(tools, m->n_tools));
    }
}

static void encode(const struct td_chat *chat, const json_t *v) {
    static struct td_chat_message m[LIST_MAX];
    static struct lists l[LIST_MAX];
    const json_t *list = json_object_get(v, "messages");
    size_t n = json_array_size(list) < LIST_MAX ? json_array_size(list) : LIST_MAX;
    for (size_t i = 0; i < n; i++) {
        read_message(json_array_get(list, i), &m[i], &l[i]);
    }
    struct td_chat_params p = {
        .thinking = json_is_true(json_object_get(v, "thinking")),
        .keep_reasoning = json_is_true(json_object_get(v, "keep")),
        .effort = (enum td_chat_effort)json_integer_value(json_object_get(v, "effort")),
        .efforts = (enum td_chat_effort_table)json_integer_value(json_object_get(v, "table")),
    };
    struct td_ids ids = {0};
    struct td_error err;
    if (td_chat_encode(chat, &p, m, n, &ids, &err) != TD_OK) printf("error: %s", err.text);
    for (size_t i = 0; i < ids.n; i++) {
        printf("%s%d", i ? " " : "", ids.ids[i]);
    }
    printf("\n");
    td_ids_free(&ids);
}

static void rewrite(const json_t *v) {
    struct td_bytes out = {0};
    struct td_error err;
    if (td_pyjson(json_string_value(v), json_string_length(v), &out, &err) != TD_OK)
        printf("error: %s", err.text);
    if (out.n) fwrite(out.p, 1, out.n, stdout);
    printf("\n");
    td_bytes_free(&out);
}

int main(int argc, char **argv) {
    struct td_tokenizer *t = NULL;
    struct td_error err;
    bool json = argc == 2 && strcmp(argv[1], "json") == 0;
    if (argc != 2 || (!json && td_tokenizer_load(argv[1], &t, &err) != TD_OK)) {
        fprintf(stderr, "%s\n", argc == 2 ? err.text : "usage: chat_main TOKENIZER_DIR | json");
        return 2;
    }
    struct td_chat chat = {0};
    if (t) td_chat_init(&chat, t);
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        json_t *v = json_loads(line, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        if (!v)
            printf("error: the line is not JSON\n");
        else if (json)
            rewrite(v);
        else
            encode(&chat, v);
        json_decref(v);
    }
    free(line);
    td_tokenizer_destroy(t);
    return 0;
}
