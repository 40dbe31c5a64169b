/* The shell that both kinds of worker live in: loop, signals, the engine's jobs thread, the control
 * link to the router, the data plane, one deadline timer, the service manager's signs of life, and
 * an orderly end. A role adds its machine; what follows from an event is decided there. */
#ifndef TD_PROTO_WORKER_HOST_H
#define TD_PROTO_WORKER_HOST_H

#include "common/base/config.h"
#include "common/io/jobs.h"
#include "proto/data_plane.h"
#include "proto/link.h"

struct td_host;

/* All come from the loop. */
struct td_host_events {
    void (*on_message)(void *user, const struct td_msg *m); /* from the router */
    void (*on_router_down)(void *user); /* the link was lost; it is dialed again */
    /* Fills in how much work there is; changes nothing. Also asked without a link. */
    void (*on_beat)(void *user, struct td_msg_heartbeat *beat, struct td_msg_ledger *ledger);
    /* td_host_deadline has come, and what had arrived by then was given out before. */
    void (*on_deadline)(void *user);
    /* SIGTERM or SIGINT: the link to the router is closed; cancel everything. The loop goes on
     * until is_idle or until `stop_ms` have passed. */
    void (*on_stop)(void *user);
    bool (*is_idle)(void *user);
    struct td_plane_events plane;
};

/* Chooses the lane for this process and writes it into the configuration; checks what talking over
 * a network needs. Early in main, before any thread. CONFIG: a sentence says what to set. */
TD_MUST_USE td_status td_host_env(struct td_config *config, struct td_error *err);

/* A random number that names this process. */
uint64_t td_host_epoch(void);

/* Fills what follows from the process, its configuration and its lane; `settings` [cap] holds the
 * text and must outlive the hello. The role adds what follows from its engine. */
void td_host_hello_init(struct td_msg_hello *hello, enum td_role role, const char *name,
                        const struct td_host *h, char *settings, size_t cap);

/* `config` and `events` must outlive the host. `max_peers` and `sends_per_peer` are the data
 * plane's; a message that finds no room is a link lost, so the machine's limits decide. `stop_ms`
 * bounds the orderly end. */
TD_MUST_USE td_status td_host_create(const struct td_config *config, enum td_role role,
                                     uint64_t epoch, const struct td_host_events *events,
                                     void *user, uint32_t max_peers, uint32_t sends_per_peer,
                                     uint32_t stop_ms, struct td_host **ret, struct td_error *err);
/* Dials router.control, or run_dir/router.sock when that is empty, for ever. `hello` must outlive
 * the host. */
TD_MUST_USE td_status td_host_dial(struct td_host *h, const struct td_msg_hello *hello,
                                   struct td_error *err);
/* Tells the service manager that the worker is ready, router or not, and serves until stopped. Not OK:
 * td_host_fault ended it. */
TD_MUST_USE td_status td_host_run(struct td_host *h, struct td_error *err);
/* The engine failed. When that was its device (IO), every later call would fail as well (a GPU's fault
 * stays until its process ends): the worker stops as after SIGTERM, and td_host_run returns this.
 * Other statuses are one request's affair and do nothing. */
void td_host_fault(struct td_host *h, td_status st, const char *sentence);
/* Ends the jobs thread first, so that nothing uses the engine any more; then links, then the loop.
 * BUSY: a handle was left open. NULL is fine. */
TD_MUST_USE td_status td_host_destroy(struct td_host *h);

struct td_jobs *td_host_jobs(struct td_host *h);
struct td_plane *td_host_plane(struct td_host *h);
uv_loop_t *td_host_loop(struct td_host *h);

/* To the router; dropped when there is no link. */
void td_host_send(struct td_host *h, const struct td_msg *m);
/* After td_plane_events.on_renewed, by whoever is dialed: tells the router where, now and at every
 * later link. `hello` is the one that td_host_dial was given; its address is brought up to date. */
void td_host_moved(struct td_host *h, struct td_msg_hello *hello);
/* When on_deadline is wanted; UINT64_MAX: never. Replaces the one before. */
void td_host_deadline(struct td_host *h, uint64_t at_ns);

#endif
