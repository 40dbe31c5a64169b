/* A prefill and a decode worker in one process, without a model: they speak the control protocol
 * to a router and answer every prompt with its own last user message. So a test over HTTP can have
 * any text, any token, any pace. What they see is printed, a line each: "admit", "prefill",
 * "cancel ROLE". A message may begin with a word that asks for a fault:
 *   @hang     prefill never answers          @slow   20 ms between tokens
 *   @quiet    7 s of silence after token 2   @fail   decode fails after 3 tokens
 *   @die      decode's link drops after 3 tokens, and comes back under a new epoch
 *   @fast     64 tokens per message          @one     as @slow, and choice 1 alone fails
 * and `@ids 5 7 9` anywhere in it is answered with these ids instead, marks included: a recorded
 * answer. All choices of a request get the same.
 * usage: fake_worker SOCKET MODEL_NAME TOKENIZER_DIR MAX_CONTEXT */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/io/loop.h"
#include "common/text/bytes.h"
#include "common/text/chat.h"
#include "proto/link.h"

enum { MS = 1000000, QUIET_MS = 7000, SLOW_MS = 20, FAULT_AT = 3 };

struct worker {
    enum td_role role;
    struct td_link_client *client;
    struct td_msg_hello hello;
    struct td_link_options options;
};

struct job {
    struct td_link link;
    struct td_key key;
    uint32_t choice;
    uint64_t ticket;
    struct td_sampling sampling;
    uint32_t max_new, sent;
    struct td_ids answer;
    char word[16];
    bool decoding; /* decode may send from `sent` on */
    uint64_t due_ns;
};

static uv_loop_t loop;
static const char *socket_path;
static struct td_tokenizer *tokenizer;
static struct td_chat chat;
static struct worker prefill, decode;
static struct td_link jobs;
static uint64_t next_ticket, steps;
static struct td_timer *tick;

static void say(struct worker *w, const struct td_msg *m) {
    struct td_error err;
    struct td_conn *c = w->client ? td_link_client_conn(w->client) : NULL;
    if (c && td_conn_send(c, m, &err) != TD_OK) fprintf(stderr, "send: %s\n", err.text);
}

static void release(struct worker *w, struct td_key key) {
    struct td_msg m = {.type = TD_MSG_RELEASED, .released = {.key = key}};
    say(w, &m);
}

static bool of_key(const struct job *j, struct td_key key) {
    return j->key.request == key.request && j->key.attempt == key.attempt;
}

static struct job *find(struct td_key key) {
    TD_LIST_EACH (&jobs, it) {
        struct job *j = TD_CONTAINER(it, struct job, link);
        if (of_key(j, key)) return j;
    }
    return NULL;
}

static void drop(struct job *j) {
    td_list_remove(&j->link);
    td_ids_free(&j->answer);
    free(j);
}

/* Decode lets go of a key with its last choice. */
static void drop_and_release(struct job *j) {
    struct td_key key = j->key;
    drop(j);
    if (!find(key)) release(&decode, key);
}

/* ---- the "model" ---- */

static void read_word(struct job *j) {
    char text[64];
    size_t n = 0;
    for (size_t i = 0; i < j->answer.n && n < sizeof text - 1; i++) {
        size_t len;
        const char *s = td_tokenizer_bytes(tokenizer, j->answer.ids[i], &len);
        for (size_t k = 0; k < len && n < sizeof text - 1; k++)
            text[n++] = s[k];
    }
    text[n] = 0;
    if (text[0] == '@') snprintf(j->word, sizeof j->word, "%.*s", (int)strcspn(text, " \n"), text);
}

static void think(struct job *j, const struct td_ids *user) {
    for (size_t i = 0; i < user->n; i++) {
        if (i == FAULT_AT) (void)!td_ids_push(&j->answer, chat.think_end);
        (void)!td_ids_push(&j->answer, user->ids[i]);
    }
}

static char *text_of(const struct td_ids *ids) {
    struct td_bytes text = {0};
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *bytes = td_tokenizer_bytes(tokenizer, ids->ids[i], &n);
        td_bytes_add(&text, bytes, n);
    }
    td_bytes_add(&text, "", 1);
    if (text.failed) abort();
    return text.p;
}

/* The recorded answer that the message asks for. */
static bool recorded(struct job *j, const struct td_ids *user) {
    char *text = text_of(user), *at = strstr(text, "@ids "), *end;
    for (at = at ? at + 5 : NULL; at; at = end) {
        long id = strtol(at, &end, 10);
        if (end == at) break;
        if (td_ids_push(&j->answer, (int32_t)id) != TD_OK) abort();
    }
    free(text);
    return at != NULL;
}

static void make_answer(struct job *j, const int32_t *ids, uint32_t n) {
    struct td_ids user = {0};
    uint32_t from = 0, to = n;
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == chat.user || ids[i] == chat.bos) from = i + 1;
    for (uint32_t i = n; i > from; i--)
        if (ids[i - 1] == chat.assistant) to = i - 1;
    if (td_ids_append(&user, ids + from, to - from) != TD_OK) abort();
    /* Behind the assistant's two marks stands what an earlier attempt has said. */
    uint32_t begin = n - to < 2 ? n : to + 2;
    if (!recorded(j, &user) && to < begin && ids[begin - 1] == chat.think)
        think(j, &user);
    else if (j->answer.n == 0 && td_ids_append(&j->answer, user.ids, user.n) != TD_OK)
        abort();
    td_ids_free(&user);
    if (td_ids_push(&j->answer, chat.eos) != TD_OK) abort();
    read_word(j);
    size_t said = n - begin < j->answer.n ? n - begin : j->answer.n - 1;
    j->answer.n -= said;
    memmove(j->answer.ids, j->answer.ids + said, j->answer.n * sizeof j->answer.ids[0]);
}

static struct td_token token(const struct job *j, uint32_t i) {
    struct td_token t = {.id = j->answer.ids[i % j->answer.n],
                         .logprob = -0.5f - 0.001f * (float)i};
    t.n_top = j->sampling.top_logprobs;
    for (uint32_t k = 0; k < t.n_top; k++) {
        t.top[k].id = (t.id + (int32_t)k) % td_tokenizer_size(tokenizer);
        t.top[k].logprob = t.logprob - 0.25f * (float)k;
    }
    return t;
}

static bool is_last(const struct job *j, uint32_t i) {
    return i + 1 == j->max_new ||
           (!j->sampling.ignore_eos && j->answer.ids[i % j->answer.n] == chat.eos);
}

static void send_tokens(struct worker *w, struct job *j, uint32_t most) {
    struct td_token t[TD_TOKENS_PER_MSG_MAX];
    uint32_t n = 0, index = j->sent;
    bool last = index > 0 && is_last(j, index - 1);
    while (!last && n < most) {
        t[n] = token(j, j->sent);
        last = is_last(j, j->sent);
        n++;
        j->sent++;
    }
    struct td_msg m = {
        .type = TD_MSG_TOKENS,
        .tokens = {.key = j->key, .choice = j->choice, .index = index, .n = n, .tokens = t}};
    if (n > 0) say(w, &m);
    if (!last || w->role == TD_ROLE_PREFILL) return;
    bool stop = !j->sampling.ignore_eos && j->answer.ids[(j->sent - 1) % j->answer.n] == chat.eos;
    struct td_msg f = {.type = TD_MSG_FINISHED,
                       .finished = {.key = j->key,
                                    .choice = j->choice,
                                    .reason = stop ? TD_FINISH_STOP : TD_FINISH_LENGTH,
                                    .n_tokens = j->sent}};
    say(w, &f);
    drop_and_release(j);
}

static void client_start(struct worker *w);

static bool is(const struct job *j, const char *word) {
    return strcmp(j->word, word) == 0;
}

/* One step of the "engine" for one sequence. */
static void advance(struct job *j, uint64_t now) {
    if (!j->decoding || now < j->due_ns) return;
    bool preempted = is(j, "@preempt");
    bool fails = is(j, "@fail") || (is(j, "@one") && j->choice == 1);
    if (j->sent >= FAULT_AT && (preempted || fails)) {
        struct td_msg m = {.type = TD_MSG_FAILED,
                           .failed = {.key = j->key,
                                      .only = j->choice + 1,
                                      .status = preempted ? TD_PREEMPTED : TD_INTERNAL,
                                      .text = "asked to fail"}};
        say(&decode, &m);
        drop_and_release(j);
        return;
    }
    if (j->sent >= FAULT_AT && is(j, "@die")) {
        drop(j);
        td_link_client_destroy(decode.client);
        decode.client = NULL;
        decode.hello.epoch++;
        decode.options.epoch++;
        client_start(&decode);
        return;
    }
    j->due_ns = now + (is(j, "@slow") || is(j, "@one")   ? SLOW_MS
                       : is(j, "@quiet") && j->sent == 2 ? QUIET_MS
                                                         : 0) *
                          (uint64_t)MS;
    send_tokens(&decode, j, is(j, "@fast") ? TD_TOKENS_PER_MSG_MAX : 1);
}

static void on_tick(void *user) {
    (void)user;
    uint64_t now = td_now_ns();
    steps++;
    TD_LIST_EACH_SAFE (&jobs, it, tmp) {
        advance(TD_CONTAINER(it, struct job, link), now);
    }
}

/* ---- messages ---- */

static void make_job(const struct td_msg_admit *a, uint32_t choice, uint64_t ticket) {
    struct job *j = calloc(1, sizeof *j);
    if (!j) abort();
    j->key = a->key;
    j->choice = choice;
    j->ticket = ticket;
    j->sampling = a->sampling;
    j->max_new = a->max_new;
    td_list_push_back(&jobs, &j->link);
    if (!a->ids) return;
    make_answer(j, a->ids, a->n_prompt);
    j->decoding = true;
}

static void on_admit(const struct td_msg_admit *a) {
    uint64_t ticket = ++next_ticket;
    printf("admit prompt=%u max=%u grammar=%u temperature=%g seed=%llu\n", a->n_prompt, a->max_new,
           a->sampling.guide ? a->sampling.guide->grammar_n : 0u, (double)a->sampling.temperature,
           (unsigned long long)a->sampling.seed);
    struct td_msg m = {
        .type = TD_MSG_ADMIT_REPLY,
        .admit_reply = {.key = a->key, .status = TD_OK, .ticket = ticket, .lease_ms = 10000}};
    say(&decode, &m);
    for (uint32_t c = 0; c == 0 || c < a->n; c++)
        make_job(a, c, ticket);
}

static void on_prefill(const struct td_msg_prefill *p) {
    printf("prefill prompt=%u\n", p->n_prompt);
    TD_LIST_EACH_SAFE (&jobs, it, tmp) {
        struct job *j = TD_CONTAINER(it, struct job, link);
        if (!of_key(j, p->key) || j->ticket != p->ticket) continue;
        make_answer(j, p->ids, p->n_prompt);
        if (is(j, "@hang")) return;
        send_tokens(&prefill, j, 1);
        j->decoding = true;
    }
    release(&prefill, p->key);
}

static void on_cancel(struct worker *w, const struct td_msg_cancel *m) {
    printf("cancel %s\n", w->role == TD_ROLE_PREFILL ? "prefill" : "decode");
    TD_LIST_EACH_SAFE (&jobs, it, tmp) {
        struct job *j = TD_CONTAINER(it, struct job, link);
        if (w->role != TD_ROLE_DECODE || !of_key(j, m->key)) continue;
        if (m->only == 0 || m->only == j->choice + 1) drop(j);
    }
    if (w->role == TD_ROLE_PREFILL || !find(m->key)) release(w, m->key);
}

static void on_msg(void *user, struct td_conn *c, const struct td_msg *m) {
    (void)c;
    struct worker *w = user;
    if (m->type == TD_MSG_ADMIT) on_admit(&m->admit);
    if (m->type == TD_MSG_PREFILL) on_prefill(&m->prefill);
    if (m->type == TD_MSG_CANCEL) on_cancel(w, &m->cancel);
}

static void on_beat(void *user, struct td_conn *c, struct td_msg_heartbeat *b) {
    struct worker *w = user;
    (void)c;
    b->free_pages = w->hello.pages;
    b->free_slots = w->hello.slots;
    b->steps = steps;
    struct td_msg m = {.type = TD_MSG_LEDGER,
                       .ledger = {.pages_free = w->hello.pages, .slots_free = w->hello.slots}};
    say(w, &m);
}

static void on_down(void *user, struct td_conn *c, td_status why, const char *text) {
    struct worker *w = user;
    (void)c;
    (void)why;
    printf("down %s: %s\n", w->hello.name, text);
}

static const struct td_link_events events = {
    .on_msg = on_msg, .on_beat = on_beat, .on_down = on_down};

static void client_start(struct worker *w) {
    struct td_error err;
    if (td_link_client_create(&loop, socket_path, &w->options, &w->hello, &events, w, &w->client,
                              &err) != TD_OK) {
        fprintf(stderr, "fake_worker: %s\n", err.text);
        exit(1);
    }
}

static void worker_init(struct worker *w, enum td_role role, const char *model, uint32_t context) {
    static const uint8_t address[] = "nowhere";
    static const char settings[] = "numerics = none\nthreads = 0\n";
    uint64_t epoch = td_now_ns() ^ (uint64_t)getpid() << 40 ^ (uint64_t)role << 60;
    w->role = role;
    w->options =
        (struct td_link_options){.epoch = epoch, .heartbeat_ms = 100, .peer_timeout_ms = 5000};
    w->hello = (struct td_msg_hello){.version = TD_PROTO_VERSION,
                                     .role = role,
                                     .epoch = epoch,
                                     .pid = (uint64_t)getpid(),
                                     .fingerprint = 1,
                                     .numerics_id = 2,
                                     .max_context = context,
                                     .max_running = 256,
                                     .pages = 65536,
                                     .slots = 256,
                                     .xfer_address = address,
                                     .xfer_address_len = sizeof address,
                                     .settings = settings,
                                     .settings_len = sizeof settings - 1};
    snprintf(w->hello.name, sizeof w->hello.name, "%s@0",
             role == TD_ROLE_PREFILL ? "prefill" : "decode");
    snprintf(w->hello.model, sizeof w->hello.model, "%s", model);
    snprintf(w->hello.numerics, sizeof w->hello.numerics, "none");
    client_start(w);
}

static void on_signal(void *user, int signum) {
    (void)user;
    (void)signum;
    td_link_client_destroy(prefill.client);
    td_link_client_destroy(decode.client);
    td_timer_destroy(tick);
    tick = NULL;
}

int main(int argc, char **argv) {
    struct td_error err;
    struct td_signals *signals;
    if (argc != 5) {
        fprintf(stderr, "usage: fake_worker SOCKET MODEL_NAME TOKENIZER_DIR MAX_CONTEXT\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (td_tokenizer_load(argv[3], &tokenizer, &err) != TD_OK) {
        fprintf(stderr, "fake_worker: %s\n", err.text);
        return 1;
    }
    td_chat_init(&chat, tokenizer);
    td_list_init(&jobs);
    socket_path = argv[1];
    uint32_t context = (uint32_t)strtoul(argv[4], NULL, 10);
    if (uv_loop_init(&loop) != 0 || td_timer_create(&loop, on_tick, NULL, &tick) != TD_OK ||
        td_signals_create(&loop, on_signal, NULL, &signals) != TD_OK)
        return 1;
    worker_init(&prefill, TD_ROLE_PREFILL, argv[2], context);
    worker_init(&decode, TD_ROLE_DECODE, argv[2], context);
    td_timer_every(tick, 1);
    uv_run(&loop, UV_RUN_DEFAULT);
    td_signals_destroy(signals);
    td_status st = td_loop_drain(&loop, 5000);
    TD_LIST_EACH_SAFE (&jobs, it, tmp) {
        drop(TD_CONTAINER(it, struct job, link));
    }
    td_tokenizer_destroy(tokenizer);
    return st == TD_OK ? 0 : 1;
}
