/* The parts of a worker's shell, put together and taken apart in order. */
#include "proto/worker_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/notify.h"
#include "common/base/role_args.h"
#include "common/io/loop.h"
#include "common/io/stream.h"

enum { JOBS_MAX = 8, DRAIN_MS = 3000, ALIVE_MS = 1000 };

struct td_host {
    uv_loop_t loop;
    const struct td_config *config;
    uint64_t epoch;
    const struct td_host_events *events;
    void *user;
    struct td_signals *signals;
    struct td_jobs *jobs;
    struct td_plane *plane;
    struct td_link_client *router;
    struct td_timer *deadline, *stop_timer;
    uint64_t deadline_ns; /* what the timer is set to */
    uv_idle_t due;        /* active: it has come; the loop reads, without waiting, before it is told */
    uint32_t stop_ms;
    uv_check_t check; /* behind reading: tells a deadline, looks for the end once stopping */
    bool check_open, stopping; /* check_open: `due` too */
    struct td_error fault; /* status OK: none */
    struct td_notify notify; /* the service manager */
    struct td_timer *alive;  /* asks whether it deserves a sign of life */
    enum td_role role;
    struct td_cluster_key *key;  /* NULL when nothing needs it */
    const struct td_msg_hello *moved; /* NULL: the address is that of the first hello */
    char down_text[TD_TEXT_MAX]; /* why the router could not be reached last */
};

/* ---- the network ---- */

static td_status load_key(const struct td_config *c, struct td_cluster_key **ret,
                          struct td_error *err) {
    *ret = NULL;
    return c->cluster_key_file[0] ? td_cluster_key_load(c->cluster_key_file, ret, err) : TD_OK;
}

td_status td_host_env(struct td_config *c, struct td_error *err) {
    bool tcp = false;
    struct td_cluster_key *key = NULL;
    if (c->router_control[0]) TD_TRY(td_address_is_tcp(c->router_control, &tcp, err));
    if (c->lane == TD_LANE_AUTO) c->lane = tcp ? TD_LANE_TCP : TD_LANE_SHM;
    if (c->lane == TD_LANE_TCP || tcp) {
        const char *what = tcp ? "router.control" : "lane = tcp";
        if (!c->cluster_key_file[0])
            return td_fail(
                err, TD_CONFIG,
                "%s: expected cluster_key_file, found none: processes that talk over TCP "
                "share a secret (head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; "
                "the same on every host)",
                what);
        TD_TRY(load_key(c, &key, err));
        td_cluster_key_free(key);
    }
    return td_xfer_env(c->lane == TD_LANE_TCP ? TD_XFER_TCP : TD_XFER_SHM, c->lane_device, err);
}

uint64_t td_host_epoch(void) {
    uint64_t e = 0;
    while (e == 0)
        if (getrandom(&e, sizeof e, 0) != sizeof e) e = td_now_ns() ^ (uint64_t)getpid() << 40;
    return e;
}

void td_host_hello_init(struct td_msg_hello *hello, enum td_role role, const char *name,
                        const struct td_host *h, char *settings, size_t cap) {
    *hello = (struct td_msg_hello){.version = TD_PROTO_VERSION,
                                   .role = role,
                                   .epoch = h->epoch,
                                   .pid = (uint64_t)getpid(),
                                   .settings = settings};
    snprintf(hello->name, sizeof hello->name, "%s", name);
    size_t n = td_config_text(h->config, settings, cap);
    /* What UCX really uses, beside what was asked for. */
    int more = snprintf(settings + n, cap - n, "lane_transport = %s\n",
                        td_xfer_transport(td_plane_xfer(h->plane)));
    hello->settings_len = more > 0 && (size_t)more < cap - n ? n + (size_t)more : n;
    settings[hello->settings_len] = 0;
}

/* ---- the router's link ---- */

static void say_moved(struct td_host *h, struct td_conn *c) {
    struct td_msg m = {.type = TD_MSG_MOVED};
    m.moved = (struct td_msg_moved){h->epoch, h->moved->xfer_address, h->moved->xfer_address_len,
                                    h->moved->xfer_number};
    /* A failure means that the link is going down, which on_down reports. */
    (void)!td_conn_send(c, &m, NULL);
}

static void on_up(void *user, struct td_conn *c, const struct td_msg *first) {
    struct td_host *h = user;
    if (h->moved) say_moved(h, c); /* it may have happened behind the hello that was just answered */
    h->down_text[0] = 0;
    td_notify_status(&h->notify, "serving; linked with router %016llx",
                     (unsigned long long)first->hello_reply.epoch);
    td_info("linked with router %016llx", (unsigned long long)first->hello_reply.epoch);
}

static void on_msg(void *user, struct td_conn *c, const struct td_msg *m) {
    (void)c;
    struct td_host *h = user;
    if (m->type != TD_MSG_HEARTBEAT) h->events->on_message(h->user, m);
}

static void on_down(void *user, struct td_conn *c, td_status why, const char *text) {
    struct td_host *h = user;
    td_notify_status(&h->notify, "waiting for the router: %s", text);
    if (!c && strcmp(text, h->down_text) == 0) return; /* said already */
    snprintf(h->down_text, sizeof h->down_text, "%s", c ? "" : text);
    td_warn("router: %s (%s)", text, td_status_name(why));
    if (c != NULL) h->events->on_router_down(h->user);
}

static void on_beat(void *user, struct td_conn *c, struct td_msg_heartbeat *beat) {
    struct td_host *h = user;
    struct td_msg ledger = {.type = TD_MSG_LEDGER};
    h->events->on_beat(h->user, beat, &ledger.ledger);
    /* A failure means that the link is going down, which on_down reports. */
    (void)!td_conn_send(c, &ledger, NULL);
}

static const struct td_link_events link_events = {
    .on_up = on_up, .on_msg = on_msg, .on_down = on_down, .on_beat = on_beat};

/* ---- the service manager ---- */

static void on_alive(void *user) {
    struct td_host *h = user;
    struct td_msg_heartbeat load = {0};
    struct td_msg_ledger ledger;
    h->events->on_beat(h->user, &load, &ledger);
    td_notify_alive(&h->notify, td_now_ns(), load.busy, load.steps);
    const char *why = h->router ? td_link_client_trouble(h->router) : "";
    if (*why == 0 || strcmp(why, h->down_text) == 0) return;
    snprintf(h->down_text, sizeof h->down_text, "%s", why);
    td_notify_status(&h->notify, "waiting for the router: %s", why);
    td_debug("waiting for the router: %s", why); /* that it is not there yet is no fault */
}

/* ---- the end ---- */

static void on_check(uv_check_t *c) {
    struct td_host *h = c->data;
    if (uv_is_active((uv_handle_t *)&h->due)) {
        uv_idle_stop(&h->due);
        h->deadline_ns = UINT64_MAX;
        h->events->on_deadline(h->user);
    }
    if (h->stopping && h->events->is_idle(h->user)) uv_stop(&h->loop);
}

static void on_stop_timer(void *user) {
    struct td_host *h = user;
    uv_stop(&h->loop);
}

static void stop(struct td_host *h) {
    if (h->stopping) return;
    h->stopping = true;
    td_notify_stopping(&h->notify);
    td_link_client_destroy(h->router);
    h->router = NULL;
    td_timer_after(h->stop_timer, h->stop_ms);
    h->events->on_stop(h->user);
}

static void on_signal(void *user, int signum) {
    (void)signum;
    stop(user);
}

static void on_due(uv_idle_t *i) {
    (void)i;
}

/* libuv runs timers before it reads. A loop that comes late, from a long callback or on a loaded
 * machine, may have the answer lying there: nobody is judged by his silence before it is read. */
static void on_deadline(void *user) {
    struct td_host *h = user;
    uv_idle_start(&h->due, on_due);
}

/* ---- interface ---- */

static void log_lane(const struct td_host *h) {
    const struct td_config *c = h->config;
    struct td_xfer *x = td_plane_xfer(h->plane);
    bool tcp = td_xfer_lane_of(x) == TD_XFER_TCP;
    td_info("lane %s: %s", tcp ? "tcp" : "shm", td_xfer_transport(x));
    if (tcp && strcmp(c->lane_device, "lo") != 0)
        td_warn(
            "lane tcp: UCX listens on %s, which must be a private network: it trusts whoever is in "
            "that subnet, and nothing is encrypted there",
            c->lane_device);
    if (c->router_control[0])
        td_warn(
            "router.control %s must be reached over a private network: both ends prove the cluster "
            "key, but nothing is encrypted",
            c->router_control);
}

static td_status open_parts(struct td_host *h, uint32_t max_peers, uint32_t sends_per_peer,
                            struct td_error *err) {
    if (td_signals_create(&h->loop, on_signal, h, &h->signals) != TD_OK ||
        td_timer_create(&h->loop, on_deadline, h, &h->deadline) != TD_OK ||
        td_timer_create(&h->loop, on_alive, h, &h->alive) != TD_OK ||
        td_timer_create(&h->loop, on_stop_timer, h, &h->stop_timer) != TD_OK)
        return td_fail(err, TD_NO_MEMORY, "no memory for signals and timers");
    uv_check_init(&h->loop, &h->check);
    uv_idle_init(&h->loop, &h->due);
    h->check.data = h;
    h->check_open = true;
    uv_check_start(&h->check, on_check);
    TD_TRY(load_key(h->config, &h->key, err));
    struct td_plane_options po = {.max_peers = max_peers,
                                  .sends_per_peer = sends_per_peer,
                                  .key = h->key,
                                  .role = h->role,
                                  .epoch = h->epoch};
    TD_TRY(td_plane_create(&h->loop, &h->events->plane, h->user, &po, &h->plane, err));
    log_lane(h);
    return td_jobs_create(&h->loop, JOBS_MAX, "engine", &h->jobs, err);
}

td_status td_host_create(const struct td_config *config, enum td_role role, uint64_t epoch,
                         const struct td_host_events *events, void *user, uint32_t max_peers,
                         uint32_t sends_per_peer, uint32_t stop_ms, struct td_host **ret,
                         struct td_error *err) {
    struct td_host *h = calloc(1, sizeof *h);
    if (!h) return td_fail(err, TD_NO_MEMORY, "no memory for the worker's shell");
    if (uv_loop_init(&h->loop) != 0) {
        free(h);
        return td_fail(err, TD_IO, "the event loop cannot start");
    }
    h->config = config;
    h->role = role;
    h->epoch = epoch;
    h->events = events;
    h->user = user;
    h->stop_ms = stop_ms;
    h->deadline_ns = UINT64_MAX;
    struct td_error unheard;
    if (td_notify_open(&h->notify, &unheard) != TD_OK)
        td_warn("the service manager will not hear of us: %s", unheard.text);
    td_status st = open_parts(h, max_peers, sends_per_peer, err);
    if (st != TD_OK) {
        (void)!td_host_destroy(h);
        return st;
    }
    *ret = h;
    return TD_OK;
}

td_status td_host_dial(struct td_host *h, const struct td_msg_hello *hello, struct td_error *err) {
    char address[TD_CONFIG_STRING_MAX + sizeof "/router.sock"];
    if (h->config->router_control[0])
        snprintf(address, sizeof address, "%s", h->config->router_control);
    else
        snprintf(address, sizeof address, "%s/router.sock", h->config->run_dir);
    struct td_link_options o = {.epoch = h->epoch,
                                .role = h->role,
                                .key = h->key,
                                .heartbeat_ms = (uint32_t)h->config->heartbeat_ms,
                                .peer_timeout_ms = (uint32_t)h->config->peer_timeout_ms};
    return td_link_client_create(&h->loop, address, &o, hello, &link_events, h, &h->router, err);
}

void td_host_fault(struct td_host *h, td_status st, const char *sentence) {
    if (st != TD_IO || h->fault.status != TD_OK) return;
    (void)td_fail(&h->fault, st, "the device has failed, and a new process is needed: %s", sentence);
    stop(h);
}

td_status td_host_run(struct td_host *h, struct td_error *err) {
    td_timer_every(h->alive, ALIVE_MS);
    td_notify_status(&h->notify, "waiting for the router");
    td_notify_ready(&h->notify);
    uv_run(&h->loop, UV_RUN_DEFAULT);
    if (h->fault.status != TD_OK) *err = h->fault;
    return h->fault.status;
}

td_status td_host_destroy(struct td_host *h) {
    if (!h) return TD_OK;
    td_jobs_destroy(h->jobs);
    td_link_client_destroy(h->router);
    td_plane_destroy(h->plane);
    td_cluster_key_free(h->key);
    h->key = NULL;
    td_timer_destroy(h->deadline);
    td_timer_destroy(h->stop_timer);
    td_timer_destroy(h->alive);
    td_notify_close(&h->notify);
    td_signals_destroy(h->signals);
    if (h->check_open) {
        uv_close((uv_handle_t *)&h->check, NULL);
        uv_close((uv_handle_t *)&h->due, NULL);
    }
    td_status st = td_loop_drain(&h->loop, DRAIN_MS);
    if (st == TD_OK) free(h); /* else a handle still points into it */
    return st;
}

struct td_jobs *td_host_jobs(struct td_host *h) {
    return h->jobs;
}

struct td_plane *td_host_plane(struct td_host *h) {
    return h->plane;
}

uv_loop_t *td_host_loop(struct td_host *h) {
    return &h->loop;
}

void td_host_send(struct td_host *h, const struct td_msg *m) {
    struct td_conn *c = h->router ? td_link_client_conn(h->router) : NULL;
    /* A failure means that the link is going down, which on_down reports. */
    if (c) (void)!td_conn_send(c, m, NULL);
}

void td_host_moved(struct td_host *h, struct td_msg_hello *hello) {
    struct td_xfer *x = td_plane_xfer(h->plane);
    struct td_xfer_counts counts;
    td_xfer_counts(x, &counts);
    hello->xfer_address = td_xfer_address(x, &hello->xfer_address_len);
    hello->xfer_number = (uint32_t)counts.renewals;
    h->moved = hello;
    struct td_conn *c = h->router ? td_link_client_conn(h->router) : NULL;
    if (c) say_moved(h, c);
}

void td_host_deadline(struct td_host *h, uint64_t at_ns) {
    if (at_ns == h->deadline_ns) return;
    h->deadline_ns = at_ns;
    if (at_ns == UINT64_MAX) {
        td_timer_stop(h->deadline);
    } else {
        td_timer_at(h->deadline, at_ns);
    }
}
