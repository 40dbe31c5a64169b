/* Processes, links and messages of the test cluster. */
#include "tests/workers/cluster.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/io/loop.h"
#include "common/kv/checksum.h"

enum { ROUTER_EPOCH = 4711, LOG_TAIL = 2500, KEEP_MS = 500, SILENCE_MS = 20000 };

static bool tcp;
static const char key_text[] = "a secret of tests, which is no secret";

bool cluster_lane(int *argc, char **argv) {
    struct td_error err;
    int kept = 0;
    for (int i = 0; i < *argc; i++) {
        if (i > 0 && strcmp(argv[i], "tcp") == 0)
            tcp = true;
        else
            argv[kept++] = argv[i];
    }
    *argc = kept;
    if (td_xfer_env(tcp ? TD_XFER_TCP : TD_XFER_SHM, "lo", &err) == TD_OK) return true;
    fprintf(stderr, "%s\n", err.text);
    return false;
}

bool cluster_tcp(void) {
    return tcp;
}

struct td_plane_options cluster_plane(const struct cluster *c, uint32_t max_peers,
                                      uint32_t sends_per_peer) {
    return (struct td_plane_options){.max_peers = max_peers,
                                     .sends_per_peer = sends_per_peer,
                                     .key = c->key,
                                     .role = TD_ROLE_PREFILL,
                                     .epoch = 1};
}

/* ---- the router's side ---- */

static struct worker *worker_of(struct cluster *c, const struct td_conn *conn) {
    return c->prefill.conn == conn ? &c->prefill : c->decode.conn == conn ? &c->decode : NULL;
}

static struct request *find(struct cluster *c, struct td_key key) {
    for (int i = 0; i < CLUSTER_REQUESTS; i++)
        if (c->request[i].key.request == key.request && key.request != 0) return &c->request[i];
    return NULL;
}

static void on_up(void *user, struct td_conn *conn, const struct td_msg *m) {
    struct cluster *c = user;
    const struct td_msg_hello *h = &m->hello;
    struct worker *w = h->role == TD_ROLE_PREFILL ? &c->prefill : &c->decode;
    w->conn = conn;
    w->epoch = h->epoch;
    w->pages = h->pages;
    w->slots = h->slots;
    w->ledgers = 0;
    w->address_len = h->xfer_address_len;
    w->address_number = h->xfer_number;
    if (w->address_len) memcpy(w->address, h->xfer_address, h->xfer_address_len);
}

static void on_down(void *user, struct td_conn *conn, td_status why, const char *text) {
    struct cluster *c = user;
    (void)why, (void)text;
    struct worker *w = worker_of(c, conn);
    if (w) w->conn = NULL;
}

static void send_to(struct worker *w, const struct td_msg *m) {
    struct td_error err = {0};
    if (w->conn && td_conn_send(w->conn, m, &err) != TD_OK)
        fprintf(stderr, "to %s: %s\n", w->name, err.text);
}

static void take_tokens(struct request *r, const struct td_msg_tokens *t, bool from_prefill) {
    if (!r) return;
    for (uint32_t i = 0; i < t->n; i++) {
        uint32_t at = t->index + i;
        /* Decode's second token may overtake prefill's first: two links. */
        bool right = from_prefill ? at == 0 && !r->colocated : at > 0 || r->colocated;
        if (!right || at >= CLUSTER_TOKENS || r->token[at].id != -1) {
            r->disorder = true;
            continue;
        }
        r->token[at] = t->tokens[i];
        r->n_tokens++;
    }
}

static void moved(struct cluster *c, struct worker *w, const struct td_msg *m) {
    if (m->moved.epoch != w->epoch || m->moved.xfer_number <= w->address_number) return;
    w->moves++;
    w->address_number = m->moved.xfer_number;
    w->address_len = m->moved.xfer_address_len;
    memcpy(w->address, m->moved.xfer_address, w->address_len);
    if (!c->via) send_to(&c->prefill, m);
}

static void on_msg(void *user, struct td_conn *conn, const struct td_msg *m) {
    struct cluster *c = user;
    struct worker *w = worker_of(c, conn);
    if (!w) return;
    bool prefill = w == &c->prefill;
    struct request *r;
#define LEG(key) ((r = find(c, key)) == NULL ? NULL : prefill ? &r->prefill : &r->decode)
    struct leg *leg;
    switch (m->type) {
    case TD_MSG_HEARTBEAT:
        w->beat = m->heartbeat;
        return;
    case TD_MSG_LEDGER:
        w->ledger = m->ledger;
        w->ledgers++;
        return;
    case TD_MSG_ADMIT_REPLY:
        leg = LEG(m->admit_reply.key);
        if (!leg) return;
        leg->replied = true;
        leg->reply = m->admit_reply;
        if (leg->reply.status == TD_OK && !r->hold && !r->colocated) cluster_send_prefill(c, r);
        return;
    case TD_MSG_TOKENS:
        take_tokens(find(c, m->tokens.key), &m->tokens, prefill);
        return;
    case TD_MSG_FINISHED:
        leg = LEG(m->finished.key);
        if (leg) leg->finished = true, leg->finish = m->finished;
        return;
    case TD_MSG_FAILED:
        leg = LEG(m->failed.key);
        if (leg) leg->failed = true, leg->failure = m->failed;
        return;
    case TD_MSG_MOVED:
        moved(c, w, m);
        return;
    case TD_MSG_RELEASED:
        leg = LEG(m->released.key);
        if (leg) leg->released = true;
        return;
    default:
        fprintf(stderr, "%s said message type %d\n", w->name, (int)m->type);
    }
#undef LEG
}

static void on_stranger(void *user, td_status why, const char *text) {
    struct cluster *c = user;
    (void)why;
    c->strangers++;
    snprintf(c->stranger, sizeof c->stranger, "%s", text);
}

static const struct td_link_events events = {
    .on_up = on_up, .on_msg = on_msg, .on_down = on_down, .on_stranger = on_stranger};

void cluster_serve(struct cluster *c) {
    char path[100];
    struct td_link_options o = {.epoch = ROUTER_EPOCH,
                                .heartbeat_ms = 50,
                                .peer_timeout_ms = SILENCE_MS,
                                .key = c->key,
                                .role = TD_ROLE_ROUTER};
    struct td_error err = {0};
    snprintf(path, sizeof path, "%s/router.sock", c->dir);
    if (tcp) snprintf(path, sizeof path, "%s", c->control[0] ? c->control : "127.0.0.1:0");
    if (td_link_server_create(&c->loop, path, &o, 8, &events, c, &c->server, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    if (tcp)
        snprintf(c->control, sizeof c->control, "127.0.0.1:%u",
                 (unsigned)td_link_server_port(c->server));
}

void cluster_unserve(struct cluster *c) {
    td_link_server_destroy(c->server);
    c->server = NULL;
    c->prefill.conn = c->decode.conn = NULL;
}

static void on_keep(uv_timer_t *t) {
    struct cluster *c = t->data;
    for (int i = 0; i < CLUSTER_REQUESTS; i++) {
        const struct request *r = &c->request[i];
        if (r->key.request == 0 || r->hold || request_over(&c->request[i])) continue;
        struct td_msg m = {.type = TD_MSG_KEEP, .keep.key = r->key};
        send_to(&c->decode, &m);
    }
}

/* ---- processes ---- */

static void log_path(const struct cluster *c, const struct worker *w, char *path, size_t cap) {
    snprintf(path, cap, "%s/%s.log", c->dir, w->name);
}

void cluster_spawn(struct cluster *c, struct worker *w) {
    char model[300], run[100], log[120];
    snprintf(model, sizeof model, "model.dir=%s", c->model);
    snprintf(run, sizeof run, "run_dir=%s", c->dir);
    log_path(c, w, log, sizeof log);
    w->conn = NULL;
    w->pid = fork();
    if (w->pid != 0) return;
    int fd = open(log, O_CREAT | O_APPEND | O_WRONLY, 0600);
    dup2(fd, STDERR_FILENO);
    dup2(fd, STDOUT_FILENO);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* no orphan of a test that was killed */
    const char *set[] = {model,
                         run,
                         "numerics=plain",
                         "heartbeat_ms=50",
                         "chunk_tokens=256",
                         "max_context=4096",
                         "pool_pages=64",
                         "lease_ms=4000",
                         "transfer_timeout_ms=30000"};
    const char *argv[2 * (sizeof set / sizeof set[0] + CLUSTER_SETTINGS + 3) + 2] = {w->program};
    size_t n = 1;
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++)
        argv[n++] = "--set", argv[n++] = set[i];
    char control[64], key[120];
    snprintf(control, sizeof control, "router.control=%s", c->control);
    snprintf(key, sizeof key, "cluster_key_file=%s/key", c->dir);
    const char *over_tcp[] = {control, key, "lane_device=lo"};
    for (size_t i = 0; tcp && i < sizeof over_tcp / sizeof over_tcp[0]; i++)
        argv[n++] = "--set", argv[n++] = over_tcp[i];
    for (size_t i = 0; i < CLUSTER_SETTINGS && c->settings && c->settings[i]; i++)
        argv[n++] = "--set", argv[n++] = c->settings[i];
    execv(w->program, (char *const *)argv);
    _exit(127);
}

void cluster_kill(struct worker *w) {
    kill(w->pid, SIGKILL);
    waitpid(w->pid, NULL, 0);
    w->pid = 0;
}

void cluster_start(struct cluster *c, const char *prefill, const char *decode, const char *model) {
    cluster_start_with(c, prefill, decode, model, NULL);
}

static void make_key(struct cluster *c) {
    char path[100];
    struct td_error err;
    snprintf(path, sizeof path, "%s/key", c->dir);
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, key_text, sizeof key_text - 1) != sizeof key_text - 1) abort();
    close(fd);
    if (td_cluster_key_load(path, &c->key, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
}

void cluster_open(struct cluster *c, const char *prefill, const char *decode, const char *model,
                  const char *const *settings) {
    memset(c, 0, sizeof *c);
    c->settings = settings;
    snprintf(c->dir, sizeof c->dir, "/tmp/td-workers-XXXXXX");
    if (!mkdtemp(c->dir) || uv_loop_init(&c->loop) != 0) abort();
    signal(SIGPIPE, SIG_IGN);
    if (tcp) make_key(c);
    c->model = model;
    c->next_request = 1;
    c->prefill = (struct worker){.role = TD_ROLE_PREFILL, .program = prefill, .name = "prefill"};
    c->decode = (struct worker){.role = TD_ROLE_DECODE, .program = decode, .name = "decode"};
    uv_timer_init(&c->loop, &c->keeper);
    c->keeper.data = c;
    uv_timer_start(&c->keeper, on_keep, KEEP_MS, KEEP_MS);
    cluster_serve(c);
}

void cluster_launch(struct cluster *c) {
    cluster_spawn(c, &c->prefill);
    cluster_spawn(c, &c->decode);
    if (!cluster_until(c, cluster_linked, c)) abort();
}

void cluster_start_with(struct cluster *c, const char *prefill, const char *decode,
                        const char *model, const char *const *settings) {
    cluster_open(c, prefill, decode, model, settings);
    cluster_launch(c);
}

static bool log_has(const struct cluster *c, const struct worker *w, const char *what) {
    char path[120], line[1000];
    bool has = false;
    log_path(c, w, path, sizeof path);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        has |= strstr(line, what) != NULL;
    if (f) fclose(f);
    return has;
}

static bool ended(struct cluster *c, struct worker *w) {
    int status = -1;
    uint64_t end = td_now_ns() + CLUSTER_WAIT_MS * 1000000ull;
    if (w->pid == 0) return false; /* a test that failed between its end and the next */
    kill(w->pid, SIGTERM);
    while (waitpid(w->pid, &status, WNOHANG) == 0 && td_now_ns() < end)
        cluster_run_ms(c, 5);
    if (status == -1) cluster_kill(w);
    w->pid = 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 && !log_has(c, w, "left at exit") &&
           !log_has(c, w, "Sanitizer") && !log_has(c, w, "runtime error") &&
           !log_has(c, w, "ledger:") && !log_has(c, w, "was left open") && log_has(c, w, "stopped");
}

bool cluster_stop(struct cluster *c) {
    char path[120];
    bool ok = ended(c, &c->prefill);
    ok = ended(c, &c->decode) && ok;
    if (!ok) cluster_print_logs(c);
    cluster_unserve(c);
    uv_close((uv_handle_t *)&c->keeper, NULL);
    ok = td_loop_drain(&c->loop, 3000) == TD_OK && ok;
    log_path(c, &c->prefill, path, sizeof path);
    unlink(path);
    log_path(c, &c->decode, path, sizeof path);
    unlink(path);
    snprintf(path, sizeof path, "%s/key", c->dir);
    unlink(path);
    td_cluster_key_free(c->key);
    rmdir(c->dir);
    return ok;
}

void cluster_print_logs(struct cluster *c) {
    const struct worker *w[2] = {&c->prefill, &c->decode};
    for (int i = 0; i < 2; i++) {
        char path[120], tail[LOG_TAIL + 1];
        log_path(c, w[i], path, sizeof path);
        FILE *f = fopen(path, "r");
        if (!f) continue;
        fseek(f, 0, SEEK_END);
        long size = ftell(f);
        fseek(f, size > LOG_TAIL ? size - LOG_TAIL : 0, SEEK_SET);
        tail[fread(tail, 1, LOG_TAIL, f)] = 0;
        fclose(f);
        fprintf(stderr, "---- end of %s's log\n%s\n", w[i]->name, tail);
    }
}

/* ---- waiting ---- */

static void on_tick(uv_timer_t *t) {
    (void)t;
}

static bool until_ms(struct cluster *c, bool (*holds)(void *), void *arg, uint64_t ms) {
    uv_timer_t tick;
    uint64_t end = td_now_ns() + ms * 1000000u;
    bool ok;
    uv_timer_init(&c->loop, &tick);
    uv_timer_start(&tick, on_tick, 2, 2);
    while (!(ok = holds(arg)) && td_now_ns() < end)
        uv_run(&c->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&tick, NULL);
    uv_run(&c->loop, UV_RUN_NOWAIT);
    return ok;
}

bool cluster_until(struct cluster *c, bool (*holds)(void *), void *arg) {
    bool ok = until_ms(c, holds, arg, CLUSTER_WAIT_MS);
    if (!ok) cluster_print_logs(c);
    return ok;
}

static bool never(void *arg) {
    (void)arg;
    return false;
}

void cluster_run_ms(struct cluster *c, uint64_t ms) {
    until_ms(c, never, NULL, ms);
}

bool cluster_settles(struct cluster *c) {
    c->prefill.ledgers = c->decode.ledgers = 0;
    return cluster_until(c, cluster_at_baseline, c);
}

const char *cluster_wrong_token(const struct request *r, const struct request *alone) {
    static char wrong[80];
    if (r->disorder) return "tokens out of order";
    for (uint32_t i = 0; i < r->max_new; i++) {
        if (r->token[i].id < 0 ||
            (r->token[i].id == alone->token[i].id &&
             memcmp(&r->token[i].logprob, &alone->token[i].logprob, sizeof(float)) == 0))
            continue;
        snprintf(wrong, sizeof wrong, "token %u is %d, alone it is %d", i, r->token[i].id,
                 alone->token[i].id);
        return wrong;
    }
    return NULL;
}

bool cluster_linked(void *arg) {
    const struct cluster *c = arg;
    return c->prefill.conn && c->decode.conn && c->prefill.ledgers > 0 && c->decode.ledgers > 0;
}

bool cluster_at_baseline(void *arg) {
    const struct cluster *c = arg;
    const struct td_msg_ledger *p = &c->prefill.ledger, *d = &c->decode.ledger;
    return cluster_linked(arg) && p->pages_free == c->prefill.pages &&
           p->slots_free == c->prefill.slots && p->send_busy == 0 &&
           d->pages_free == c->decode.pages && d->slots_free == c->decode.slots &&
           d->landing_quarantined == 0 && c->prefill.beat.running + c->prefill.beat.waiting == 0 &&
           c->decode.beat.running + c->decode.beat.waiting == 0;
}

/* ---- requests ---- */

struct request *cluster_begin(struct cluster *c, const int32_t *ids, uint32_t n, uint32_t max_new,
                              const struct td_sampling *sampling, bool colocated, bool hold) {
    struct request *r = NULL;
    for (int i = 0; i < CLUSTER_REQUESTS && !r; i++)
        if (c->request[i].key.request == 0) r = &c->request[i];
    if (!r) abort();
    memset(r, 0, sizeof *r);
    for (int i = 0; i < CLUSTER_TOKENS; i++)
        r->token[i].id = -1;
    r->key = (struct td_key){c->next_request++, 1};
    r->ids = ids;
    r->n_prompt = n;
    r->max_new = max_new;
    r->sampling = *sampling;
    r->colocated = colocated;
    r->hold = hold;
    struct td_msg m = {.type = TD_MSG_ADMIT};
    m.admit.key = r->key;
    m.admit.n_prompt = n;
    m.admit.max_new = max_new;
    m.admit.sampling = *sampling;
    m.admit.ids = colocated ? ids : NULL;
    m.admit.prompt_hash = td_prompt_hash(ids, n);
    send_to(&c->decode, &m);
    return r;
}

void cluster_send_prefill(struct cluster *c, struct request *r) {
    struct td_msg m = {.type = TD_MSG_PREFILL};
    m.prefill.key = r->key;
    m.prefill.n_prompt = r->n_prompt;
    m.prefill.max_new = r->max_new;
    m.prefill.sampling = r->sampling;
    m.prefill.ids = r->ids;
    m.prefill.ticket = r->decode.reply.ticket;
    m.prefill.decode_epoch = c->decode.epoch;
    snprintf(m.prefill.decode_name, sizeof m.prefill.decode_name, "decode@0");
    m.prefill.decode_address = c->via ? c->via : c->decode.address;
    m.prefill.decode_address_len = c->via ? c->via_len : c->decode.address_len;
    m.prefill.decode_number = c->via ? c->via_number : c->decode.address_number;
    r->sent_prefill = true;
    send_to(&c->prefill, &m);
}

void cluster_cancel(struct cluster *c, struct request *r) {
    struct td_msg m = {.type = TD_MSG_CANCEL, .cancel.key = r->key};
    send_to(&c->decode, &m);
    send_to(&c->prefill, &m);
    r->sent_prefill = true; /* both answer with RELEASED */
}

bool request_over(void *arg) {
    const struct request *r = arg;
    if (r->decode.replied && r->decode.reply.status != TD_OK) return true;
    return r->decode.released && (r->prefill.released || !r->sent_prefill);
}

void cluster_forget(struct request *r) {
    memset(r, 0, sizeof *r);
}
