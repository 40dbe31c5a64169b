/* tandem-router: options, configuration, the loop. Everything else is in the library. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>

#include "common/base/config.h"
#include "common/base/log.h"
#include "common/base/role_args.h"
#include "common/io/loop.h"
#include "router/serve.h"

enum { DRAIN_MS = 10000 };

static const char usage[] =
    "usage: tandem-router [--config FILE] [--set KEY=VALUE]...\n"
    "The OpenAI-compatible endpoint of a Tandem cluster.\n"
    "  --config FILE     configuration; the sections [router] and none hold\n"
    "  --set KEY=VALUE   one setting, after the file; may be repeated\n"
    "  --help            this text and every setting\n";

static void print_help(void) {
    struct td_config c;
    const char *key, *help;
    char value[TD_CONFIG_STRING_MAX];
    td_config_defaults(&c);
    fputs(usage, stdout);
    puts("\nsettings and their defaults:");
    for (size_t i = 0; td_config_row(&c, i, &key, value, &help); i++)
        printf("  %-28s %-16s %s\n", key, *value ? value : "(none)", help);
}

/* 0: go on; 1: help was printed; -1: wrong, and said so. */
static int read_options(int argc, char **argv, struct td_config *config) {
    struct td_error err;
    td_config_defaults(config);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return 1;
        }
        bool known = strcmp(argv[i], "--config") == 0 || strcmp(argv[i], "--set") == 0;
        if (!known || i + 1 == argc) {
            fprintf(stderr, "tandem-router: %s: %s\n%s", argv[i],
                    known ? "a value is missing" : "unknown option", usage);
            return -1;
        }
        i++;
        if (strcmp(argv[i - 1], "--config") == 0 &&
            td_config_load(config, argv[i], "router", "", &err) != TD_OK) {
            fprintf(stderr, "tandem-router: %s\n", err.text);
            return -1;
        }
    }
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--set") != 0) continue;
        if (td_config_set(config, argv[i + 1], &err) != TD_OK) {
            fprintf(stderr, "tandem-router: %s\n", err.text);
            return -1;
        }
    }
    return 0;
}

static void log_settings(const struct td_config *c) {
    const char *key;
    char value[TD_CONFIG_STRING_MAX];
    for (size_t i = 0; td_config_row(c, i, &key, value, NULL); i++)
        td_info("setting %s = %s", key, value);
}

static void on_signal(void *user, int signum) {
    if (signum == SIGHUP) {
        td_serve_reload(user);
        return;
    }
    td_info("signal %d: stopping", signum);
    td_serve_stop(user);
}

static int run(uv_loop_t *loop, const struct td_config *config) {
    struct td_serve *serve = NULL;
    struct td_signals *signals = NULL;
    struct td_error err;
    td_status st = td_serve_create(loop, config, &serve, &err);
    if (st != TD_OK) {
        td_err("%s", err.text);
        if (td_loop_drain(loop, DRAIN_MS) != TD_OK) td_warn("the loop did not run out in time");
        return td_role_exit(st);
    }
    if (td_signals_create(loop, on_signal, serve, &signals) != TD_OK) {
        td_err("signals: out of memory");
        td_serve_stop(serve);
    }
    uv_run(loop, UV_RUN_DEFAULT);
    td_signals_destroy(signals);
    if (td_loop_drain(loop, DRAIN_MS) != TD_OK) td_warn("the loop did not run out in time");
    td_status result = td_serve_result(serve, &err);
    td_serve_destroy(serve);
    if (result == TD_OK) td_info("stopped"); /* else the last line of the log is why */
    return td_role_exit(result);
}

int main(int argc, char **argv) {
    static struct td_config config;
    uv_loop_t loop;
    int rc = read_options(argc, argv, &config);
    if (rc != 0) return rc > 0 ? 0 : TD_ROLE_EXIT_CONFIG;
    td_log_init("router", (enum td_log_level)config.log_level);
    log_settings(&config);
    if (uv_loop_init(&loop) != 0) {
        td_err("the event loop cannot start");
        return TD_ROLE_EXIT_FAILED;
    }
    return run(&loop, &config);
}
