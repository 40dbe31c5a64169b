/* See aside.h. */
#include "kernels/aside.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

struct td_aside {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void (*fn)(void *); /* NULL: nothing to do */
    void *arg;
    bool stop;
};

static void *run(void *p) {
    struct td_aside *a = p;
    pthread_mutex_lock(&a->lock);
    for (;;) {
        while (!a->fn && !a->stop)
            pthread_cond_wait(&a->changed, &a->lock);
        if (a->stop) break;
        void (*fn)(void *) = a->fn;
        pthread_mutex_unlock(&a->lock);
        fn(a->arg);
        pthread_mutex_lock(&a->lock);
        a->fn = NULL;
        pthread_cond_broadcast(&a->changed);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

td_status td_aside_create(struct td_aside **ret, struct td_error *err) {
    struct td_aside *a = calloc(1, sizeof *a);
    if (!a) return td_fail(err, TD_NO_MEMORY, "no memory for a thread");
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->changed, NULL);
    if (pthread_create(&a->thread, NULL, run, a) != 0) {
        pthread_cond_destroy(&a->changed);
        pthread_mutex_destroy(&a->lock);
        free(a);
        return td_fail(err, TD_NO_MEMORY, "the thread beside the engine could not be started");
    }
    *ret = a;
    return TD_OK;
}

void td_aside_destroy(struct td_aside *a) {
    if (!a) return;
    pthread_mutex_lock(&a->lock);
    a->stop = true;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

void td_aside_start(struct td_aside *a, void (*fn)(void *), void *arg) {
    pthread_mutex_lock(&a->lock);
    a->fn = fn;
    a->arg = arg;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

void td_aside_wait(struct td_aside *a) {
    pthread_mutex_lock(&a->lock);
    while (a->fn)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
}
