/* Puts and flushes: requests of the caller, finished by UCX, reported here; and the peer's regions
 * they write to. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/xfer/internal.h"

static td_status map(struct td_xfer_remote *remote, const struct td_xfer_envelope *e,
                     const void *key, struct td_error *err) {
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_ep_rkey_unpack(remote->peer->ep, key, &remote->rkey);
    if (s != UCS_OK)
        return td_fail(err, TD_UNREACHABLE, "region of process %u: cannot be mapped: %s. %s",
                       e->origin.pid, ucs_status_string(s), td_xfer_ucx_said());
    /* Mapped through /proc/PID/fd: make sure it was still that process. */
    td_status st = td_xfer_origin_check(&e->origin, "region key", err);
    if (st != TD_OK) ucp_rkey_destroy(remote->rkey);
    return st;
}

td_status td_xfer_remote_open(struct td_xfer_peer *peer, const void *key, size_t len,
                              struct td_xfer_remote **ret_remote, struct td_error *err) {
    if (peer->state != TD_XFER_OPEN)
        return td_fail(err, TD_PEER_LOST, "region key: its link is lost or closed");
    if (len > TD_XFER_KEY_MAX)
        return td_fail(err, TD_PROTOCOL, "region key: expected at most %d bytes, found %zu",
                       TD_XFER_KEY_MAX, len);
    struct td_xfer_envelope e;
    TD_TRY(td_xfer_unseal(key, len, TD_XFER_KEY_MAGIC, "region key", &e, err));
    if (e.memory != TD_XFER_HOST)
        return td_fail(err, TD_UNSUPPORTED, "region key: expected host memory, found kind %u",
                       e.memory);
    if (e.bytes == 0 || e.base + e.bytes < e.base)
        return td_fail(err, TD_PROTOCOL, "region key: a region of %llu bytes cannot be",
                       (unsigned long long)e.bytes);
    struct td_xfer_remote *remote = calloc(1, sizeof *remote);
    if (!remote) return td_fail(err, TD_NO_MEMORY, "no memory for a remote region");
    uint64_t copy[TD_XFER_KEY_MAX / 8];
    memcpy(copy, (const char *)key + sizeof e, e.inner);
    remote->peer = peer;
    remote->base = e.base;
    remote->bytes = e.bytes;
    td_status st = TD_OK;
    if (td_xfer_lane_chosen() == TD_XFER_SHM)
        st = map(remote, &e, copy, err);
    else if (e.inner != sizeof remote->region)
        st = td_fail(err, TD_PROTOCOL, "region key: expected an id of %zu bytes, found %u",
                     sizeof remote->region, e.inner);
    if (st != TD_OK) {
        free(remote);
        return st;
    }
    if (!remote->rkey) memcpy(&remote->region, copy, sizeof remote->region);
    td_list_push_back(&peer->remotes, &remote->link);
    *ret_remote = remote;
    return TD_OK;
}

void *td_xfer_remote_at(struct td_xfer_remote *remote, uint64_t offset, size_t len) {
    void *at;
    if (!remote->rkey || len == 0 || len > remote->bytes || offset > remote->bytes - len)
        return NULL;
    return ucp_rkey_ptr(remote->rkey, remote->base + offset, &at) == UCS_OK ? at : NULL;
}

void td_xfer_remote_close(struct td_xfer_remote *remote) {
    if (!remote) return;
    td_list_remove(&remote->link);
    if (remote->rkey) ucp_rkey_destroy(remote->rkey);
    free(remote);
}

void td_xfer_remotes_drop(struct td_xfer_peer *peer) {
    TD_LIST_EACH_SAFE (&peer->remotes, it, tmp) {
        td_xfer_remote_close(TD_CONTAINER(it, struct td_xfer_remote, link));
    }
}

/* ---- requests --------------------------------------------------------------------------------*/

void td_xfer_req_finish(struct td_xfer_req *req, td_status status) {
    struct td_xfer *x = req->peer->x;
    req->status = status;
    req->ucx = NULL;
    td_list_remove(&req->link);
    td_list_push_back(&x->done, &req->link);
}

static void on_request(void *request, ucs_status_t s, void *user) {
    struct td_xfer_req *req = user;
    td_status status = td_xfer_from_ucs(s);
    if (status == TD_CANCELLED && req->peer->state != TD_XFER_CLOSING) status = TD_PEER_LOST;
    ucp_request_free(request);
    td_xfer_req_finish(req, status);
}

static ucp_request_param_t begin(struct td_xfer_peer *peer, struct td_xfer_req *req) {
    req->quiet = req->reported = false;
    req->status = TD_OK;
    req->ucx = NULL;
    req->peer = peer;
    td_list_init(&req->link);
    return (ucp_request_param_t){.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb = {.send = on_request},
                                 .user_data = req};
}

static td_status began(struct td_xfer_peer *peer, struct td_xfer_req *req, ucs_status_ptr_t r) {
    if (UCS_PTR_IS_ERR(r)) {
        req->quiet = true;
        return td_xfer_from_ucs(UCS_PTR_STATUS(r));
    }
    peer->requests_open++;
    peer->x->counts.requests++;
    if (UCS_PTR_IS_PTR(r)) {
        req->ucx = r;
        td_list_push_back(&peer->requests, &req->link);
    } else {
        td_xfer_req_finish(req, TD_OK);
    }
    return TD_OK;
}

/* tcp lane: what `req` says is done by messages. */
static void begin_pieces(struct td_xfer_peer *peer, struct td_xfer_req *req) {
    peer->requests_open++;
    peer->x->counts.requests++;
    td_xfer_pieces_post(peer, req);
}

td_status td_xfer_put(struct td_xfer_peer *peer, struct td_xfer_remote *remote, uint64_t offset,
                      const void *local, size_t len, struct td_xfer_req *req) {
    assert(req->on_done);
    req->quiet = true;
    if (peer->state != TD_XFER_OPEN) return TD_PEER_LOST;
    if (remote->peer != peer || len == 0 || len > remote->bytes || offset > remote->bytes - len)
        return TD_INVALID;
    ucp_request_param_t param = begin(peer, req);
    td_status st = TD_OK;
    if (td_xfer_lane_chosen() == TD_XFER_TCP) {
        req->local = local;
        req->region = remote->region;
        req->offset = offset;
        req->len = len;
        begin_pieces(peer, req);
    } else {
        st = began(peer, req,
                   ucp_put_nbx(peer->ep, local, len, remote->base + offset, remote->rkey, &param));
    }
    if (st == TD_OK) {
        peer->x->counts.puts++;
        peer->x->counts.put_bytes += len;
    }
    return st;
}

td_status td_xfer_flush(struct td_xfer_peer *peer, struct td_xfer_req *req) {
    assert(req->on_done);
    req->quiet = true;
    if (peer->state != TD_XFER_OPEN) return TD_PEER_LOST;
    ucp_request_param_t param = begin(peer, req);
    td_status st = TD_OK;
    if (td_xfer_lane_chosen() == TD_XFER_TCP) {
        req->local = NULL;
        begin_pieces(peer, req);
    } else {
        st = began(peer, req, ucp_ep_flush_nbx(peer->ep, &param));
    }
    if (st == TD_OK) peer->x->counts.flushes++;
    return st;
}

unsigned td_xfer_done_deliver(struct td_xfer *x) {
    unsigned n = 0;
    /* Not what callbacks add: they get their turn in the next progress call. */
    struct td_link batch;
    td_list_init(&batch);
    while (!td_list_empty(&x->done)) {
        struct td_link *it = x->done.next;
        td_list_remove(it);
        td_list_push_back(&batch, it);
    }
    while (!td_list_empty(&batch)) {
        struct td_xfer_req *req = TD_CONTAINER(batch.next, struct td_xfer_req, link);
        td_list_remove(&req->link);
        void (*on_quiet)(struct td_xfer_req *) = req->on_quiet;
        req->peer->requests_open--;
        x->counts.requests--;
        req->quiet = true;
        n++;
        if (req->reported) {
            x->counts.quarantined--;
        } else {
            req->reported = true;
            req->on_done(req, req->status);
        }
        if (on_quiet) on_quiet(req);
    }
    return n;
}

unsigned td_xfer_requests_cancel(struct td_xfer_peer *peer) {
    TD_LIST_EACH (&peer->requests, it) {
        struct td_xfer_req *req = TD_CONTAINER(it, struct td_xfer_req, link);
        if (req->reported) continue;
        req->reported = true;
        peer->x->counts.quarantined++;
        req->on_done(req, TD_CANCELLED);
        return 1;
    }
    return 0;
}
