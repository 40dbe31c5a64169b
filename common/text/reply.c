/* The output machine: bytes to symbols, symbols to text, and the events of a step. */
#include "common/text/reply.h"

#include <stdlib.h>
#include <string.h>

#include "common/text/chat_parts.h"
#include "common/text/reply_parts.h"
#include "common/text/unicode.h"

enum { LINE_ENDS_MAX = 64, RECORDS = 16 };

td_status td_reply_init(struct td_reply *r, const struct td_reply_params *p, struct td_error *err) {
    *r = (struct td_reply){
        .chat = p->chat,
        .plain = p->plain,
        .calls = p->calls && !p->plain,
        .one_call = p->one_call,
        .enforced = p->enforced,
        .min_ids = p->min_ids,
        .reasoning = p->reasoning && !p->plain,
    };
    TD_TRY(td_stops_init(&r->stops, p->stops, p->n_stops, err));
    /* What is held, and one token of which every byte becomes an escape or U+FFFD. */
    r->out.cap = LINE_ENDS_MAX + 4 * TD_REPLY_HELD_MAX + sizeof r->keep +
                 8 * td_tokenizer_max_bytes(p->chat->t);
    r->out.p = malloc(r->out.cap);
    r->cap_records = RECORDS;
    r->records = malloc(r->cap_records * sizeof *r->records);
    if (!r->out.p || !r->records) {
        td_reply_free(r);
        return td_fail(err, TD_NO_MEMORY, "output: no memory for its buffers");
    }
    return TD_OK;
}

void td_reply_free(struct td_reply *r) {
    td_stops_finish(&r->stops);
    td_bytes_free(&r->out);
    free(r->records);
    *r = (struct td_reply){.stopped = true};
}

/* ---- events ---- */

void td_reply_event_open(struct td_reply *r, enum td_reply_kind kind) {
    uint32_t call = r->n_calls ? r->n_calls - 1 : 0;
    if (r->n_records > 0 && kind < TD_REPLY_CALL_END && kind != TD_REPLY_CALL) {
        struct td_reply_record *last = &r->records[r->n_records - 1];
        if (last->kind == kind && last->call == call) return;
    }
    if (r->n_records == r->cap_records) {
        struct td_reply_record *grown =
            realloc(r->records, 2 * r->cap_records * sizeof *r->records);
        if (!grown) {
            r->failed = true;
            return;
        }
        r->records = grown;
        r->cap_records *= 2;
    }
    r->records[r->n_records++] = (struct td_reply_record){kind, call, r->out.n, 0};
}

void td_reply_event_text(struct td_reply *r, const char *p, size_t n) {
    if (r->n_records == 0) return; /* out of memory */
    td_bytes_add(&r->out, p, n);
    if (r->out.failed)
        r->failed = true;
    else
        r->records[r->n_records - 1].n += n;
}

static void begin_step(struct td_reply *r) {
    r->out.n = r->n_records = r->next = 0;
}

bool td_reply_next(struct td_reply *r, struct td_reply_event *ret_ev) {
    while (r->next < r->n_records) {
        const struct td_reply_record *e = &r->records[r->next++];
        if (e->n == 0 && e->kind != TD_REPLY_CALL_END) continue;
        *ret_ev = (struct td_reply_event){e->kind, e->call, r->out.p + e->at, e->n};
        return true;
    }
    return false;
}

/* ---- text ---- */

size_t td_reply_utf8(uint32_t sym, char out[16]) {
    if (sym >= TD_SYM_DSML) {
        const char *name = sym == TD_SYM_DSML ? TD_NAME_DSML : TD_NAME_THINK_END;
        memcpy(out, name, strlen(name));
        return strlen(name);
    }
    return td_utf8_encode(sym, out);
}

/* Content that can no longer become a stop string; with `all`, the rest too. */
static void release_kept(struct td_reply *r, bool all) {
    size_t n = all || r->stopped ? r->n_keep : r->n_keep - r->stops.held;
    if (n == 0) return;
    td_reply_event_open(r, TD_REPLY_CONTENT);
    td_reply_event_text(r, r->keep, n);
    r->n_keep -= n;
    memmove(r->keep, r->keep + n, r->n_keep);
}

static void put_content(struct td_reply *r, const char *p, size_t n) {
    if (r->stops.n == 0 || r->early) {
        td_reply_event_open(r, TD_REPLY_CONTENT);
        td_reply_event_text(r, p, n);
        return;
    }
    for (size_t i = 0; i < n && !r->stopped; i++) {
        r->keep[r->n_keep++] = p[i];
        size_t longest = td_stops_byte(&r->stops, p[i]);
        r->stopped = longest > 0;
        r->n_keep -= longest;
        release_kept(r, false);
    }
}

void td_reply_put_text(struct td_reply *r, uint32_t sym) {
    char utf8[16];
    size_t n = td_reply_utf8(sym, utf8);
    if (r->stopped) return;
    r->begun = true;
    if (!r->reasoning) {
        put_content(r, utf8, n);
        return;
    }
    td_reply_event_open(r, TD_REPLY_REASONING);
    td_reply_event_text(r, utf8, n);
}

static void put_line_ends(struct td_reply *r) {
    for (; r->line_ends > 0; r->line_ends--) {
        td_reply_put_text(r, '\n');
    }
}

/* ---- text before the calls ---- */

static void text_symbol(struct td_reply *r, uint32_t sym);

/* What was held is no call: its first symbol is text, and the rest is looked at again. */
static void release_held(struct td_reply *r) {
    uint32_t held[TD_REPLY_HELD_MAX], n = r->n_held;
    memcpy(held, r->held, n * sizeof *held);
    r->n_held = 0;
    put_line_ends(r);
    td_reply_put_text(r, held[0]);
    for (uint32_t i = 1; i < n && !r->stopped; i++) {
        text_symbol(r, held[i]);
    }
}

/* The first call begins; the content is complete. */
static void begin_calls(struct td_reply *r) {
    uint32_t n = r->n_held - 1, from = n; /* without the quote behind the name */
    while (r->held[from - 1] != '"') {
        from--;
    }
    r->line_ends = r->n_held = 0;
    r->reasoning = false;
    release_kept(r, true);
    td_reply_call_begin(r, r->held + from, n - from);
}

static bool held_symbol(struct td_reply *r, uint32_t sym) {
    bool complete;
    if (!td_reply_open_takes(r, sym, &complete)) return false;
    if (complete)
        begin_calls(r);
    else
        r->held[r->n_held++] = sym;
    return true;
}

static void end_reasoning(struct td_reply *r) {
    r->reasoning = r->begun = false;
    r->line_ends = 0;
}

static void line_end(struct td_reply *r) {
    if (!r->begun) return;
    if (!r->reasoning && !r->calls) {
        td_reply_put_text(r, '\n');
        return;
    }
    if (r->line_ends == LINE_ENDS_MAX)
        td_reply_put_text(r, '\n');
    else
        r->line_ends++;
}

static void text_symbol(struct td_reply *r, uint32_t sym) {
    if (r->state != TD_IN_TEXT) {
        td_reply_call_symbol(r, sym);
        return;
    }
    if (r->n_held > 0) {
        if (held_symbol(r, sym)) return;
        release_held(r);
        if (!r->stopped) text_symbol(r, sym);
        return;
    }
    if (sym == TD_SYM_THINK_END) {
        if (r->reasoning) end_reasoning(r);
    } else if (sym == '\n') {
        line_end(r);
    } else if (sym == '<' && r->calls && !(r->reasoning && r->enforced)) {
        r->held[r->n_held++] = sym;
    } else {
        put_line_ends(r);
        td_reply_put_text(r, sym);
    }
}

static void symbol(struct td_reply *r, uint32_t sym) {
    if (r->stopped) return;
    if (r->plain)
        td_reply_put_text(r, sym);
    else
        text_symbol(r, sym);
}

/* ---- bytes to symbols ---- */

/* U+FF5C D S M L U+FF5C: only its last code point occurs in it before. */
static const uint32_t spelled_mark[] = {0xFF5C, 'D', 'S', 'M', 'L', 0xFF5C};
enum { SPELLED = sizeof spelled_mark / sizeof *spelled_mark };

static void flush_spelled(struct td_reply *r) {
    uint8_t n = r->spelled;
    r->spelled = 0;
    for (uint8_t i = 0; i < n; i++) {
        symbol(r, spelled_mark[i]);
    }
}

static void code_point(struct td_reply *r, uint32_t cp) {
    if (!r->calls || r->chat->dsml >= 0) {
        symbol(r, cp);
        return;
    }
    if (cp != spelled_mark[r->spelled]) flush_spelled(r);
    if (cp != spelled_mark[r->spelled]) {
        symbol(r, cp);
        return;
    }
    r->spelled++;
    if (r->spelled < SPELLED) return;
    r->spelled = 0;
    symbol(r, TD_SYM_DSML);
}

static void add_byte(struct td_reply *r, uint8_t byte) {
    r->pending[r->pending_n++] = byte;
    while (r->pending_n) {
        uint32_t cp;
        int len = td_utf8_decode(r->pending, r->pending_n, &cp);
        if (len == 0) break;
        code_point(r, len > 0 ? cp : 0xFFFD);
        len = len > 0 ? len : -len;
        r->pending_n = (uint8_t)(r->pending_n - len);
        memmove(r->pending, r->pending + len, r->pending_n);
    }
}

/* The bytes that wait can no longer be completed. They are one maximal subpart. */
static void flush_pending(struct td_reply *r) {
    if (r->pending_n) code_point(r, 0xFFFD);
    r->pending_n = 0;
}

static void mark(struct td_reply *r, uint32_t sym) {
    flush_pending(r);
    flush_spelled(r);
    symbol(r, sym);
}

/* In a value the name of an added token is text, as the model meant it. */
static void spell_name(struct td_reply *r, int32_t id) {
    size_t n;
    const char *name = td_tokenizer_bytes(r->chat->t, id, &n);
    if (n == 0) return;
    flush_pending(r);
    flush_spelled(r);
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = td_utf8_decode((const uint8_t *)name + i, n - i, &cp);
        symbol(r, len > 0 ? cp : 0xFFFD);
        i += len > 0 ? (size_t)len : 1;
    }
}

static void added_token(struct td_reply *r, int32_t id) {
    if (!r->plain && id == r->chat->think_end) {
        mark(r, TD_SYM_THINK_END);
    } else if (!r->plain && id == r->chat->dsml) {
        mark(r, TD_SYM_DSML);
    } else if ((r->state == TD_IN_VALUE || r->state == TD_IN_KEY) && id != r->chat->eos) {
        spell_name(r, id);
    }
}

void td_reply_push(struct td_reply *r, int32_t id) {
    begin_step(r);
    if (r->stopped || r->ended || id < 0) return;
    r->early = r->min_ids > 0;
    if (r->early) r->min_ids--;
    if (td_tokenizer_is_special(r->chat->t, id)) {
        added_token(r, id);
        return;
    }
    size_t n;
    const char *bytes = td_tokenizer_bytes(r->chat->t, id, &n);
    for (size_t i = 0; i < n && !r->stopped; i++) {
        add_byte(r, (uint8_t)bytes[i]);
    }
}

/* ---- the end ---- */

/* What is spelled so far would be a mark that goes on with the markup. */
static bool mark_fits(struct td_reply *r) {
    bool complete;
    if (r->spelled == 0) return false;
    if (r->state == TD_IN_VALUE) return r->value_at == 2;
    return r->n_held > 0 && td_reply_open_takes(r, TD_SYM_DSML, &complete);
}

/* A call that only began, or a closing tag, is left out of an answer that was cut. */
static void drop_markup(struct td_reply *r) {
    bool fits = mark_fits(r);
    if (fits)
        r->spelled = 0;
    else
        flush_spelled(r);
    if (r->n_held > 1 || (fits && r->n_held > 0)) r->line_ends = r->n_held = 0;
    if (fits) r->value_at = 0;
}

void td_reply_end(struct td_reply *r, bool cut) {
    begin_step(r);
    if (r->stopped || r->ended) return;
    if (!cut) flush_pending(r);
    if (cut) drop_markup(r);
    flush_spelled(r);
    put_line_ends(r);
    for (uint32_t i = 0; i < r->n_held && r->state == TD_IN_TEXT; i++) {
        td_reply_put_text(r, r->held[i]);
    }
    td_reply_call_end(r, cut);
    release_kept(r, true);
    r->ended = true;
}

bool td_reply_in_reasoning(const struct td_reply *r) {
    return r->reasoning;
}

enum td_reply_finish td_reply_finish(const struct td_reply *r, bool cut) {
    bool done = r->state == TD_IN_DONE;
    if (r->completed > 0 && (done || !cut)) return TD_REPLY_CALLS;
    return cut && !r->stopped ? TD_REPLY_LENGTH : TD_REPLY_STOP;
}
