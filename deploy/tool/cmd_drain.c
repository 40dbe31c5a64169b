/* `tandem drain` and `tandem resume`: work for one worker, through the router. */
#include <curl/curl.h>
#include <stdio.h>

#include "deploy/tool/tool.h"
#include "deploy/tool/watch.h"

static const char drain_help[] =
    "usage: tandem drain ROLE[@N] [--timeout SECONDS] [--config FILE]\n\n"
    "Gives prefill[@N] or decode[@N] no new work and waits until what it has is done (default\n"
    "600 s; 0: does not wait). It stays drained until `tandem resume`, or until its process or "
    "the\n"
    "router ends. When the time is over it stays drained and the exit code is 1.\n"
    "Without --config: the installed configuration.\n";
static const char resume_help[] = "usage: tandem resume ROLE[@N] [--config FILE]\n\n"
                                  "Gives a drained worker work again.\n"
                                  "Without --config: the installed configuration.\n";

enum { WAIT_S = 600 };

static int run(int argc, char **argv, const char *help, bool draining) {
    struct td_target_options o;
    static struct td_target t;
    struct td_error err;
    int code = td_target_options(argc, argv, help, draining ? "t" : "", &o);
    if (code >= 0) return code;
    if (!o.role) {
        fprintf(stderr, "tandem %s: which worker?\n\n%s", argv[0], help);
        return TD_EXIT_USAGE;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    td_status st = td_target_find(&t, o.config, o.role, &err);
    if (st == TD_OK) st = td_watch_drain(&t, draining, &err);
    if (st == TD_OK && draining && o.timeout_s != 0)
        st = td_watch_until_idle(&t, o.timeout_s < 0 ? WAIT_S : o.timeout_s, &err);
    curl_global_cleanup();
    if (st != TD_OK) {
        fprintf(stderr, "tandem %s: %s\n", argv[0], err.text);
        return TD_EXIT_FAILED;
    }
    printf("%s %s\n", t.name,
           !draining          ? "takes work"
           : o.timeout_s == 0 ? "drains"
                              : "is drained: it has no request");
    return TD_EXIT_OK;
}

int td_cmd_drain(int argc, char **argv) {
    return run(argc, argv, drain_help, true);
}

int td_cmd_resume(int argc, char **argv) {
    return run(argc, argv, resume_help, false);
}
