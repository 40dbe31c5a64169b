/* The ledger: units in lists by owner, a stack of free ones, and a hash table of owners. An owner
 * holds at least one unit while it is in the table, so both have room for whatever can happen. */
#include "common/kv/ledger.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "common/kv/checksum.h"

enum { NONE = UINT32_MAX };

struct td_ledger_unit {
    uint64_t owner; /* 0 when free */
    uint32_t prev;  /* of the owner's list; of a free unit: its place on the stack */
    uint32_t next;
    uint32_t state;
};

struct td_ledger_entry {
    uint64_t owner; /* 0: empty */
    uint32_t first, last;
    uint32_t owned;
    uint32_t holders;
};

/* ---- owners ---- */

static uint32_t home(const struct td_ledger *l, uint64_t owner) {
    return (uint32_t)td_mix64(owner) & (l->table_size - 1);
}

static struct td_ledger_entry *find(const struct td_ledger *l, uint64_t owner) {
    for (uint32_t i = home(l, owner);; i = (i + 1) & (l->table_size - 1)) {
        if (l->table[i].owner == owner) return &l->table[i];
        if (l->table[i].owner == 0) return NULL;
    }
}

/* The table is at most half full: there is always an empty place. */
static struct td_ledger_entry *find_or_add(struct td_ledger *l, uint64_t owner) {
    uint32_t i = home(l, owner);
    for (; l->table[i].owner != owner; i = (i + 1) & (l->table_size - 1)) {
        if (l->table[i].owner != 0) continue;
        l->table[i] =
            (struct td_ledger_entry){.owner = owner, .first = NONE, .last = NONE, .holders = 1};
        l->owners++;
        break;
    }
    return &l->table[i];
}

/* Closes the gap by moving back what would no longer be found, so no marks of the dead remain. */
static void forget(struct td_ledger *l, struct td_ledger_entry *e) {
    uint32_t mask = l->table_size - 1, hole = (uint32_t)(e - l->table);
    for (uint32_t i = (hole + 1) & mask; l->table[i].owner != 0; i = (i + 1) & mask) {
        uint32_t from_home = (i - home(l, l->table[i].owner)) & mask;
        if (from_home < ((i - hole) & mask)) continue;
        l->table[hole] = l->table[i];
        hole = i;
    }
    l->table[hole] = (struct td_ledger_entry){0};
    l->owners--;
}

/* ---- units ---- */

static void push_free(struct td_ledger *l, uint32_t unit) {
    uint32_t place = l->count[TD_UNIT_FREE]++;
    l->stack[place] = unit;
    l->unit[unit] = (struct td_ledger_unit){.prev = place, .next = NONE, .state = TD_UNIT_FREE};
}

static void append(struct td_ledger *l, struct td_ledger_entry *e, uint32_t unit) {
    struct td_ledger_unit *u = &l->unit[unit];
    assert(u->state == TD_UNIT_FREE && u->owner == 0);
    *u = (struct td_ledger_unit){e->owner, e->last, NONE, TD_UNIT_OWNED};
    if (e->last == NONE)
        e->first = unit;
    else
        l->unit[e->last].next = unit;
    e->last = unit;
    e->owned++;
    l->count[TD_UNIT_OWNED]++;
}

/* Takes a unit from its owner's list and frees it. */
static void let_go(struct td_ledger *l, struct td_ledger_entry *e, uint32_t unit) {
    struct td_ledger_unit *u = &l->unit[unit];
    assert(u->owner == e->owner);
    if (u->prev == NONE)
        e->first = u->next;
    else
        l->unit[u->prev].next = u->next;
    if (u->next == NONE)
        e->last = u->prev;
    else
        l->unit[u->next].prev = u->prev;
    e->owned--;
    l->count[TD_UNIT_OWNED]--;
    push_free(l, unit);
}

/* Last taken first, so that the stack gives them out again in the order they were taken. */
static uint32_t let_go_all(struct td_ledger *l, struct td_ledger_entry *e) {
    uint32_t n = e->owned;
    for (uint32_t u = e->last, prev; u != NONE; u = prev) {
        prev = l->unit[u].prev;
        let_go(l, e, u);
    }
    forget(l, e);
    return n;
}

/* ---- the interface ---- */

td_status td_ledger_init(struct td_ledger *l, const char *noun, uint32_t units,
                         struct td_error *err) {
    *l = (struct td_ledger){.noun = noun};
    if (units == 0 || units > TD_LEDGER_MAX_UNITS)
        return td_fail(err, TD_INVALID, "%s ledger: expected 1 to %d %ss, found %u", noun,
                       TD_LEDGER_MAX_UNITS, noun, units);
    l->units = units;
    l->table_size = 2;
    while (l->table_size < 2 * units)
        l->table_size *= 2;
    l->unit = calloc(units, sizeof *l->unit);
    l->stack = calloc(units, sizeof *l->stack);
    l->table = calloc(l->table_size, sizeof *l->table);
    if (!l->unit || !l->stack || !l->table) {
        td_ledger_finish(l);
        return td_fail(err, TD_NO_MEMORY, "%s ledger: no memory for %u %ss", noun, units, noun);
    }
    for (uint32_t u = units; u-- > 0;)
        push_free(l, u);
    return TD_OK;
}

void td_ledger_finish(struct td_ledger *l) {
    free(l->unit);
    free(l->stack);
    free(l->table);
    *l = (struct td_ledger){0};
}

td_status td_ledger_take(struct td_ledger *l, uint64_t owner, uint32_t n, uint32_t *ret_units,
                         struct td_error *err) {
    assert(owner != 0);
    if (n > l->count[TD_UNIT_FREE])
        return td_fail(err, TD_BUSY, "%ss: %u asked for, %u of %u free", l->noun, n,
                       l->count[TD_UNIT_FREE], l->units);
    if (n == 0) return TD_OK;
    struct td_ledger_entry *e = find_or_add(l, owner);
    assert(e->holders == 1);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t unit = l->stack[--l->count[TD_UNIT_FREE]];
        append(l, e, unit);
        ret_units[i] = unit;
    }
    return TD_OK;
}

void td_ledger_hold(struct td_ledger *l, uint64_t owner, uint32_t n) {
    assert(owner != 0);
    struct td_ledger_entry *e = find(l, owner);
    assert(e);
    if (e->holders == 1 && n > 0) l->shared += e->owned;
    e->holders += n;
}

uint32_t td_ledger_release(struct td_ledger *l, uint64_t owner) {
    assert(owner != 0);
    struct td_ledger_entry *e = find(l, owner);
    if (!e) return 0;
    if (e->holders > 1) {
        if (--e->holders == 1) l->shared -= e->owned;
        return 0;
    }
    return let_go_all(l, e);
}

struct td_ledger_holding td_ledger_holding(const struct td_ledger *l, uint64_t owner) {
    assert(owner != 0);
    const struct td_ledger_entry *e = find(l, owner);
    if (!e) return (struct td_ledger_holding){.owner = owner};
    return (struct td_ledger_holding){owner, e->owned, e->holders};
}

enum td_unit_state td_ledger_state(const struct td_ledger *l, uint32_t unit, uint64_t *ret_owner) {
    assert(unit < l->units);
    *ret_owner = l->unit[unit].owner;
    return l->unit[unit].state;
}

/* ---- the proof ---- */

/* A list is a simple path: each unit names the one before it, so none can be reached twice. */
static td_status check_owner(const struct td_ledger *l, const struct td_ledger_entry *e,
                             uint32_t listed[TD_UNIT_STATES], struct td_error *err) {
    uint32_t seen = 0, before = NONE;
    if (find(l, e->owner) != e)
        return td_fail(err, TD_INTERNAL, "%s ledger: owner %" PRIu64 " is not found by its hash",
                       l->noun, e->owner);
    for (uint32_t u = e->first; u != NONE; before = u, u = l->unit[u].next) {
        if (u >= l->units || l->unit[u].prev != before || l->unit[u].owner != e->owner ||
            l->unit[u].state != TD_UNIT_OWNED)
            return td_fail(err, TD_INTERNAL,
                           "%s ledger: %s %u is in the list of owner %" PRIu64
                           " but does not belong there",
                           l->noun, l->noun, u, e->owner);
        seen++;
    }
    if (before != e->last || before == NONE || seen != e->owned)
        return td_fail(err, TD_INTERNAL,
                       "%s ledger: owner %" PRIu64 " counts %u units, its list has %u", l->noun,
                       e->owner, e->owned, seen);
    listed[TD_UNIT_OWNED] += e->owned;
    return TD_OK;
}

td_status td_ledger_check(const struct td_ledger *l, struct td_error *err) {
    uint32_t listed[TD_UNIT_STATES] = {0}, owners = 0, shared = 0;
    uint32_t n_free = l->count[TD_UNIT_FREE];
    if (n_free > l->units)
        return td_fail(err, TD_INTERNAL, "%s ledger: %u of %u %ss free", l->noun, n_free, l->units,
                       l->noun);
    for (uint32_t i = 0; i < n_free; i++) {
        uint32_t u = l->stack[i];
        if (u >= l->units || l->unit[u].state != TD_UNIT_FREE || l->unit[u].owner != 0 ||
            l->unit[u].prev != i)
            return td_fail(err, TD_INTERNAL, "%s ledger: %s %u on the free stack is not free",
                           l->noun, l->noun, u);
    }
    listed[TD_UNIT_FREE] = n_free;
    for (uint32_t i = 0; i < l->table_size; i++) {
        if (l->table[i].owner == 0) continue;
        TD_TRY(check_owner(l, &l->table[i], listed, err));
        if (l->table[i].holders == 0)
            return td_fail(err, TD_INTERNAL, "%s ledger: owner %" PRIu64 " has no holder", l->noun,
                           l->table[i].owner);
        if (l->table[i].holders > 1) shared += l->table[i].owned;
        owners++;
    }
    if (owners != l->owners)
        return td_fail(err, TD_INTERNAL, "%s ledger: counts %u owners, has %u", l->noun, l->owners,
                       owners);
    if (shared != l->shared)
        return td_fail(err, TD_INTERNAL, "%s ledger: counts %u shared %ss, has %u", l->noun,
                       l->shared, l->noun, shared);
    for (int s = 0; s < TD_UNIT_STATES; s++)
        if (listed[s] != l->count[s])
            return td_fail(err, TD_INTERNAL, "%s ledger: counts %u in state %d, has %u", l->noun,
                           l->count[s], s, listed[s]);
    if (listed[TD_UNIT_FREE] + listed[TD_UNIT_OWNED] != l->units)
        return td_fail(err, TD_INTERNAL, "%s ledger: some of %u %ss are in no list", l->noun,
                       l->units, l->noun);
    return TD_OK;
}
