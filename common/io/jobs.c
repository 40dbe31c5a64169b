/* One thread, one ring of jobs. Three counters walk the same ring: submitted, run, reported; the
 * lock guards the first two, the third belongs to the loop. */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/io/jobs.h"

enum { NAME_BYTES = 16 };

struct job {
    td_job_fn *run, *done;
    void *user;
};

struct td_jobs {
    uv_async_t ready; /* wakes the loop when jobs were run */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    uint64_t submitted, run;
    uint64_t reported;
    bool stop;
    char name[NAME_BYTES];
    uint32_t capacity;
    struct job ring[];
};

static struct job *at(struct td_jobs *j, uint64_t i) {
    return &j->ring[i % j->capacity];
}

static void *work(void *arg) {
    struct td_jobs *j = arg;
    pthread_setname_np(pthread_self(), j->name);
    pthread_mutex_lock(&j->lock);
    for (;;) {
        while (!j->stop && j->run == j->submitted)
            pthread_cond_wait(&j->work, &j->lock);
        if (j->stop) break;
        struct job job = *at(j, j->run);
        pthread_mutex_unlock(&j->lock);
        job.run(job.user);
        pthread_mutex_lock(&j->lock);
        j->run++;
        uv_async_send(&j->ready);
    }
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

static void on_ready(uv_async_t *h) {
    struct td_jobs *j = h->data;
    pthread_mutex_lock(&j->lock);
    uint64_t run = j->run;
    pthread_mutex_unlock(&j->lock);
    /* `done` may destroy the jobs: the handle then lives until its close callback. */
    while (j->reported < run && !uv_is_closing((uv_handle_t *)h)) {
        struct job job = *at(j, j->reported);
        j->reported++;
        if (job.done) job.done(job.user);
    }
}

static void on_closed(uv_handle_t *h) {
    struct td_jobs *j = h->data;
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->work);
    free(j);
}

td_status td_jobs_create(uv_loop_t *loop, uint32_t capacity, const char *name, struct td_jobs **ret,
                         struct td_error *err) {
    if (capacity == 0) return td_fail(err, TD_INVALID, "a queue of no jobs");
    struct td_jobs *j = calloc(1, sizeof *j + capacity * sizeof j->ring[0]);
    if (!j) return td_fail(err, TD_NO_MEMORY, "no memory for %u jobs", capacity);
    j->capacity = capacity;
    snprintf(j->name, sizeof j->name, "%s", name);
    int rc = uv_async_init(loop, &j->ready, on_ready);
    if (rc != 0) {
        free(j);
        return td_fail(err, TD_IO, "a wake-up handle: %s", uv_strerror(rc));
    }
    j->ready.data = j;
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->work, NULL);
    rc = pthread_create(&j->thread, NULL, work, j);
    if (rc != 0) {
        uv_close((uv_handle_t *)&j->ready, on_closed);
        return td_fail(err, TD_IO, "thread %s: %s", name, uv_strerror(-rc));
    }
    *ret = j;
    return TD_OK;
}

td_status td_jobs_submit(struct td_jobs *j, td_job_fn *run, td_job_fn *done, void *user) {
    if (td_jobs_pending(j) == j->capacity) return TD_BUSY;
    pthread_mutex_lock(&j->lock);
    *at(j, j->submitted) = (struct job){.run = run, .done = done, .user = user};
    j->submitted++;
    pthread_cond_signal(&j->work);
    pthread_mutex_unlock(&j->lock);
    return TD_OK;
}

uint32_t td_jobs_pending(const struct td_jobs *j) {
    return (uint32_t)(j->submitted - j->reported); /* both written by this thread only */
}

void td_jobs_destroy(struct td_jobs *j) {
    if (!j) return;
    pthread_mutex_lock(&j->lock);
    j->stop = true;
    pthread_cond_signal(&j->work);
    pthread_mutex_unlock(&j->lock);
    pthread_join(j->thread, NULL);
    uv_close((uv_handle_t *)&j->ready, on_closed);
}
