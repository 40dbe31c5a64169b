/* Life of a td_xfer and its place in the event loop. UCX's callbacks only take notes (done list,
 * inbox, lost_due); everything the upper layer sees is delivered here, outside UCX. */
#include "common/xfer/xfer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/xfer/internal.h"

static td_status open_context(struct td_xfer *x, struct td_error *err) {
    ucp_config_t *config = NULL;
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_config_read(NULL, NULL, &config);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: its settings cannot be read: %s. %s",
                       ucs_status_string(s), td_xfer_ucx_said());
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                           .name = "tandem"};
    /* With it UCX would also answer its own emulated puts and gets, by address. */
    if (td_xfer_lane_chosen() == TD_XFER_SHM) params.features |= UCP_FEATURE_RMA;
    s = ucp_init(&params, config, &x->context);
    ucp_config_release(config);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: expected %s, found: %s. %s",
                       td_xfer_lane_chosen() == TD_XFER_SHM ? "shared memory under /dev/shm"
                                                            : "TCP on lane_device",
                       ucs_status_string(s), td_xfer_ucx_said());
    return TD_OK;
}

/* tcp lane: the address becomes that of a port, and UCX's ports are closed to strangers. */
static td_status open_door(struct td_xfer *x, const struct td_xfer_ports *before,
                           struct td_error *err) {
    if (td_xfer_lane_chosen() == TD_XFER_SHM) return TD_OK;
    if (getrandom(&x->random, sizeof x->random, 0) != sizeof x->random)
        return td_fail(err, TD_IO, "getrandom: no random bytes for an address");
    TD_TRY(td_xfer_door_open(x, err));
    return td_xfer_fence(before, td_xfer_device(), err);
}

td_status td_xfer_create(const struct td_xfer_options *options, struct td_xfer **ret_x,
                         struct td_error *err) {
    if (!options->on_accept || !options->on_message || !options->on_lost || !options->on_closed)
        return td_fail(err, TD_INVALID, "transfer options: all four callbacks are needed");
    if (options->max_peers > TD_XFER_PEERS_MAX || options->sends_per_peer > TD_XFER_SENDS_MAX)
        return td_fail(err, TD_INVALID,
                       "transfer options: expected at most %d peers and %d sends, found %u and %u",
                       TD_XFER_PEERS_MAX, TD_XFER_SENDS_MAX, options->max_peers,
                       options->sends_per_peer);
    TD_TRY(td_xfer_env_check(err));
    if (td_xfer_lane_chosen() == TD_XFER_TCP && !options->key)
        return td_fail(err, TD_CONFIG,
                       "lane tcp: expected a cluster key (cluster_key_file), found "
                       "none");
    struct td_xfer *x = calloc(1, sizeof *x);
    if (!x) return td_fail(err, TD_NO_MEMORY, "no memory for the transfer layer");
    x->options = *options;
    x->fd = x->queue.fd = x->old.fd = -1;
    if (x->options.max_peers == 0) x->options.max_peers = 64;
    if (x->options.sends_per_peer == 0) x->options.sends_per_peer = 16;
    td_list_init(&x->peers);
    td_list_init(&x->regions);
    td_list_init(&x->done);
    td_status st;
    struct td_xfer_ports before;
    TD_TRY_GOTO(open_context(x, err), destroy);
    td_xfer_fence_look(&before);
    TD_TRY_GOTO(td_xfer_queue_open(x, &before, err), destroy);
    TD_TRY_GOTO(open_door(x, &before, err), destroy);
    if (td_xfer_lane_chosen() == TD_XFER_TCP) TD_TRY_GOTO(td_xfer_pieces_start(x, err), destroy);
    *ret_x = x;
    return TD_OK;
destroy:
    td_xfer_destroy(x);
    return st;
}

static void quieten(struct td_link *requests) {
    TD_LIST_EACH_SAFE (requests, it, tmp) {
        struct td_xfer_req *req = TD_CONTAINER(it, struct td_xfer_req, link);
        td_list_remove(&req->link);
        req->quiet = true;
    }
}

static unsigned progress_ucx(struct td_xfer *x) {
    unsigned n = x->queue.worker ? ucp_worker_progress(x->queue.worker) : 0;
    if (x->old.worker) n += ucp_worker_progress(x->old.worker);
    return n;
}

void td_xfer_destroy(struct td_xfer *x) {
    if (!x) return;
    assert(!x->inside);
    assert(td_list_empty(&x->regions));
    x->destroying = true;
    td_xfer_door_close(x);
    TD_LIST_EACH (&x->peers, it) {
        td_xfer_peer_close(TD_CONTAINER(it, struct td_xfer_peer, link));
    }
    /* A few rounds let the farewells out and UCX unmap; what is stuck dies with the worker. */
    for (int i = 0; i < 64; i++)
        progress_ucx(x);
    td_xfer_inbox_drop(x);
    TD_LIST_EACH (&x->peers, it) {
        td_xfer_peer_settle(TD_CONTAINER(it, struct td_xfer_peer, link));
    }
    td_xfer_queue_close(x);
    quieten(&x->done);
    TD_LIST_EACH_SAFE (&x->peers, it, tmp) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        quieten(&peer->requests);
        td_xfer_peer_free(peer);
    }
    if (x->context) ucp_cleanup(x->context);
    free(x);
}

const void *td_xfer_address(const struct td_xfer *x, size_t *ret_len) {
    *ret_len = x->queue.address_len;
    return x->queue.address;
}

enum td_xfer_lane td_xfer_lane_of(const struct td_xfer *x) {
    (void)x;
    return td_xfer_lane_chosen();
}

const char *td_xfer_transport(const struct td_xfer *x) {
    return x->lanes;
}

int td_xfer_fd(const struct td_xfer *x) {
    return x->fd;
}

bool td_xfer_progress(struct td_xfer *x) {
    assert(!x->inside);
    unsigned n = progress_ucx(x);
    x->inside = true;
    n += td_xfer_door_answer(x);
    n += td_xfer_inbox_deliver(x);
    if (x->pump_due) td_xfer_pieces_go_on(x);
    td_xfer_landed_say(x);
    n += td_xfer_done_deliver(x);
    if (x->attention) n += td_xfer_peers_sweep(x);
    td_xfer_queue_retire(x);
    x->inside = false;
    if (n) x->moved = true;
    return n != 0;
}

enum td_xfer_wait td_xfer_arm(struct td_xfer *x) {
    bool moved = x->moved;
    x->moved = false;
    if (!td_list_empty(&x->done) || x->inbox_used != x->inbox_taken) return TD_XFER_AGAIN;
    /* An old queue cannot be armed; it is gone in a few calls. */
    x->waiting = x->attention || x->old.worker || ucp_worker_arm(x->queue.worker) != UCS_OK;
    if (!x->waiting) {
        x->busy_before = false;
        return TD_XFER_SLEEP;
    }
    bool stuck = x->busy_before && !moved;
    x->busy_before = true;
    return stuck ? TD_XFER_POLL : TD_XFER_AGAIN;
}

static uint64_t expire_messages(struct td_xfer_peer *peer, uint64_t now_ns) {
    uint64_t next = UINT64_MAX;
    if (peer->state != TD_XFER_OPEN) return next;
    for (uint32_t i = 0; i < peer->slots_used; i++) {
        uint32_t at = (peer->slot_first + i) % peer->x->options.sends_per_peer;
        uint64_t deadline = peer->slots[at].deadline_ns;
        if (deadline <= now_ns) {
            peer->x->counts.timeouts++;
            td_xfer_peer_fail(peer, TD_TIMEOUT, "a message was not taken by its deadline");
            return UINT64_MAX;
        }
        if (deadline < next) next = deadline;
    }
    return next;
}

/* The first overdue, unreported request, or NULL with the earliest deadline of the rest. */
static struct td_xfer_req *overdue(struct td_xfer *x, uint64_t now_ns, uint64_t *next) {
    TD_LIST_EACH (&x->peers, p) {
        struct td_xfer_peer *peer = TD_CONTAINER(p, struct td_xfer_peer, link);
        TD_LIST_EACH (&peer->requests, r) {
            struct td_xfer_req *req = TD_CONTAINER(r, struct td_xfer_req, link);
            if (req->reported) continue;
            if (req->deadline_ns <= now_ns) return req;
            if (req->deadline_ns < *next) *next = req->deadline_ns;
        }
    }
    return NULL;
}

uint64_t td_xfer_expire(struct td_xfer *x, uint64_t now_ns) {
    assert(!x->inside);
    x->inside = true;
    /* Callbacks may close peers and post requests: start over after each. */
    uint64_t next;
    for (;;) {
        next = UINT64_MAX;
        struct td_xfer_req *req = overdue(x, now_ns, &next);
        if (!req) break;
        req->reported = true;
        x->counts.timeouts++;
        x->counts.quarantined++;
        req->on_done(req, TD_TIMEOUT);
    }
    TD_LIST_EACH (&x->peers, it) {
        uint64_t t = expire_messages(TD_CONTAINER(it, struct td_xfer_peer, link), now_ns);
        if (t < next) next = t;
    }
    uint64_t prove = td_xfer_prove_expire(x, now_ns);
    if (prove < next) next = prove;
    td_xfer_queue_look(x, now_ns);
    if (x->attention) (void)td_xfer_peers_sweep(x);
    x->inside = false;
    return next;
}

void td_xfer_counts(const struct td_xfer *x, struct td_xfer_counts *ret_counts) {
    *ret_counts = x->counts;
}
