/* Streams of token ids through the output machine, for comparisons with other programs.
 *
 * usage: reply_main TOKENIZER_DIR < STREAMS    a JSON object per line: {"ids", "plain",
 * "reasoning", "calls", "one_call", "cut", "stops"} The answer is a line: {"reasoning", "content",
 * "calls": [[name, arguments, complete]], "finish", "used": ids taken before the machine stopped}.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "common/text/reply.h"

enum { CALLS_MAX = 64 };

struct result {
    struct td_bytes text[2]; /* reasoning, content */
    struct td_bytes name[CALLS_MAX], arguments[CALLS_MAX];
    bool complete[CALLS_MAX];
    uint32_t calls;
};

static void collect(struct td_reply *r, struct result *out) {
    struct td_reply_event ev;
    while (td_reply_next(r, &ev)) {
        if (ev.call >= CALLS_MAX) abort();
        if (ev.kind == TD_REPLY_REASONING) td_bytes_add(&out->text[0], ev.text, ev.n);
        if (ev.kind == TD_REPLY_CONTENT) td_bytes_add(&out->text[1], ev.text, ev.n);
        if (ev.kind == TD_REPLY_CALL) {
            if (ev.call != out->calls++) abort();
            td_bytes_add(&out->name[ev.call], ev.text, ev.n);
        }
        if (ev.kind == TD_REPLY_ARGUMENTS) td_bytes_add(&out->arguments[ev.call], ev.text, ev.n);
        if (ev.kind == TD_REPLY_CALL_END) out->complete[ev.call] = true;
    }
}

static json_t *text(const struct td_bytes *b) {
    json_t *v = json_stringn(b->n ? b->p : "", b->n);
    if (!v) abort(); /* not UTF-8 */
    return v;
}

static void answer(const struct td_chat *chat, const json_t *v) {
    static const char *const finishes[] = {"stop", "length", "tool_calls"};
    static struct result out;
    struct td_stop stops[TD_STOP_MAX + 1];
    struct td_reply r;
    struct td_error err;
    bool cut = json_is_true(json_object_get(v, "cut"));
    struct td_reply_params p = {
        .chat = chat,
        .plain = json_is_true(json_object_get(v, "plain")),
        .reasoning = json_is_true(json_object_get(v, "reasoning")),
        .calls = json_is_true(json_object_get(v, "calls")),
        .one_call = json_is_true(json_object_get(v, "one_call")),
        .stops = stops,
    };
    const json_t *list = json_object_get(v, "stops"), *ids = json_object_get(v, "ids");
    for (; p.n_stops < json_array_size(list); p.n_stops++) {
        const json_t *s = json_array_get(list, p.n_stops);
        stops[p.n_stops] = (struct td_stop){json_string_value(s), json_string_length(s)};
    }
    if (td_reply_init(&r, &p, &err) != TD_OK) abort();
    memset(&out, 0, sizeof out);
    size_t i = 0;
    for (; i < json_array_size(ids) && !r.stopped; i++) {
        td_reply_push(&r, (int32_t)json_integer_value(json_array_get(ids, i)));
        collect(&r, &out);
    }
    td_reply_end(&r, cut);
    collect(&r, &out);
    if (r.failed) abort();
    json_t *calls = json_array();
    for (uint32_t k = 0; k < out.calls; k++) {
        json_array_append_new(calls, json_pack("[o, o, b]", text(&out.name[k]),
                                               text(&out.arguments[k]), out.complete[k]));
        td_bytes_free(&out.name[k]);
        td_bytes_free(&out.arguments[k]);
    }
    json_t *doc = json_pack("{s:o, s:o, s:o, s:s, s:I}", "reasoning", text(&out.text[0]), "content",
                            text(&out.text[1]), "calls", calls, "finish",
                            finishes[td_reply_finish(&r, cut)], "used", (json_int_t)i);
    json_dumpf(doc, stdout, JSON_COMPACT);
    printf("\n");
    json_decref(doc);
    td_bytes_free(&out.text[0]);
    td_bytes_free(&out.text[1]);
    td_reply_free(&r);
}

int main(int argc, char **argv) {
    struct td_tokenizer *t = NULL;
    struct td_error err;
    struct td_chat chat;
    if (argc != 2 || td_tokenizer_load(argv[1], &t, &err) != TD_OK) {
        fprintf(stderr, "%s\n", argc == 2 ? err.text : "usage: reply_main TOKENIZER_DIR");
        return 2;
    }
    td_chat_init(&chat, t);
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        json_t *v = json_loads(line, JSON_ALLOW_NUL, NULL);
        if (v) answer(&chat, v);
        json_decref(v);
    }
    free(line);
    td_tokenizer_destroy(t);
    return 0;
}
