/* `tandem restart`: one role, and no other process. */
#include <curl/curl.h>
#include <stdio.h>

#include "common/base/clock.h"
#include "deploy/tool/restart.h"
#include "deploy/tool/tool.h"
#include "deploy/tool/watch.h"

static const char help[] =
    "usage: tandem restart ROLE[@N] [--drain] [--timeout SECONDS] [--config FILE]\n\n"
    "Restarts router, prefill[@N] or decode[@N] and waits until it serves again (default 120 s).\n"
    "No other process is touched. Requests on it that have shown no token are retried elsewhere;\n"
    "streams end in an error frame, unless --drain first waits until it has none (default 600 s;\n"
    "then, or when it is interrupted, it is resumed and not restarted).\n"
    "Without --config: the installed configuration. A role that `tandem up` did not start is\n"
    "restarted by systemctl.\n";

enum { SERVE_S = 120, DRAIN_S = 600 };

static td_status drain_first(const struct td_target *t, long timeout_s, struct td_error *err) {
    struct td_error ignored;
    TD_TRY(td_watch_drain(t, true, err));
    td_status st = td_watch_until_idle(t, timeout_s, err);
    if (st == TD_TIMEOUT || st == TD_CANCELLED) (void)!td_watch_drain(t, false, &ignored);
    return st;
}

static td_status replace(const struct td_target *t, struct td_error *err) {
    if (!t->local) {
        const char *const argv[] = {"systemctl", "restart", t->unit, NULL};
        int rc = td_target_run(argv);
        return rc == 0 ? TD_OK
                       : td_fail(err, TD_INTERNAL,
                                 "systemctl restart %s: exit code %d; `tandem "
                                 "logs %s` shows why",
                                 t->unit, rc, t->name);
    }
    int lock;
    TD_TRY(td_procs_lock(&t->procs, &lock, err));
    if (td_proc_stop(&t->procs, t->index, TD_STOP_GRACE_MS))
        fprintf(stderr, "%s did not end and was killed\n", t->name);
    td_status st = td_proc_start(&t->procs, t->index, t->config_path, err);
    td_procs_unlock(lock);
    return st;
}

td_status td_restart(const struct td_target *t, bool drain, long timeout_s, struct td_error *err) {
    struct td_watched before;
    bool router = false;
    td_watch_worker(t, &before);
    if (drain) TD_TRY(drain_first(t, timeout_s < 0 ? DRAIN_S : timeout_s, err));
    pid_t old = td_target_pid(t);
    uint64_t start = td_now_ns();
    TD_TRY(replace(t, err));
    TD_TRY(
        td_watch_until_serving(t, before.epoch, timeout_s < 0 ? SERVE_S : timeout_s, &router, err));
    printf("%s restarted: process %d, before %d; %s after %.1f s\n", t->name, (int)td_target_pid(t),
           (int)old,
           router ? "serves" : "runs (the router does not answer, so that is all that is known)",
           (double)(td_now_ns() - start) / 1e9);
    fflush(stdout);
    return TD_OK;
}

int td_cmd_restart(int argc, char **argv) {
    struct td_target_options o;
    static struct td_target t;
    struct td_error err;
    int code = td_target_options(argc, argv, help, "td", &o);
    if (code >= 0) return code;
    if (!o.role) {
        fprintf(stderr, "tandem restart: which role?\n\n%s", help);
        return TD_EXIT_USAGE;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    td_watch_interrupts();
    td_status st = td_target_find(&t, o.config, o.role, &err);
    if (st == TD_OK) st = td_restart(&t, o.drain, o.timeout_s, &err);
    curl_global_cleanup();
    if (st == TD_OK) return TD_EXIT_OK;
    fprintf(stderr, "tandem restart: %s\n", err.text);
    return TD_EXIT_FAILED;
}
