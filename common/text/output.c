/* The output machine. Every step works on one buffer: text held back by the step before, then
 * what the token adds; the step hands out a prefix of it. Stop strings are matched byte by byte
 * with one Knuth-Morris-Pratt automaton each: an automaton's state is how many bytes at the end of
 * the content could still become its string, so the greatest state is what must be held back. */
#include "common/text/output.h"

#include <stdlib.h>
#include <string.h>

#include "common/text/unicode.h"

struct td_output_match {
    uint16_t n;
    uint16_t state;                       /* bytes matched, < n between steps */
    uint16_t fail[TD_STOP_BYTES_MAX + 1]; /* [k]: longest proper border of the first k bytes */
    char text[TD_STOP_BYTES_MAX];
};

static void match_init(struct td_output_match *m, const char *text, size_t n) {
    m->n = (uint16_t)n;
    m->state = 0;
    memcpy(m->text, text, n);
    m->fail[0] = m->fail[1] = 0;
    for (uint16_t i = 1, k = 0; i < n; i++) {
        while (k && text[i] != text[k]) {
            k = m->fail[k];
        }
        if (text[i] == text[k]) k++;
        m->fail[i + 1] = k;
    }
}

static void match_byte(struct td_output_match *m, char byte) {
    while (m->state && m->text[m->state] != byte) {
        m->state = m->fail[m->state];
    }
    if (m->text[m->state] == byte) m->state++;
}

static td_status check_stops(const struct td_output_params *p, struct td_error *err) {
    if (p->n_stops > TD_STOP_MAX) {
        return td_fail(err, TD_INVALID, "stop: expected at most %d strings, found %zu", TD_STOP_MAX,
                       p->n_stops);
    }
    for (size_t i = 0; i < p->n_stops; i++) {
        if (p->stops[i].n == 0 || p->stops[i].n > TD_STOP_BYTES_MAX) {
            return td_fail(err, TD_INVALID, "stop string %zu: expected 1 to %d bytes, found %zu", i,
                           TD_STOP_BYTES_MAX, p->stops[i].n);
        }
        if (!td_utf8_valid(p->stops[i].text, p->stops[i].n)) {
            return td_fail(err, TD_INVALID, "stop string %zu: expected UTF-8, found other bytes",
                           i);
        }
    }
    return TD_OK;
}

td_status td_output_init(struct td_output *o, const struct td_output_params *p,
                         struct td_error *err) {
    *o = (struct td_output){
        .t = p->t, .n_stops = p->n_stops, .think_end = p->think_end, .reasoning = p->reasoning};
    TD_TRY(check_stops(p, err));
    /* Held content, and one token (with the bytes pending before it) of nothing but U+FFFD. */
    o->cap = TD_STOP_BYTES_MAX + 3 * (td_tokenizer_max_bytes(p->t) + sizeof o->pending);
    o->buf = malloc(o->cap);
    if (p->n_stops) o->stops = malloc(p->n_stops * sizeof *o->stops);
    if (!o->buf || (p->n_stops && !o->stops)) {
        td_output_finish(o);
        return td_fail(err, TD_NO_MEMORY, "output: no memory for its buffers");
    }
    for (size_t i = 0; i < p->n_stops; i++) {
        match_init(&o->stops[i], p->stops[i].text, p->stops[i].n);
    }
    return TD_OK;
}

void td_output_finish(struct td_output *o) {
    free(o->buf);
    free(o->stops);
    *o = (struct td_output){.stopped = true};
}

/* Advances all automata; on a match takes the longest string completed here off the content. */
static void match_all(struct td_output *o, char byte) {
    size_t longest = 0;
    for (size_t i = 0; i < o->n_stops; i++) {
        struct td_output_match *m = &o->stops[i];
        match_byte(m, byte);
        if (m->state == m->n && m->n > longest) longest = m->n;
    }
    if (longest) {
        o->stopped = true;
        o->n -= longest;
    }
}

/* One code point's bytes, of whichever part of the answer is being written. */
static void add_code_point(struct td_output *o, const char *p, size_t n) {
    for (size_t i = 0; i < n && !o->stopped; i++) {
        o->buf[o->n++] = p[i];
        if (!o->reasoning) match_all(o, p[i]);
    }
}

static const char replacement[] = "\xEF\xBF\xBD";

static void add_byte(struct td_output *o, uint8_t byte) {
    o->pending[o->pending_n++] = byte;
    while (o->pending_n) {
        uint32_t cp;
        int len = td_utf8_decode(o->pending, o->pending_n, &cp);
        if (len == 0) break;
        if (len > 0) {
            add_code_point(o, (const char *)o->pending, (size_t)len);
        } else {
            add_code_point(o, replacement, 3);
            len = -len;
        }
        o->pending_n = (uint8_t)(o->pending_n - len);
        memmove(o->pending, o->pending + len, o->pending_n);
    }
}

/* The bytes that wait can no longer be completed. They are one maximal subpart. */
static void flush_pending(struct td_output *o) {
    if (o->pending_n) add_code_point(o, replacement, 3);
    o->pending_n = 0;
}

static void begin_step(struct td_output *o) {
    o->n -= o->emitted;
    memmove(o->buf, o->buf + o->emitted, o->n);
    o->emitted = 0;
}

/* Hands out the buffer without its last `held` bytes. */
static void emit(struct td_output *o, size_t held, struct td_output_event *ret_ev) {
    o->emitted = o->n - held;
    *ret_ev = (struct td_output_event){.stopped = o->stopped};
    if (o->reasoning) {
        ret_ev->reasoning = o->buf;
        ret_ev->reasoning_n = o->emitted;
    } else {
        ret_ev->content = o->buf;
        ret_ev->content_n = o->emitted;
    }
}

static size_t held_back(const struct td_output *o) {
    size_t held = 0;
    for (size_t i = 0; i < o->n_stops; i++) {
        if (o->stops[i].state > held) held = o->stops[i].state;
    }
    return o->stopped ? 0 : held;
}

void td_output_push(struct td_output *o, int32_t id, struct td_output_event *ret_ev) {
    *ret_ev = (struct td_output_event){.stopped = o->stopped};
    if (o->stopped) return;
    begin_step(o);
    if (id == o->think_end && o->reasoning) {
        flush_pending(o);
        emit(o, 0, ret_ev);
        o->reasoning = false;
        return;
    }
    if (!td_tokenizer_is_special(o->t, id)) {
        size_t n;
        const char *bytes = td_tokenizer_bytes(o->t, id, &n);
        for (size_t i = 0; i < n && !o->stopped; i++) {
            add_byte(o, (uint8_t)bytes[i]);
        }
    }
    emit(o, held_back(o), ret_ev);
}

void td_output_end(struct td_output *o, bool cut, struct td_output_event *ret_ev) {
    *ret_ev = (struct td_output_event){.stopped = o->stopped};
    if (o->stopped) return;
    begin_step(o);
    if (!cut) flush_pending(o);
    emit(o, 0, ret_ev);
    o->stopped = true;
}
