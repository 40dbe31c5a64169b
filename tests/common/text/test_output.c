/* The output machine against a naive definition that sees the whole stream at once, over random
 * streams, splits and stop strings; and the cases a reader would ask about. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/output.h"
#include "common/text/unicode.h"
#include "tests/common/text/tiny.h"

enum { LONGEST = 4096 };

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
static bool cut_at_stop(struct text *c, const struct td_output_stop *s, size_t n) {
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

static size_t could_become_stop(const struct text *c, const struct td_output_stop *s, size_t n) {
    size_t held = 0;
    for (size_t k = 0; k < n; k++) {
        for (size_t len = held + 1; len < s[k].n && len <= c->n; len++) {
            if (memcmp(c->p + c->n - len, s[k].text, len) == 0) held = len;
        }
    }
    return held;
}

/* The definition, for the first n ids. `more`: others follow, so what may still change is not
 * counted in. */
static void define(const struct td_tokenizer *t, const struct td_output_params *p,
                   const int32_t *ids, size_t n, bool cut, bool more, struct result *r) {
    struct text bytes[2] = {0};
    int part = p->reasoning ? 0 : 1;
    for (size_t i = 0; i < n; i++) {
        size_t k;
        const char *b = td_tokenizer_bytes(t, ids[i], &k);
        if (ids[i] == p->think_end) part = 1;
        if (!td_tokenizer_is_special(t, ids[i])) add(&bytes[part], b, k);
    }
    to_utf8(&bytes[0], part == 0 && (cut || more), &r->reasoning);
    to_utf8(&bytes[1], cut || more, &r->content);
    r->stopped = cut_at_stop(&r->content, p->stops, p->n_stops);
    if (more && !r->stopped) r->content.n -= could_become_stop(&r->content, p->stops, p->n_stops);
}

static void collect(const struct td_output_event *ev, struct result *r) {
    assert_true(td_utf8_valid(ev->reasoning, ev->reasoning_n));
    assert_true(td_utf8_valid(ev->content, ev->content_n));
    assert_true(ev->reasoning_n == 0 || ev->content_n == 0);
    add(&r->reasoning, ev->reasoning, ev->reasoning_n);
    add(&r->content, ev->content, ev->content_n);
    r->stopped = ev->stopped;
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
static void run(const struct td_tokenizer *t, const struct td_output_params *p, const int32_t *ids,
                size_t n, bool cut, bool each, struct result *got) {
    static struct result want;
    struct td_output o;
    struct td_output_event ev;
    struct td_error err;
    if (td_output_init(&o, p, &err) != TD_OK) fail_msg("%s", err.text);
    memset(got, 0, sizeof *got);
    for (size_t i = 0; i < n; i++) {
        td_output_push(&o, ids[i], &ev);
        collect(&ev, got);
        if (!each) continue;
        define(t, p, ids, i + 1, false, true, &want);
        same(got, &want, "token", i);
    }
    td_output_end(&o, cut, &ev);
    collect(&ev, got);
    bool stopped = got->stopped;
    td_output_push(&o, 'x', &ev); /* after the end nothing comes */
    collect(&ev, got);
    got->stopped = stopped;
    td_output_finish(&o);
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

static size_t random_stops(uint64_t *seed, struct td_output_stop stops[TD_STOP_MAX],
                           char text[TD_STOP_MAX][64]) {
    size_t n = tiny_random(seed, 4) ? tiny_random(seed, TD_STOP_MAX + 1) : 1;
    for (size_t i = 0; i < n; i++) {
        size_t len = 0;
        do {
            const char *p = pieces[tiny_random(seed, PIECES)];
            memcpy(text[i] + len, p, strlen(p));
            len += strlen(p);
        } while (len < 48 && tiny_random(seed, 3));
        stops[i] = (struct td_output_stop){text[i], len};
    }
    return n;
}

static void agrees_with_the_definition(void **state) {
    struct td_tokenizer *t = *state;
    uint64_t seed = tiny_seed();
    static struct result got, want;
    int stopped = 0, rounds = 20000;
    for (int round = 0; round < rounds; round++) {
        struct td_output_stop stops[TD_STOP_MAX];
        char text[TD_STOP_MAX][64];
        struct stream s;
        random_stream(&seed, &s);
        struct td_output_params p = {.t = t,
                                     .reasoning = tiny_random(&seed, 2),
                                     .think_end = TINY_THINK_END,
                                     .stops = stops,
                                     .n_stops = random_stops(&seed, stops, text)};
        bool cut = tiny_random(&seed, 2);
        run(t, &p, s.ids, s.n, cut, round % 8 == 0, &got);
        define(t, &p, s.ids, s.n, cut, false, &want);
        stopped += want.stopped;
        same(&got, &want, "round", (size_t)round);
    }
    assert_in_range(stopped, rounds / 10, rounds - rounds / 10); /* both kinds were tried */
}

/* Tokens that spell the same bytes, cut at other places, give the same text. */
static void does_not_depend_on_the_split(void **state) {
    struct td_tokenizer *t = *state;
    uint64_t seed = tiny_seed();
    static struct result first, other;
    for (int round = 0; round < 4000; round++) {
        struct td_output_stop stops[TD_STOP_MAX];
        char text[TD_STOP_MAX][64];
        struct stream a, b = {.n = 0};
        random_stream(&seed, &a);
        a.n = a.n > 60 ? 60 : a.n;
        for (size_t i = 0; i < a.n; i++) { /* each token again, as its bytes one by one */
            size_t k;
            const char *p = td_tokenizer_bytes(t, a.ids[i], &k);
            if (td_tokenizer_is_special(t, a.ids[i])) {
                b.ids[b.n++] = a.ids[i];
                continue;
            }
            for (size_t c = 0; c < k; c++) {
                b.ids[b.n++] = (uint8_t)p[c];
            }
        }
        struct td_output_params p = {.t = t,
                                     .reasoning = tiny_random(&seed, 2),
                                     .think_end = TINY_THINK_END,
                                     .stops = stops,
                                     .n_stops = random_stops(&seed, stops, text)};
        bool cut = tiny_random(&seed, 2);
        run(t, &p, a.ids, a.n, cut, false, &first);
        run(t, &p, b.ids, b.n, cut, false, &other);
        same(&other, &first, "round", (size_t)round);
    }
}

#define STOPS(...)                                                                                 \
    (const struct td_output_stop[]) {                                                              \
        __VA_ARGS__                                                                                \
    }
#define STOP(s)                                                                                    \
    { s, sizeof s - 1 }

static void expect(const struct td_output_event *ev, const char *content, bool stopped) {
    assert_int_equal(ev->content_n, strlen(content));
    assert_memory_equal(ev->content, content, ev->content_n);
    assert_int_equal(ev->reasoning_n, 0);
    assert_int_equal(ev->stopped, stopped);
}

#define PUSH(id, content, stopped)                                                                 \
    do {                                                                                           \
        td_output_push(&o, id, &ev);                                                               \
        expect(&ev, content, stopped);                                                             \
    } while (0)

static void holds_back_no_more_than_it_must(void **state) {
    struct td_output o;
    struct td_output_event ev;
    struct td_output_params p = {.t = *state,
                                 .think_end = TINY_THINK_END,
                                 .stops = STOPS(STOP("STOP"), STOP("TOO"), STOP("abab")),
                                 .n_stops = 3};
    assert_int_equal(td_output_init(&o, &p, NULL), TD_OK);
    PUSH('x', "x", false);
    PUSH(266, "", false); /* ST */
    PUSH('x', "STx", false);
    PUSH(256, "", false); /* ab */
    PUSH('a', "", false);
    PUSH('a', "aba", false); /* "aba" + "a": only the last a can begin anything */
    PUSH('S', "a", false);
    PUSH('T', "", false);
    PUSH('O', "", false);
    PUSH('O', "S", true); /* TOO, which began inside STOP */
    PUSH('x', "", true);
    td_output_end(&o, false, &ev);
    expect(&ev, "", true);
    td_output_finish(&o);
}

static void holds_code_points_together(void **state) {
    struct td_output o;
    struct td_output_event ev;
    struct td_output_params p = {.t = *state, .think_end = TINY_THINK_END};
    assert_int_equal(td_output_init(&o, &p, NULL), TD_OK);
    PUSH(269, "c", false); /* c and E6 */
    PUSH(0xAF, "", false);
    PUSH(TINY_EOS, "", false); /* added tokens do not interrupt */
    PUSH(0x95, "毕", false);
    PUSH(261, "", false); /* F0 9F */
    PUSH('x', "\xEF\xBF\xBDx", false);
    PUSH(0x80, "\xEF\xBF\xBD", false);
    PUSH(TINY_SIZE + 5, "", false); /* an id that names nothing */
    PUSH(262, "", false);
    td_output_end(&o, false, &ev);
    expect(&ev, "\xEF\xBF\xBD", false);
    td_output_finish(&o);

    assert_int_equal(td_output_init(&o, &p, NULL), TD_OK);
    PUSH(269, "c", false);
    td_output_end(&o, true, &ev); /* cut by length: the beginning of a character is dropped */
    expect(&ev, "", false);
    td_output_finish(&o);
}

static void separates_reasoning(void **state) {
    struct td_output o;
    struct td_output_event ev;
    struct td_output_params p = {.t = *state,
                                 .reasoning = true,
                                 .think_end = TINY_THINK_END,
                                 .stops = STOPS(STOP("ab")),
                                 .n_stops = 1};
    assert_int_equal(td_output_init(&o, &p, NULL), TD_OK);
    td_output_push(&o, 256, &ev); /* no stop string in reasoning, nothing held either */
    assert_int_equal(ev.reasoning_n, 2);
    assert_memory_equal(ev.reasoning, "ab", 2);
    assert_int_equal(ev.content_n, 0);
    td_output_push(&o, 'a', &ev);
    assert_int_equal(ev.reasoning_n, 1);
    td_output_push(&o, 0xE6, &ev);
    assert_int_equal(ev.reasoning_n, 0);
    td_output_push(&o, TINY_THINK_END, &ev);
    assert_int_equal(ev.reasoning_n, 3); /* what was waiting is U+FFFD */
    PUSH('b', "b", false);               /* the a before belonged to the reasoning */
    PUSH(TINY_THINK_END, "", false);
    PUSH('a', "", false);
    PUSH('b', "", true);
    td_output_finish(&o);
}

static void refuses_bad_stop_strings(void **state) {
    struct td_output o;
    struct td_error err;
    char longest[TD_STOP_BYTES_MAX + 1];
    memset(longest, 'a', sizeof longest);
    struct td_output_stop many[TD_STOP_MAX + 1],
        bad[] = {{"", 0}, {longest, sizeof longest}, STOP("\x95")};
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        many[i] = (struct td_output_stop){longest, sizeof longest - 1};
    }
    struct td_output_params p = {
        .t = *state, .think_end = -1, .stops = many, .n_stops = TD_STOP_MAX + 1};
    assert_int_equal(td_output_init(&o, &p, &err), TD_INVALID);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        many[3] = bad[i];
        p.n_stops = 4;
        assert_int_equal(td_output_init(&o, &p, &err), TD_INVALID);
        assert_non_null(strstr(err.text, "stop string 3"));
        td_output_finish(&o);
    }
    /* The longest that are allowed are held and found. */
    many[3] = many[0];
    p.n_stops = TD_STOP_MAX;
    struct td_output_event ev;
    assert_int_equal(td_output_init(&o, &p, &err), TD_OK);
    for (int i = 0; i < TD_STOP_BYTES_MAX - 1; i++) {
        PUSH('a', "", false);
    }
    td_output_push(&o, 'b', &ev);
    assert_int_equal(ev.content_n, TD_STOP_BYTES_MAX);
    for (int i = 0; i < TD_STOP_BYTES_MAX - 1; i++) {
        PUSH('a', "", false);
    }
    PUSH('a', "", true);
    td_output_finish(&o);
}

static int load(void **state) {
    *state = tiny_tokenizer();
    return 0;
}

static int unload(void **state) {
    td_tokenizer_destroy(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_the_definition),
        cmocka_unit_test(does_not_depend_on_the_split),
        cmocka_unit_test(holds_back_no_more_than_it_must),
        cmocka_unit_test(holds_code_points_together),
        cmocka_unit_test(separates_reasoning),
        cmocka_unit_test(refuses_bad_stop_strings),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
