/* The codec: every message there and back, frames of other versions, frames of nobody.
 *
 * usage: test_codec FRAMES_DIR            run
 *        test_codec --record FRAMES_DIR   write the frames (once per wire version) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "proto/codec.h"
#include "tests/proto/count_malloc.h"
#include "tests/proto/messages.h"

enum { FRAME_MAX = 64 << 10, RECORD_SEED = 20240601 };

static const char *frames_dir;
static struct test_room room;
static struct td_msg_arena *arena;
static uint64_t seed;

static int setup(void **state) {
    (void)state;
    return td_msg_arena_create(&arena) == TD_OK ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    td_msg_arena_destroy(arena);
    return 0;
}

static size_t encode(const struct td_msg *m, uint8_t *buf) {
    size_t n = 0;
    struct td_error err = {0};
    if (td_msg_encode(m, buf, FRAME_MAX, &n, &err) != TD_OK)
        fail_msg("encoding %s: %s", test_type_name(m->type), err.text);
    assert_true(n <= td_msg_size_bound(m));
    return n;
}

static void decode_like(const uint8_t *bytes, size_t n, const struct td_msg *want, bool recorded) {
    struct td_msg got;
    struct td_error err = {0};
    if (td_msg_decode(bytes, n, arena, &got, &err) != TD_OK)
        fail_msg("decoding %s: %s", test_type_name(want->type), err.text);
    const char *f = test_message_differs(want, &got, recorded);
    if (f) fail_msg("%s differs (seed %llu)", f, (unsigned long long)seed);
}

static size_t read_frame(enum td_msg_type t, uint8_t *buf) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s.bin", frames_dir, test_type_name(t));
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s is missing", path);
    size_t n = fread(buf, 1, FRAME_MAX, f);
    fclose(f);
    return n;
}

static int record(void) {
    static uint8_t buf[FRAME_MAX];
    for (int i = 0; i < TEST_TYPES; i++) {
        struct td_msg m;
        char path[1024];
        size_t n;
        test_message_fill(&m, test_types[i], RECORD_SEED, &room);
        snprintf(path, sizeof path, "%s/%s.bin", frames_dir, test_type_name(m.type));
        FILE *f = fopen(path, "wb");
        if (!f || td_msg_encode(&m, buf, sizeof buf, &n, NULL) != TD_OK ||
            fwrite(buf, 1, n, f) != n || fclose(f) != 0)
            return 1;
    }
    return 0;
}

static void test_round_trip(void **state) {
    (void)state;
    static uint8_t buf[FRAME_MAX];
    struct td_msg m;
    for (uint64_t k = 0; k < 300; k++) {
        for (int i = 0; i < TEST_TYPES; i++) {
            test_message_fill(&m, test_types[i], seed + k, &room);
            decode_like(buf, encode(&m, buf), &m, false);
        }
    }
}

static void test_recorded_frames(void **state) {
    (void)state;
    static uint8_t buf[FRAME_MAX];
    struct td_msg m;
    for (int i = 0; i < TEST_TYPES; i++) {
        test_message_fill(&m, test_types[i], RECORD_SEED, &room);
        decode_like(buf, read_frame(test_types[i], buf), &m, true);
    }
}

/* ---- other versions ---- */

static size_t put_varint(uint8_t *p, uint64_t v) {
    size_t n = 0;
    for (; v >= 0x80; v >>= 7)
        p[n++] = (uint8_t)(v | 0x80);
    p[n++] = (uint8_t)v;
    return n;
}

/* Splits a frame of one field into its tag and body. */
static const uint8_t *frame_body(const uint8_t *frame, size_t *tag_len, size_t *body_len) {
    size_t at = 0, shift = 0;
    while (frame[at] & 0x80)
        at++;
    *tag_len = ++at;
    *body_len = 0;
    do {
        *body_len |= (size_t)(frame[at] & 0x7f) << shift;
        shift += 7;
    } while (frame[at++] & 0x80);
    return frame + at;
}

static size_t with_body(uint8_t *to, const uint8_t *frame, const uint8_t *body, size_t n) {
    size_t tag_len, old;
    frame_body(frame, &tag_len, &old);
    memcpy(to, frame, tag_len);
    size_t at = tag_len + put_varint(to + tag_len, n);
    memcpy(to + at, body, n);
    return at + n;
}

/* A newer version added fields: a number and a string. */
static void test_unknown_fields(void **state) {
    (void)state;
    static uint8_t frame[FRAME_MAX], body[FRAME_MAX], newer[FRAME_MAX];
    struct td_msg m;
    for (int i = 0; i < TEST_TYPES; i++) {
        test_message_fill(&m, test_types[i], RECORD_SEED, &room);
        size_t tag, n;
        read_frame(test_types[i], frame);
        const uint8_t *b = frame_body(frame, &tag, &n);
        memcpy(body, b, n);
        n += put_varint(body + n, 500 << 3 | 0); /* field 500, varint */
        n += put_varint(body + n, 123456789);
        n += put_varint(body + n, 501 << 3 | 2); /* field 501, bytes */
        n += put_varint(body + n, 5);
        memcpy(body + n, "hello", 5);
        n += 5;
        decode_like(newer, with_body(newer, frame, body, n), &m, true);
    }
}

/* Length of the field at `p`, tag included. */
static size_t field_len(const uint8_t *p) {
    size_t at = 0;
    uint64_t tag = 0, len = 0;
    int shift = 0;
    do {
        tag |= (uint64_t)(p[at] & 0x7f) << shift;
        shift += 7;
    } while (p[at++] & 0x80);
    if ((tag & 7) == 1) return at + 8;
    if ((tag & 7) == 5) return at + 4;
    shift = 0;
    do {
        len |= (uint64_t)(p[at] & 0x7f) << shift;
        shift += 7;
    } while (p[at++] & 0x80);
    return (tag & 7) == 2 ? at + (size_t)len : at;
}

/* An older version lacks a field, any one: read as its zero, or refused with a sentence where a
 * message without it means nothing. Which ones may be refused is written down here. */
static void test_missing_fields(void **state) {
    (void)state;
    static uint8_t frame[FRAME_MAX], body[FRAME_MAX], older[FRAME_MAX];
    int refused = 0, read = 0;
    for (int i = 0; i < TEST_TYPES; i++) {
        size_t tag, n;
        read_frame(test_types[i], frame);
        const uint8_t *b = frame_body(frame, &tag, &n);
        for (size_t at = 0; at < n;) {
            size_t len = field_len(b + at);
            assert_true(at + len <= n);
            memcpy(body, b, at);
            memcpy(body + at, b + at + len, n - at - len);
            struct td_msg m;
            struct td_error err = {0};
            td_status st =
                td_msg_decode(older, with_body(older, frame, body, n - len), arena, &m, &err);
            if (st == TD_OK) {
                read++;
            } else {
                assert_int_equal(st, TD_PROTOCOL);
                assert_true(strlen(err.text) > 5);
                refused++;
            }
            at += len;
        }
    }
    /* hello: role, name; admit: n_prompt, max_new; prefill: max_new, ids; tokens: tokens; finished:
     * reason; peer_hello: name; manifest: n_prompt and the three columns of families. The recorded
     * welcome has a refusal's status, so its slabs may be missing. */
    assert_int_equal(refused, 13);
    assert_true(read > 70);
}

static void test_defaults(void **state) {
    (void)state;
    struct td_msg m, got;
    uint8_t buf[256];
    size_t n;
    memset(&m, 0, sizeof m);
    m.type = TD_MSG_ADMIT;
    m.admit.n_prompt = m.admit.max_new = 1;
    m.admit.sampling.top_p = 1;
    assert_int_equal(td_msg_encode(&m, buf, sizeof buf, &n, NULL), TD_OK);
    assert_int_equal(td_msg_decode(buf, n, arena, &got, NULL), TD_OK);
    assert_null(got.admit.ids);
    assert_true(got.admit.sampling.top_p == 1);
    /* no sampling at all: greedy, nothing cut off */
    const uint8_t bare[] = {4 << 3 | 2, 4, 2 << 3, 7, 3 << 3, 9};
    assert_int_equal(td_msg_decode(bare, sizeof bare, arena, &got, NULL), TD_OK);
    assert_int_equal(got.admit.n_prompt, 7);
    assert_true(got.admit.sampling.top_p == 1 && got.admit.sampling.temperature == 0);
    /* a status code of the future is an error, not success */
    const uint8_t future[] = {10 << 3 | 2, 3, 2 << 3, 0x80 | 100, 1};
    assert_int_equal(td_msg_decode(future, sizeof future, arena, &got, NULL), TD_OK);
    assert_int_equal(got.failed.status, TD_INTERNAL);
    /* a message type of the future */
    const uint8_t type[] = {0x80 | (100 << 3 & 0x7f) | 2, 100 << 3 >> 7, 0};
    assert_int_equal(td_msg_decode(type, sizeof type, arena, &got, NULL), TD_UNSUPPORTED);
}

/* ---- refusals ---- */

static void refuse(const struct td_msg *m) {
    static uint8_t buf[FRAME_MAX];
    size_t n;
    struct td_error err = {0};
    assert_int_equal(td_msg_encode(m, buf, sizeof buf, &n, &err), TD_PROTOCOL);
    assert_true(strlen(err.text) > 5);
}

static void set_guide(struct td_msg *m) {
    room.guide.n_bias = room.guide.n_prompt_ids = room.guide.grammar_n = 2;
    m->prefill.sampling.guide = &room.guide;
}

static void test_limits(void **state) {
    (void)state;
    struct td_msg m;
#define REFUSED(TYPE, change)                                                                      \
    test_message_fill(&m, TD_MSG_##TYPE, RECORD_SEED, &room);                                      \
    change;                                                                                        \
    refuse(&m)
    REFUSED(HELLO, m.hello.role = 9);
    REFUSED(HELLO, m.hello.name[0] = 0);
    REFUSED(HELLO, m.hello.xfer_address_len = TD_MSG_ADDRESS_MAX + 1);
    REFUSED(ADMIT, m.admit.max_new = 0);
    REFUSED(ADMIT, m.admit.n_prompt = 0);
    REFUSED(ADMIT, m.admit.sampling.top_p = 0);
    REFUSED(ADMIT, m.admit.sampling.top_p = 1.5f);
    REFUSED(ADMIT, m.admit.sampling.min_p = 1);
    REFUSED(ADMIT, m.admit.sampling.temperature = -1);
    REFUSED(ADMIT, m.admit.sampling.temperature = 0.0f / 0.0f);
    REFUSED(ADMIT, m.admit.sampling.top_logprobs = TD_TOP_LOGPROBS_MAX + 1);
    REFUSED(ADMIT, m.admit.n = TD_CHOICES_MAX + 1);
    REFUSED(ADMIT, m.admit.sampling.frequency_penalty = 2.1f);
    REFUSED(ADMIT, m.admit.sampling.presence_penalty = 0.0f / 0.0f);
    REFUSED(ADMIT, m.admit.sampling.repetition_penalty = -1);
    REFUSED(ADMIT, m.admit.sampling.n_said = 3; m.admit.sampling.said = NULL);
    REFUSED(PREFILL, set_guide(&m); room.guide.n_bias = TD_LOGIT_BIAS_MAX + 1);
    REFUSED(PREFILL, set_guide(&m); room.bias[0] = 0.0f / 0.0f);
    REFUSED(PREFILL, set_guide(&m); room.guide_id[0][0] = -1);
    REFUSED(PREFILL, set_guide(&m); room.guide_id[1][1] = -1);
    REFUSED(PREFILL, set_guide(&m); room.guide.grammar_n = TD_GUIDE_GRAMMAR_MAX + 1);
    REFUSED(PREFILL, set_guide(&m); room.guide.grammar = NULL);
    REFUSED(PREFILL, m.prefill.n = TD_CHOICES_MAX + 1);
    REFUSED(TOKENS, m.tokens.choice = TD_CHOICES_MAX);
    REFUSED(FINISHED, m.finished.choice = TD_CHOICES_MAX);
    REFUSED(FAILED, m.failed.only = TD_CHOICES_MAX + 1);
    REFUSED(CANCEL, m.cancel.only = TD_CHOICES_MAX + 1);
    REFUSED(PREFILL, m.prefill.ids = NULL);
    REFUSED(PREFILL, room.ids[m.prefill.n_prompt - 1] = -1);
    REFUSED(TOKENS, m.tokens.n = 0);
    REFUSED(TOKENS, m.tokens.n = TD_TOKENS_PER_MSG_MAX + 1);
    REFUSED(TOKENS, room.tokens[0].n_top = TD_TOP_LOGPROBS_MAX + 1);
    REFUSED(TOKENS, room.tokens[0].id = -5);
    REFUSED(FINISHED, m.finished.reason = (enum td_finish)0);
    REFUSED(PEER_WELCOME, m.peer_welcome.n_slabs = TD_LANDING_SLABS_MAX + 1);
    REFUSED(PEER_WELCOME, m.peer_welcome.n_slabs = 0; m.peer_welcome.status = TD_OK);
    REFUSED(MANIFEST, m.manifest.n_families = TD_KV_FAMILIES_MAX + 1);
    REFUSED(MANIFEST, m.manifest.n_first = TD_FIRST_TOKENS_MAX + 1);
    REFUSED(KEEP, m.type = (enum td_msg_type)77);
#undef REFUSED
}

/* A selection that is not what workers choose must not reach a client as one. */
static void test_selections(void **state) {
    (void)state;
    static uint32_t layer[TD_SELECTION_LAYERS_MAX + 1], count[TD_SELECTION_LAYERS_MAX + 1];
    static uint32_t entry[TD_SELECTION_ENTRIES_MAX + 2];
    static uint8_t buf[FRAME_MAX];
    struct td_token t[2] = {{.id = 3}, {.id = 4}};
    const struct td_selection good = {2, 5, layer, count, entry};
    struct td_selection s[2];
    struct td_msg m = {.type = TD_MSG_TOKENS, .tokens = {.n = 2, .tokens = t, .selections = s}};
#define REFUSED(change)                                                                            \
    for (uint32_t i = 0; i < TD_SELECTION_ENTRIES_MAX + 2; i++)                                    \
        entry[i] = i;                                                                              \
    layer[0] = 2, layer[1] = 4, count[0] = 3, count[1] = 2;                                        \
    s[0] = s[1] = good;                                                                            \
    decode_like(buf, encode(&m, buf), &m, false);                                                  \
    change;                                                                                        \
    refuse(&m)
    REFUSED(layer[1] = 2);
    REFUSED(count[0] = 2);
    REFUSED(count[1] = 3);
    REFUSED(entry[2] = entry[1]);
    REFUSED(entry[3] = 9);
    REFUSED(s[1].n_entries = 6);
    REFUSED(s[1].n_layers = 1);
    REFUSED(s[1].n_layers = TD_SELECTION_LAYERS_MAX + 1);
    REFUSED(count[0] = TD_SELECTION_ENTRIES_MAX + 1; count[1] = 0;
            s[0].n_entries = s[1].n_entries = count[0]);
#undef REFUSED
    for (uint32_t i = 0; i < TD_SELECTION_ENTRIES_MAX; i++)
        entry[i] = UINT32_MAX - TD_SELECTION_ENTRIES_MAX + i;
    count[0] = TD_SELECTION_ENTRIES_MAX;
    s[0] = s[1] = (struct td_selection){1, TD_SELECTION_ENTRIES_MAX, layer, count, entry};
    decode_like(buf, encode(&m, buf), &m, false); /* as many as there may be, of the longest */
}

/* ---- hostile bytes ---- */

static void mutate(uint8_t *b, size_t *n, size_t cap, uint64_t *r) {
    uint64_t kind = test_random(r) % 5;
    size_t at = *n ? test_random(r) % *n : 0;
    if (kind == 0 && *n) b[at] = (uint8_t)test_random(r);
    if (kind == 1 && *n) b[at] ^= (uint8_t)(1u << test_random(r) % 8);
    if (kind == 2) *n = at;
    if (kind == 3 && *n < cap) {
        memmove(b + at + 1, b + at, *n - at);
        b[at] = (uint8_t)test_random(r);
        ++*n;
    }
    if (kind == 4 && *n > at + 1) {
        memmove(b + at, b + at + 1, *n - at - 1);
        --*n;
    }
}

static void test_hostile_bytes(void **state) {
    (void)state;
    static uint8_t frame[FRAME_MAX], again[FRAME_MAX * 2];
    uint64_t r = seed;
    unsigned long ok = 0, refused = 0;
    for (int k = 0; k < 40000; k++) {
        size_t n = read_frame(test_types[k % TEST_TYPES], frame);
        if (n > 600) n = 600; /* damage near the front, where structure is */
        if (k % 3 == 0) n = read_frame(test_types[k % TEST_TYPES], frame);
        uint64_t times = 1 + test_random(&r) % 8;
        for (uint64_t i = 0; i < times; i++)
            mutate(frame, &n, FRAME_MAX, &r);
        /* An exact heap copy, so that reading past the end is seen. */
        uint8_t *copy = malloc(n ? n : 1);
        assert_non_null(copy);
        memcpy(copy, frame, n);
        struct td_msg m;
        if (td_msg_decode(copy, n, arena, &m, NULL) == TD_OK) {
            size_t len; /* what was let in obeys the limits for sending */
            assert_int_equal(td_msg_encode(&m, again, sizeof again, &len, NULL), TD_OK);
            ok++;
        } else {
            refused++;
        }
        free(copy);
    }
    print_message("hostile bytes: %lu read, %lu refused\n", ok, refused);
    assert_true(ok > 100 && refused > 100);
}

/* Many tiny pieces in one frame: refused at the arena's bound, not by exhausting memory. */
static void test_bomb(void **state) {
    (void)state;
    size_t n = TD_FRAME_BYTES_MAX;
    uint8_t *b = malloc(n);
    struct td_msg m;
    assert_non_null(b);
    for (size_t i = 0; i < n; i += 2)
        b[i] = 11 << 3 | 2, b[i + 1] = 0; /* "cancel" 8 million times */
    (void)!td_msg_decode(b, n, arena, &m, NULL);
    b[0] = 7 << 3 | 2; /* a prompt of 16 million one-byte ids */
    size_t at = 1 + put_varint(b + 1, n - 5);
    b[at] = 4 << 3 | 2;
    at += 1 + put_varint(b + at + 1, n - 10);
    memset(b + at, 1, n - at);
    assert_int_not_equal(td_msg_decode(b, n, arena, &m, NULL), TD_OK);
    assert_int_equal(td_msg_decode(b, n + 1, arena, &m, NULL), TD_TOO_LONG);
    free(b);
}

static void test_longest_prompt(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    int32_t *ids = malloc(N * sizeof *ids);
    uint8_t *buf = malloc(TD_FRAME_BYTES_MAX);
    assert_non_null(ids);
    assert_non_null(buf);
    for (int i = 0; i < N; i++)
        ids[i] = 129279 - i % 1000;
    struct td_msg m = {.type = TD_MSG_PREFILL}, got;
    m.prefill.n_prompt = N;
    m.prefill.ids = ids;
    m.prefill.max_new = 1;
    m.prefill.sampling.top_p = 1;
    size_t n;
    assert_int_equal(td_msg_encode(&m, buf, TD_FRAME_BYTES_MAX, &n, NULL), TD_OK);
    assert_int_equal(td_msg_encode(&m, buf, n - 1, &n, NULL), TD_TOO_LONG);
    assert_int_equal(td_msg_decode(buf, n, arena, &got, NULL), TD_OK);
    assert_null(test_message_differs(&m, &got, false));
    free(ids);
    free(buf);
}

static void test_steady_state(void **state) {
    (void)state;
    if (!test_counts_malloc) skip();
    static uint8_t frames[TEST_TYPES][FRAME_MAX];
    size_t len[TEST_TYPES];
    struct td_msg m;
    for (int i = 0; i < TEST_TYPES; i++) {
        test_message_fill(&m, test_types[i], seed, &room);
        len[i] = encode(&m, frames[i]);
    }
    for (int round = 0; round < 3; round++) {
        unsigned long before = test_mallocs;
        for (int i = 0; i < TEST_TYPES; i++) {
            size_t n;
            assert_int_equal(td_msg_decode(frames[i], len[i], arena, &m, NULL), TD_OK);
            assert_int_equal(td_msg_encode(&m, frames[i], FRAME_MAX, &n, NULL), TD_OK);
        }
        if (round == 2) assert_int_equal(test_mallocs, before);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_recorded_frames),
        cmocka_unit_test(test_unknown_fields), cmocka_unit_test(test_missing_fields),
        cmocka_unit_test(test_defaults),       cmocka_unit_test(test_limits),
        cmocka_unit_test(test_selections),     cmocka_unit_test(test_hostile_bytes),
        cmocka_unit_test(test_bomb),           cmocka_unit_test(test_longest_prompt),
        cmocka_unit_test(test_steady_state),
    };
    if (argc == 3 && strcmp(argv[1], "--record") == 0) {
        frames_dir = argv[2];
        return record();
    }
    if (argc < 2) {
        fprintf(stderr, "usage: test_codec [--record] FRAMES_DIR\n");
        return 2;
    }
    frames_dir = argv[1];
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, setup, teardown);
}
