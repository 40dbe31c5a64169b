/* The queue that this process receives from: a UCX worker with its address, and on the shm lane the
 * endpoint over which the process speaks to itself. A queue that is read no more (ear.h) is given
 * up: a new one takes its place with a new address, every link over the old one is lost, and when
 * the last is closed here UCX's memory of it goes back.
 *
 * What the old one leaves behind are the numbers of its file descriptors. Peers know UCX's shared
 * memory as /proc/PID/fd/NUMBER, and one that has not heard yet may map it by an old address, or
 * write through an old link into a part of it that it maps only now. So no file may come under such
 * a number again: each is taken by one of /dev/null, which cannot be mapped. */
#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"

/* ---- opening ---- */

static td_status open_worker(struct td_xfer *x, struct td_xfer_queue *q,
                             const struct td_xfer_ports *before, struct td_error *err) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_worker_create(x->context, &params, &q->worker);
    if (s != UCS_OK && td_xfer_lane_chosen() == TD_XFER_TCP)
        return td_fail(err, TD_CONFIG, "UCX: its TCP port cannot be opened: %s. %s",
                       ucs_status_string(s), td_xfer_ucx_said());
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG,
                       "UCX: its receive queues (20 MB) do not fit /dev/shm: %s. %s Give it more "
                       "(mount -o remount,size=..., docker --shm-size)",
                       ucs_status_string(s), td_xfer_ucx_said());
    /* Its transport's port is open already; td_xfer_door_open makes another. */
    if (td_xfer_lane_chosen() == TD_XFER_TCP) TD_TRY(td_xfer_fence(before, td_xfer_device(), err));
    s = ucp_worker_get_efd(q->worker, &q->fd);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: no event descriptor: %s", ucs_status_string(s));
    ucp_address_t *address;
    size_t len;
    s = ucp_worker_get_address(q->worker, &address, &len);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: no worker address: %s", ucs_status_string(s));
    struct td_xfer_envelope e = {0};
    td_status st = td_xfer_seal(&e, TD_XFER_ADDRESS_MAGIC, address, len, q->address,
                                sizeof q->address, &q->address_len, err);
    ucp_worker_release_address(q->worker, address);
    return st;
}

static void ignore_error(void *arg, ucp_ep_h ep, ucs_status_t s) {
    (void)arg, (void)ep, (void)s;
}

static void close_self(struct td_xfer_queue *q) {
    ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    if (!q->self) return;
    void *closing = ucp_ep_close_nbx(q->self, &force);
    q->self = NULL;
    for (int i = 0; i < 1000 && (i < 8 || (UCS_PTR_IS_PTR(closing) &&
                                           ucp_request_check_status(closing) == UCS_INPROGRESS));
         i++)
        ucp_worker_progress(q->worker);
    if (UCS_PTR_IS_PTR(closing)) ucp_request_free(closing);
}

/* A link to ourselves shows what lanes links get, before anything depends on it. It fails when
 * shared-memory error handling is not in force, whatever the environment says. On the shm lane it
 * stays: what we say to ourselves comes through the queue like everything else. */
static td_status open_self(struct td_xfer *x, struct td_xfer_queue *q, struct td_error *err) {
    bool shm = td_xfer_lane_chosen() == TD_XFER_SHM;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER | (shm ? UCP_EP_PARAM_FIELD_FLAGS : 0),
        .flags = UCP_EP_PARAMS_FLAGS_NO_LOOPBACK,
        .address = (const ucp_address_t *)(q->address + sizeof(struct td_xfer_envelope)),
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = ignore_error}};
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_ep_create(q->worker, &params, &q->self);
    if (s != UCS_OK) {
        q->self = NULL;
        return td_fail(err, TD_CONFIG, "UCX: no %s lane that reports dead peers: %s. %s",
                       td_xfer_lane_name(td_xfer_lane_chosen()), ucs_status_string(s),
                       td_xfer_ucx_said());
    }
    td_status st = td_xfer_ep_lanes(q->self, x->lanes, err);
    if (!shm) close_self(q);
    return st;
}

static void close_queue(struct td_xfer_queue *q) {
    close_self(q);
    if (q->worker) ucp_worker_destroy(q->worker);
    *q = (struct td_xfer_queue){.fd = -1};
}

static td_status open_queue(struct td_xfer *x, struct td_xfer_queue *q,
                            const struct td_xfer_ports *before, struct td_error *err) {
    td_status st;
    *q = (struct td_xfer_queue){.fd = -1};
    TD_TRY_GOTO(open_worker(x, q, before, err), close);
    TD_TRY_GOTO(open_self(x, q, err), close);
    TD_TRY_GOTO(td_xfer_message_start(x, q->worker, err), close);
    return TD_OK;
close:
    close_queue(q);
    return st;
}

td_status td_xfer_queue_open(struct td_xfer *x, const struct td_xfer_ports *before,
                             struct td_error *err) {
    TD_TRY(open_queue(x, &x->queue, before, err));
    x->fd = fcntl(x->queue.fd, F_DUPFD_CLOEXEC, 0);
    if (x->fd < 0) return td_fail(err, TD_IO, "UCX: its event descriptor cannot be doubled");
    return TD_OK;
}

void td_xfer_queue_close(struct td_xfer *x) {
    close_queue(&x->queue);
    close_queue(&x->old);
    if (x->fd >= 0) close(x->fd);
    for (uint32_t i = 0; i < TD_XFER_PLUGS_MAX; i++)
        if (x->plug[i] > 0) close(x->plug[i]);
}

/* ---- the word to ourselves ---- */

static void word_said(void *request, ucs_status_t s, void *user) {
    struct td_xfer *x = user;
    (void)s;
    x->word_busy = false;
    ucp_request_free(request);
}

static void say_word(struct td_xfer *x) {
    /* With UCX still: then it has not come, which is what we want to know. */
    if (x->word_busy || !x->queue.self) return;
    x->word = (struct td_xfer_head){
        .magic = TD_XFER_HEAD_MAGIC, .version = TD_XFER_VERSION, .kind = TD_XFER_WORD};
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb = {.send = word_said},
                                 .user_data = x};
    ucs_status_ptr_t r = ucp_am_send_nbx(x->queue.self, TD_XFER_MESSAGE_ID, &x->word,
                                         sizeof x->word, NULL, 0, &param);
    x->word_busy = UCS_PTR_IS_PTR(r);
}

/* ---- giving up a queue ---- */

static void lose_links(struct td_xfer *x) {
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->state != TD_XFER_OPEN) continue;
        /* We are deaf, not dumb: so that nobody waits for an answer. */
        td_xfer_note_send(&peer->bye, TD_XFER_BYE, NULL, 0);
        td_xfer_peer_fail(peer, TD_PEER_LOST,
                          "nothing could be received any more (a process that ends or stops inside "
                          "a send does that); all links begin anew");
    }
}

static void renew(struct td_xfer *x) {
    struct td_xfer_queue fresh;
    struct td_error err;
    struct td_xfer_ports unused = {0};
    assert(x->inbox_used == 0 && !x->old.worker);
    td_status st = open_queue(x, &fresh, &unused, &err);
    if (st == TD_OK && dup3(fresh.fd, x->fd, O_CLOEXEC) < 0) {
        st = td_fail(&err, TD_IO, "UCX: its event descriptor cannot be doubled");
        close_queue(&fresh);
    }
    if (st == TD_OK) {
        lose_links(x);
        td_xfer_message_end(x->queue.worker);
        x->old = x->queue;
        x->queue = fresh;
        /* UCX counts for each worker; what was made towards others was made by the old one. */
        memset(x->made, 0, sizeof x->made);
        x->heard = false;
        x->attention = true;
        x->counts.renewals++;
    }
    if (x->options.on_renewed)
        x->options.on_renewed(x->options.user, st, st == TD_OK ? "" : err.text);
}

void td_xfer_queue_look(struct td_xfer *x, uint64_t now_ns) {
    if (td_xfer_lane_chosen() != TD_XFER_SHM || x->old.worker) return;
    enum td_ear_verdict v = td_ear_look(&x->ear, now_ns, x->waiting, x->heard);
    x->heard = false;
    if (v == TD_EAR_ASK) say_word(x);
    if (v == TD_EAR_DEAF) renew(x);
}

/* ---- the end of an old one ---- */

/* Descriptors of UCX's shared memory among ours. */
static int list_memory(int *ret_fd, int max) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    if (!d) return 0;
    for (struct dirent *e; n < max && (e = readdir(d));) {
        char target[128];
        ssize_t len = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);
        if (len <= 0) continue;
        target[len] = 0;
        if (strstr(target, "/ucx_shm_posix")) ret_fd[n++] = (int)strtol(e->d_name, NULL, 10);
    }
    closedir(d);
    return n;
}

static void plug(struct td_xfer *x, int number, int null) {
    int got = fcntl(null, F_DUPFD_CLOEXEC, number);
    if (got >= 0 && got != number) { /* another thread was quicker: then it is no memory of ours */
        close(got);
        got = -1;
    }
    if (got < 0) return;
    int *place = &x->plug[x->plugs++ % TD_XFER_PLUGS_MAX];
    if (*place > 0) close(*place); /* of a queue that was given up long ago */
    *place = got;
}

static bool is_open(int fd) {
    return fcntl(fd, F_GETFD) >= 0;
}

void td_xfer_queue_retire(struct td_xfer *x) {
    if (!x->old.worker) return;
    TD_LIST_EACH (&x->peers, it) {
        const struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->worker == x->old.worker) return;
    }
    int memory[TD_XFER_PLUGS_MAX];
    int n = list_memory(memory, TD_XFER_PLUGS_MAX), null = open("/dev/null", O_RDWR | O_CLOEXEC);
    close_queue(&x->old);
    for (int i = 0; i < n && null >= 0; i++)
        if (!is_open(memory[i])) plug(x, memory[i], null);
    if (null >= 0) close(null);
    x->ear = (struct td_ear){0};
}
