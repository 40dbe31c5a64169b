/* A cluster for tests: real tandem-prefill and tandem-decode processes, and a router made of a link
 * server inside the test that says exactly what a test wants said. */
#ifndef TD_TESTS_WORKERS_CLUSTER_H
#define TD_TESTS_WORKERS_CLUSTER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/data_plane.h"
#include "proto/link.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CLUSTER_SLOW = 6 }; /* kernels take that many times as long, and more */
#else
enum { CLUSTER_SLOW = 1 };
#endif
enum { CLUSTER_SETTINGS = 8 };
enum {
    CLUSTER_REQUESTS = 64,
    CLUSTER_TOKENS = 512,
    CLUSTER_WAIT_MS = CLUSTER_SLOW > 1 ? 900000 : 300000, /* only a hang takes so long */
};

struct leg { /* what one worker said about a request */
    bool replied, finished, failed, released;
    struct td_msg_admit_reply reply;
    struct td_msg_finished finish;
    struct td_msg_failed failure;
};

struct request {
    struct td_key key; /* request 0: unused */
    const int32_t *ids;
    uint32_t n_prompt, max_new;
    struct td_sampling sampling;
    bool colocated;
    bool hold; /* do not send PREFILL by itself when admitted, nor KEEP */
    bool sent_prefill;
    uint32_t n_tokens;
    bool disorder; /* a token came twice, too early, or from the wrong worker */
    struct td_token token[CLUSTER_TOKENS];
    struct leg prefill, decode;
};

struct worker {
    enum td_role role;
    const char *program;
    char name[32];
    pid_t pid;
    struct td_conn *conn; /* NULL while it has no link */
    uint64_t epoch;
    uint32_t pages, slots;
    uint8_t address[TD_MSG_ADDRESS_MAX];
    size_t address_len;
    uint32_t address_number;
    unsigned moves;   /* MOVED said */
    uint64_t ledgers; /* received on this link */
    struct td_msg_ledger ledger;
    struct td_msg_heartbeat beat;
};

struct cluster {
    uv_loop_t loop;
    struct td_cluster_key *key; /* NULL: shm lane, Unix socket */
    char dir[64];
    const char *model;
    unsigned strangers;          /* refused by the challenge */
    char stranger[200];          /* why, the last one */
    char control[32];            /* "127.0.0.1:port" on the tcp lane */
    const char *const *settings; /* more "key=value" for both workers, up to NULL; may be NULL */
    struct td_link_server *server;
    uv_timer_t keeper; /* sends KEEP for what is under way */
    struct worker prefill, decode;
    const void *via; /* the address prefill gets instead of decode's; NULL: decode's */
    size_t via_len;
    uint32_t via_number;
    uint64_t next_request;
    struct request request[CLUSTER_REQUESTS];
};

/* Sets UCX up in this process, for the shm lane, or with "tcp" among the arguments for the tcp
 * lane: then clusters started later run over TCP on the loopback interface, control links too, with
 * a cluster key. Takes the word out of the arguments. False, said on stderr: cannot be. */
bool cluster_lane(int *argc, char **argv);
bool cluster_tcp(void);
/* For the test's own ends of data links. */
struct td_plane_options cluster_plane(const struct cluster *c, uint32_t max_peers,
                                      uint32_t sends_per_peer);

/* Programs and model are kept by pointer. Both workers are up when it returns. */
void cluster_start(struct cluster *c, const char *prefill, const char *decode, const char *model);
/* The same with other settings than the usual ones, kept by pointer. */
void cluster_start_with(struct cluster *c, const char *prefill, const char *decode,
                        const char *model, const char *const *settings);
/* Its two halves. Between them belongs what keeps the loop long, as opening UCX does on a loaded
 * machine: the workers would hear nothing from their router meanwhile. */
void cluster_open(struct cluster *c, const char *prefill, const char *decode, const char *model,
                  const char *const *settings);
void cluster_launch(struct cluster *c);
/* SIGTERM to both; true when both ended with 0, in time and without residue in their logs. */
bool cluster_stop(struct cluster *c);

void cluster_serve(struct cluster *c); /* opens the router's socket (again) */
void cluster_unserve(struct cluster *c);
void cluster_spawn(struct cluster *c, struct worker *w);
void cluster_kill(struct worker *w); /* SIGKILL, waited for */

/* Runs the loop until `holds(arg)`; false after CLUSTER_WAIT_MS, with the logs printed. */
bool cluster_until(struct cluster *c, bool (*holds)(void *arg), void *arg);
/* The same for the file's own `cluster`; else the test fails, with what never held. */
#define UNTIL(what, holds, arg)                                                                    \
    do {                                                                                           \
        if (!cluster_until(&cluster, holds, arg)) fail_msg("%s: never: %s", what, #holds);         \
    } while (0)
void cluster_run_ms(struct cluster *c, uint64_t ms);

/* Begins a request: ADMIT now, PREFILL when it is admitted (unless hold or colocated). */
struct request *cluster_begin(struct cluster *c, const int32_t *ids, uint32_t n, uint32_t max_new,
                              const struct td_sampling *sampling, bool colocated, bool hold);
void cluster_send_prefill(struct cluster *c, struct request *r);
void cluster_cancel(struct cluster *c, struct request *r); /* both legs */
/* Finished or failed on a leg that counts, and released by every worker that knew it. */
bool request_over(void *r);
void cluster_forget(struct request *r);

/* Both ledgers are as after the start. */
bool cluster_at_baseline(void *c);
bool cluster_linked(void *c);
/* Waits for that, by what the workers say from now on. */
bool cluster_settles(struct cluster *c);
/* What is wrong with the tokens that came: each must be the one, log probability included, that
 * `alone` has in its place. NULL: nothing; else good until the next call. */
const char *cluster_wrong_token(const struct request *r, const struct request *alone);

/* The end of both logs, for a failed test. */
void cluster_print_logs(struct cluster *c);

#endif
