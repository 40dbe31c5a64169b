/* What an engine on a device does at its start, and never again: decode steps are recorded and
 * replayed with the bits of launched ones, random weights are made there with the bits of the
 * host's, and memory is taken to the byte planned and no more afterwards. Built twice: over the GPU
 * (skipped where there is none) and over the emulator of tests/kernels/cuda. */
#include "tests/kernels/engine_fixture.h"

#include <stdio.h>

#include "kernels/decode_graphs.h"
#include "kernels/device.h"
#include "kernels/model/random.h"
#include "kernels/ops.h"

extern const struct td_backend TD_TEST_BACKEND;

enum { SEQUENCES = 10, PREFIX = 7 }; /* an emulated token takes milliseconds */

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

/* ---- recorded steps ---- */

static void every_number_of_rows_has_one(void **state) {
    (void)state;
    uint32_t n = 0;
    for (uint32_t rows = 0, next; rows < 1u << 16; rows = next, n++) {
        next = td_decode_graph_next(rows);
        assert_true(next > rows);
        if (next <= TD_GRAPHS_EACH) assert_int_equal(next, rows + 1);
        /* The fewest sequences it serves leave at most a fifth of its rows idle. */
        assert_true((next - rows - 1) * 5 <= next);
    }
    assert_true(n <= TD_GRAPHS_MAX);
    assert_int_equal(td_decode_graphs_count(SEQUENCES), 9); /* 1 to 8, 10 */
}

struct pair {
    struct td_engine *e[2]; /* launched, recorded */
    uint32_t pos[SEQUENCES];
    uint32_t pages[SEQUENCES][1];
    int32_t *ids;
};

static struct td_engine_options recorded_options(void) {
    struct td_engine_options o = td_test_options();
    o.backend = &TD_TEST_BACKEND;
    o.slots = o.max_runs = SEQUENCES;
    o.pages = SEQUENCES;
    o.max_context = 256;
    o.max_tokens = 64;
    o.index_topk = 1;
    return o;
}

static void same_step(struct pair *p, const struct td_run *run, uint32_t n, bool chosen) {
    const float *logits[2];
    uint32_t layers = td_engine_layout(p->e[0])->csa_layers, topk = recorded_options().index_topk;
    size_t bytes = (size_t)SEQUENCES * layers * topk * sizeof(int32_t);
    struct td_capture c[2];
    for (int i = 0; i < 2; i++)
        c[i] = (struct td_capture){SEQUENCES, layers, topk, td_test_bytes(bytes)};
    for (int i = 0; i < 2; i++)
        ok(td_engine_step(p->e[i], run, n, &logits[i], chosen ? &c[i] : NULL, &err));
    td_test_same("logits", logits[0], logits[1], n * td_test_logit_bytes());
    if (chosen) td_test_same("chosen entries", c[0].entries, c[1].entries, bytes);
    for (int i = 0; i < 2; i++)
        free(c[i].entries);
}

/* `n` of the sequences, from the first-th on, one token each. */
static void decode(struct pair *p, uint32_t first, uint32_t n, bool chosen) {
    struct td_run run[SEQUENCES];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t s = (first + i) % SEQUENCES;
        run[i] = (struct td_run){.slot = s,
                                 .pos = p->pos[s],
                                 .n = 1,
                                 .ids = p->ids + s * 256 + p->pos[s],
                                 .pages = p->pages[s],
                                 .want_logits = true};
        p->pos[s]++;
    }
    same_step(p, run, n, chosen);
}

static void same_slots(struct pair *p) {
    const struct td_kv_layout *l = td_engine_layout(p->e[0]);
    size_t cap = td_kv_page_block_bytes_max(l), slot = td_kv_slot_block_bytes_max(l), len[2];
    struct td_kv_ticket t = {1, 2};
    cap = slot > cap ? slot : cap;
    void *block[2] = {td_test_bytes(cap), td_test_bytes(cap)};
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        for (int i = 0; i < 2; i++)
            ok(td_engine_pack_slot(p->e[i], s, t, p->pos[s], block[i], cap, &len[i], NULL, &err));
        td_test_same("slot", block[0], block[1], len[0]);
        for (int i = 0; i < 2; i++)
            ok(td_engine_pack_page(p->e[i], p->pages[s][0], t, 0, p->pos[s], block[i], cap, &len[i],
                                   NULL, &err));
        td_test_same("page", block[0], block[1], len[0]);
    }
    free(block[0]);
    free(block[1]);
}

/* Sequences of different lengths, in steps of every size, idle rows and other orders among them;
 * what was chosen is wanted in some. */
static void replay(struct td_engine_options o) {
    static const uint8_t sizes[] = {9, 3, 10};
    struct pair p = {.ids = td_test_ids(SEQUENCES * 256)};
    struct td_engine_memory m;
    for (int i = 0; i < 2; i++) {
        o.eager = i == 0;
        p.e[i] = td_test_engine(&o);
        td_engine_memory(p.e[i], &m);
        assert_int_equal(m.graphs, i ? td_decode_graphs_count(SEQUENCES) : 0);
        assert_true(i ? m.graph_launches > 100 : m.graph_launches == 0);
    }
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        uint32_t n = s % 5 == 1 ? PREFIX + s : 1; /* two with more entries than are chosen */
        p.pages[s][0] = (s * 7 + 3) % SEQUENCES;
        struct td_run run = {
            .slot = s, .n = n, .ids = p.ids + s * 256, .pages = p.pages[s], .want_logits = s == 0};
        p.pos[s] = n;
        for (int i = 0; i < 2; i++)
            ok(td_engine_step(p.e[i], &run, 1, &(const float *){NULL}, NULL, &err));
    }
    for (uint32_t i = 0; i < sizeof sizes; i++)
        decode(&p, i * 3, sizes[i], i % 2);
    same_slots(&p);
    for (int i = 0; i < 2; i++)
        td_engine_destroy(p.e[i]);
    free(p.ids);
}

static void replayed_plain_steps(void **state) {
    (void)state;
    struct td_engine_options o = recorded_options();
    ok(td_ops_mask("all", &o.force_ref, &err));
    replay(o);
}

static void replayed_fast_steps(void **state) {
    (void)state;
    struct td_engine_options o = recorded_options();
    o.ref = true;
    o.row_dtype = TD_KV_ROW_FP8;
    replay(o);
}

static void launches_are_counted(void **state) {
    (void)state;
    struct td_engine_options o = recorded_options();
    struct td_engine *e = td_test_engine(&o);
    struct td_engine_memory m;
    uint32_t sum = 0, n;
    td_engine_memory(e, &m);
    for (uint32_t l = 0; l < td_test_model()->config.layers; l++) {
        ok(td_engine_launches(e, l, &n, &err));
        assert_in_range(n, 20, 200);
        sum += n;
    }
    assert_in_range(m.graph_launches, sum + 5, sum + 40); /* embedding, angles, head, chosen */
    td_engine_destroy(e);
}

/* ---- random weights ---- */

/* Every form of bytes, of lengths that end inside a word. */
static void filled_as_on_the_host(void **state) {
    (void)state;
    static const char *const names[] = {"layers.1.attn.wq_a", "layers.0.attn_norm.weight",
                                        "layers.2.hc_attn_base"};
    struct td_device d = {0};
    ok(TD_TEST_BACKEND.open(&d, 0, &err));
    for (uint32_t f = TD_W_F32; f <= TD_W_NVFP4; f++)
        for (int i = 0; i < 3; i++) {
            struct td_weight w = {
                .format = (enum td_weight_format)f, .rows = i == 2 ? 1 : 131, .cols = 96};
            td_random_weight(77, names[i], &w);
            for (int scale = 0; scale < 2; scale++) {
                size_t n = scale ? td_weight_scale_bytes(&w) : td_weight_data_bytes(&w);
                if (n == 0) continue;
                struct td_random r = td_random_of(&w, scale);
                void *memory, *mine = td_test_bytes(n), *there = td_test_bytes(n);
                ok(TD_TEST_BACKEND.take(&d, n, "a tensor", &memory, &err));
                struct td_fill whole = {memory, 0, n, 1, n};
                TD_TEST_BACKEND.fill(&d, &r, &whole);
                td_download(&d, there, memory, n);
                ok(TD_TEST_BACKEND.wait(&d, TD_LANE_STEP, &err));
                td_random_bytes(&r, 0, n, mine);
                td_test_same("bytes", mine, there, n);
                TD_TEST_BACKEND.give(&d, memory, n);
                free(mine);
                free(there);
            }
        }
    TD_TEST_BACKEND.close(&d);
}

/* Parts of rows, of whole words and not: the bytes that the whole tensor has there. */
static void parts_are_the_whole_s(void **state) {
    (void)state;
    static const struct td_fill part[] = {{NULL, 64, 128, 5, 512},   {NULL, 3, 7, 9, 13},
                                          {NULL, 8, 12, 6, 24},      {NULL, 5, 1000, 1, 1000},
                                          {NULL, 16, 1001, 1, 1001}, {NULL, 4, 8, 3, 16}};
    struct td_device d = {0};
    struct td_weight w = {.format = TD_W_BF16, .rows = 64, .cols = 96};
    td_random_weight(77, "layers.1.attn.wq_a", &w);
    struct td_random r = td_random_of(&w, false);
    ok(TD_TEST_BACKEND.open(&d, 0, &err));
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        struct td_fill f = part[i];
        size_t n = f.width * f.rows;
        uint8_t *mine = td_test_bytes(n), *there = td_test_bytes(n);
        ok(TD_TEST_BACKEND.take(&d, n, "a tensor", &f.to, &err));
        TD_TEST_BACKEND.fill(&d, &r, &f);
        td_download(&d, there, f.to, n);
        ok(TD_TEST_BACKEND.wait(&d, TD_LANE_STEP, &err));
        for (size_t row = 0; row < f.rows; row++)
            td_random_bytes(&r, f.from + row * f.pitch, f.width, mine + row * f.width);
        td_test_same("bytes", mine, there, n);
        TD_TEST_BACKEND.give(&d, f.to, n);
        free(mine);
        free(there);
    }
    TD_TEST_BACKEND.close(&d);
}

/* The bundled model's shapes without its weights. */
static void same_model_anywhere(void **state) {
    (void)state;
    enum { N = 5 };
    static const uint32_t page[] = {0};
    for (int kind = TD_OUTLINE_BF16; kind <= TD_OUTLINE_NVFP4; kind++) {
        const float *logits[2] = {NULL, NULL};
        struct td_engine_options o = recorded_options();
        struct td_engine *e[2];
        struct td_model *m;
        int32_t *ids = td_test_ids(N);
        o.ref = kind != TD_OUTLINE_BF16;
        ok(td_ops_mask("all", &o.force_ref, &err));
        ok(td_model_random(&td_test_model()->config, (enum td_outline)kind, 9, &m, &err));
        for (int i = 0; i < 2; i++) {
            o.backend = i ? &TD_TEST_BACKEND : NULL;
            struct td_run run = {.n = N, .ids = ids, .pages = page, .want_logits = true};
            ok(td_engine_create(m, &o, &e[i], &err));
            ok(td_engine_step(e[i], &run, 1, &logits[i], NULL, &err));
        }
        td_test_same("logits", logits[0], logits[1], td_test_logit_bytes());
        td_engine_destroy(e[0]);
        td_engine_destroy(e[1]);
        td_model_close(m);
        free(ids);
    }
}

/* ---- memory ---- */

/* What is free on the card does not change from the first step on, whatever a step is. */
static void nothing_is_taken_after_start(void **state) {
    (void)state;
    static const uint32_t sizes[] = {17, 1, 1, 5};
    struct td_engine_options o = recorded_options();
    uint64_t bytes, before, during, after;
    uint32_t page[] = {3}, pos = 0;
    int32_t *ids = td_test_ids(256);
    ok(TD_TEST_BACKEND.memory(0, &bytes, &before, &err));
    struct td_engine *e = td_test_engine(&o);
    struct td_engine_memory m;
    td_engine_memory(e, &m);
    ok(TD_TEST_BACKEND.memory(0, &bytes, &during, &err));
    assert_true(before - during >= m.weights + m.pool + m.slots + m.index_workspace + m.scratch);
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct td_run run = {
            .pos = pos, .n = sizes[i], .ids = ids + pos, .pages = page, .want_logits = i > 1};
        const float *logits;
        ok(td_engine_step(e, &run, 1, &logits, NULL, &err));
        pos += sizes[i];
        ok(TD_TEST_BACKEND.memory(0, &bytes, &after, &err));
        assert_int_equal(after, during);
    }
    td_engine_destroy(e);
    free(ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_of_rows_has_one),
        cmocka_unit_test(replayed_plain_steps),
        cmocka_unit_test(replayed_fast_steps),
        cmocka_unit_test(launches_are_counted),
        cmocka_unit_test(filled_as_on_the_host),
        cmocka_unit_test(parts_are_the_whole_s),
        cmocka_unit_test(same_model_anywhere),
        cmocka_unit_test(nothing_is_taken_after_start),
    };
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
