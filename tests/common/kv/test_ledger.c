/* The ledger against a plain model of it, under random calls; and that its self check sees faults.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/kv/checksum.h"
#include "common/kv/ledger.h"

static uint64_t seed;

static uint64_t next_random(void) {
    seed += 0x9E3779B97F4A7C15u;
    return td_mix64(seed);
}

static struct td_ledger make(uint32_t units) {
    struct td_ledger l;
    struct td_error err;
    assert_int_equal(td_ledger_init(&l, "page", units, &err), TD_OK);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    return l;
}

static void test_take_and_release(void **state) {
    (void)state;
    struct td_ledger l = make(8);
    struct td_error err;
    uint32_t a[8], b[8], got[8];
    assert_int_equal(td_ledger_take(&l, 11, 3, a, &err), TD_OK);
    assert_int_equal(td_ledger_take(&l, 22, 2, b, &err), TD_OK);
    assert_int_equal(td_ledger_take(&l, 11, 1, a + 3, &err), TD_OK);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(a[i], i); /* fixed order */

    /* All or none, and the sentence has both numbers. */
    memset(got, 0xff, sizeof got);
    assert_int_equal(td_ledger_take(&l, 33, 3, got, &err), TD_BUSY);
    assert_int_equal(got[0], UINT32_MAX);
    assert_string_equal(err.text, "pages: 3 asked for, 2 of 8 free");
    assert_int_equal(td_ledger_holding(&l, 33).owned, 0);
    assert_int_equal(td_ledger_take(&l, 33, 0, NULL, &err), TD_OK);
    assert_int_equal(l.owners, 2);

    uint64_t owner;
    assert_int_equal(td_ledger_state(&l, a[3], &owner), TD_UNIT_OWNED);
    assert_int_equal(owner, 11);
    assert_int_equal(td_ledger_release(&l, 11), 4);
    assert_int_equal(td_ledger_release(&l, 11), 0);
    assert_int_equal(td_ledger_release(&l, 44), 0);
    assert_int_equal(td_ledger_state(&l, a[3], &owner), TD_UNIT_FREE);
    assert_int_equal(owner, 0);
    assert_int_equal(l.count[TD_UNIT_FREE], 6);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);

    /* The next taker gets the same units in the same order. */
    assert_int_equal(td_ledger_take(&l, 55, 4, got, &err), TD_OK);
    assert_memory_equal(got, a, 4 * sizeof *a);
    assert_int_equal(td_ledger_release(&l, 55), 4);
    assert_int_equal(l.owners, 1);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    td_ledger_finish(&l);
    td_ledger_finish(&l);
}

/* The pages of one prompt, held by its choices. */
static void test_shared(void **state) {
    (void)state;
    struct td_ledger l = make(6);
    struct td_error err;
    uint32_t a[6], b[6];
    assert_int_equal(td_ledger_take(&l, 7, 4, a, &err), TD_OK);
    assert_int_equal(td_ledger_holding(&l, 7).holders, 1);
    td_ledger_hold(&l, 7, 2);
    assert_int_equal(td_ledger_holding(&l, 7).holders, 3);
    assert_int_equal(td_ledger_holding(&l, 7).owned, 4); /* counted once */
    assert_int_equal(l.count[TD_UNIT_OWNED], 4);
    assert_int_equal(l.shared, 4);
    assert_int_equal(td_ledger_release(&l, 7), 0);
    assert_int_equal(td_ledger_take(&l, 9, 3, b, &err), TD_BUSY);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    assert_int_equal(td_ledger_release(&l, 7), 0);
    assert_int_equal(l.shared, 0); /* one is left */
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    assert_int_equal(td_ledger_release(&l, 7), 4);
    assert_int_equal(td_ledger_release(&l, 7), 0);
    assert_int_equal(td_ledger_holding(&l, 7).holders, 0);
    assert_int_equal(l.count[TD_UNIT_FREE], 6);
    assert_int_equal(td_ledger_take(&l, 9, 4, b, &err), TD_OK);
    assert_memory_equal(a, b, 4 * sizeof *a);
    assert_int_equal(td_ledger_holding(&l, 9).holders, 1);
    td_ledger_finish(&l);
}

static void test_limits(void **state) {
    (void)state;
    struct td_ledger l;
    struct td_error err;
    assert_int_equal(td_ledger_init(&l, "slot", 0, &err), TD_INVALID);
    td_ledger_finish(&l);
    assert_int_equal(td_ledger_init(&l, "slot", TD_LEDGER_MAX_UNITS + 1, &err), TD_INVALID);
    assert_non_null(strstr(err.text, "slot"));
    l = make(1);
    uint32_t u;
    assert_int_equal(td_ledger_take(&l, UINT64_MAX, 1, &u, &err), TD_OK);
    assert_int_equal(td_ledger_take(&l, 1, 1, &u, &err), TD_BUSY);
    assert_int_equal(td_ledger_release(&l, UINT64_MAX), 1);
    td_ledger_finish(&l);
}

/* ---- against a model ---- */

enum { UNITS = 64, OWNERS = 40 };

struct model {
    uint64_t owner[UNITS];
    int state[UNITS];
    uint32_t more[OWNERS + 1]; /* holders beside the first, by owner's number */
};

/* Owners that differ in high bits only, too. */
static uint64_t owner_of(uint64_t k) {
    return k % 2 ? k : k << 40;
}

static uint32_t model_count(const struct model *m, uint64_t owner, int state) {
    uint32_t n = 0;
    for (int u = 0; u < UNITS; u++)
        n += m->state[u] == state && (!owner || m->owner[u] == owner);
    return n;
}

static void model_move(struct model *m, uint64_t owner, int from, int to) {
    for (int u = 0; u < UNITS; u++)
        if (m->owner[u] == owner && m->state[u] == from) {
            m->state[u] = to;
            if (to == TD_UNIT_FREE) m->owner[u] = 0;
        }
}

static void compare(const struct td_ledger *l, const struct model *m) {
    struct td_error err;
    if (td_ledger_check(l, &err) != TD_OK) fail_msg("%s", err.text);
    for (int s = 0; s < TD_UNIT_STATES; s++)
        assert_int_equal(l->count[s], model_count(m, 0, s));
    for (uint32_t u = 0; u < UNITS; u++) {
        uint64_t owner;
        assert_int_equal(td_ledger_state(l, u, &owner), m->state[u]);
        assert_true(owner == m->owner[u]);
    }
    uint32_t owners = 0, shared = 0;
    for (uint64_t k = 1; k <= OWNERS; k++) {
        uint32_t owned = model_count(m, owner_of(k), TD_UNIT_OWNED);
        assert_int_equal(td_ledger_holding(l, owner_of(k)).owned, owned);
        if (m->more[k]) shared += owned;
        owners += owned > 0;
    }
    assert_int_equal(l->shared, shared);
    assert_int_equal(l->owners, owners);
}

static void model_take(struct td_ledger *l, struct model *m, uint64_t owner) {
    struct td_error err;
    uint32_t n = (uint32_t)(next_random() % 9), got[8];
    uint32_t n_free = model_count(m, 0, TD_UNIT_FREE);
    td_status st = td_ledger_take(l, owner, n, got, &err);
    assert_int_equal(st, n <= n_free ? TD_OK : TD_BUSY);
    for (uint32_t i = 0; st == TD_OK && i < n; i++) {
        assert_int_equal(m->state[got[i]], TD_UNIT_FREE); /* no unit with two owners */
        m->state[got[i]] = TD_UNIT_OWNED;
        m->owner[got[i]] = owner;
    }
}

static void test_random_calls(void **state) {
    (void)state;
    struct td_ledger l = make(UNITS);
    struct model m = {0};
    for (int step = 0; step < 40000; step++) {
        uint64_t k = next_random() % OWNERS + 1, owner = owner_of(k);
        uint32_t n = (uint32_t)(next_random() % 4);
        switch (next_random() % 5) {
        case 0:
            if (m.more[k]) {
                assert_int_equal(td_ledger_release(&l, owner), 0);
                m.more[k]--;
                break;
            }
            assert_int_equal(td_ledger_release(&l, owner), model_count(&m, owner, TD_UNIT_OWNED));
            model_move(&m, owner, TD_UNIT_OWNED, TD_UNIT_FREE);
            break;
        case 1:
            if (!model_count(&m, owner, TD_UNIT_OWNED)) break;
            td_ledger_hold(&l, owner, n);
            m.more[k] += n;
            break;
        default:
            if (!m.more[k]) model_take(&l, &m, owner);
        }
        compare(&l, &m);
    }
    for (uint64_t k = 1; k <= OWNERS; k++) {
        uint64_t owner = owner_of(k);
        for (uint32_t i = 0; i <= m.more[k]; i++)
            td_ledger_release(&l, owner);
    }
    assert_int_equal(l.count[TD_UNIT_FREE], UNITS);
    assert_int_equal(l.owners, 0);
    td_ledger_finish(&l);
}

/* A full set of owners with one unit each is the most the table can hold. */
static void test_many_owners(void **state) {
    (void)state;
    struct td_ledger l = make(1000);
    struct td_error err;
    uint32_t u;
    for (uint64_t o = 1; o <= 1000; o++)
        assert_int_equal(td_ledger_take(&l, o * 0x10001, 1, &u, &err), TD_OK);
    assert_int_equal(td_ledger_take(&l, 5, 1, &u, &err), TD_BUSY);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    for (uint64_t o = 1; o <= 1000; o += 2)
        assert_int_equal(td_ledger_release(&l, o * 0x10001), 1);
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    for (uint64_t o = 2; o <= 1000; o += 2)
        assert_int_equal(td_ledger_holding(&l, o * 0x10001).owned, 1);
    td_ledger_finish(&l);
}

/* Damage is seen. The inner records are private, so the public counters and the stack are hit. */
static void test_check_sees_damage(void **state) {
    (void)state;
    struct td_ledger l = make(8);
    struct td_error err;
    uint32_t a[3];
    assert_int_equal(td_ledger_take(&l, 3, 3, a, &err), TD_OK);
    uint32_t keep = l.stack[0];
    l.stack[0] = l.stack[1]; /* one unit on the stack twice */
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    l.stack[0] = a[0]; /* a free unit that has an owner */
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    assert_non_null(strstr(err.text, "page"));
    l.stack[0] = keep;
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    l.count[TD_UNIT_OWNED]++;
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    l.count[TD_UNIT_OWNED]--;
    l.count[TD_UNIT_FREE]--; /* a unit in no list */
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    l.count[TD_UNIT_FREE]++;
    l.owners++;
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    l.owners--;
    l.shared++;
    assert_int_equal(td_ledger_check(&l, &err), TD_INTERNAL);
    l.shared--;
    assert_int_equal(td_ledger_check(&l, &err), TD_OK);
    td_ledger_finish(&l);
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_take_and_release),
        cmocka_unit_test(test_shared),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_random_calls),
        cmocka_unit_test(test_many_owners),
        cmocka_unit_test(test_check_sees_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
