/* What the files of the router's shell share: the server's state and the life of one generating
 * request. Included by serve*.c, request.c, route.c and api_*.c alone. */
#ifndef TD_ROUTER_SERVE_PARTS_H
#define TD_ROUTER_SERVE_PARTS_H

#include "common/base/list.h"
#include "common/base/notify.h"
#include "common/io/loop.h"
#include "proto/link.h"
#include "router/access.h"
#include "router/answer.h"
#include "router/flow.h"
#include "router/metrics.h"
#include "router/serve.h"

enum { TD_REQUEST_ID_MAX = 65, TD_KEEP_ALIVE_MS = 5000, TD_SERVE_TICK_MS = 500 };

enum td_serve_phase { TD_SERVE_LOADING, TD_SERVE_RUNNING, TD_SERVE_STOPPING };

struct td_serve_worker { /* a control link that is up */
    uint64_t epoch;      /* 0: free */
    struct td_conn *conn;
    char name[TD_NAME_MAX];
    char *settings; /* "key = value\n" lines of its hello */
    size_t settings_len;
};

struct td_serve {
    uv_loop_t *loop;
    const struct td_config *config;
    uint64_t epoch, started_ns;
    int64_t started_wall_s;
    char model[TD_NAME_MAX];
    enum td_serve_phase phase;
    td_status result;
    struct td_error error;

    struct td_http_server *http;
    struct td_link_server *links;
    struct td_link_server *remote_links; /* over TCP; NULL without router.control */
    struct td_cluster_key *key;          /* for them */
    uint64_t stranger_ns;                /* when one was logged last */
    struct td_flow *flow;                /* NULL while loading */
    struct td_timer *deadline, *tick;
    uint64_t deadline_ns; /* what `deadline` is set to; UINT64_MAX: stopped */
    uint64_t now_ns;      /* of the last event */
    struct td_serve_worker workers[TD_FLEET_WORKERS_MAX];
    bool pumping;
    char last_probe[TD_TEXT_MAX]; /* why the last probe failed; "" */

    /* set by the loading job, read-only afterwards */
    uv_work_t load;
    bool load_pending;
    td_status load_status;
    struct td_error load_error;
    struct td_tokenizer *tokenizer;
    struct td_chat chat;
    struct td_ids probe;
    struct td_api_defaults defaults;

    struct td_link requests; /* alive */
    struct td_link dead;     /* ended; freed when no action can refer to them */
    uint32_t n_requests, n_text_jobs;
    uint32_t n_topk; /* running requests with return_indexer_topk */
    uint64_t next_request;
    struct td_access access;
    struct td_response_store *responses; /* NULL: none are kept */
    struct td_metrics metrics;
    struct td_notify notify;    /* the service manager */
    struct td_json_out scratch; /* every answer is written here before it is sent */
};

/* What owns a connection while it is answered; the first member of whatever that is. */
struct td_conn_owner {
    void (*gone)(struct td_conn_owner *o); /* the client left */
};

/* ---- one request for tokens (request.c) ---- */

/* Of one choice. */
struct td_request_choice {
    bool over;         /* END or FAIL came */
    uint32_t n_tokens; /* delivered */
    uint64_t first_ns, last_ns;
};

enum td_request_stage { TD_REQUEST_PREPARING, TD_REQUEST_RUNNING, TD_REQUEST_ENDED };

struct td_request {
    struct td_conn_owner owner;
    struct td_link link;
    struct td_serve *s;
    struct td_http_conn *conn; /* NULL: the client is gone, or answered */
    enum td_request_stage stage;
    uint32_t held; /* by so many on the stack that still look at it */
    bool begun;    /* the head of a stream is out */
    uint64_t id;   /* of the flow, and of its first prompt: see td_request_flow_id */
    char request_id[TD_REQUEST_ID_MAX];
    struct td_api_key *key; /* whose it is; NULL: no key was needed, or its end is accounted */
    uv_work_t work;
    enum td_api_kind kind;
    char *body; /* owned until prepared */
    size_t body_n;
    bool on_loop;              /* it is being prepared there */
    struct td_api_error error; /* of the preparation; status 0: none */
    struct td_prompts prompts;
    struct td_answer answer;
    struct td_request_choice *choice; /* [answer.n], once it runs */
    uint32_t n_tokens;                /* delivered, of all */
    bool cut;                         /* by the output limit, some choice */
    uint64_t arrived_ns, prepared_ns, first_ns;
    uint64_t n_seen, quiet_since_ns; /* keep-alive */
};

/* The flow's number of a choice of the answer: each prompt has TD_CHOICES_MAX of them. */
static inline uint64_t td_request_flow_id(const struct td_request *r, uint32_t choice) {
    uint32_t n = r->answer.params.n;
    return r->id + choice / n * TD_CHOICES_MAX + choice % n;
}

/* Holds a prepared request against what the workers and this router can do, and shortens output
 * limits that the client did not give. Not OK: r->error says why not. */
TD_MUST_USE td_status td_request_check(struct td_request *r);
/* Takes a POST to a generating endpoint; always answers, at once or later. `key`: the client's, or
 * NULL. */
void td_request_start(struct td_serve *s, struct td_http_conn *c, enum td_api_kind kind,
                      const char *request_id, struct td_api_key *key);
void td_request_abandon(struct td_request *r); /* the router stops */
void td_request_hold(struct td_request *r, const struct td_flow_action *a);
void td_request_deliver(struct td_request *r, const struct td_flow_action *a);
void td_request_end(struct td_request *r, const struct td_flow_action *a);
void td_request_fail(struct td_request *r, const struct td_flow_action *a);
void td_request_tick(struct td_request *r, uint64_t now_ns);
/* Frees ended requests. */
void td_request_reap(struct td_serve *s);

/* ---- text_job.c: answers about text alone, made in the thread pool ---- */

void td_api_tokenize(struct td_serve *s, struct td_http_conn *c);
void td_api_detokenize(struct td_serve *s, struct td_http_conn *c);
void td_api_count_tokens(struct td_serve *s, struct td_http_conn *c);

/* ---- serve_flow.c ---- */

/* Feeds one event and carries out all actions, also those of events fed meanwhile. */
void td_serve_step(struct td_serve *s, const struct td_flow_event *ev);
td_status td_serve_start_flow(struct td_serve *s, struct td_error *err);
/* Why /ready would say no; NULL when it says yes. */
const char *td_serve_not_ready(const struct td_serve *s);

/* ---- route.c and one file per endpoint ---- */

void td_route(void *serve, struct td_http_conn *c);
void td_route_refused(void *serve, struct td_http_conn *c, int status, const char *sentence);
void td_api_models(struct td_serve *s, struct td_http_conn *c, const char *name);
/* Of /v1/responses/ID and its input_items; `rest` begins with the id. `key`: the client's, or NULL. */
void td_api_stored(struct td_serve *s, struct td_http_conn *c, const char *rest,
                   const struct td_api_key *key);
void td_api_stored_items(struct td_serve *s, struct td_http_conn *c, const char *rest,
                         const struct td_api_key *key);
void td_api_health(struct td_serve *s, struct td_http_conn *c);
void td_api_ready(struct td_serve *s, struct td_http_conn *c);
void td_api_openapi(struct td_serve *s, struct td_http_conn *c);
void td_api_metrics(struct td_serve *s, struct td_http_conn *c);
void td_api_cluster(struct td_serve *s, struct td_http_conn *c);
void td_api_drain(struct td_serve *s, struct td_http_conn *c);
void td_api_resume(struct td_serve *s, struct td_http_conn *c);
/* Sends what is in s->scratch. */
void td_api_send(struct td_serve *s, struct td_http_conn *c, int status, const char *type);

#endif
