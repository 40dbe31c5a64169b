/* The pool behind td_threads_run: one ticket word, claimed piecewise.
 *
 * The ticket holds the loop's number (high half) and the next unclaimed piece (low half). A
 * worker reads ticket, then the loop's fields, then claims by compare-and-swap on the ticket it
 * read: success proves that the fields belong to that loop, because the ticket is closed before
 * fields change. So a worker that wakes late finds nothing to do and nobody waits for it; the
 * caller waits for claimed pieces only. */
#include "kernels/threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/futex.h"

enum {
    CLOSED = 0xffffffffu,   /* piece number of a ticket whose fields are being written */
    SPIN = 4000,            /* pauses before a worker sleeps: about the gap between two ops */
    CHUNKS_PER_THREAD = 16, /* small enough that waiting for the last one is short */
};

struct worker {
    struct td_threads *pool;
    pthread_t handle;
    uint32_t index;
};

struct td_threads {
    _Atomic uint64_t ticket;
    _Atomic(td_loop_fn *) fn;
    _Atomic(const void *) arg;
    _Atomic uint32_t items, grain;
    _Atomic uint32_t done;  /* pieces finished of this loop */
    _Atomic uint32_t epoch; /* futex word workers sleep on; bumped per loop */
    _Atomic uint32_t asleep;
    _Atomic bool stop;
    uint32_t loops; /* the caller's own count, high half of the next ticket */
    uint32_t count, started;
    struct worker worker[]; /* [count - 1] */
};

/* Does pieces of the current loop until none is left. */
static void work(struct td_threads *t, uint32_t thread) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&t->ticket, memory_order_acquire);
        td_loop_fn *fn = atomic_load_explicit(&t->fn, memory_order_acquire);
        const void *arg = atomic_load_explicit(&t->arg, memory_order_acquire);
        uint32_t items = atomic_load_explicit(&t->items, memory_order_acquire);
        uint32_t grain = atomic_load_explicit(&t->grain, memory_order_acquire);
        uint32_t begin = (uint32_t)ticket;
        if (begin == CLOSED || begin >= items) return;
        uint32_t n = items - begin < grain ? items - begin : grain;
        if (!atomic_compare_exchange_strong(&t->ticket, &ticket, ticket + n)) continue;
        fn(arg, begin, begin + n, thread);
        atomic_fetch_add_explicit(&t->done, n, memory_order_release);
    }
}

static void *worker_main(void *p) {
    struct worker *w = p;
    struct td_threads *t = w->pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t epoch = atomic_load_explicit(&t->epoch, memory_order_acquire);
        for (uint32_t i = 0; epoch == seen && i < SPIN; i++) {
            td_relax();
            epoch = atomic_load_explicit(&t->epoch, memory_order_acquire);
        }
        if (epoch == seen) {
            atomic_fetch_add(&t->asleep, 1);
            while (atomic_load(&t->epoch) == seen)
                td_futex_wait(&t->epoch, seen, 0);
            atomic_fetch_sub(&t->asleep, 1);
            epoch = atomic_load(&t->epoch);
        }
        seen = epoch;
        if (atomic_load(&t->stop)) return NULL;
        work(t, w->index);
    }
}

td_status td_threads_create(uint32_t count, struct td_threads **ret, struct td_error *err) {
    if (count == 0 || count > TD_MAX_THREADS)
        return td_fail(err, TD_INVALID, "threads: expected 1 to %d, found %u", TD_MAX_THREADS,
                       count);
    struct td_threads *t = calloc(1, sizeof *t + (count - 1) * sizeof t->worker[0]);
    if (!t) return td_fail(err, TD_NO_MEMORY, "no memory for %u threads", count);
    t->count = count;
    atomic_store(&t->ticket, CLOSED);
    for (uint32_t i = 0; i + 1 < count; i++) {
        t->worker[i].pool = t;
        t->worker[i].index = i + 1;
        if (pthread_create(&t->worker[i].handle, NULL, worker_main, &t->worker[i]) != 0) {
            td_threads_destroy(t);
            return td_fail(err, TD_NO_MEMORY, "compute thread %u of %u could not be started", i + 1,
                           count);
        }
        t->started++;
    }
    *ret = t;
    return TD_OK;
}

void td_threads_destroy(struct td_threads *t) {
    if (!t) return;
    atomic_store(&t->stop, true);
    atomic_fetch_add(&t->epoch, 1);
    td_futex_wake_all(&t->epoch);
    for (uint32_t i = 0; i < t->started; i++)
        pthread_join(t->worker[i].handle, NULL);
    free(t);
}

uint32_t td_threads_count(const struct td_threads *t) {
    return t->count;
}

void td_threads_run(struct td_threads *t, td_loop_fn *fn, const void *arg, uint32_t items) {
    if (items == 0) return;
    if (t->count == 1 || items == 1) {
        fn(arg, 0, items, 0);
        return;
    }
    uint32_t grain = items / (t->count * CHUNKS_PER_THREAD);
    uint64_t number = (uint64_t)++t->loops << 32;
    atomic_store(&t->ticket, number | CLOSED);
    atomic_store_explicit(&t->fn, fn, memory_order_release);
    atomic_store_explicit(&t->arg, arg, memory_order_release);
    atomic_store_explicit(&t->items, items, memory_order_release);
    atomic_store_explicit(&t->grain, grain ? grain : 1, memory_order_release);
    atomic_store_explicit(&t->done, 0, memory_order_release);
    atomic_store(&t->ticket, number);
    atomic_fetch_add(&t->epoch, 1);
    if (atomic_load(&t->asleep) != 0) td_futex_wake_all(&t->epoch);
    work(t, 0);
    /* What is left are pieces others have claimed; they are short, but their owner may have lost
     * its core to another process. */
    for (uint32_t spins = 0; atomic_load_explicit(&t->done, memory_order_acquire) != items;) {
        if (++spins < SPIN)
            td_relax();
        else
            (void)syscall(SYS_sched_yield);
    }
}
