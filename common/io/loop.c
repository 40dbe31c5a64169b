/* Timers, termination signals and the end of a loop. */
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>

#include "common/io/loop.h"

enum { NS_PER_MS = 1000000 };

struct td_timer {
    uv_timer_t handle;
    td_timer_fn *fn;
    void *user;
};

static void on_timer(uv_timer_t *h) {
    struct td_timer *t = h->data;
    t->fn(t->user);
}

td_status td_timer_create(uv_loop_t *loop, td_timer_fn *fn, void *user, struct td_timer **ret) {
    struct td_timer *t = calloc(1, sizeof *t);
    if (!t) return TD_NO_MEMORY;
    uv_timer_init(loop, &t->handle);
    t->handle.data = t;
    t->fn = fn;
    t->user = user;
    *ret = t;
    return TD_OK;
}

void td_timer_after(struct td_timer *t, uint64_t delay_ms) {
    /* The loop's cached time may lie behind after a long callback. */
    uv_update_time(t->handle.loop);
    uv_timer_start(&t->handle, on_timer, delay_ms, 0);
}

void td_timer_every(struct td_timer *t, uint64_t period_ms) {
    uv_update_time(t->handle.loop);
    uv_timer_start(&t->handle, on_timer, period_ms, period_ms);
}

void td_timer_at(struct td_timer *t, uint64_t at_ns) {
    /* In whole milliseconds of the loop's own clock, which is the same one rounded down: a timer
     * that came early would find the deadline not yet passed. */
    uint64_t at_ms = at_ns / NS_PER_MS + (at_ns % NS_PER_MS != 0);
    uv_update_time(t->handle.loop);
    uint64_t now_ms = uv_now(t->handle.loop);
    uv_timer_start(&t->handle, on_timer, at_ms > now_ms ? at_ms - now_ms : 0, 0);
}

void td_timer_stop(struct td_timer *t) {
    uv_timer_stop(&t->handle);
}

static void free_timer(uv_handle_t *h) {
    free(h->data);
}

void td_timer_destroy(struct td_timer *t) {
    if (t) uv_close((uv_handle_t *)&t->handle, free_timer);
}

/* ---- signals ---- */

struct td_signals {
    uv_signal_t handle[3];
    int open;
    td_signal_fn *fn;
    void *user;
};

static void on_signal(uv_signal_t *h, int signum) {
    struct td_signals *s = h->data;
    s->fn(s->user, signum);
}

td_status td_signals_create(uv_loop_t *loop, td_signal_fn *fn, void *user,
                            struct td_signals **ret) {
    struct td_signals *s = calloc(1, sizeof *s);
    if (!s) return TD_NO_MEMORY;
    s->fn = fn;
    s->user = user;
    for (int i = 0; i < 3; i++) {
        if (uv_signal_init(loop, &s->handle[i]) != 0) { /* only the first of a loop can fail */
            free(s);
            return TD_IO;
        }
        s->handle[i].data = s;
        s->open++;
    }
    static const int signums[3] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < 3; i++) {
        if (uv_signal_start(&s->handle[i], on_signal, signums[i]) != 0) {
            td_signals_destroy(s);
            return TD_IO;
        }
        uv_unref((uv_handle_t *)&s->handle[i]); /* waiting for a signal keeps no loop alive */
    }
    if (signal(SIGPIPE, SIG_IGN) == SIG_ERR) {
        td_signals_destroy(s);
        return TD_IO;
    }
    *ret = s;
    return TD_OK;
}

static void free_signals(uv_handle_t *h) {
    struct td_signals *s = h->data;
    if (--s->open == 0) free(s);
}

void td_signals_destroy(struct td_signals *s) {
    if (!s) return;
    for (int i = 0; i < 3; i++)
        uv_close((uv_handle_t *)&s->handle[i], free_signals);
}

/* ---- end ---- */

static void on_deadline(uv_timer_t *t) {
    *(bool *)t->data = true;
    uv_stop(t->loop);
}

td_status td_loop_drain(uv_loop_t *loop, uint64_t timeout_ms) {
    uv_timer_t deadline;
    bool late = false;
    uv_timer_init(loop, &deadline);
    deadline.data = &late;
    uv_timer_start(&deadline, on_deadline, timeout_ms, 0);
    uv_unref((uv_handle_t *)&deadline); /* it bounds the wait, it is not waited for */
    while (uv_run(loop, UV_RUN_DEFAULT) && !late) {
    }
    uv_close((uv_handle_t *)&deadline, NULL);
    uv_run(loop, UV_RUN_NOWAIT);
    return uv_loop_close(loop) == 0 ? TD_OK : TD_BUSY;
}
