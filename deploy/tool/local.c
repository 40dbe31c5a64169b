/* Starting a local cluster and waiting for its readiness. */
#include "deploy/tool/local.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "common/base/clock.h"
#include "deploy/tool/client.h"

td_status td_local_load(struct td_local *l, const char *path, struct td_error *err) {
    l->path = path;
    td_config_defaults(&l->config);
    TD_TRY(td_config_load(&l->config, path, "router", "", err));
    td_procs_init(&l->procs, &l->config);
    snprintf(l->url, sizeof l->url, "http://%s", l->config.router_listen);
    return TD_OK;
}

static td_status prepare_run_dir(const char *dir, struct td_error *err) {
    struct sockaddr_un limit;
    if (strlen(dir) + sizeof "/router.sock" > sizeof limit.sun_path)
        return td_fail(err, TD_CONFIG,
                       "run_dir %s: expected at most %zu bytes, since sockets are made in it", dir,
                       sizeof limit.sun_path - sizeof "/router.sock");
    if (mkdir(dir, 0750) != 0 && errno != EEXIST)
        return td_fail(err, TD_IO, "run_dir %s: %s", dir, strerror(errno));
    return TD_OK;
}

static td_status nothing_runs(const struct td_local *l, struct td_error *err) {
    const struct td_procs *p = &l->procs;
    for (int i = 0; i < p->n; i++)
        if (td_proc_pid(p, i))
            return td_fail(err, TD_BUSY,
                           "%s already runs (pid %d); `tandem down --config %s` stops it",
                           p->proc[i].name, (int)td_proc_pid(p, i), l->path);
    /* A router of another cluster, or of the systemd units, would answer in place of ours. */
    json_t *j = NULL;
    long http;
    td_status st = td_client_get(l->url, "/health", 2000, &j, &http, NULL);
    json_decref(j);
    if (st != TD_UNREACHABLE)
        return td_fail(
            err, TD_BUSY,
            "something answers at %s already, and this configuration's processes are not "
            "running by pid files: another cluster, or the systemd units?",
            l->url);
    return TD_OK;
}

/* Last non-empty line of a log: there a role says why it ended. */
static void last_line(const char *path, char *ret, size_t cap) {
    char line[2048];
    ret[0] = '\0';
    FILE *f = fopen(path, "re");
    if (!f) return;
    while (fgets(line, sizeof line, f))
        if (line[0] != '\n') snprintf(ret, cap, "%.*s", (int)strcspn(line, "\n"), line);
    fclose(f);
}

static td_status all_alive(const struct td_procs *p, struct td_error *err) {
    for (int i = 0; i < p->n; i++) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
        if (td_proc_pid(p, i)) continue;
        char log[600], said[240];
        td_proc_log(p, i, log, sizeof log);
        last_line(log, said, sizeof said);
        return td_fail(err, TD_INTERNAL, "%s ended while starting: %s (log: %s)", p->proc[i].name,
                       said, log);
    }
    return TD_OK;
}

/* Polls /ready until 200; a role that ended is the better news, so that is looked for too. */
static td_status wait_ready(const struct td_local *l, long timeout_s, struct td_error *err) {
    uint64_t until = td_now_ns() + (uint64_t)timeout_s * 1000000000u;
    char why[300] = "no answer yet";
    for (;;) {
        TD_TRY(all_alive(&l->procs, err));
        json_t *j = NULL;
        long http = 0;
        if (td_client_get(l->url, "/ready", 2000, &j, &http, NULL) == TD_OK) {
            const char *m =
                json_string_value(json_object_get(json_object_get(j, "error"), "message"));
            if (m) snprintf(why, sizeof why, "%s", m);
            json_decref(j);
            if (http == 200) return TD_OK;
        }
        if (td_now_ns() > until)
            return td_fail(err, TD_TIMEOUT, "%s not ready after %ld s: %s", l->url, timeout_s, why);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

static td_status start_all(struct td_local *l, long timeout_s, struct td_error *err) {
    TD_TRY(nothing_runs(l, err));
    td_status st = TD_OK;
    for (int i = 0; st == TD_OK && i < l->procs.n; i++)
        st = td_proc_start(&l->procs, i, l->path, err);
    if (st == TD_OK) st = wait_ready(l, timeout_s, err);
    if (st != TD_OK) {
        int killed;
        (void)td_local_down(l, &killed);
    }
    return st;
}

td_status td_local_up(struct td_local *l, long timeout_s, struct td_error *err) {
    int lock;
    TD_TRY(prepare_run_dir(l->procs.run_dir, err));
    TD_TRY(td_procs_lock(&l->procs, &lock, err));
    td_status st = start_all(l, timeout_s, err);
    td_procs_unlock(lock);
    return st;
}

int td_local_down(const struct td_local *l, int *ret_killed) {
    int running = 0;
    *ret_killed = 0;
    for (int i = l->procs.n - 1; i >= 0; i--) {
        running += td_proc_pid(&l->procs, i) != 0;
        *ret_killed += td_proc_stop(&l->procs, i, TD_STOP_GRACE_MS);
    }
    return running;
}
