/* Looking at a cluster until something has happened. */
#include "deploy/tool/watch.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "deploy/tool/client.h"

enum { ASK_MS = 2000, LOOK_NS = 50000000 };
#define SECOND_NS 1000000000ull

static volatile sig_atomic_t interrupted;

static void note_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

void td_watch_interrupts(void) {
    struct sigaction sa = {.sa_handler = note_interrupt}; /* no SA_RESTART: sleeps end */
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

static bool is_router(const struct td_target *t) {
    return strcmp(t->name, "router") == 0;
}

static const char *string_of(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

static bool pair_serves(const json_t *pairs, const char *name) {
    size_t i, with = 0, proven = 0;
    json_t *p;
    json_array_foreach(pairs, i, p) {
        if (strcmp(string_of(p, "prefill"), name) != 0 && strcmp(string_of(p, "decode"), name) != 0)
            continue;
        with++;
        proven += json_is_true(json_object_get(p, "proven"));
    }
    return with == 0 || proven > 0;
}

static void read_worker(const json_t *cluster, const json_t *w, struct td_watched *ret) {
    ret->answers = ret->present = true;
    snprintf(ret->name, sizeof ret->name, "%s", string_of(w, "name"));
    snprintf(ret->epoch, sizeof ret->epoch, "%s", string_of(w, "epoch"));
    ret->pid = (long)json_integer_value(json_object_get(w, "pid"));
    ret->requests = (long)json_integer_value(json_object_get(w, "legs"));
    ret->draining = json_is_true(json_object_get(w, "draining"));
    ret->serves = pair_serves(json_object_get(cluster, "pairs"), ret->name);
}

void td_watch_worker(const struct td_target *t, struct td_watched *ret) {
    json_t *cluster = NULL, *w;
    long http = 0;
    size_t i;
    struct td_error ignored;
    memset(ret, 0, sizeof *ret);
    if (td_client_get(t->url, "/v1/cluster", ASK_MS, &cluster, &http, &ignored) != TD_OK) return;
    ret->answers = http == 200;
    json_array_foreach(json_object_get(cluster, "workers"), i, w) {
        if (strcmp(string_of(w, "name"), t->name) == 0) read_worker(cluster, w, ret);
    }
    json_decref(cluster);
}

/* By role, decode first as a cluster starts, and by number. */
static int by_name(const void *a, const void *b) {
    return strverscmp(((const struct td_watched *)a)->name, ((const struct td_watched *)b)->name);
}

td_status td_watch_fleet(const struct td_target *t, struct td_watched *ret, int cap, int *ret_n,
                         struct td_error *err) {
    json_t *cluster = NULL, *w;
    long http = 0;
    size_t i;
    char message[300];
    TD_TRY(td_client_get(t->url, "/v1/cluster", ASK_MS, &cluster, &http, err));
    const json_t *workers = json_object_get(cluster, "workers");
    td_status st = TD_OK;
    *ret_n = 0;
    if (http != 200)
        st = td_fail(err, TD_INVALID, "%s/v1/cluster: %s", t->url,
                     td_client_message(cluster, http, message));
    else if (json_array_size(workers) > (size_t)cap)
        st = td_fail(err, TD_TOO_LONG, "%zu workers; at most %d are watched",
                     json_array_size(workers), cap);
    else
        json_array_foreach(workers, i, w) {
            memset(&ret[*ret_n], 0, sizeof *ret);
            read_worker(cluster, w, &ret[(*ret_n)++]);
        }
    json_decref(cluster);
    qsort(ret, (size_t)*ret_n, sizeof *ret, by_name);
    return st;
}

td_status td_watch_drain(const struct td_target *t, bool draining, struct td_error *err) {
    char body[TD_PROC_NAME_MAX + 32], message[300];
    json_t *j = NULL;
    long http = 0;
    if (is_router(t))
        return td_fail(err, TD_INVALID,
                       "the router cannot be drained: it is where work comes from");
    snprintf(body, sizeof body, "{\"worker\": \"%s\"}", t->name);
    TD_TRY(td_client_post(t->url, draining ? "/v1/cluster/drain" : "/v1/cluster/resume", body,
                          ASK_MS, &j, &http, err));
    td_status st = TD_OK;
    if (http != 200)
        st = td_fail(err, TD_INVALID, "%s: %s", t->name, td_client_message(j, http, message));
    json_decref(j);
    return st;
}

td_status td_watch_a_little(struct td_error *err) {
    nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    return interrupted ? td_fail(err, TD_CANCELLED, "interrupted") : TD_OK;
}

td_status td_watch_until_idle(const struct td_target *t, long timeout_s, struct td_error *err) {
    uint64_t until = td_now_ns() + (uint64_t)timeout_s * SECOND_NS;
    struct td_watched w;
    for (;;) {
        td_watch_worker(t, &w);
        if (w.answers && !w.present)
            return td_fail(err, TD_PEER_LOST, "%s left while it was draining", t->name);
        if (w.answers && !w.draining)
            return td_fail(err, TD_CANCELLED,
                           "%s takes work again: somebody else resumed or "
                           "restarted it",
                           t->name);
        if (w.answers && w.requests == 0) return TD_OK;
        if (td_now_ns() >= until)
            return td_fail(err, TD_TIMEOUT, "%s still has %ld requests after %ld s", t->name,
                           w.requests, timeout_s);
        TD_TRY(td_watch_a_little(err));
    }
}

static bool router_ready(const struct td_target *t, char why[300]) {
    json_t *j = NULL;
    long http = 0;
    struct td_error err;
    if (td_client_get(t->url, "/ready", ASK_MS, &j, &http, &err) != TD_OK) {
        snprintf(why, 300, "%.299s", err.text);
        return false;
    }
    td_client_message(j, http, why);
    json_decref(j);
    return http == 200;
}

td_status td_watch_until_serving(const struct td_target *t, const char *old_epoch, long timeout_s,
                                 bool *ret_router, struct td_error *err) {
    uint64_t until = td_now_ns() + (uint64_t)timeout_s * SECOND_NS;
    char why[300] = "";
    for (;;) {
        struct td_watched w = {0};
        if (t->local && td_target_pid(t) == 0)
            return td_fail(err, TD_INTERNAL,
                           "%s ended while starting; `tandem logs %s --config %s`", t->name,
                           t->name, t->config_path);
        if (is_router(t)) {
            *ret_router = true;
            if (router_ready(t, why)) return TD_OK;
        } else {
            td_watch_worker(t, &w);
            *ret_router = w.answers;
            if (!w.answers && !old_epoch[0]) return TD_OK;
            if (w.present && w.serves && strcmp(w.epoch, old_epoch) != 0) return TD_OK;
            snprintf(why, sizeof why, "%s",
                     !w.answers                        ? "the router does not answer"
                     : !w.present                      ? "it is not linked with the router"
                     : strcmp(w.epoch, old_epoch) == 0 ? "the router still sees the old process"
                                                       : "no pair with it is proven yet");
        }
        if (td_now_ns() >= until)
            return td_fail(err, TD_TIMEOUT, "%s does not serve after %ld s: %s", t->name, timeout_s,
                           why);
        TD_TRY(td_watch_a_little(err));
    }
}
