/* The output machine over any stream of tokens: two ways of cutting the same text into tokens give
 * the same answer, every piece is UTF-8, calls come in order, and the arguments of a complete call
 * are JSON unless the model wrote a value raw.
 *
 * Input: a byte of options, then the text; bytes above 0xF7, which UTF-8 does not have, are marks
 * and other added tokens. Accepted: a call is complete. */
#include <stdlib.h>
#include <string.h>

#include "common/text/pyjson.h"
#include "common/text/reply.h"
#include "common/text/unicode.h"
#include "tests/common/text/tiny.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

enum { SPELLED = 1, PLAIN = 2, REASONING = 4, CALLS = 8, ONE_CALL = 16, CUT = 32, STOPS = 64 };
enum { ADDED = 0xF8, ADDED_DSML = 0xF8, ADDED_THINK_END = 0xF9, CALLS_MAX = 1 << 16 };

static struct td_tokenizer *tok[2]; /* with a DSML token, without */
static struct td_chat chat[2];

static void load(void) {
    struct td_error err;
    json_t *root = tiny_json();
    tiny_add(root, TINY_SIZE, "｜DSML｜", true);
    PROMISE(tiny_load(root, &tok[0], &err) == TD_OK);
    tok[1] = tiny_tokenizer();
    for (int i = 0; i < 2; i++)
        td_chat_init(&chat[i], tok[i]);
}

struct answer {
    struct td_bytes all; /* every event, kind by kind in the order of the answer */
    uint32_t calls, completed;
    size_t arguments_at; /* of the call that is open, in `all` */
    enum td_reply_finish finish;
};

static void collect(struct td_reply *r, struct answer *a, bool raw) {
    struct td_reply_event ev;
    while (td_reply_next(r, &ev)) {
        PROMISE(td_utf8_valid(ev.text, ev.n));
        PROMISE(ev.kind == TD_REPLY_CALL_END ? ev.n == 0 : ev.n > 0);
        if (ev.kind == TD_REPLY_CALL) {
            PROMISE(ev.call == a->calls && a->calls < CALLS_MAX);
            a->calls++;
            td_bytes_add(&a->all, "[", 1);
        } else if (ev.kind > TD_REPLY_CALL) {
            PROMISE(ev.call + 1 == a->calls);
        } else {
            PROMISE(a->calls == 0); /* no text behind a call */
            const char sign = ev.kind == TD_REPLY_REASONING ? 'r' : 'c';
            if (a->all.n == 0 || a->arguments_at != (size_t)sign) td_bytes_add(&a->all, &sign, 1);
            a->arguments_at = (size_t)sign;
        }
        td_bytes_add(&a->all, ev.text, ev.n);
        if (ev.kind == TD_REPLY_CALL) {
            td_bytes_add(&a->all, "]", 1);
            a->arguments_at = a->all.n;
        }
        if (ev.kind == TD_REPLY_CALL_END) {
            struct td_bytes json = {0};
            td_status st =
                td_pyjson(a->all.p + a->arguments_at, a->all.n - a->arguments_at, &json, NULL);
            PROMISE(raw || st == TD_OK);
            td_bytes_free(&json);
            a->completed++;
        }
    }
}

static int32_t added(uint8_t byte, const struct td_chat *c) {
    const int32_t ids[] = {c->dsml, c->think_end, c->think,      c->eos,
                           c->user, -1,           TINY_SIZE + 9, c->bos};
    return ids[byte - ADDED];
}

/* One token from the text: its first byte, or with `longest` as many as some merge makes. */
static int32_t next_token(const struct td_tokenizer *t, const uint8_t *p, size_t n, bool longest,
                          size_t *ret_n) {
    int32_t id = p[0];
    *ret_n = 1;
    for (int32_t i = 256; longest && i < 256 + TINY_MERGES; i++) {
        size_t k;
        const char *bytes = td_tokenizer_bytes(t, i, &k);
        if (k <= *ret_n || k > n || memcmp(bytes, p, k) != 0) continue;
        *ret_n = k;
        id = i;
    }
    return id;
}

/* The word that makes a value raw, whatever tokens without text stand in it. */
static bool has_false(const uint8_t *p, size_t n) {
    static const char word[] = "false";
    size_t at = 0;
    for (size_t i = 0; i < n && word[at]; i++)
        if (p[i] < ADDED) at = p[i] == (uint8_t)word[at] ? at + 1 : p[i] == 'f';
    return word[at] == 0;
}

static void run(uint8_t options, const uint8_t *data, size_t size, bool longest, struct answer *a) {
    static const struct td_stop stops[] = {{"STOP", 4}, {"\n\nab", 4}, {"<", 1}, {"毕a", 4}};
    const struct td_chat *c = &chat[options & SPELLED];
    struct td_reply_params p = {.chat = c,
                                .plain = options & PLAIN,
                                .reasoning = options & REASONING,
                                .calls = options & CALLS,
                                .one_call = options & ONE_CALL,
                                .stops = stops,
                                .n_stops = options & STOPS ? 4 : 0};
    struct td_reply r;
    bool raw = has_false(data, size);
    PROMISE(td_reply_init(&r, &p, &td_fuzz_error) == TD_OK);
    for (size_t i = 0, n = 1; i < size; i += n, n = 1) {
        bool is_added = data[i] >= ADDED;
        int32_t id =
            is_added ? added(data[i], c) : next_token(c->t, data + i, size - i, longest, &n);
        td_reply_push(&r, id);
        collect(&r, a, raw);
    }
    td_reply_end(&r, options & CUT);
    collect(&r, a, raw);
    PROMISE(!r.failed && !a->all.failed);
    PROMISE(a->completed == r.completed && a->calls == r.n_calls);
    a->finish = td_reply_finish(&r, options & CUT);
    td_reply_free(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct answer one = {0}, other = {0};
    if (!tok[0]) load();
    uint8_t options = size ? data[0] : 0;
    run(options, data + (size > 0), size - (size > 0), false, &one);
    run(options, data + (size > 0), size - (size > 0), true, &other);
    PROMISE(one.all.n == other.all.n && one.finish == other.finish);
    PROMISE(one.all.n == 0 || memcmp(one.all.p, other.all.p, one.all.n) == 0);
    PROMISE(one.calls == other.calls && one.completed == other.completed);
    PROMISE(one.calls == 0 || (options & CALLS));
    td_fuzz_accepted = one.completed > 0;
    if (!td_fuzz_accepted)
        (void)td_fail(&td_fuzz_error, TD_INVALID, "no complete call, %zu bytes", one.all.n);
    td_bytes_free(&one.all);
    td_bytes_free(&other.all);
    return 0;
}
