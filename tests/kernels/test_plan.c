/* The plan is what is taken, to the byte; an outline without weights is the checkpoint, to the
 * byte; what does not fit is refused with the number to change, and that number then fits. */
#include <stdio.h>

#include "kernels/device.h"
#include "kernels/worker_engine.h"
#include "kernels/worker_plan.h"
#include "tests/kernels/engine_fixture.h"

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

static struct td_model *outline(const struct td_model_config *c, enum td_outline kind) {
    struct td_model *m;
    ok(td_model_outline(c, kind, &m, &err));
    return m;
}

static struct td_model_config flash(void) {
    struct td_model_config c;
    ok(td_model_config_load(TD_TEST_FLASH, &c, &err));
    return c;
}

static void same_memory(const struct td_engine_memory *a, const struct td_engine_memory *b) {
    assert_int_equal(a->weights, b->weights);
    assert_int_equal(a->pool, b->pool);
    assert_int_equal(a->slots, b->slots);
    assert_int_equal(a->index_workspace, b->index_workspace);
    assert_int_equal(a->scratch, b->scratch);
    assert_int_equal(a->host, b->host);
}

/* Published sizes without the draft layer, whose tensors the official ones are of too. */
static void outline_is_the_release(void **state) {
    (void)state;
    struct td_model_config c = flash();
    const size_t drafts = 159609485896 - 156015698140;
    struct td_model *m = outline(&c, TD_OUTLINE_FP4);
    assert_int_equal(m->bytes, 156015698140);
    assert_true(m->config.quantised);
    td_model_close(m);
    m = outline(&c, TD_OUTLINE_NVFP4);
    assert_int_equal(m->bytes, 168266793544 - drafts);
    td_model_close(m);
}

/* What a rank of a GPU worker holds of a model. */
static size_t weights(const struct td_model *m, uint32_t ranks) {
    struct td_engine_options o = td_test_options();
    struct td_engine_memory memory;
    struct td_kv_layout layout;
    o.index_topk = 512;
    o.ranks = ranks;
    o.backend = td_worker_plan_cuda();
    ok(td_engine_plan(m, &o, &layout, &memory, &err));
    assert_int_equal(memory.ranks, ranks);
    return memory.weights;
}

/* Shares of experts, heads and vocabulary add up to the whole; the rest is on every rank. */
static void shares_add_up(void **state) {
    (void)state;
    struct td_model_config c = flash();
    for (enum td_outline kind = TD_OUTLINE_FP4; kind <= TD_OUTLINE_NVFP4; kind++) {
        struct td_model *m = outline(&c, kind);
        size_t whole = weights(m, 1), divided = 0;
        assert_in_range(whole, m->bytes, m->bytes / 100 * 102);
        for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
            /* bytes(ranks) = divided / ranks + rest: the same two numbers at every size */
            size_t again = (whole - weights(m, ranks)) / (ranks - 1) * ranks;
            if (divided == 0) divided = again;
            assert_in_range(again, divided / 10000 * 9999, divided / 10000 * 10001);
        }
        assert_true(whole - divided < whole / 40);
        td_model_close(m);
    }
    struct td_engine_options o = td_test_options();
    struct td_engine_memory memory;
    struct td_kv_layout layout;
    struct td_model *m = outline(&c, TD_OUTLINE_FP4);
    o.ranks = 3;
    assert_int_equal(td_engine_plan(m, &o, &layout, &memory, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "1, 2, 4 or 8"));
    m->config.o_groups = 4;
    o.ranks = 8;
    assert_int_equal(td_engine_plan(m, &o, &layout, &memory, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "8 ranks share the model's 4 output groups"));
    td_model_close(m);
}

/* The CPU with a tally of what it is asked for, by all ranks. */
static _Atomic size_t taken;
static struct td_backend counting;

static td_status counting_open(struct td_device *d, uint32_t index, struct td_error *e) {
    td_status st = td_backend_cpu.open(d, index, e);
    d->backend = &counting;
    return st;
}

static td_status counting_take(struct td_device *d, size_t bytes, const char *what, void **ret,
                               struct td_error *e) {
    taken += bytes;
    return td_backend_cpu.take(d, bytes, what, ret, e);
}

static td_status counting_take_host(struct td_device *d, size_t bytes, const char *what, void **ret,
                                    struct td_error *e) {
    taken += bytes;
    return td_backend_cpu.take_host(d, bytes, what, ret, e);
}

static void plan_is_what_is_taken(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    counting = td_backend_cpu;
    counting.open = counting_open;
    counting.take = counting_take;
    counting.take_host = counting_take_host;
    o.backend = &counting;
    struct td_engine_memory real, planned, outlined;
    struct td_kv_layout layout;
    for (int ref = 0; ref < 2; ref++) {
        o.ref = ref;
        o.row_dtype = ref ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16;
        o.max_context = ref ? 1500 : TD_TEST_CONTEXT;
        o.slots = o.max_runs = 1 + (uint32_t)ref * 4;
        o.ranks = 1 + (uint32_t)ref;
        taken = 0;
        struct td_engine *e = td_test_engine(&o);
        td_engine_memory(e, &real);
        size_t most = o.ranks * (real.weights + real.pool + real.slots + real.index_workspace +
                                 real.scratch) +
                      real.host;
        /* Values decide how much a rank's share takes, and the plan is of the one with most. */
        assert_in_range(taken, ref ? most / 100 * 99 : most, most);
        size_t before = taken;
        ok(td_engine_plan(td_test_model(), &o, &layout, &planned, &err));
        assert_int_equal(taken, before); /* planning takes nothing */
        same_memory(&planned, &real);
        assert_int_equal(layout.fingerprint, td_engine_layout(e)->fingerprint);
        struct td_model *m = outline(&td_test_model()->config, TD_OUTLINE_NVFP4);
        assert_int_equal(m->bytes, td_test_model()->bytes);
        ok(td_engine_plan(m, &o, &layout, &outlined, &err));
        assert_true(outlined.weights >= real.weights); /* values decide over NVFP4 on the CPU */
        outlined.weights = real.weights;
        same_memory(&outlined, &real);
        td_model_close(m);
        td_engine_destroy(e);
    }
}

/* Everything a worker takes at start, against its plan. */
static void worker_is_as_planned(void **state) {
    (void)state;
    struct td_config c;
    struct td_worker_engine w;
    struct td_worker_plan p;
    char said[2048], planned[2048];
    td_config_defaults(&c);
    ok(td_config_set(&c, "model.dir=" TD_TEST_MODEL, &err));
    ok(td_config_set(&c, "max_context=4096", &err));
    ok(td_config_set(&c, "max_running=3", &err));
    ok(td_config_set(&c, "tp=2", &err));
    ok(td_worker_engine_open(&w, &c, NULL, &err));
    const struct td_plan_device host = {0};
    ok(td_worker_plan(w.model, &w.options, &host, c.slab_bytes, 2, c.grammar_mask_bytes, &p, &err));
    assert_int_equal(p.slab_bytes, td_worker_slab_bytes(w.layout, c.slab_bytes));
    td_worker_plan_text(&p, planned, sizeof planned);
    td_worker_engine_memory_text(&w, p.slabs, said, sizeof said);
    assert_string_equal(planned, said);
    assert_non_null(strstr(said, "pool: indexer keys"));
    assert_non_null(strstr(said, " x 2 ranks"));
    td_worker_engine_close(&w);
}

/* ---- what fits a GPU ---- */

static td_status plan(uint32_t gb, uint32_t ranks, uint32_t context, uint32_t slots,
                      struct td_worker_plan *p) {
    enum { FRACTION = 95 };
    struct td_model_config c = flash();
    struct td_model *m = outline(&c, TD_OUTLINE_NVFP4);
    struct td_engine_options o = td_test_options();
    const struct td_plan_device d = {.bytes = gb * 1000000000ull, .fraction = FRACTION};
    o.ranks = ranks;
    o.ref = true;
    o.row_dtype = TD_KV_ROW_FP8;
    o.index_topk = c.index_topk;
    o.max_context = context;
    o.slots = o.max_runs = slots;
    o.pages = 0;
    o.backend = td_worker_plan_cuda();
    td_status st = td_worker_plan(m, &o, &d, 8 << 20, 2, 1 << 20, p, &err);
    td_model_close(m);
    return st;
}

static void pool_gets_what_is_left(void **state) {
    (void)state;
    struct td_worker_plan p;
    ok(plan(96, 4, 1048576, 64, &p));
    size_t sum = td_worker_plan_bytes(&p, false), page = p.layout.pool_bytes / p.options.pages;
    assert_true(sum <= 91200000000 && sum + 2 * page > 91200000000);
    assert_int_equal(td_worker_plan_sequences(&p, 1048576), p.options.pages / 4096);
    assert_int_equal(td_worker_plan_sequences(&p, 256), 64);
    /* A share of the weights and a bit: 41 GB of 164, and what every rank has whole. */
    assert_in_range(p.engine.weights, 41000000000, 44000000000);
    ok(plan(141, 2, 1048576, 64, &p));
    assert_in_range(p.engine.weights, 82000000000, 86000000000);
}

static uint32_t number_after(const char *word) {
    const char *at = strstr(err.text, word);
    if (!at) fail_msg("expected \"%s\" in: %s", word, err.text);
    return (uint32_t)strtoul(at + strlen(word), NULL, 10);
}

static void refusals_say_what_fits(void **state) {
    (void)state;
    struct td_worker_plan p;
    assert_int_equal(plan(96, 1, 4096, 1, &p), TD_NO_MEMORY);
    assert_non_null(strstr(err.text, "more GPUs"));
    /* The context: the number said fits, one page more does not. */
    assert_int_equal(plan(96, 2, 1048576, 100, &p), TD_NO_MEMORY);
    uint32_t context = number_after("set max_context to at most ");
    uint32_t slots = number_after("or max_running to at most ");
    ok(plan(96, 2, context, 100, &p));
    assert_int_equal(plan(96, 2, context + 256, 100, &p), TD_NO_MEMORY);
    assert_in_range(slots, 1, 99);
    ok(plan(96, 2, 1048576, slots, &p));
    assert_int_equal(plan(96, 2, 1048576, slots + 1, &p), TD_NO_MEMORY);
    /* The slots. */
    assert_int_equal(plan(96, 4, 8192, 4000, &p), TD_NO_MEMORY);
    slots = number_after("set max_running to at most ");
    assert_in_range(slots, 100, 3999);
    ok(plan(96, 4, 8192, slots, &p));
    assert_int_equal(plan(96, 4, 8192, slots + 1, &p), TD_NO_MEMORY);
}

/* ---- at a worker's start ---- */

static uint64_t card_bytes, card_free;

static td_status card_memory(uint32_t index, uint64_t *ret_bytes, uint64_t *ret_free,
                             struct td_error *e) {
    (void)e;
    assert_int_equal(index, 0);
    *ret_bytes = card_bytes;
    *ret_free = card_free;
    return TD_OK;
}

/* The bundled model on a card of `gb`, of which `free_gb` are free. */
static td_status start(double gb, double free_gb, const char *setting,
                       struct td_engine_options *o) {
    static struct td_backend card;
    struct td_config c;
    card = *td_worker_plan_cuda();
    card.memory = card_memory;
    card_bytes = (uint64_t)(gb * 1e9);
    card_free = (uint64_t)(free_gb * 1e9);
    td_config_defaults(&c);
    ok(td_config_set(&c, setting, &err));
    ok(td_engine_options_from(&c, &td_test_model()->config, o, &err));
    o->backend = &card;
    return td_worker_plan_card(td_test_model(), &c, o, &err);
}

static void a_worker_fills_its_card(void **state) {
    (void)state;
    struct td_engine_options o, half;
    struct td_engine_memory m;
    struct td_kv_layout l;
    ok(start(8, 7.3, "mem_fraction=90", &o));
    ok(td_engine_plan(td_test_model(), &o, &l, &m, &err));
    size_t own = m.weights + m.pool + m.slots + m.index_workspace + m.scratch;
    assert_true(own < 7200000000 && own > 6000000000); /* context and graphs are beside it */
    ok(start(8, 7.3, "mem_fraction=45", &half));
    assert_true(half.pages < o.pages * 45 / 90);
    ok(start(8, 7.3, "pool_pages=300", &o));
    assert_int_equal(o.pages, 300);
    /* Too much for the card, and for what others left of it: the number said then fits. */
    assert_int_equal(start(8, 7.3, "pool_pages=16000000", &o), TD_NO_MEMORY);
    char set[64];
    snprintf(set, sizeof set, "pool_pages=%u", number_after("set pool_pages to at most "));
    ok(start(8, 7.3, set, &o));
    assert_int_equal(start(8, 4, set, &o), TD_NO_MEMORY);
    assert_non_null(strstr(err.text, "lower pool_pages"));
    assert_int_equal(start(8, 4, "mem_fraction=90", &o), TD_NO_MEMORY);
    uint32_t fraction = number_after("set mem_fraction to at most ");
    snprintf(set, sizeof set, "mem_fraction=%u", fraction);
    ok(start(8, 4, set, &o));
    snprintf(set, sizeof set, "mem_fraction=%u", fraction + 1);
    assert_int_equal(start(8, 4, set, &o), TD_NO_MEMORY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outline_is_the_release),  cmocka_unit_test(shares_add_up),
        cmocka_unit_test(plan_is_what_is_taken),   cmocka_unit_test(worker_is_as_planned),
        cmocka_unit_test(pool_gets_what_is_left),  cmocka_unit_test(refusals_say_what_fits),
        cmocka_unit_test(a_worker_fills_its_card),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
