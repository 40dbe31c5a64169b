/* Threads of ranks, their meetings, and their end; see team.h.
 *
 * The thread that calls td_team_run is the one that watches: it sleeps until all ranks are done and
 * looks up now and then whether any of them has told something since. Ranks never look at a clock.
 */
#include "kernels/team.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/futex.h"
#include "kernels/near.h"

enum {
    SPIN = 2000,     /* pauses before a rank sleeps: about as long as waking one takes */
    LOOKS = 8,       /* of the watch in the time of a silence */
    GRACE_MS = 3000, /* at most, for ranks to come back from a run that was given up */
};

enum place { AT_WORK, AT_MEETING, DONE };

struct rank {
    struct td_team *team;
    pthread_t thread;
    uint32_t index;
    struct td_error err; /* of the run */
    /* What the watch reads. */
    _Atomic uint32_t met;   /* meetings so far: which half of `brought` */
    _Atomic uint32_t told;  /* grows with everything the rank tells */
    _Atomic uint32_t where; /* enum place */
    _Atomic uint32_t layer;
    _Atomic(const char *) what;
};

struct td_team {
    struct td_team_options o;
    uint32_t started;
    _Atomic uint32_t run;     /* number of the run: what ranks wait for */
    _Atomic uint32_t working; /* ranks that are not done with it: what the caller waits for */
    _Atomic uint32_t arrived, meeting;
    _Atomic uint32_t failed; /* 1 + the first rank that failed */
    _Atomic bool broken, stop;
    td_team_fn *fn;
    void *arg;
    const void *brought[2][TD_MAX_RANKS];
    struct td_error cause; /* of a broken team */
    struct rank rank[TD_MAX_RANKS];
};

/* ---- telling ---- */

static void tell(struct rank *r) {
    atomic_store_explicit(&r->told, atomic_load_explicit(&r->told, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

bool td_team_broken(const struct td_team *t) {
    return t && atomic_load_explicit(&t->broken, memory_order_acquire);
}

bool td_team_at(struct td_team *t, uint32_t rank, const char *what, uint32_t layer) {
    if (!t) return true;
    struct rank *r = &t->rank[rank];
    atomic_store_explicit(&r->what, what, memory_order_relaxed);
    atomic_store_explicit(&r->layer, layer, memory_order_relaxed);
    tell(r);
    return !td_team_broken(t);
}

const void *const *td_team_meet(struct td_team *t, uint32_t rank, const void *mine) {
    struct rank *r = &t->rank[rank];
    const void **brought = t->brought[atomic_fetch_add(&r->met, 1) % 2];
    uint32_t seen = atomic_load(&t->meeting);
    brought[rank] = mine;
    tell(r);
    if (atomic_fetch_add(&t->arrived, 1) + 1 == t->o.ranks) {
        atomic_store(&t->arrived, 0);
        atomic_fetch_add(&t->meeting, 1);
        td_futex_wake_all(&t->meeting);
    } else {
        atomic_store(&r->where, AT_MEETING);
        /* Who breaks the team sets `broken` before it counts the meeting up. */
        if (!td_team_broken(t)) (void)td_futex_until(&t->meeting, seen, SPIN);
        atomic_store(&r->where, AT_WORK);
    }
    return td_team_broken(t) ? NULL : brought;
}

/* ---- a rank's thread ---- */

static void release(struct td_team *t) {
    atomic_store(&t->broken, true);
    atomic_fetch_add(&t->meeting, 1);
    td_futex_wake_all(&t->meeting);
}

static void *rank_main(void *p) {
    struct rank *r = p;
    struct td_team *t = r->team;
    if (t->o.pci[r->index][0]) td_near_stay(t->o.pci[r->index]);
    for (uint32_t seen = 0;;) {
        seen = td_futex_until(&t->run, seen, SPIN);
        if (atomic_load(&t->stop)) return NULL;
        if (t->fn(t->arg, r->index, &r->err) != TD_OK) {
            uint32_t none = 0;
            atomic_compare_exchange_strong(&t->failed, &none, r->index + 1);
            release(t);
        }
        atomic_store(&r->where, DONE);
        tell(r);
        if (atomic_fetch_sub(&t->working, 1) == 1 || td_team_broken(t))
            td_futex_wake_all(&t->working);
    }
}

/* ---- the caller ---- */

static uint32_t told(struct td_team *t) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < t->o.ranks; i++)
        sum += atomic_load_explicit(&t->rank[i].told, memory_order_relaxed);
    return sum;
}

/* "rank 2 (cuda:2) at attend of layer 3" */
static int say_rank(const struct td_team *t, uint32_t i, char *to, size_t cap) {
    const char *what = atomic_load(&t->rank[i].what);
    uint32_t layer = atomic_load(&t->rank[i].layer);
    int n = snprintf(to, cap, "rank %u (%s) at %s", i, t->o.place[i], what ? what : "the start");
    if (layer != TD_TEAM_NO_LAYER && n > 0 && (size_t)n < cap)
        n += snprintf(to + n, cap - (size_t)n, " of layer %u", layer);
    return n;
}

/* The others wait for it: it is at work, or has not come back from a meeting that is over. */
static bool missing(struct td_team *t, uint32_t i) {
    enum place where = (enum place)atomic_load(&t->rank[i].where);
    uint32_t over = atomic_load(&t->meeting), met = atomic_load(&t->rank[i].met);
    return where == AT_WORK || (where == AT_MEETING && (int32_t)(over - met) >= 0);
}

static void name_missing(struct td_team *t) {
    char who[300];
    size_t used = 0;
    who[0] = 0;
    for (uint32_t i = 0; i < t->o.ranks && used < sizeof who; i++) {
        if (!missing(t, i)) continue;
        if (used) used += (size_t)snprintf(who + used, sizeof who - used, ", ");
        if (used < sizeof who) used += (size_t)say_rank(t, i, who + used, sizeof who - used);
    }
    (void)td_fail(&t->cause, TD_IO, "ranks: for %u ms nothing came from %s", t->o.silence_ms,
                  used ? who : "any of them");
}

/* "rank 2 (cuda:2): " and the sentence. */
static void name_failed(struct td_team *t, uint32_t i) {
    const struct td_error *e = &t->rank[i].err;
    (void)td_fail(&t->cause, e->status, "rank %u (%s): %.370s", i, t->o.place[i], e->text);
}

/* Until every rank is done or the team is broken. */
static void watch(struct td_team *t) {
    uint32_t left, before = told(t), period = t->o.silence_ms / LOOKS + 1;
    uint64_t since = td_now_ns();
    for (uint32_t i = 0; i < SPIN && atomic_load(&t->working); i++)
        td_relax();
    while ((left = atomic_load(&t->working)) != 0 && !td_team_broken(t)) {
        td_futex_wait(&t->working, left, period);
        uint32_t now = told(t);
        if (now != before) {
            before = now;
            since = td_now_ns();
        } else if (td_now_ns() - since > (uint64_t)t->o.silence_ms * 1000000 &&
                   atomic_load(&t->working) != 0 && !td_team_broken(t)) {
            name_missing(t);
            release(t);
        }
    }
}

/* Everybody out, as far as they come. */
static td_status give_up(struct td_team *t, struct td_error *err) {
    uint32_t grace = t->o.silence_ms < GRACE_MS ? t->o.silence_ms : GRACE_MS;
    uint64_t end = td_now_ns() + (uint64_t)grace * 1000000;
    if (t->o.break_off) t->o.break_off(t->o.user);
    for (uint32_t left; (left = atomic_load(&t->working)) != 0 && td_now_ns() < end;)
        td_futex_wait(&t->working, left, 1 + grace / LOOKS);
    uint32_t first = atomic_load(&t->failed);
    if (t->cause.status == TD_OK && first) name_failed(t, first - 1);
    if (err) *err = t->cause;
    return t->cause.status;
}

td_status td_team_run(struct td_team *t, td_team_fn *fn, void *arg, struct td_error *err) {
    if (!t) return fn(arg, 0, err);
    if (td_team_broken(t)) {
        if (err) *err = t->cause;
        return t->cause.status;
    }
    t->fn = fn;
    t->arg = arg;
    for (uint32_t i = 0; i < t->o.ranks; i++)
        atomic_store(&t->rank[i].where, AT_WORK);
    atomic_store(&t->working, t->o.ranks);
    atomic_fetch_add(&t->run, 1);
    td_futex_wake_all(&t->run);
    watch(t);
    return td_team_broken(t) ? give_up(t, err) : TD_OK;
}

void td_team_silence(struct td_team *t, uint32_t ms) {
    if (t) t->o.silence_ms = ms;
}

bool td_team_lost(const struct td_team *t) {
    return t && atomic_load(&t->working) != 0;
}

td_status td_team_create(const struct td_team_options *o, struct td_team **ret,
                         struct td_error *err) {
    if (o->ranks < 2 || o->ranks > TD_MAX_RANKS || o->silence_ms == 0)
        return td_fail(err, TD_INVALID, "ranks: expected 2 to %d and a limit to their silence",
                       TD_MAX_RANKS);
    struct td_team *t = calloc(1, sizeof *t);
    if (!t) return td_fail(err, TD_NO_MEMORY, "no memory for %u ranks", o->ranks);
    t->o = *o;
    for (uint32_t i = 0; i < o->ranks; i++) {
        struct rank *r = &t->rank[i];
        r->team = t;
        r->index = i;
        atomic_store(&r->layer, TD_TEAM_NO_LAYER);
        if (pthread_create(&r->thread, NULL, rank_main, r) != 0) {
            td_team_destroy(t);
            return td_fail(err, TD_NO_MEMORY, "the thread of rank %u could not be started", i);
        }
        t->started++;
    }
    *ret = t;
    return TD_OK;
}

void td_team_destroy(struct td_team *t) {
    if (!t || td_team_lost(t)) return;
    atomic_store(&t->stop, true);
    atomic_fetch_add(&t->run, 1);
    td_futex_wake_all(&t->run);
    for (uint32_t i = 0; i < t->started; i++)
        pthread_join(t->rank[i].thread, NULL);
    free(t);
}
