/* What ranks tell each other on a device has the bits of its definition: sums by the binary tree,
 * words or-ed, parts gathered and exchanged, small and large; queued far ahead, recorded or not,
 * past the end of the epochs; and whoever waits in vain is released with a sentence. Built twice:
 * over GPUs (skipped where there is none; ranks share one, and have one each where there are more)
 * and over the emulator. */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels/device.h"
#include "kernels/mailbox.h"
#include "kernels/team.h"
#include "tests/kernels/device_arrays.h"
#include "tests/kernels/fixture.h"

extern const struct td_backend TD_TEST_BACKEND;

#ifdef TD_TEST_EMULATED
enum {
    EMULATED = 1,
    MOST = 300001
}; /* MOST: words of a buffer, more than all rooms and more than
      what NCCL is left alone with */
void td_emulate_hurry(unsigned times);
#else
enum { EMULATED = 0, MOST = 2200003 };
static void td_emulate_hurry(unsigned times) {
    (void)times;
}
#endif

enum {
    CALLS = 12,      /* queued without a wait */
    SILENCE = 60000, /* ms */
};

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

/* ---- ranks ---- */

struct group {
    uint32_t ranks;
    struct td_team *team;
    struct td_device d[TD_MAX_RANKS];
    float *x[TD_MAX_RANKS], *y[TD_MAX_RANKS], *add[TD_MAX_RANKS]; /* device, [MOST] */
    bool broken;
};

static td_status start_rank(void *arg, uint32_t rank, struct td_error *e) {
    struct group *g = arg;
    struct td_device *d = &g->d[rank];
    void *p[3];
    TD_TRY(TD_TEST_BACKEND.join(d, MOST, e));
    for (int i = 0; i < 3; i++)
        TD_TRY(TD_TEST_BACKEND.take(d, MOST * sizeof(float), "words", &p[i], e));
    g->x[rank] = p[0];
    g->y[rank] = p[1];
    g->add[rank] = p[2];
    return TD_TEST_BACKEND.wait(d, TD_LANE_STEP, e);
}

static void break_off(void *user) {
    struct group *g = user;
    for (uint32_t q = 0; q < g->ranks; q++)
        TD_TEST_BACKEND.break_off(&g->d[q]);
}

/* On one device, or each on its own. */
static struct group *start(uint32_t ranks, bool share) {
    struct group *g = td_test_bytes(sizeof *g);
    struct td_team_options o = {
        .ranks = ranks, .silence_ms = SILENCE, .break_off = break_off, .user = g};
    g->ranks = ranks;
    for (uint32_t q = 0; q < ranks; q++) {
        snprintf(o.place[q], sizeof o.place[q], "cuda:%u", share ? 0 : q);
        ok(TD_TEST_BACKEND.open(&g->d[q], share ? 0 : q, &err));
        g->d[q].rank = q;
        g->d[q].ranks = ranks;
    }
    ok(td_team_create(&o, &g->team, &err));
    for (uint32_t q = 0; q < ranks; q++)
        g->d[q].team = g->team;
    ok(td_team_run(g->team, start_rank, g, &err));
    return g;
}

static void finish(struct group *g) {
    td_team_destroy(g->team);
    for (uint32_t q = 0; q < g->ranks; q++) {
        struct td_device *d = &g->d[q];
        for (int i = 0; i < 3; i++)
            TD_TEST_BACKEND.give(d, (float *[]){g->x[q], g->y[q], g->add[q]}[i],
                                 MOST * sizeof(float));
        assert_in_range(d->taken, TD_MAIL_OWN, td_join_bytes(g->ranks));
        TD_TEST_BACKEND.leave(d);
        TD_TEST_BACKEND.leave(d); /* nothing is left of it */
        assert_int_equal(d->taken, 0);
        TD_TEST_BACKEND.close(d);
    }
    free(g);
}

/* ---- definitions ---- */

static float tree(float *const x[], uint32_t lo, uint32_t hi, size_t i) {
    uint32_t mid = lo + (hi - lo) / 2;
    return hi - lo == 1 ? x[lo][i] : tree(x, lo, mid, i) + tree(x, mid, hi, i);
}

static float either(float *const x[], uint32_t ranks, size_t i) {
    uint32_t word = 0, of;
    float f;
    for (uint32_t q = 0; q < ranks; q++) {
        memcpy(&of, &x[q][i], sizeof of);
        word |= of;
    }
    memcpy(&f, &word, sizeof f);
    return f;
}

/* Numbers whose sum depends on the order. */
static void numbers(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint64_t any = td_test_next();
        x[i] = (float)(int32_t)(any >> 32) * (float)(1 << any % 16);
    }
}

/* ---- calls beside their definitions ---- */

/* One of a list that all ranks queue: n words of x and add from `at`, to the same place of y; or
 * parts of y gathered, with `own` from where they are in add; or parts of x to each rank its own.
 */
struct call {
    bool gather, own, exchange, bits, add, in_place;
    uint32_t n, dim;
    size_t at; /* words */
    size_t cut[TD_MAX_RANKS + 1];
    size_t part; /* bytes */
};

struct job {
    struct group *g;
    const struct call *call;
    uint32_t calls;
    float *x[TD_MAX_RANKS], *add[TD_MAX_RANKS], *y[TD_MAX_RANKS]; /* host, [MOST] */
    struct td_recording *recording[TD_MAX_RANKS];
    enum { DIRECT, RECORD, REPLAY, FORGET } how;
};

static void queue(const struct job *j, uint32_t rank) {
    const struct group *g = j->g;
    const struct td_device *d = &g->d[rank];
    for (uint32_t i = 0; i < j->calls; i++) {
        const struct call *c = &j->call[i];
        struct td_all_gather_args parts = {.buffer = g->y[rank] + c->at};
        float *y = c->in_place ? g->add[rank] : g->y[rank];
        struct td_all_reduce_args sum = {g->x[rank] + c->at,
                                         c->add ? g->add[rank] + c->at : NULL,
                                         y + c->at,
                                         c->n,
                                         c->dim,
                                         c->bits};
        struct td_all_to_all_args each = {g->x[rank] + c->at, g->y[rank] + c->at, c->part};
        memcpy(parts.at, c->cut, sizeof parts.at);
        if (c->own) parts.own = (uint8_t *)(g->add[rank] + c->at) + c->cut[rank];
        if (c->exchange)
            TD_TEST_BACKEND.all_to_all(d, &each);
        else if (c->gather)
            TD_TEST_BACKEND.all_gather(d, &parts);
        else
            TD_TEST_BACKEND.all_reduce(d, &sum);
    }
}

static td_status do_job(void *arg, uint32_t rank, struct td_error *e) {
    struct job *j = arg;
    struct group *g = j->g;
    struct td_device *d = &g->d[rank];
    size_t bytes = MOST * sizeof(float);
    if (j->how == RECORD) {
        TD_TRY(TD_TEST_BACKEND.record(d, e));
        queue(j, rank);
        return TD_TEST_BACKEND.keep(d, &j->recording[rank], NULL, e);
    }
    if (j->how == FORGET) {
        TD_TEST_BACKEND.forget(d, j->recording[rank]);
        return TD_OK;
    }
    td_upload(d, g->x[rank], j->x[rank], bytes);
    td_upload(d, g->add[rank], j->add[rank], bytes);
    td_upload(d, g->y[rank], j->y[rank], bytes);
    if (j->how == REPLAY)
        TD_TEST_BACKEND.replay(d, j->recording[rank]);
    else
        queue(j, rank);
    td_download(d, j->y[rank], g->y[rank], bytes);
    td_download(d, j->add[rank], g->add[rank], bytes);
    return TD_TEST_BACKEND.wait(d, TD_LANE_STEP, e);
}

/* What y and add of every rank are then. */
static void define(const struct job *j, float *const y[], float *const add[]) {
    uint32_t ranks = j->g->ranks;
    for (uint32_t i = 0; i < j->calls; i++) {
        const struct call *c = &j->call[i];
        size_t n = (size_t)c->n * c->dim;
        for (uint32_t q = 0; q < ranks; q++) {
            float *to = (c->in_place ? add : y)[q];
            for (uint32_t p = 0; c->exchange && p < ranks; p++)
                memcpy((uint8_t *)(y[q] + c->at) + p * c->part,
                       (uint8_t *)(j->x[p] + c->at) + q * c->part, c->part);
            for (size_t k = c->at; !c->gather && !c->exchange && k < c->at + n; k++) {
                float v = c->bits ? either(j->x, ranks, k) : tree(j->x, 0, ranks, k);
                to[k] = c->add ? v + add[q][k] : v;
            }
            for (uint32_t p = 0; c->gather && p < ranks; p++)
                memcpy((uint8_t *)(y[q] + c->at) + c->cut[p],
                       (uint8_t *)((c->own ? add : y)[p] + c->at) + c->cut[p],
                       c->cut[p + 1] - c->cut[p]);
        }
    }
}

/* New numbers, the calls, and what came of them. */
static void same(struct job *j) {
    float *y[TD_MAX_RANKS], *add[TD_MAX_RANKS];
    uint32_t ranks = j->g->ranks;
    for (uint32_t q = 0; q < ranks; q++) {
        numbers(j->x[q], MOST);
        numbers(j->add[q], MOST);
        numbers(j->y[q], MOST);
        y[q] = td_test_bytes(MOST * sizeof(float));
        add[q] = td_test_bytes(MOST * sizeof(float));
        memcpy(y[q], j->y[q], MOST * sizeof(float));
        memcpy(add[q], j->add[q], MOST * sizeof(float));
    }
    for (uint32_t i = 0; i < j->calls; i++) /* what is or-ed one rank has: a negative zero too */
        for (size_t k = 0; j->call[i].bits && k < (size_t)j->call[i].n * j->call[i].dim; k++) {
            size_t at = j->call[i].at + k;
            uint32_t has = (uint32_t)(k * 7 % ranks);
            for (uint32_t q = 0; q < ranks; q++)
                j->x[q][at] = q != has ? 0.0f : k % 3 ? j->x[q][at] : -0.0f;
        }
    define(j, y, add);
    ok(td_team_run(j->g->team, do_job, j, &err));
    for (uint32_t q = 0; q < ranks; q++) {
        td_test_same("y", y[q], j->y[q], MOST * sizeof(float));
        td_test_same("add", add[q], j->add[q], MOST * sizeof(float));
        free(y[q]);
        free(add[q]);
    }
}

static struct job job_of(struct group *g, const struct call *call, uint32_t calls) {
    struct job j = {.g = g, .call = call, .calls = calls};
    for (uint32_t q = 0; q < g->ranks; q++) {
        j.x[q] = td_test_bytes(MOST * sizeof(float));
        j.add[q] = td_test_bytes(MOST * sizeof(float));
        j.y[q] = td_test_bytes(MOST * sizeof(float));
    }
    return j;
}

static void job_done(struct job *j) {
    for (uint32_t q = 0; q < j->g->ranks; q++) {
        free(j->x[q]);
        free(j->add[q]);
        free(j->y[q]);
    }
}

/* A call over about `words` words at `at`, with odd sizes among them. */
static struct call any_call(uint32_t ranks, size_t at, uint32_t words) {
    struct call c = {.at = at, .n = 1 + td_test_below(3), .gather = td_test_below(3) == 0};
    uint32_t unit = td_test_below(2) ? 16 : 4;
    c.own = c.gather && td_test_below(2);
    c.exchange = !c.gather && td_test_below(3) == 0;
    c.part = words / 4 / ranks * 16; /* bytes of whole vectors, or none */
    c.dim = words / c.n;
    if (td_test_below(2) && c.dim > 4) c.dim -= c.dim % 4;
    c.bits = !c.exchange && td_test_below(3) == 0;
    c.add = !c.bits && !c.exchange && td_test_below(2);
    c.in_place = c.add && td_test_below(2);
    for (uint32_t q = 0; q < ranks; q++) /* some have nothing */
        c.cut[q + 1] = c.cut[q] + td_test_below(2 * words * 4 / ranks / unit / 2 + 1) * unit;
    return c;
}

/* Many small calls, which are queued far ahead of what is done; then a few of many pieces. */
static void calls_of(struct group *g) {
    static const uint32_t large[] = {4096, 40000, 90000, 300001, MOST};
    struct call call[CALLS];
    struct job j = job_of(g, call, CALLS);
    for (int round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < CALLS; i++)
            call[i] = any_call(g->ranks, i * 8192, 1 + td_test_below(round < 2 ? 100 : 8192));
        same(&j);
    }
    j.calls = 1;
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        for (int k = 0; k < 2; k++) {
            call[0] = any_call(g->ranks, 0, large[i]);
            if (i > 1) call[0].exchange = call[0].gather = false;
            if (i > 1 && k == 1) *(i % 2 ? &call[0].exchange : &call[0].gather) = true;
            call[0].own = call[0].own && call[0].gather;
            same(&j);
        }
    for (int k = 0; k < 2; k++) { /* what another may add, as it is and with more to add */
        call[0] = any_call(g->ranks, 0, MOST);
        call[0].gather = call[0].own = call[0].exchange = false;
        call[0].bits = call[0].in_place = false;
        call[0].add = k == 1;
        same(&j);
    }
    job_done(&j);
}

/* A recording knows nothing of how often it runs, nor of what runs between. */
static void recorded(struct group *g) {
    struct call first[CALLS], between[CALLS];
    struct job a = job_of(g, first, CALLS), b = job_of(g, between, 5);
    for (uint32_t i = 0; i < CALLS; i++) {
        first[i] = any_call(g->ranks, i * 8192, 1 + td_test_below(8192));
        between[i] = any_call(g->ranks, i * 8192, 1 + td_test_below(3000));
    }
    a.how = RECORD;
    ok(td_team_run(g->team, do_job, &a, &err));
    for (int i = 0; i < 3; i++) {
        a.how = REPLAY;
        same(&a);
        same(&b);
    }
    a.how = FORGET;
    ok(td_team_run(g->team, do_job, &a, &err));
    job_done(&a);
    job_done(&b);
}

static void of_every_size(void (*test)(struct group *)) {
    uint32_t most = td_test_devices(&TD_TEST_BACKEND);
    for (uint32_t ranks = 2; ranks <= TD_MAX_RANKS; ranks *= 2)
        for (int share = 0; share < 2; share++) {
            if (!share && ranks > most) continue;
            struct group *g = start(ranks, share);
            if (!EMULATED)
                print_message("    %u ranks on %s\n", ranks, share ? "one GPU" : "a GPU each");
            test(g);
            finish(g);
        }
}

static void calls_have_their_bits(void **state) {
    (void)state;
    of_every_size(calls_of);
}

static void recordings_have_their_bits(void **state) {
    (void)state;
    of_every_size(recorded);
}

/* ---- devices and threads ---- */

/* Every entry in a thread that was busy with another device. */
static void entries_find_their_device(void **state) {
    (void)state;
    struct td_device d[2] = {{0}, {0}};
    struct td_recording *r[2];
    uint64_t bytes, left;
    void *there[2], *here[2];
    uint32_t other = td_test_devices(&TD_TEST_BACKEND) > 1 ? 1 : 0;
    const struct td_backend *b = &TD_TEST_BACKEND;
#define EACH(what)                                                                                 \
    for (int i = 1; i >= 0; i--) {                                                                 \
        what;                                                                                      \
    }
    EACH(ok(b->open(&d[i], i ? other : 0, &err)));
    EACH(ok(b->take(&d[i], 4096, "words", &there[i], &err)));
    EACH(ok(b->take_host(&d[i], 4096, "words", &here[i], &err)));
    ok(b->memory(0, &bytes, &left, &err));
    EACH(td_upload(&d[i], there[i], here[i], 4096));
    EACH(b->mark(&d[i], TD_LANE_KV, 0));
    EACH(b->mark(&d[i], TD_LANE_STEP, 1));
    EACH(b->reach(&d[i], TD_LANE_KV, 0));
    EACH(td_download(&d[i], here[i], there[i], 4096));
    EACH(ok(b->wait(&d[i], TD_LANE_STEP, &err)));
    struct td_sums sums = {.n = 1, .bytes = {1024}};
    EACH(sums.stretch[0] = there[i]; sums.share = (uint64_t *)there[i] + 256; b->sum(&d[i], &sums));
    EACH(ok(b->wait(&d[i], TD_LANE_KV, &err)));
    EACH(ok(b->record(&d[i], &err)); ok(b->memory(i ? 0 : other, &bytes, &left, &err));
         ok(b->keep(&d[i], &r[i], NULL, &err)));
    EACH(b->replay(&d[i], r[i]));
    EACH(ok(b->wait(&d[i], TD_LANE_STEP, &err)));
    EACH(b->forget(&d[i], r[i]));
    EACH(b->give_host(&d[i], here[i]));
    EACH(b->give(&d[i], there[i], 4096));
    EACH(b->close(&d[i]));
#undef EACH
}

/* ---- who does not come ---- */

/* The last rank stays away, and breaks off when told to. */
struct absence {
    struct group *g;
    bool break_off;
    uint32_t rows, again;
    _Atomic uint32_t queued;
    struct td_error err[TD_MAX_RANKS];
};

static td_status wait_in_vain(void *arg, uint32_t rank, struct td_error *e) {
    struct absence *a = arg;
    struct group *g = a->g;
    struct td_device *d = &g->d[rank];
    struct td_all_reduce_args sum = {g->x[rank], NULL, g->y[rank], a->rows, 1024, false};
    (void)e;
    if (rank == g->ranks - 1) {
        /* The emulator's calls come back when they are done. */
        while (!EMULATED && a->break_off && atomic_load(&a->queued) + 1 < g->ranks)
            sched_yield();
        if (a->break_off) break_off(g);
        return TD_OK;
    }
    TD_TEST_BACKEND.all_reduce(d, &sum);
    for (uint32_t i = 0; i < a->again; i++)
        TD_TEST_BACKEND.all_reduce(d, &sum);
    atomic_fetch_add(&a->queued, 1);
    (void)TD_TEST_BACKEND.wait(d, TD_LANE_STEP, &a->err[rank]);
    return TD_OK;
}

static void released(uint32_t ranks, bool share, bool with_break, bool large) {
    struct absence a = {.g = start(ranks, share),
                        .break_off = with_break,
                        .rows = large ? MOST / 1024 : 12,
                        .again = large ? 0 : 200};
    char who[64];
    snprintf(who, sizeof who, "rank %u (cuda:%u)", ranks - 1, share ? 0 : ranks - 1);
    if (!with_break) td_emulate_hurry(100);
    for (int time = 0; time < 2; time++) { /* it stays so */
        memset(a.err, 0, sizeof a.err);
        atomic_store(&a.queued, 0);
        ok(td_team_run(a.g->team, wait_in_vain, &a, &err));
        for (uint32_t q = 0; q + 1 < ranks; q++) {
            assert_int_equal(a.err[q].status, TD_IO);
            assert_non_null(strstr(a.err[q].text, with_break ? "given up" : "did not come"));
            /* With more than two somebody else may have given up first. */
            if (ranks == 2 && !large) assert_non_null(strstr(a.err[q].text, who));
        }
    }
    td_emulate_hurry(1);
    finish(a.g);
}

static void broken_off(void **state) {
    (void)state;
    for (uint32_t ranks = 2; ranks <= TD_MAX_RANKS; ranks *= 2)
        released(ranks, true, true, false);
    for (int large = 0; td_test_devices(&TD_TEST_BACKEND) > 1 && large < 2; large++)
        released(2, false, true, large);
}

static void too_late(void **state) {
    (void)state;
    released(2, true, false, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_have_their_bits),
        cmocka_unit_test(recordings_have_their_bits),
        cmocka_unit_test(entries_find_their_device),
        cmocka_unit_test(broken_off),
        cmocka_unit_test(too_late),
    };
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
