/* Addresses and limits of a configuration that contradict each other (topology_check.h). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "deploy/tool/topology_check.h"

/* ---- addresses ---- */

struct address {
    char host[TD_CONFIG_STRING_MAX];
    unsigned long port; /* 0: none */
};

/* "host:port"; a port that is none is told. */
static struct address address(struct td_check *c, const char *key, const char *text) {
    struct address a = {.port = 0};
    const char *colon = strrchr(text, ':');
    char *end;
    if (!colon || !colon[1] || (a.port = strtoul(colon + 1, &end, 10)) == 0 || *end ||
        a.port > 65535) {
        a.port = 0;
        td_check_say(c, TD_FINDING_ERROR, "router",
                     "%s: expected address:port with a port from 1 to 65535, found '%s'", key,
                     text);
    }
    snprintf(a.host, sizeof a.host, "%.*s", colon ? (int)(colon - text) : 0, text);
    return a;
}

static bool any_host(const char *host) {
    return strcmp(host, "0.0.0.0") == 0 || strcmp(host, "[::]") == 0 || strcmp(host, "::") == 0;
}

static void addresses(struct td_check *c) {
    const struct td_config *r = &c->t->router;
    struct sockaddr_un limit;
    struct address listen = address(c, "router.listen", r->router_listen);
    if (strlen(r->run_dir) + sizeof "/router.sock" > sizeof limit.sun_path)
        td_check_say(c, TD_FINDING_ERROR, "",
                     "run_dir: expected at most %zu bytes, since sockets are made in it: choose a "
                     "shorter one",
                     sizeof limit.sun_path - sizeof "/router.sock");
    if (!r->router_control[0]) return;
    struct address control = address(c, "router.control", r->router_control);
    if (listen.port && listen.port == control.port &&
        (strcmp(listen.host, control.host) == 0 || any_host(listen.host) || any_host(control.host)))
        td_check_say(c, TD_FINDING_ERROR, "router",
                     "router.listen = %s and router.control = %s are the same port: give one of "
                     "them another",
                     r->router_listen, r->router_control);
}

/* Whether something was told; then the others' is the same. */
static bool network(struct td_check *c, const char *who, const struct td_config *w) {
    uint32_t before = c->n[TD_FINDING_ERROR];
    bool tcp = w->lane == TD_LANE_TCP || w->router_control[0];
    if (tcp && !w->cluster_key_file[0])
        td_check_say(c, TD_FINDING_ERROR, who,
                     "%s: processes that talk over TCP share a secret: head -c 32 /dev/urandom | "
                     "base64 > FILE, chmod 600 FILE, and cluster_key_file = FILE",
                     w->router_control[0] ? "router.control" : "lane = tcp");
    bool lane = w->lane == TD_LANE_TCP || (w->lane == TD_LANE_AUTO && w->router_control[0]);
    if (lane && !w->lane_device[0])
        td_check_say(c, TD_FINDING_ERROR, who,
                     "KV state travels over TCP: set lane_device to an interface of a private "
                     "network, or to lo on one host");
    return c->n[TD_FINDING_ERROR] > before;
}

/* ---- limits ---- */

static const char *one(uint64_t n) {
    return n == 1 ? "" : "s";
}

static void contexts(struct td_check *c) {
    const struct td_topology *t = c->t;
    const struct td_topology_worker *least = NULL, *most = NULL;
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        uint64_t n = w->config.max_context ? w->config.max_context : UINT64_MAX;
        if (!least || n < (least->config.max_context ? least->config.max_context : UINT64_MAX))
            least = w;
        if (!most || n > (most->config.max_context ? most->config.max_context : UINT64_MAX))
            most = w;
    }
    if (!least || least->config.max_context == most->config.max_context) return;
    char longer[40] = "the checkpoint's";
    if (most->config.max_context)
        snprintf(longer, sizeof longer, "%" PRIu64, most->config.max_context);
    td_check_say(
        c, TD_FINDING_WARNING, most->name,
        "max_context is %s, and %" PRIu64 " of %s: a request needs room in both roles, so "
        "what is longer is memory that nobody uses: write it once, above the first section",
        longer, least->config.max_context, least->name);
}

static void counts(struct td_check *c) {
    const struct td_topology *t = c->t;
    uint64_t slots = 0, prefill = t->router.cluster_prefill;
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        if (w->prefill) continue;
        slots += w->config.max_running;
        if (w->config.max_prefill_peers < prefill)
            td_check_say(c, TD_FINDING_ERROR, w->name,
                         "max_prefill_peers = %" PRIu64 " and there are %" PRIu64
                         " prefill workers, so the last would be refused: set it to %" PRIu64,
                         w->config.max_prefill_peers, prefill, prefill);
        if (w->config.max_context && w->config.reserve_tokens >= w->config.max_context)
            td_check_say(c, TD_FINDING_WARNING, w->name,
                         "reserve_tokens = %" PRIu64 " is no less than max_context = %" PRIu64
                         ", so every request reserves a whole context: lower it",
                         w->config.reserve_tokens, w->config.max_context);
    }
    if (t->router.router_max_requests < slots)
        td_check_say(c, TD_FINDING_WARNING, "router",
                     "router.max_requests = %" PRIu64 " is less than the %" PRIu64
                     " sequence%s that decode can run, so slots stay empty: set it to at least "
                     "%" PRIu64,
                     t->router.router_max_requests, slots, one(slots), slots);
}

/* A beat may be late by as much as its period. As network(). */
static bool clocks(struct td_check *c, const char *who, const struct td_config *w) {
    if (w->peer_timeout_ms >= 2 * w->heartbeat_ms) return false;
    td_check_say(c, TD_FINDING_ERROR, who,
                 "peer_timeout_ms = %" PRIu64 " is less than two heartbeats of %" PRIu64
                 " ms, so peers that live would be lost: set it to at least %" PRIu64,
                 w->peer_timeout_ms, w->heartbeat_ms, 2 * w->heartbeat_ms);
    return true;
}

void td_check_limits(struct td_check *c) {
    addresses(c);
    bool net = network(c, "router", &c->t->router), beats = clocks(c, "router", &c->t->router);
    for (uint32_t i = 0; i < c->t->workers; i++) {
        const struct td_topology_worker *w = &c->t->worker[i];
        net = net || network(c, w->name, &w->config);
        beats = beats || clocks(c, w->name, &w->config);
    }
    contexts(c);
    counts(c);
}
