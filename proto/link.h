/* Control links between the router and its workers: framed streams that carry messages, opened
 * by hello and hello_reply, kept by heartbeats both ways, and ended by silence.
 *
 * Over a Unix socket the system vouches for the other side's user. Over TCP both sides first prove
 * that they know the cluster key (common/auth/challenge.h), in frames of their own; until then
 * nothing else is decoded, a frame may have 64 bytes, the whole opening has peer_timeout_ms, and
 * TD_LINK_STRANGERS_MAX connections at most are in that state, the newest of which stay.
 *
 * The worker dials (td_link_client) and dials again for ever; the router listens
 * (td_link_server). Both see a connection as `struct td_conn` between on_up and on_down. */
#ifndef TD_PROTO_LINK_H
#define TD_PROTO_LINK_H

#include <uv.h>

#include "common/auth/key.h"
#include "proto/msg.h"

struct td_conn;

struct td_link_options {
    uint64_t epoch;           /* ours, random */
    uint32_t heartbeat_ms;    /* between our heartbeats; a worker's first comes at once */
    uint32_t peer_timeout_ms; /* silence, and time for the hello exchange, before a link is lost */
    size_t queue_max;         /* bytes waiting for a slow peer before it is dropped;
                               * 0: TD_LINK_QUEUE_DEFAULT */
    enum td_role role;        /* ours, in the challenge */
    /* The cluster key; outlives the link. Without one a TCP address is refused. */
    const struct td_cluster_key *key;
};

enum { TD_LINK_QUEUE_DEFAULT = 4 * TD_FRAME_BYTES_MAX, TD_LINK_STRANGERS_MAX = 16 };

/* All callbacks come from the loop. Every pointer but on_msg may be NULL. */
struct td_link_events {
    /* Server: shall this HELLO be let in? A status other than OK refuses it with the sentence
     * written to `text`. Without it every hello of the right version is let in. */
    td_status (*on_hello)(void *user, const struct td_msg_hello *hello, char text[TD_TEXT_MAX]);
    /* The exchange is complete. `first` is the HELLO (server) or the HELLO_REPLY (client). */
    void (*on_up)(void *user, struct td_conn *c, const struct td_msg *first);
    /* Any later message, heartbeats included; what it points to is borrowed. */
    void (*on_msg)(void *user, struct td_conn *c, const struct td_msg *m);
    /* After on_up: the link is lost, `c` is dead when this returns, `text` is a sentence. Client
     * only: also for a refused hello (c == NULL), each time it is refused; then it dials again. */
    void (*on_down)(void *user, struct td_conn *c, td_status why, const char *text);
    /* Server: somebody dialed in over TCP and did not prove to know the cluster key. */
    void (*on_stranger)(void *user, td_status why, const char *text);
    /* A heartbeat is about to be sent: fill in the load (epoch and seq are set already). A worker
     * also sends its LEDGER from here. */
    void (*on_beat)(void *user, struct td_conn *c, struct td_msg_heartbeat *beat);
};

/* ---- a connection ---- */

/* TD_UNREACHABLE: the link is down. TD_BUSY: the peer does not read; the link goes down. */
TD_MUST_USE td_status td_conn_send(struct td_conn *c, const struct td_msg *m, struct td_error *err);
uint64_t td_conn_peer_epoch(const struct td_conn *c);
/* A pointer of the owner's for this connection; NULL at first. */
void td_conn_set_data(struct td_conn *c, void *data);
void *td_conn_data(const struct td_conn *c);
/* Ends the link after what is queued was sent; on_down does not come. */
void td_conn_close(struct td_conn *c);

/* ---- router's side ---- */

struct td_link_server;
/* `events` is kept by pointer. `max_conns` bounds connections, with or without hello. */
/* CONFIG: a TCP address without a cluster key. */
TD_MUST_USE td_status td_link_server_create(uv_loop_t *loop, const char *address,
                                            const struct td_link_options *o, uint32_t max_conns,
                                            const struct td_link_events *events, void *user,
                                            struct td_link_server **ret, struct td_error *err);
/* The TCP port really bound, 0 for a Unix socket. */
uint16_t td_link_server_port(const struct td_link_server *s);
/* Closes the socket and every connection (flushed), without on_down; the memory goes with the
 * loop's close callbacks. NULL is fine. */
void td_link_server_destroy(struct td_link_server *s);

/* ---- worker's side ---- */

struct td_link_client;
/* `hello` is sent at each connect; it and what it points to must outlive the client. */
TD_MUST_USE td_status td_link_client_create(uv_loop_t *loop, const char *address,
                                            const struct td_link_options *o,
                                            const struct td_msg_hello *hello,
                                            const struct td_link_events *events, void *user,
                                            struct td_link_client **ret, struct td_error *err);
/* NULL while the link is down. */
struct td_conn *td_link_client_conn(const struct td_link_client *c);
/* Why the last call found nobody, "" when none failed since the last connection. */
const char *td_link_client_trouble(const struct td_link_client *c);
/* Closes (flushed), without on_down. NULL is fine. */
void td_link_client_destroy(struct td_link_client *c);

#endif
