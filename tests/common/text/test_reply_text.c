/* Text, marks and stop strings: after every single token, what is out is what a naive definition
 * says that sees all tokens so far, so nothing is held longer than it must be, and no memory is
 * taken after the start. test_reply.c has the readable cases and the calls. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/reply.h"
#include "common/text/unicode.h"
#include "tests/common/text/tiny.h"

enum { LONGEST = 4096 };

static struct td_tokenizer *tok;
static struct td_chat chat;

static int load(void **state) {
    (void)state;
    tok = tiny_tokenizer();
    td_chat_init(&chat, tok);
    return 0;
}

static int unload(void **state) {
    (void)state;
    td_tokenizer_destroy(tok);
    return 0;
}

struct text {
    char p[LONGEST];
    size_t n;
};

static void add(struct text *t, const char *p, size_t n) {
    assert_true(t->n + n <= LONGEST);
    if (n) memcpy(t->p + t->n, p, n);
    t->n += n;
}

struct result {
    struct text reasoning, content;
    bool stopped;
};

/* What the bytes so far amount to: U+FFFD per maximal subpart; an incomplete tail is left off if
 * `open`, else it is one U+FFFD too. */
static void to_utf8(const struct text *bytes, bool open, struct text *out) {
    out->n = 0;
    for (size_t i = 0; i < bytes->n;) {
        uint32_t cp;
        int len = td_utf8_decode((const uint8_t *)bytes->p + i, bytes->n - i, &cp);
        if (len == 0 && open) return;
        if (len <= 0) add(out, "\xEF\xBF\xBD", 3);
        if (len > 0) add(out, bytes->p + i, (size_t)len);
        i += len > 0 ? (size_t)len : len < 0 ? (size_t)-len : bytes->n - i;
    }
}

/* Cuts at the first byte that completes a stop string, before the longest completed there. */
static bool cut_at_stop(struct text *c, const struct td_stop *s, size_t n) {
    for (size_t end = 1; end <= c->n; end++) {
        size_t longest = 0;
        for (size_t k = 0; k < n; k++) {
            if (s[k].n <= end && s[k].n > longest &&
                memcmp(c->p + end - s[k].n, s[k].text, s[k].n) == 0) {
                longest = s[k].n;
            }
        }
        if (longest) {
            c->n = end - longest;
            return true;
        }
    }
    return false;
}

static size_t could_become_stop(const struct text *c, const struct td_stop *s, size_t n) {
    size_t held = 0;
    for (size_t k = 0; k < n; k++) {
        for (size_t len = held + 1; len < s[k].n && len <= c->n; len++) {
            if (memcmp(c->p + c->n - len, s[k].text, len) == 0) held = len;
        }
    }
    return held;
}

static void drop_line_ends(struct text *t, bool at_end) {
    size_t n = 0;
    while (n < t->n && t->p[n] == '\n') {
        n++;
    }
    t->n -= n;
    memmove(t->p, t->p + n, t->n);
    for (n = 0; at_end && n < 64 && t->n && t->p[t->n - 1] == '\n'; n++) {
        t->n--;
    }
}

/* The definition, for the first n ids of an answer without tools. `more`: others follow, so what
 * may still change is not counted in. */
static void define(const struct td_reply_params *p, const int32_t *ids, size_t n, bool cut,
                   bool more, struct result *r) {
    static struct text bytes[2], whole;
    bytes[0].n = bytes[1].n = 0;
    int part = p->reasoning ? 0 : 1;
    bool closed = part == 1;
    for (size_t i = 0; i < n; i++) {
        size_t k;
        const char *b = td_tokenizer_bytes(tok, ids[i], &k);
        if (ids[i] == TINY_THINK_END && !p->plain) {
            part = 1;
            to_utf8(&bytes[1], false, &whole); /* a stray one interrupts a code point too */
            bytes[1] = whole;
        }
        if (part == 1) closed = true;
        if (!td_tokenizer_is_special(tok, ids[i])) add(&bytes[part], b, k);
    }
    to_utf8(&bytes[0], !closed && (cut || more), &r->reasoning);
    to_utf8(&bytes[1], cut || more, &r->content);
    if (!p->plain) {
        drop_line_ends(&r->reasoning, closed || more);
        drop_line_ends(&r->content, false);
    }
    r->stopped = cut_at_stop(&r->content, p->stops, p->n_stops);
    if (more && !r->stopped) r->content.n -= could_become_stop(&r->content, p->stops, p->n_stops);
}

static void collect(struct td_reply *r, struct result *out) {
    struct td_reply_event ev;
    while (td_reply_next(r, &ev)) {
        assert_true(td_utf8_valid(ev.text, ev.n));
        assert_true(ev.n > 0);
        assert_true(ev.kind == TD_REPLY_REASONING || ev.kind == TD_REPLY_CONTENT);
        add(ev.kind == TD_REPLY_REASONING ? &out->reasoning : &out->content, ev.text, ev.n);
    }
    out->stopped = r->stopped;
}

static void same(const struct result *got, const struct result *want, const char *when, size_t i) {
    if (got->stopped != want->stopped || got->reasoning.n != want->reasoning.n ||
        got->content.n != want->content.n ||
        memcmp(got->reasoning.p, want->reasoning.p, want->reasoning.n) != 0 ||
        memcmp(got->content.p, want->content.p, want->content.n) != 0) {
        fail_msg("%s %zu: expected '%.*s' '%.*s' stopped %d, found '%.*s' '%.*s' stopped %d", when,
                 i, (int)want->reasoning.n, want->reasoning.p, (int)want->content.n,
                 want->content.p, want->stopped, (int)got->reasoning.n, got->reasoning.p,
                 (int)got->content.n, got->content.p, got->stopped);
    }
}

/* Runs the machine; with `each`, what is out after each token must be what the definition says. */
static void run(const struct td_reply_params *p, const int32_t *ids, size_t n, bool cut, bool each,
                struct result *got) {
    static struct result want;
    struct td_reply r;
    struct td_error err;
    if (td_reply_init(&r, p, &err) != TD_OK) fail_msg("%s", err.text);
    const char *buffer = r.out.p;
    memset(got, 0, sizeof *got);
    for (size_t i = 0; i < n; i++) {
        td_reply_push(&r, ids[i]);
        collect(&r, got);
        if (!each) continue;
        define(p, ids, i + 1, false, true, &want);
        same(got, &want, "token", i);
    }
    td_reply_end(&r, cut);
    collect(&r, got);
    bool stopped = got->stopped;
    td_reply_push(&r, 'x'); /* after the end nothing comes */
    collect(&r, got);
    got->stopped = stopped;
    assert_ptr_equal(r.out.p, buffer); /* no memory but that of the start */
    assert_false(r.failed);
    td_reply_free(&r);
}

static const char *const pieces[] = {"a",    "b",  "ab",   "aba", "S",    "T", "OP",
                                     "STOP", "\n", "\n\n", "毕",  "🙂", "é", "\xEF\xBF\xBD",
                                     "bab",  "aa"};
enum { PIECES = sizeof pieces / sizeof *pieces };

struct stream {
    int32_t ids[200];
    size_t n;
};

/* Ids of random kinds: letters, parts of characters, any byte, now and then an added token. */
static void random_stream(uint64_t *seed, struct stream *s) {
    static const int32_t parts[] = {0xE6, 0xAF, 0x95, 261,  262,  263,
                                    269,  0xF0, 0x99, 0xC3, 0xED, 0xA0};
    s->n = tiny_random(seed, 120);
    for (size_t i = 0; i < s->n; i++) {
        switch (tiny_random(seed, 12)) {
        case 0:
            s->ids[i] = (int32_t)tiny_random(seed, 270);
            break;
        case 1:
        case 2:
            s->ids[i] = parts[tiny_random(seed, sizeof parts / sizeof *parts)];
            break;
        case 3:
            s->ids[i] = TINY_BOS + (int32_t)tiny_random(seed, 6);
            break;
        case 4:
            s->ids[i] = 264 + (int32_t)tiny_random(seed, 5);
            break;
        default:
            s->ids[i] = "abaSTOP\n"[tiny_random(seed, 8)];
        }
        if (s->ids[i] == TINY_THINK_END && tiny_random(seed, 3)) s->ids[i] = 'a';
    }
}

static size_t random_stops(uint64_t *seed, struct td_stop stops[TD_STOP_MAX],
                           char text[TD_STOP_MAX][64]) {
    size_t n = tiny_random(seed, 4) ? tiny_random(seed, TD_STOP_MAX + 1) : 1;
    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        do {
            const char *p = pieces[tiny_random(seed, PIECES)];
            memcpy(text[i] + len, p, strlen(p));
            len += strlen(p);
        } while (len < 48 && tiny_random(seed, 3));
        stops[i] = (struct td_stop){text[i], len};
    }
    return n;
}

static void agrees_with_the_definition(void **state) {
    uint64_t seed = tiny_seed();
    static struct result got, want;
    int stopped = 0, rounds = 20000;
    (void)state;
    for (int round = 0; round < rounds; round++) {
        struct td_stop stops[TD_STOP_MAX];
        char text[TD_STOP_MAX][64];
        struct stream s;
        random_stream(&seed, &s);
        struct td_reply_params p = {.chat = &chat,
                                    .plain = tiny_random(&seed, 3) == 0,
                                    .stops = stops,
                                    .n_stops = random_stops(&seed, stops, text)};
        p.reasoning = !p.plain && tiny_random(&seed, 2);
        bool cut = tiny_random(&seed, 2);
        run(&p, s.ids, s.n, cut, round % 8 == 0, &got);
        define(&p, s.ids, s.n, cut, false, &want);
        stopped += want.stopped;
        same(&got, &want, "round", (size_t)round);
    }
    assert_in_range(stopped, rounds / 10, rounds - rounds / 10); /* both kinds were tried */
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees_with_the_definition)};
    return cmocka_run_group_tests(tests, load, unload);
}
