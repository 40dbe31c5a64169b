/* Who owns what: the one bookkeeping behind pool pages, slots and landing slabs.
 *
 * A ledger holds `units` numbered units. Each is free or owned, by at most one owner (a 64-bit id of the caller's choice, never 0). Everything an owner holds goes
 * back in one call that may be repeated, so every way a request can end uses the same line.
 *
 * Shared: what an owner has may be held by several (the pages of one prompt by its choices). Each
 * holder releases once, the units are free when the last one has. They are counted once.
 *
 * All memory is taken by init; nothing allocates afterwards. Not thread-safe: one owner thread.
 * Units come back in a fixed order, so a replay of the same calls gives the same numbers. */
#ifndef TD_COMMON_KV_LEDGER_H
#define TD_COMMON_KV_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_LEDGER_MAX_UNITS = 1 << 24 };

enum td_unit_state { TD_UNIT_FREE, TD_UNIT_OWNED, TD_UNIT_STATES };

struct td_ledger_unit;
struct td_ledger_entry;

struct td_ledger {
    const char *noun; /* "page", "slot": for sentences; outlives the ledger */
    uint32_t units;
    uint32_t count[TD_UNIT_STATES];
    uint32_t owners;               /* with at least one unit */
    uint32_t shared;               /* owned units with more than one holder */
    struct td_ledger_unit *unit;   /* [units] */
    uint32_t *stack;               /* [units] free unit numbers, the next one last */
    struct td_ledger_entry *table; /* [table_size] owners by hash, open addressing */
    uint32_t table_size;
};

/* What one owner holds. */
struct td_ledger_holding {
    uint64_t owner;
    uint32_t owned;
    uint32_t holders; /* who has not yet released; 1 unless td_ledger_hold() was used */
};

/* `units` 1..TD_LEDGER_MAX_UNITS. */
TD_MUST_USE td_status td_ledger_init(struct td_ledger *l, const char *noun, uint32_t units,
                                     struct td_error *err);
/* A zeroed or already finished ledger is fine. */
void td_ledger_finish(struct td_ledger *l);

/* Gives `n` more units to `owner`, all or none; their numbers go to ret_units [n]. BUSY with both numbers when fewer are free;
 * n == 0 is fine and does nothing. */
TD_MUST_USE td_status td_ledger_take(struct td_ledger *l, uint64_t owner, uint32_t n,
                                     uint32_t *ret_units, struct td_error *err);

/* `n` more holders of everything `owner` has; it has something (asserted) and takes no more. */
void td_ledger_hold(struct td_ledger *l, uint64_t owner, uint32_t n);

/* One holder is done; the last one's release gives back.
 * Everything `owner` has goes back, in such an order that the next taker gets the same units in the
 * same order. Returns how many; 0 when the owner is unknown or was released before. */
uint32_t td_ledger_release(struct td_ledger *l, uint64_t owner);
/* The owner's holding; zero counts when it holds nothing. */
struct td_ledger_holding td_ledger_holding(const struct td_ledger *l, uint64_t owner);
/* State and owner (0 when free) of one unit. */
enum td_unit_state td_ledger_state(const struct td_ledger *l, uint32_t unit, uint64_t *ret_owner);

/* Proves from scratch that no unit has two owners, none is lost, and the counts are right; INTERNAL
 * with a sentence otherwise. Visits every unit: for tests, the simulator, and idle moments. */
TD_MUST_USE td_status td_ledger_check(const struct td_ledger *l, struct td_error *err);

#endif
