/* `tandem rolling-restart`: every worker of this host, one after another. For a new binary or a
 * changed setting under load: at no moment is more than one worker away on purpose, and the first
 * that does not come back is the last that was touched. */
#include <curl/curl.h>
#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "deploy/tool/restart.h"
#include "deploy/tool/tool.h"
#include "deploy/tool/watch.h"

static const char help[] =
    "usage: tandem rolling-restart [prefill | decode] [--timeout SECONDS] [--config FILE]\n\n"
    "Restarts every worker of a role, or of both, one after another: drains it, restarts it, "
    "waits\n"
    "until it serves again and all others do, and goes on. No stream is lost. It stops at the\n"
    "first worker that does not become idle (default 600 s; that one is resumed) or does not come\n"
    "back (default 120 s), and begins only when no worker is missing or drained. The only worker\n"
    "of a role is restarted as well: what comes while it is away is refused (503).\n"
    "The router is not restarted: that ends its streams (`tandem restart router`).\n"
    "Without --config: the installed configuration, and the units of this host.\n";

enum { SERVE_S = 120 };

struct fleet {
    struct td_watched worker[TD_PROCS_MAX];
    int n;
};

struct rolling {
    struct fleet begun, now;
    int n_wanted, n_done, n_skipped;
};

static const struct td_watched *named(const struct fleet *f, const char *name) {
    for (int i = 0; i < f->n; i++)
        if (strcmp(f->worker[i].name, name) == 0) return &f->worker[i];
    return NULL;
}

static const char *role_of(const char *name) {
    return strncmp(name, "prefill@", 8) == 0 ? "prefill" : "decode";
}

static bool has_role(const char *name, const char *role) {
    size_t n = role ? strlen(role) : 0;
    return !role || (strncmp(name, role, n) == 0 && name[n] == '@');
}

static int count(const struct fleet *f, const char *role) {
    int n = 0;
    for (int i = 0; i < f->n; i++)
        n += has_role(f->worker[i].name, role);
    return n;
}

/* What should run on this host and is not linked; false: nothing. */
static bool missing(const struct td_target *t, const struct fleet *f, char ret[128]) {
    const char *const argv[] = {"systemctl", "list-units",  "--state=failed,activating",
                                "--plain",   "--no-legend", "tandem-*",
                                NULL};
    ret[0] = '\0';
    if (!t->local && td_target_ask(argv, ret, 128)) ret[strcspn(ret, " ")] = '\0';
    for (int i = 0; t->local && i < t->procs.n && !ret[0]; i++)
        if (t->procs.proc[i].instance[0] && !named(f, t->procs.proc[i].name))
            snprintf(ret, 128, "%s", t->procs.proc[i].name);
    return ret[0] != '\0';
}

/* The cluster as it should be before anything is taken away from it. */
static td_status look_first(const struct td_target *t, const char *role, struct rolling *r,
                            struct td_error *err) {
    char name[128];
    TD_TRY(td_watch_fleet(t, r->begun.worker, TD_PROCS_MAX, &r->begun.n, err));
    r->n_wanted = count(&r->begun, role);
    if (missing(t, &r->begun, name))
        return td_fail(err, TD_UNREACHABLE, "%s is not in the fleet; `tandem logs` shows why",
                       name);
    for (int i = 0; i < r->begun.n; i++)
        if (r->begun.worker[i].draining)
            return td_fail(err, TD_BUSY, "%s is drained; `tandem resume %s` gives it work again",
                           r->begun.worker[i].name, r->begun.worker[i].name);
    if (r->n_wanted == 0)
        return td_fail(err, TD_NOT_FOUND, "no %s is in the fleet", role ? role : "worker");
    return TD_OK;
}

/* Every worker that was there at the beginning is there and has work, so that one can be spared. */
static td_status wait_for_all(const struct td_target *t, struct rolling *r, long timeout_s,
                              struct td_error *err) {
    uint64_t until = td_now_ns() + (uint64_t)timeout_s * 1000000000u;
    for (;;) {
        const char *who = NULL, *why = NULL;
        TD_TRY(td_watch_fleet(t, r->now.worker, TD_PROCS_MAX, &r->now.n, err));
        for (int i = 0; i < r->begun.n && !who; i++) {
            const struct td_watched *w = named(&r->now, r->begun.worker[i].name);
            why = !w            ? "is not in the fleet any more"
                  : w->draining ? "was drained by somebody else"
                  : !w->serves  ? "has no pair that is proven"
                                : NULL;
            if (why) who = r->begun.worker[i].name;
        }
        if (!who) return TD_OK;
        if (td_now_ns() >= until)
            return td_fail(err, TD_TIMEOUT, "%s %s, for %ld s", who, why, timeout_s);
        TD_TRY(td_watch_a_little(err));
    }
}

static td_status restart_one(struct rolling *r, const char *name, const struct td_target_options *o,
                             struct td_error *err) {
    static struct td_target t;
    td_status st = td_target_find(&t, o->config, name, err);
    if (st == TD_NOT_FOUND) {
        printf("%s is not of this host and was left alone\n", name);
        r->n_skipped++;
        return TD_OK;
    }
    TD_TRY(st);
    if (count(&r->begun, role_of(name)) == 1)
        fprintf(stderr, "%s is alone in its role: requests are refused while it is away\n", name);
    TD_TRY(td_restart(&t, true, o->timeout_s, err));
    r->n_done++;
    return TD_OK;
}

static td_status roll(struct rolling *r, const struct td_target_options *o, struct td_error *err) {
    static struct td_target all;
    TD_TRY(td_target_find(&all, o->config, NULL, err));
    TD_TRY(look_first(&all, o->role, r, err));
    for (int i = 0; i < r->begun.n; i++) {
        const char *name = r->begun.worker[i].name;
        if (!has_role(name, o->role)) continue;
        TD_TRY(wait_for_all(&all, r, o->timeout_s < 0 ? SERVE_S : o->timeout_s, err));
        TD_TRY(restart_one(r, name, o, err));
    }
    return wait_for_all(&all, r, o->timeout_s < 0 ? SERVE_S : o->timeout_s, err);
}

int td_cmd_rolling(int argc, char **argv) {
    struct td_target_options o;
    static struct rolling r;
    struct td_error err;
    int code = td_target_options(argc, argv, help, "t", &o);
    if (code >= 0) return code;
    if (o.role && strcmp(o.role, "prefill") != 0 && strcmp(o.role, "decode") != 0) {
        fprintf(stderr,
                "tandem rolling-restart: expected prefill, decode or nothing, found '%s'\n\n%s",
                o.role, help);
        return TD_EXIT_USAGE;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    td_watch_interrupts();
    td_status st = roll(&r, &o, &err);
    curl_global_cleanup();
    if (st != TD_OK) {
        fprintf(stderr, "tandem rolling-restart: stopped after %d of %d workers: %s\n", r.n_done,
                r.n_wanted, err.text);
        return TD_EXIT_FAILED;
    }
    printf("%d workers restarted", r.n_done);
    if (r.n_skipped) printf(", %d left alone", r.n_skipped);
    printf("\n");
    return TD_EXIT_OK;
}
