/* A rank that fails or hangs at any op of a step: the worker's step ends with a sentence that names
 * it, and nobody is left waiting. */
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels/engine_parts.h"
#include "tests/kernels/engine_fixture.h"

enum {
    N = 40,
    SILENCE_MS = 2000,
    OPS = 0
#define X(op) +1
    TD_OPS_MAP(X)
#undef X
};

/* ---- the CPU with a fault ---- */

/* As on a GPU: when an op fails, everything that the rank queues after it is void, also what others
 * wait for, and the rank's next wait says so. Or the op does not end. */
static struct {
    uint32_t rank, op; /* which is to go wrong, OPS: none; */
    uint32_t count;    /* and how many of it go well before */
    bool hang;
    _Atomic uint32_t seen; /* of that op */
    _Atomic bool bad;
    _Atomic uint32_t late; /* ops begun though another rank was known to have failed */
    sem_t hold;
} fault;

static struct td_ops under;

static bool goes_wrong(const struct td_device *d, uint32_t op) {
    if (td_team_broken(d->team)) atomic_fetch_add(&fault.late, 1);
    if (d->rank != fault.rank) return false;
    if (op == fault.op && atomic_fetch_add(&fault.seen, 1) == fault.count) {
        while (fault.hang && sem_wait(&fault.hold) != 0)
            continue;
        atomic_store(&fault.bad, true);
    }
    return atomic_load(&fault.bad);
}

enum {
#define X(op) AT_##op,
    TD_OPS_MAP(X)
#undef X
};
#define X(op)                                                                                      \
    static void faulty_##op(const struct td_device *d, const struct td_##op##_args *a) {           \
        if (!goes_wrong(d, AT_##op)) under.op(d, a);                                               \
    }
TD_OPS_MAP(X)
#undef X
#define X(op) faulty_##op,
static const struct td_ops faulty_ops = {"faulty", TD_OPS_MAP(X)};
#undef X
#define X(op) #op,
static const char *const op_name[] = {TD_OPS_MAP(X)};
#undef X

static struct td_backend faulty;

static td_status faulty_open(struct td_device *d, uint32_t index, struct td_error *err) {
    TD_TRY(td_backend_cpu.open(d, index, err));
    d->backend = &faulty;
    return TD_OK;
}

static bool is_bad(const struct td_device *d) {
    return d->rank == fault.rank && atomic_load(&fault.bad);
}

static void void_reduce(const struct td_device *d, const struct td_all_reduce_args *a) {
    if (!is_bad(d)) td_backend_cpu.all_reduce(d, a);
}

static void void_gather(const struct td_device *d, const struct td_all_gather_args *a) {
    if (!is_bad(d)) td_backend_cpu.all_gather(d, a);
}

static void void_exchange(const struct td_device *d, const struct td_all_to_all_args *a) {
    if (!is_bad(d)) td_backend_cpu.all_to_all(d, a);
}

static td_status faulty_wait(struct td_device *d, enum td_lane lane, struct td_error *err) {
    (void)lane;
    return is_bad(d) ? td_fail(err, TD_IO, "%s: a fault of the device", op_name[fault.op]) : TD_OK;
}

static void set_fault(uint32_t rank, uint32_t op, uint32_t count, bool hang) {
    fault.rank = rank;
    fault.op = op;
    fault.count = count;
    fault.hang = hang;
    atomic_store(&fault.seen, 0);
    atomic_store(&fault.bad, false);
    atomic_store(&fault.late, 0);
}

/* ---- engines ---- */

static struct td_error err;

static struct td_model *model(void) {
    static struct td_model *m;
    struct td_model_config c = td_test_model()->config;
    c.heads = 8;
    c.o_groups = 4;
    if (!m && td_model_random(&c, TD_OUTLINE_NVFP4, 3, &m, &err) != TD_OK) fail_msg("%s", err.text);
    return m;
}

static struct td_engine *engine(uint32_t silence_ms) {
    struct td_engine_options o = td_test_options();
    struct td_engine *e;
    o.ref = o.nvfp4_activations = o.kv_split = true; /* every op is used */
    o.row_dtype = TD_KV_ROW_FP8;
    o.index_topk = 4;
    o.ranks = o.threads = 4;
    o.max_tokens = 64;
    o.collective_ms = silence_ms;
    o.ops = &faulty_ops;
    under = *td_ops_select();
    faulty = td_backend_cpu;
    faulty.open = faulty_open;
    faulty.wait = faulty_wait;
    faulty.all_reduce = void_reduce;
    faulty.all_gather = void_gather;
    faulty.all_to_all = void_exchange;
    o.backend = &faulty;
    set_fault(0, OPS, 0, false);
    if (td_engine_create(model(), &o, &e, &err) != TD_OK) fail_msg("%s", err.text);
    return e;
}

/* Nothing of the caller's is there when the step is over. */
static td_status step(struct td_engine *e, uint32_t pos, uint32_t n) {
    uint32_t *pages = td_test_bytes(TD_TEST_PAGES * sizeof *pages);
    int32_t *ids = td_test_bytes(N * sizeof *ids);
    const float *logits;
    struct td_run run = {.pos = pos, .n = n, .ids = ids, .pages = pages, .want_logits = true};
    td_status st = td_engine_step(e, &run, 1, &logits, NULL, &err);
    free(pages);
    free(ids);
    return st;
}

static void says(const char *word) {
    if (!strstr(err.text, word)) fail_msg("expected \"%s\" in: %s", word, err.text);
}

static void failures_at_every_op(void **state) {
    (void)state;
    for (uint32_t op = 0; op < OPS; op++) {
        struct td_engine *e = engine(0);
        uint32_t rank = op % 4;
        char want[100];
        assert_int_equal(step(e, 0, N), TD_OK);
        set_fault(rank, op, op % 3, false);
        td_status st = step(e, N, N);
        if (atomic_load(&fault.seen) <= fault.count) { /* once a step, as embed */
            assert_int_equal(st, TD_OK);
            set_fault(rank, op, 0, false);
            st = step(e, 2 * N, N);
        }
        if (st != TD_IO) fail_msg("%s: expected a failed step", op_name[op]);
        snprintf(want, sizeof want, "rank %u (cpu): %s: a fault of the device", rank, op_name[op]);
        assert_string_equal(err.text, want);
        while (td_team_lost(e->team)) /* on a busy machine one may not be back yet */
            sched_yield();
        /* Each of the others may have been about to begin one. */
        assert_in_range(atomic_load(&fault.late), 0, 3);
        assert_int_equal(step(e, 0, 1), TD_IO); /* for good */
        assert_string_equal(err.text, want);
        set_fault(0, OPS, 0, false);
        assert_true(td_engine_destroy(e));
    }
}

/* At some: each takes the time that silence is allowed. */
static void hangs_are_named(void **state) {
    (void)state;
    static const uint32_t at[] = {AT_embed, AT_attend_part, AT_expert_linear, AT_hc_head};
    for (uint32_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct td_engine *e = engine(SILENCE_MS);
        uint32_t rank = 3 - i, op = at[i];
        char want[100];
        sem_init(&fault.hold, 0, 0);
        set_fault(rank, op, 0, true);
        assert_int_equal(step(e, 0, N), TD_IO);
        snprintf(want, sizeof want, "nothing came from rank %u (cpu) at %s", rank, op_name[op]);
        says(want);
        assert_false(td_engine_destroy(e)); /* it cannot be ended; */
        assert_int_equal(step(e, 0, 1), TD_IO);
        says(want);
        sem_post(&fault.hold); /* here it can after all */
        while (!td_engine_destroy(e))
            sched_yield();
        sem_destroy(&fault.hold);
    }
}

/* ---- at the start ---- */

static uint32_t refuses;

static td_status scarce_take(struct td_device *d, size_t bytes, const char *what, void **ret,
                             struct td_error *e) {
    if (d->rank == refuses && strcmp(what, "KV pool") == 0)
        return td_fail(e, TD_NO_MEMORY, "KV pool: expected %zu bytes of memory", bytes);
    return td_backend_cpu.take(d, bytes, what, ret, e);
}

static td_status no_join(struct td_device *d, size_t words, struct td_error *e) {
    if (d->rank == refuses) return td_fail(e, TD_IO, "ranks: no link to the others");
    /* As those of a library that waits for all of its ranks. */
    return td_team_meet(d->team, d->rank, NULL) ? td_backend_cpu.join(d, words, e)
                                                : td_fail(e, TD_IO, "given up");
}

static td_status scarce_open(struct td_device *d, uint32_t index, struct td_error *e) {
    TD_TRY(td_backend_cpu.open(d, index, e));
    d->backend = &faulty;
    return TD_OK;
}

static void ranks_that_cannot_start(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    struct td_engine *e;
    o.ranks = o.threads = 4;
    o.backend = &faulty;
    for (refuses = 0; refuses < 4; refuses++) {
        char want[40];
        snprintf(want, sizeof want, "rank %u (cpu): ", refuses);
        faulty = td_backend_cpu;
        faulty.open = scarce_open;
        faulty.take = scarce_take;
        assert_int_equal(td_engine_create(model(), &o, &e, &err), TD_NO_MEMORY);
        says(want);
        says("KV pool");
        faulty.take = td_backend_cpu.take;
        faulty.join = no_join;
        assert_int_equal(td_engine_create(model(), &o, &e, &err), TD_IO);
        says(want);
        says("no link");
    }
}

static void end(void **state) {
    (void)state;
    td_model_close(model());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(failures_at_every_op),
        cmocka_unit_test(hangs_are_named),
        cmocka_unit_test(ranks_that_cannot_start),
        cmocka_unit_test(end),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
