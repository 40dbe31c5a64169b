/* `tandem up | down | status`: a local cluster from one configuration file, without systemd. */
#include <curl/curl.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "deploy/tool/client.h"
#include "deploy/tool/local.h"
#include "deploy/tool/tool.h"

static const char up_help[] =
    "usage: tandem up --config FILE [--timeout SECONDS]\n\n"
    "Starts the router and the prefill and decode workers that FILE describes (cluster.prefill,\n"
    "cluster.decode) and waits until the router is ready: a real prompt went through. Logs and "
    "pid\n"
    "files are in run_dir.\n";
static const char down_help[] = "usage: tandem down --config FILE\n\n"
                                "Stops the cluster of FILE: SIGTERM, after 10 seconds SIGKILL.\n";
static const char status_help[] =
    "usage: tandem status [ROLE[@N]] [--url URL | --config FILE] [--json]\n\n"
    "Shows workers, ledgers and effective settings of a running cluster (/v1/cluster); with a "
    "role,\n"
    "that process alone. Exit code 1 when the cluster is not ready or has no such process.\n"
    "Without --url and --config: the installed configuration.\n";

struct options {
    const char *config, *url, *role;
    long timeout_s;
    bool json;
};

static int parse(int argc, char **argv, const char *help, struct options *o) {
    static const struct option longs[] = {
        {"config", required_argument, NULL, 'c'},  {"url", required_argument, NULL, 'u'},
        {"timeout", required_argument, NULL, 't'}, {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {0}};
    int c;
    optind = 1;
    o->timeout_s = 60;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        char *end = NULL;
        switch (c) {
        case 'c':
            o->config = optarg;
            break;
        case 'u':
            o->url = optarg;
            break;
        case 't':
            o->timeout_s = strtol(optarg, &end, 10);
            if (*end || o->timeout_s < 1 || o->timeout_s > 86400) {
                fprintf(stderr,
                        "tandem %s: --timeout: expected seconds from 1 to 86400, found '%s'\n",
                        argv[0], optarg);
                return TD_EXIT_USAGE;
            }
            break;
        case 'j':
            o->json = true;
            break;
        case 'h':
            fputs(help, stdout);
            return TD_EXIT_OK;
        default:
            return TD_EXIT_USAGE;
        }
    }
    if (help == status_help) {
        if (optind < argc) o->role = argv[optind++];
        if (!o->config && !o->url) o->config = TD_SYSTEM_CONFIG;
    }
    if (optind != argc || (!o->config && !o->url)) {
        fprintf(stderr, "tandem %s: %s%s\n\n%s", argv[0],
                optind != argc ? "unexpected argument " : "--config is missing",
                optind != argc ? argv[optind] : "", help);
        return TD_EXIT_USAGE;
    }
    return -1;
}

static int failed(const char *command, const struct td_error *err) {
    fprintf(stderr, "tandem %s: %s\n", command, err->text);
    return TD_EXIT_FAILED;
}

int td_cmd_up(int argc, char **argv) {
    struct options o = {0};
    struct td_local l;
    struct td_error err = {.text = ""};
    int code = parse(argc, argv, up_help, &o);
    if (code >= 0) return code;
    if (!o.config) {
        fputs(up_help, stderr);
        return TD_EXIT_USAGE;
    }
    uint64_t start = td_now_ns();
    curl_global_init(CURL_GLOBAL_DEFAULT);
    td_status st = td_local_load(&l, o.config, &err);
    if (st == TD_OK) st = td_local_up(&l, o.timeout_s, &err);
    curl_global_cleanup();
    if (st != TD_OK) return failed("up", &err);
    printf("ready after %.1f s: %s, %d prefill, %d decode; logs in %s\n",
           (double)(td_now_ns() - start) / 1e9, l.url, (int)l.config.cluster_prefill,
           (int)l.config.cluster_decode, l.procs.run_dir);
    return TD_EXIT_OK;
}

int td_cmd_down(int argc, char **argv) {
    struct options o = {0};
    struct td_local l;
    struct td_error err = {.text = ""};
    int code = parse(argc, argv, down_help, &o);
    if (code >= 0) return code;
    if (!o.config) {
        fputs(down_help, stderr);
        return TD_EXIT_USAGE;
    }
    if (td_local_load(&l, o.config, &err) != TD_OK) return failed("down", &err);
    int killed, stopped = td_local_down(&l, &killed);
    printf("%d processes stopped\n", stopped);
    if (killed) fprintf(stderr, "%d of them did not end in time and were killed\n", killed);
    return TD_EXIT_OK;
}

/* Objects as "key value" lines, indented by depth; good enough to read, --json is for programs. */
static void print_tree(const char *key, const json_t *v, int depth) {
    const char *k;
    json_t *child;
    size_t i;
    if (json_is_object(v)) {
        printf("%*s%s\n", 2 * depth, "", key);
        json_object_foreach((json_t *)v, k, child) print_tree(k, child, depth + 1);
    } else if (json_is_array(v)) {
        char label[64];
        json_array_foreach(v, i, child) {
            const char *name = json_string_value(json_object_get(child, "name"));
            snprintf(label, sizeof label, "%s %s", key, name ? name : "");
            print_tree(label, child, depth);
        }
    } else {
        char *text = json_dumps(v, JSON_ENCODE_ANY);
        printf("%*s%-24s %s\n", 2 * depth, "", key,
               json_is_string(v) ? json_string_value(v)
               : text            ? text
                                 : "");
        free(text);
    }
}

/* The part of /v1/cluster that is about "router" or a worker; NULL when there is none. */
static const json_t *part_of(const json_t *cluster, const char *role) {
    size_t i;
    json_t *w;
    if (strcmp(role, "router") == 0) return json_object_get(cluster, role);
    json_array_foreach(json_object_get(cluster, "workers"), i, w) {
        const char *name = json_string_value(json_object_get(w, "name"));
        size_t n = strlen(role);
        if (name && strncmp(name, role, n) == 0 && (!name[n] || strcmp(name + n, "@0") == 0))
            return w;
    }
    return NULL;
}

/* False: no such process. */
static bool print_status(const json_t *cluster, const struct options *o, const char *url) {
    const json_t *shown = o->role ? part_of(cluster, o->role) : cluster;
    if (!shown) {
        fprintf(stderr, "tandem status: no %s is connected to the router at %s\n", o->role, url);
        return false;
    }
    if (o->json) {
        json_dumpf(shown, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
        putchar('\n');
    } else {
        print_tree(o->role ? o->role : url, shown, 0);
    }
    return true;
}

int td_cmd_status(int argc, char **argv) {
    struct options o = {0};
    struct td_local l;
    struct td_error err = {.text = ""};
    int code = parse(argc, argv, status_help, &o);
    if (code >= 0) return code;
    if (!o.url && td_local_load(&l, o.config, &err) != TD_OK) return failed("status", &err);
    const char *url = o.url ? o.url : l.url;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    json_t *cluster = NULL, *ready = NULL;
    long http = 0, ready_http = 0;
    td_status st = td_client_get(url, "/v1/cluster", 5000, &cluster, &http, &err);
    if (st == TD_OK) st = td_client_get(url, "/ready", 5000, &ready, &ready_http, &err);
    curl_global_cleanup();
    bool found = st == TD_OK && print_status(cluster, &o, url);
    if (st == TD_OK && !o.json) printf("%s\n", ready_http == 200 ? "ready" : "not ready");
    json_decref(cluster);
    json_decref(ready);
    if (st != TD_OK) return failed("status", &err);
    return found && ready_http == 200 ? TD_EXIT_OK : TD_EXIT_FAILED;
}
