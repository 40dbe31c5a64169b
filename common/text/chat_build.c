/* Marks and text between them. See chat_parts.h. */
#include <string.h>

#include "common/text/chat_parts.h"

static td_status join(struct td_chat_build *b, const char *text, size_t n) {
    if (n > TD_TEXT_BYTES_MAX || b->n > TD_TEXT_BYTES_MAX - n) {
        return td_fail(b->err, TD_TOO_LONG, "prompt: expected at most %zu bytes of text",
                       TD_TEXT_BYTES_MAX);
    }
    if (b->n == 0 || b->text != b->joined.p) {
        b->joined.n = 0;
        td_bytes_add(&b->joined, b->text, b->n);
    }
    td_bytes_add(&b->joined, text, n);
    if (b->joined.failed) {
        return td_fail(b->err, TD_NO_MEMORY, "prompt: no memory for %zu bytes", b->n + n);
    }
    b->text = b->joined.p;
    b->n += n;
    return TD_OK;
}

td_status td_chat_add_text(struct td_chat_build *b, const char *text, size_t n) {
    if (n == 0) return TD_OK;
    if (b->n > 0) return join(b, text, n);
    b->text = text;
    b->n = n;
    return TD_OK;
}

td_status td_chat_add_copy(struct td_chat_build *b, const char *text, size_t n) {
    return n ? join(b, text, n) : TD_OK;
}

td_status td_chat_flush(struct td_chat_build *b) {
    size_t n = b->n;
    b->n = 0;
    return n ? td_tokenizer_encode(b->c->t, b->text, n, b->out, b->err) : TD_OK;
}

td_status td_chat_add_mark(struct td_chat_build *b, int32_t id, const char *name) {
    if (id < 0) {
        return td_fail(b->err, TD_UNSUPPORTED,
                       "prompt: expected the checkpoint's tokenizer to have a token %s, found none",
                       name);
    }
    TD_TRY(td_chat_flush(b));
    td_status st = td_ids_push(b->out, id);
    return st == TD_OK ? TD_OK : td_fail(b->err, st, "prompt: no memory for its ids");
}

td_status td_chat_add_own(struct td_chat_build *b, const char *text) {
    const struct {
        const char *name;
        int32_t id;
    } marks[] = {
        {TD_NAME_THINK, b->c->think},
        {TD_NAME_THINK_END, b->c->think_end},
        {TD_NAME_DSML, b->c->dsml},
    };
    while (*text) {
        size_t n = strlen(text), mark = 0;
        for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
            const char *at = marks[i].id >= 0 ? strstr(text, marks[i].name) : NULL;
            if (!at || (size_t)(at - text) >= n) continue;
            n = (size_t)(at - text);
            mark = i + 1;
        }
        TD_TRY(td_chat_add_text(b, text, n));
        text += n;
        if (!mark) break;
        TD_TRY(td_chat_add_mark(b, marks[mark - 1].id, marks[mark - 1].name));
        text += strlen(marks[mark - 1].name);
    }
    return TD_OK;
}
