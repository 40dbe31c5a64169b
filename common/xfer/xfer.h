/* Everything that moves between workers without the router: KV slabs by remote write, and small
 * messages beside them. The only user of UCX.
 *
 * One thread owns a td_xfer and everything made from it. Nothing blocks. Callbacks run only inside
 * td_xfer_progress() and td_xfer_expire(), never inside the call that caused them, and may call
 * anything here except those two and td_xfer_destroy().
 *
 * The life of a link:
 *   one side   td_xfer_connect(address of the other)            -> peer, usable at once
 *   other side on_accept(peer)                                  -> peer, usable at once
 *   both       td_xfer_send / td_xfer_put / td_xfer_flush
 *   trouble    on_lost(peer, why), at most once; the peer stays and refuses new work
 *   end        td_xfer_peer_close(peer), then on_closed(peer): everything is quiet, the peer is
 * gone
 *
 * Who a peer is: an address says where to reach a process, never which one it is. The upper layer
 * exchanges 64-bit epochs in its first message and closes a peer whose epoch is old. A link itself
 * carries a random id, so a message from an earlier life of the same process is dropped here.
 *
 * UCX has no clock and a shared-memory lane notices only that a process is gone, not that it hangs:
 * every transfer has a deadline here, and heartbeats belong to the upper layer.
 *
 * Transports are chosen, not found (td_xfer_env): posix shared memory on one host, with UCX's error
 * handling for it switched on, or TCP on one named interface. (sysv would only be a second way to
 * do what posix does, with a second set of queues.) A start-up link to ourselves proves the choice;
 * anything else in a link's lanes refuses the start or the link.
 *
 * UCX's shared memory (1.13.1) receives from one queue whose senders take a place before they fill
 * it. A sender that is killed or stopped in between leaves its receiver deaf to everybody. A
 * receiver that hears nothing for a second, not even its own word, takes a new queue (another 20 MB
 * of /dev/shm until the links over the old one are closed): it has another address then, and its
 * links begin anew. Regions, their keys and what is mapped of them stay.
 *
 * The tcp lane needs a private network. Our own handshake and tokens keep strangers from opening a
 * link and from touching a region, but UCX reads from whoever reaches its port before it asks us,
 * trusts lengths it is told, and knows a message of its TCP transport that writes to an address in
 * the packet, which nothing switches off. So its port answers only the interface's own subnet, and
 * who owns that network owns the process.
 *
 * What the shm lane asks of the host: /dev/shm with twice 20 MB for the queues of each process plus
 * its regions, one process-id namespace, /proc, and one user for all (peers open each other's
 * memory through /proc/PID/fd, so no process may be non-dumpable). */
#ifndef TD_COMMON_XFER_XFER_H
#define TD_COMMON_XFER_XFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/auth/key.h"
#include "common/base/list.h"
#include "common/base/status.h"

enum {
    TD_XFER_ADDRESS_MAX = 1024,  /* bytes of td_xfer_address(), envelope included */
    TD_XFER_KEY_MAX = 512,       /* bytes of td_xfer_region_key() */
    TD_XFER_MESSAGE_MAX = 65536, /* bytes of one message */
    TD_XFER_LANES_MAX = 128,     /* bytes of td_xfer_lanes(), terminator included */
};

/* How bytes travel. One lane per process, since UCX is configured per process.
 *   SHM  processes of one host: puts into mapped memory. No TCP among UCX's transports.
 *   TCP  also between hosts: puts travel as active messages and the receiver itself copies them,
 * into what it granted to that link and nowhere else. Links open with the cluster-key challenge. */
enum td_xfer_lane { TD_XFER_SHM = 1, TD_XFER_TCP = 2 };

struct td_xfer;
struct td_xfer_peer;
struct td_xfer_region;
struct td_xfer_remote;

/* Where memory lives; a CUDA kind joins this list when a lane can carry it. Travels in keys. */
enum td_xfer_memory { TD_XFER_HOST = 1 };

struct td_xfer_options {
    /* A peer connected to us. Refuse it by closing it here. `user` is the options' user. */
    void (*on_accept)(void *user, struct td_xfer_peer *peer);
    /* One message; `bytes` are valid during the call only. Answer with td_xfer_send(peer, ...).
     * Messages of one peer arrive once and in order; bytes come from outside: check them. */
    void (*on_message)(void *user, struct td_xfer_peer *peer, const void *bytes, size_t len);
    /* The link failed: PEER_LOST (process gone, or UCX gave up), TIMEOUT (a message was not
     * accepted in time), PROTOCOL. At most once per peer, never after td_xfer_peer_close(). */
    void (*on_lost)(void *user, struct td_xfer_peer *peer, td_status why, const char *sentence);
    /* The last word on a peer, after td_xfer_peer_close(): all its requests are done and quiet, its
     * mappings are dropped, the pointer is dead after this call. */
    void (*on_closed)(void *user, struct td_xfer_peer *peer);
    /* tcp lane, may be NULL: somebody greeted without proof of the cluster key, and was dropped. */
    void (*on_stranger)(void *user, const char *sentence);
    /* shm lane, may be NULL: nothing could be received any more (see below). OK: td_xfer_address() is
     * another one from now on, and every link that was open is lost, which on_lost says of each.
     * Else `sentence` says why there is no new queue; it is tried again in a second. */
    void (*on_renewed)(void *user, td_status status, const char *sentence);
    void *user;
    /* tcp lane: who we are in the challenge; the key outlives the td_xfer. */
    const struct td_cluster_key *key;
    uint32_t role;
    uint64_t epoch;
    uint32_t max_peers;      /* links open or closing at one time; 0: 64; at most 80 */
    uint32_t sends_per_peer; /* messages under way per peer, 64 KiB each, of which only what was
                              * written is ever touched; 0: 16; at most 4096 */
};

/* Chooses the lane. Must be called early in main, before any thread: UCX takes its settings from
 * the process environment only, and several silently have no effect later. Overwrites what it sets.
 * `device`: TCP's network interface; CONFIG when there is none of that name. */
TD_MUST_USE td_status td_xfer_env(enum td_xfer_lane lane, const char *device, struct td_error *err);

/* CONFIG: td_xfer_env() was not called, a transport that was not asked for is active, shared memory
 * is not usable, or the tcp lane has no cluster key (the sentence says which and what to do). */
TD_MUST_USE td_status td_xfer_create(const struct td_xfer_options *options, struct td_xfer **ret_x,
                                     struct td_error *err);

/* Ends every link by force, without callbacks, and frees all. Regions must have been freed.
 * All requests are quiet on return. NULL is fine. */
void td_xfer_destroy(struct td_xfer *x);

/* UCX itself: "1.13.1", and into `buf` [cap] the names of the components that have something to offer
 * here ("posix tcp cma cuda_ipc"), whatever was chosen. */
const char *td_xfer_ucx_version(void);
TD_MUST_USE td_status td_xfer_ucx_components(char *buf, size_t cap, struct td_error *err);

enum td_xfer_lane td_xfer_lane_of(const struct td_xfer *x);
/* The lanes that links get, as found at the start: "posix/memory.0[am rma]". */
const char *td_xfer_transport(const struct td_xfer *x);

/* Bytes that let another process connect. Owned by x, constant until on_renewed. */
const void *td_xfer_address(const struct td_xfer *x, size_t *ret_len);

/* ---- the event loop ---------------------------------------------------------------------------
 * Poll the descriptor for reading. When it is readable, and before each wait:
 *     while (td_xfer_progress(x)) {}
 *     switch (td_xfer_arm(x)) ... */

/* Readable when there is something to do and the last td_xfer_arm() said SLEEP. Owned by x. Whoever
 * watches it with epoll begins anew at on_renewed: the number stays, what it stands for does not. */
int td_xfer_fd(const struct td_xfer *x);

/* Moves transfers on and runs callbacks. True: something happened, call again (bounded work per
 * call, so a loop may give others a turn in between). */
bool td_xfer_progress(struct td_xfer *x);

enum td_xfer_wait {
    TD_XFER_SLEEP, /* wait for the descriptor */
    TD_XFER_AGAIN, /* something arrived meanwhile: progress now */
    TD_XFER_POLL,  /* a transfer waits for room at a peer, for which UCX wakes nobody: progress
                    * again within a millisecond or so (a timer; do not spin) */
};
enum td_xfer_wait td_xfer_arm(struct td_xfer *x);

/* Reports every request whose deadline is at or before `now_ns` as TIMEOUT, and links with an
 * overdue message as lost. Call from a timer; returns the earliest deadline left, or UINT64_MAX. */
uint64_t td_xfer_expire(struct td_xfer *x, uint64_t now_ns);

/* ---- memory ----------------------------------------------------------------------------------*/

/* `bytes` of zeroed, page-aligned host memory that peers can write to and that may be the source
 * of puts. On the tcp lane any memory would do; on the shm lane made by UCX as a shared-memory
 * segment: posix needs no more than a mapping on either side, whereas memory from malloc could only
 * be reached through cma (a system call per put and ptrace rights between the processes), which is
 * not among our lanes. So landing slabs come from here; the *source* of a put may be any memory.
 * The segment has no name: it is gone with the last process that maps it, also after kill -9.
 * (UCX names it while it makes it; only a kill in these milliseconds of start-up leaves a file
 * /dev/shm/ucx_shm_posix_*, which the kernel keeps until someone removes it.)
 * NO_MEMORY with a sentence when /dev/shm cannot hold it (checked: tmpfs fails only when touched).
 */
TD_MUST_USE td_status td_xfer_region_alloc(struct td_xfer *x, size_t bytes,
                                           struct td_xfer_region **ret_region,
                                           struct td_error *err);
/* Frees the memory here; peers that still have it mapped keep their mapping until they drop it.
 * NULL is fine. */
void td_xfer_region_free(struct td_xfer_region *region);
void *td_xfer_region_base(const struct td_xfer_region *region);
/* What the memory is made of, for the log: "posix" shared memory, or "private". */
const char *td_xfer_region_transport(const struct td_xfer_region *region);
/* tcp lane: the one range this link may write to from now on, replacing what it was granted before
 * (bytes 0: nothing). A link that writes elsewhere is lost with PROTOCOL, and the bytes are not. On
 * the shm lane, where whoever has the key can write, it does nothing. */
void td_xfer_grant(struct td_xfer_peer *peer, struct td_xfer_region *region, uint64_t offset,
                   uint64_t bytes);
/* Bytes with which a peer can write anywhere in the region. Owned by the region, constant. */
const void *td_xfer_region_key(const struct td_xfer_region *region, size_t *ret_len);

/* ---- peers -----------------------------------------------------------------------------------*/

/* Starts a link. Usable at once: what is sent and put now waits until the other process has
 * answered UCX's greeting, at the latest until its deadline. A peer that has max_peers links
 * already says no: on_lost(PEER_LOST). UNREACHABLE when the process is already gone; PEER_LOST when it
 * lives and has perhaps another address by now; CONFIG when the lanes are not the chosen ones; BUSY
 * at max_peers. */
TD_MUST_USE td_status td_xfer_connect(struct td_xfer *x, const void *address, size_t len,
                                      struct td_xfer_peer **ret_peer, struct td_error *err);

/* Ends a link now: no more callbacks for its messages, what waits is dropped, unfinished requests
 * are reported CANCELLED and become quiet, then on_closed, a few progress calls later (tcp: not
 * before the link is a tenth of a second old). Never waits
 * for the other side, which may be dead or stopped (the other side is told if it listens; it then
 * gets on_lost). Twice is fine. Orderly ends belong to the upper layer: say goodbye, flush, then
 * close. */
void td_xfer_peer_close(struct td_xfer_peer *peer);

/* For the upper layer's own record; NULL at first. */
void td_xfer_peer_set_user(struct td_xfer_peer *peer, void *user);
void *td_xfer_peer_user(const struct td_xfer_peer *peer);

/* The lanes in use, "posix/memory[am,rma]", for the log. `buf` holds TD_XFER_LANES_MAX. */
void td_xfer_lanes(const struct td_xfer_peer *peer, char *buf);

/* ---- small messages --------------------------------------------------------------------------*/

/* Copies `len` <= TD_XFER_MESSAGE_MAX bytes and sends them by active message. Ordered among
 * messages of this peer. NOT ordered with puts: flush first, then tell.
 * BUSY: sends_per_peer messages are under way (nothing was sent). If the transport has not taken
 * it by `deadline_ns` the link is lost (on_lost, TIMEOUT). PEER_LOST after on_lost or close. */
TD_MUST_USE td_status td_xfer_send(struct td_xfer_peer *peer, const void *bytes, size_t len,
                                   uint64_t deadline_ns);

/* ---- puts ------------------------------------------------------------------------------------*/

/* A peer's region as this link sees it; from td_xfer_region_key() bytes. UNREACHABLE when its
 * process is gone, PROTOCOL on damaged bytes, UNSUPPORTED for memory no chosen lane reaches.
 * Belongs to the peer: dropped when it closes, at the latest. */
TD_MUST_USE td_status td_xfer_remote_open(struct td_xfer_peer *peer, const void *key, size_t len,
                                          struct td_xfer_remote **ret_remote, struct td_error *err);
/* Where this process can write to `len` bytes of it by itself, for as long as it is open: shared memory
 * that is mapped here. What is written there is there before any message that is sent afterwards.
 * NULL where there are no such bytes, and on the tcp lane. */
void *td_xfer_remote_at(struct td_xfer_remote *remote, uint64_t offset, size_t len);
/* Only when no put to it is unfinished. NULL is fine. */
void td_xfer_remote_close(struct td_xfer_remote *remote);

/* One put or flush. Caller-owned, zeroed, then the first four members filled; neither moved nor
 * reused until `quiet`. */
struct td_xfer_req {
    uint64_t deadline_ns;
    /* Exactly once: OK; TIMEOUT; CANCELLED (closed); PEER_LOST. After TIMEOUT, CANCELLED or
     * PEER_LOST the transport may still read the source memory until `quiet`. */
    void (*on_done)(struct td_xfer_req *req, td_status status);
    /* Exactly once, after on_done (in the same breath when all is well): UCX has let go, the source
     * memory and this struct may be reused. May be NULL. */
    void (*on_quiet)(struct td_xfer_req *req);
    void *user;
    bool quiet;
    /* Below: ours. */
    bool reported;
    td_status status;
    void *ucx;
    struct td_xfer_peer *peer;
    struct td_link link;
    /* tcp lane */
    const uint8_t *local; /* NULL: a flush */
    uint64_t region, offset, len, sent;
    uint32_t pending; /* pieces with UCX */
    uint32_t after;   /* flush: done when so many pieces have landed */
};

/* Writes `len` bytes of `local` to `offset` of the remote region. `len` > 0; INVALID when the range
 * is not inside the region. on_done(OK) means the *source* may be reused, nothing more. A
 * shared-memory put is a copy by this thread inside this call: about 1 ms for 8 MiB, so a loop that
 * must answer in between puts a slab in several pieces. Bounded by the caller's slabs and
 * credits. On a failure status no callback follows and req is quiet. */
TD_MUST_USE td_status td_xfer_put(struct td_xfer_peer *peer, struct td_xfer_remote *remote,
                                  uint64_t offset, const void *local, size_t len,
                                  struct td_xfer_req *req);

/* on_done(OK): all puts of this peer posted before are visible in the peer's memory. (On the tcp
 * lane the peer says so: UCX's own flush only knows what the system has taken.) */
TD_MUST_USE td_status td_xfer_flush(struct td_xfer_peer *peer, struct td_xfer_req *req);

/* ---- counters, for the ledger ----------------------------------------------------------------*/
struct td_xfer_counts {
    uint64_t puts, put_bytes, flushes, messages_out, messages_in;
    uint64_t stale_dropped;     /* messages of links we do not know (any more) */
    uint64_t malformed_dropped; /* wrong envelope, no token, or no proof of the key */
    uint64_t timeouts, peers_lost, renewals;
    uint32_t peers;       /* open or closing */
    uint32_t requests;    /* not yet quiet */
    uint32_t quarantined; /* of these: already reported */
};
void td_xfer_counts(const struct td_xfer *x, struct td_xfer_counts *ret_counts);

#endif
