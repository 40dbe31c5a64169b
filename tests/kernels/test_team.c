/* Ranks as threads: they meet, one fails or hangs and all others come back with a sentence; what
 * they tell each other, against the definition; and the cores beside a device. */
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels/collectives.h"
#include "kernels/near.h"
#include "kernels/team.h"
#include "kernels/threads.h"
#include "tests/kernels/fixture.h"

enum { MANY = 500, SILENCE_MS = 300, PATIENCE_MS = 60000 };

static _Atomic uint32_t broken_off;

static void break_off(void *user) {
    (void)user;
    atomic_fetch_add(&broken_off, 1);
}

static struct td_team *team_of(uint32_t ranks, uint32_t silence_ms) {
    struct td_team_options o = {.ranks = ranks, .silence_ms = silence_ms, .break_off = break_off};
    struct td_team *t = NULL;
    struct td_error err;
    for (uint32_t i = 0; i < ranks; i++)
        snprintf(o.place[i], sizeof o.place[i], "cuda:%u", 10 + i);
    atomic_store(&broken_off, 0);
    if (td_team_create(&o, &t, &err) != TD_OK) fail_msg("%s", err.text);
    return t;
}

static void says(const struct td_error *err, const char *word) {
    if (!strstr(err->text, word)) fail_msg("expected \"%s\" in: %s", word, err->text);
}

/* ---- meetings ---- */

struct round {
    struct td_team *team;
    uint32_t ranks;
    uint32_t number[TD_MAX_RANKS];
};

static td_status bring_numbers(void *arg, uint32_t rank, struct td_error *err) {
    struct round *r = arg;
    for (uint32_t i = 0; i < MANY; i++) {
        r->number[rank] = i * 100 + rank;
        const void *const *all = td_team_meet(r->team, rank, &r->number[rank]);
        if (!all) return td_fail(err, TD_INTERNAL, "broken");
        for (uint32_t k = 0; k < r->ranks; k++)
            if (*(const uint32_t *)all[k] != i * 100 + k)
                return td_fail(err, TD_INTERNAL, "round %u: of rank %u found %u", i, k,
                               *(const uint32_t *)all[k]);
        if (!td_team_meet(r->team, rank, NULL)) return td_fail(err, TD_INTERNAL, "broken");
    }
    return TD_OK;
}

static void ranks_meet(void **state) {
    (void)state;
    for (uint32_t ranks = 2; ranks <= TD_MAX_RANKS; ranks *= 2) {
        struct round r = {.team = team_of(ranks, PATIENCE_MS), .ranks = ranks};
        struct td_error err = {0};
        for (int again = 0; again < 3; again++)
            if (td_team_run(r.team, bring_numbers, &r, &err) != TD_OK) fail_msg("%s", err.text);
        assert_false(td_team_broken(r.team));
        td_team_destroy(r.team);
    }
}

static td_status thread_is(void *arg, uint32_t rank, struct td_error *err) {
    (void)err;
    assert_int_equal(rank, 0);
    *(pthread_t *)arg = pthread_self();
    return TD_OK;
}

static void one_rank_has_no_team(void **state) {
    (void)state;
    pthread_t where;
    struct td_error err;
    assert_int_equal(td_team_run(NULL, thread_is, &where, &err), TD_OK);
    assert_true(pthread_equal(where, pthread_self()));
    assert_true(td_team_at(NULL, 0, "anything", 0));
    assert_false(td_team_broken(NULL));
    td_team_destroy(NULL);
}

/* ---- ends ---- */

struct trouble {
    struct td_team *team;
    uint32_t rank, left;
    sem_t hold;
    _Atomic uint32_t released; /* that came back from a meeting which never was */
};

static td_status fail_one(void *arg, uint32_t rank, struct td_error *err) {
    struct trouble *t = arg;
    for (uint32_t i = 0; i < 6; i++) {
        if (i == 5 && rank == t->rank) return td_fail(err, TD_IO, "an illegal address");
        if (!td_team_meet(t->team, rank, NULL)) break;
        assert_int_not_equal(i, 5);
    }
    atomic_fetch_add(&t->released, 1);
    assert_false(td_team_at(t->team, rank, "more", 7));
    return td_fail(err, TD_INTERNAL, "not the cause");
}

static void a_failure_releases_all(void **state) {
    (void)state;
    for (uint32_t rank = 0; rank < 4; rank++) {
        struct trouble t = {.team = team_of(4, PATIENCE_MS), .rank = rank};
        struct td_error err = {0}, again = {0};
        char want[80];
        assert_int_equal(td_team_run(t.team, fail_one, &t, &err), TD_IO);
        snprintf(want, sizeof want, "rank %u (cuda:%u): an illegal address", rank, 10 + rank);
        assert_string_equal(err.text, want);
        assert_int_equal(err.status, TD_IO);
        assert_int_equal(atomic_load(&t.released), 3);
        assert_int_equal(atomic_load(&broken_off), 1);
        /* For good. */
        assert_int_equal(td_team_run(t.team, fail_one, &t, &again), TD_IO);
        assert_string_equal(again.text, want);
        assert_false(td_team_lost(t.team));
        td_team_destroy(t.team);
    }
}

/* As a kernel that never ends: the rank comes back only when the test lets it. */
static td_status hang_one(void *arg, uint32_t rank, struct td_error *err) {
    struct trouble *t = arg;
    for (uint32_t i = 0; i < 5; i++)
        (void)td_team_meet(t->team, rank, NULL);
    (void)td_team_at(t->team, rank, rank == t->rank ? "attend" : "linear", 3);
    if (rank == t->rank) {
        while (sem_wait(&t->hold) != 0)
            continue;
        return td_fail(err, TD_INTERNAL, "too late");
    }
    if (t->left && rank != 0) return TD_OK;
    if (!td_team_meet(t->team, rank, NULL)) atomic_fetch_add(&t->released, 1);
    return td_fail(err, TD_INTERNAL, "not the cause");
}

static void silence_is_named(void **state) {
    (void)state;
    for (uint32_t left = 0; left < 2; left++) { /* the others wait, or are done */
        struct trouble t = {.team = team_of(4, PATIENCE_MS), .rank = 2, .left = left};
        struct td_error err = {0};
        sem_init(&t.hold, 0, 0);
        td_team_silence(t.team, SILENCE_MS);
        assert_int_equal(td_team_run(t.team, hang_one, &t, &err), TD_IO);
        assert_string_equal(err.text,
                            "ranks: for 300 ms nothing came from rank 2 (cuda:12) at attend "
                            "of layer 3");
        assert_int_equal(atomic_load(&t.released), left ? 1 : 3);
        assert_int_equal(atomic_load(&broken_off), 1);
        assert_true(td_team_lost(t.team));
        td_team_destroy(t.team); /* leaves it */
        assert_int_equal(td_team_run(t.team, hang_one, &t, &err), TD_IO);
        says(&err, "rank 2 (cuda:12)");
        sem_post(&t.hold);
        while (td_team_lost(t.team))
            sched_yield();
        td_team_destroy(t.team);
        sem_destroy(&t.hold);
    }
}

/* All are somewhere in a device, none of them at a meeting; break_off lets them go. */
static sem_t device;

static void let_go(void *user) {
    for (uint32_t i = 0; i < *(uint32_t *)user; i++)
        sem_post(&device);
}

static td_status wait_on_device(void *arg, uint32_t rank, struct td_error *err) {
    (void)td_team_at(arg, rank, "wait", TD_TEAM_NO_LAYER);
    while (sem_wait(&device) != 0)
        continue;
    return td_fail(err, TD_IO, "broken off");
}

static void a_device_is_let_go(void **state) {
    (void)state;
    uint32_t ranks = 2;
    struct td_team_options o = {.ranks = ranks,
                                .silence_ms = SILENCE_MS,
                                .break_off = let_go,
                                .user = &ranks,
                                .place = {"cuda:0", "cuda:1"}};
    struct td_team *t;
    struct td_error err;
    sem_init(&device, 0, 0);
    assert_int_equal(td_team_create(&o, &t, &err), TD_OK);
    assert_int_equal(td_team_run(t, wait_on_device, t, &err), TD_IO);
    assert_string_equal(err.text,
                        "ranks: for 300 ms nothing came from rank 0 (cuda:0) at wait, rank 1 "
                        "(cuda:1) at wait");
    assert_false(td_team_lost(t));
    td_team_destroy(t);
    sem_destroy(&device);
}

/* ---- what ranks tell each other ---- */

struct exchange {
    struct td_team *team;
    uint32_t ranks, n, dim;
    bool bits, add;
    float *x[TD_MAX_RANKS], *y[TD_MAX_RANKS], *added;
    size_t at[TD_MAX_RANKS + 1];
    uint8_t *buffer[TD_MAX_RANKS];
};

/* The definition: halves from the top. */
static float tree(const struct exchange *e, uint32_t lo, uint32_t hi, size_t i) {
    uint32_t mid = lo + (hi - lo) / 2;
    return hi - lo == 1 ? e->x[lo][i] : tree(e, lo, mid, i) + tree(e, mid, hi, i);
}

static float expected(const struct exchange *e, size_t i) {
    uint32_t word = 0, of;
    float v;
    if (!e->bits) return e->add ? tree(e, 0, e->ranks, i) + e->added[i] : tree(e, 0, e->ranks, i);
    for (uint32_t r = 0; r < e->ranks; r++) {
        memcpy(&of, &e->x[r][i], 4);
        word |= of;
    }
    memcpy(&v, &word, 4);
    return v;
}

static td_status exchange(void *arg, uint32_t rank, struct td_error *err) {
    struct exchange *e = arg;
    struct td_device d = {.team = e->team, .rank = rank, .ranks = e->ranks};
    TD_TRY(td_threads_create(1 + rank % 2, &d.threads, err));
    for (int again = 0; again < 20; again++) {
        /* A rank's x is its own again as soon as the call is over. */
        size_t values = (size_t)e->n * e->dim;
        struct td_all_reduce_args a = {
            .x = e->x[rank], .y = e->y[rank], .n = e->n, .dim = e->dim, .bits = e->bits};
        if (e->add) a.add = again % 2 ? memcpy(e->y[rank], e->added, values * 4) : e->added;
        td_host_all_reduce(&d, &a);
        float first = e->x[rank][0];
        e->x[rank][0] = 12345;
        e->x[rank][0] = first;
    }
    struct td_all_gather_args g = {.buffer = e->buffer[rank]};
    memcpy(g.at, e->at, sizeof g.at);
    for (int again = 0; again < 20; again++) {
        memset(e->buffer[rank], 0xee, e->at[e->ranks]);
        memset(e->buffer[rank] + e->at[rank], (int)(again + rank), e->at[rank + 1] - e->at[rank]);
        td_host_all_gather(&d, &g);
    }
    td_threads_destroy(d.threads);
    return TD_OK;
}

static void check_exchange(uint32_t ranks, uint32_t n, uint32_t dim, bool bits, bool add) {
    struct exchange e = {.team = team_of(ranks, PATIENCE_MS),
                         .ranks = ranks,
                         .n = n,
                         .dim = dim,
                         .bits = bits,
                         .add = add};
    struct td_error err = {0};
    size_t values = (size_t)n * dim;
    e.added = td_test_floats(values, -1, 1);
    for (uint32_t r = 0; r < ranks; r++) {
        e.x[r] = td_test_floats(values, -100, 100);
        e.y[r] = td_test_poison(values);
        e.at[r + 1] = e.at[r] + 4 * td_test_below(50);
        for (size_t i = 0; bits && i < values; i++) /* one rank has it, +0 elsewhere; -0 survives */
            e.x[r][i] = i % ranks != r ? 0.0f : i % 7 ? e.x[r][i] : -0.0f;
    }
    for (uint32_t r = 0; r < ranks; r++)
        e.buffer[r] = td_test_bytes(e.at[ranks] + 4);
    if (td_team_run(e.team, exchange, &e, &err) != TD_OK) fail_msg("%s", err.text);
    float *want = td_test_poison(values);
    for (size_t i = 0; i < values; i++)
        want[i] = expected(&e, i);
    for (uint32_t r = 0; r < ranks; r++) {
        td_test_same("all_reduce", want, e.y[r], values * sizeof *want);
        for (uint32_t of = 0; of < ranks; of++)
            for (size_t i = e.at[of]; i < e.at[of + 1]; i++)
                assert_int_equal(e.buffer[r][i], (uint8_t)(19 + of));
    }
    for (uint32_t r = 0; r < ranks; r++) {
        free(e.x[r]);
        free(e.y[r]);
        free(e.buffer[r]);
    }
    free(e.added);
    free(want);
    td_team_destroy(e.team);
}

static void ranks_tell_each_other(void **state) {
    (void)state;
    for (uint32_t ranks = 2; ranks <= TD_MAX_RANKS; ranks *= 2) {
        check_exchange(ranks, 1, 1, false, false);
        check_exchange(ranks, 3, 257, false, true);
        check_exchange(ranks, 2, 300, false, false);
        check_exchange(ranks, 5, 128, true, false);
    }
}

/* ---- cores ---- */

static void cores(const char *list, bool ok, const char *have, const char *lack) {
    struct td_cores c;
    assert_int_equal(td_near_parse(list, &c), ok);
    for (; ok && *have; have += 2 + (have[1] != ' '))
        assert_true(td_near_has(&c, (unsigned)strtoul(have, NULL, 10)));
    for (; ok && *lack; lack += 2 + (lack[1] != ' '))
        assert_false(td_near_has(&c, (unsigned)strtoul(lack, NULL, 10)));
}

static void cores_beside_a_device(void **state) {
    (void)state;
    cores("0-3,8\n", true, "0 1 2 3 8 ", "4 7 9 ");
    cores("5", true, "5 ", "4 6 ");
    cores("0-31,64-95", true, "0 31 64 95 ", "32 63 96 ");
    static const char *const wrong[] = {"",     "\n",  "a",    "1-",     "-1",   "3-1", "1,",
                                        "1,,2", "1 2", "1024", "0-1024", "1\nx", "0x3"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cores(wrong[i], false, "", "");
    cores("1023", true, "", "");
    td_near_stay("0000:ZZ:00.0"); /* nothing known: nothing done */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_meet),
        cmocka_unit_test(one_rank_has_no_team),
        cmocka_unit_test(a_failure_releases_all),
        cmocka_unit_test(silence_is_named),
        cmocka_unit_test(a_device_is_let_go),
        cmocka_unit_test(ranks_tell_each_other),
        cmocka_unit_test(cores_beside_a_device),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
