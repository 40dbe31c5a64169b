/* One request for tokens, from the body to the last byte of the answer: preparation in the thread
 * pool, or at once if it is small (JSON, chat encoding, tokenizer), submission to the flow, delivery,
 * the end. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/put.h"
#include "router/api_anthropic.h"
#include "router/api_grammar.h"
#include "router/api_prompt.h"
#include "router/serve_parts.h"

/* ---- the end ---- */

static double ms(uint64_t from, uint64_t to) {
    return from && to > from ? (double)(to - from) * 1e-6 : 0.0;
}

static const char *worker_name(const struct td_serve *s, uint64_t epoch) {
    const struct td_fleet_worker *w =
        epoch && s->flow ? td_fleet_find(td_flow_fleet(s->flow), epoch) : NULL;
    return w ? w->name : "-";
}

static void log_end(const struct td_request *r, enum td_outcome outcome, int status,
                    const struct td_flow_times *t, const char *text) {
    static const struct td_flow_times none;
    if (!t) t = &none;
    td_info("request %s id=%s key=%s status=%d %s prompt=%llu tokens=%u prepare=%.1fms queue=%.1fms "
            "first=%.1fms total=%.1fms attempts=%u %s>%s%s%s",
            r->request_id, r->answer.id[0] ? r->answer.id : "-", r->key ? r->key->name : "-", status, td_outcome_label(outcome),
            (unsigned long long)td_prompts_tokens(&r->prompts), r->n_tokens,
            ms(r->arrived_ns, r->prepared_ns), ms(t->submitted, t->admitted),
            ms(r->arrived_ns, r->first_ns), ms(r->arrived_ns, td_now_ns()), t->attempts,
            worker_name(r->s, t->pair.prefill), worker_name(r->s, t->pair.decode), text ? ": " : "",
            text ? text : "");
}

/* Settles the accounts and puts the request where reap finds it. */
static void finish(struct td_request *r, enum td_outcome outcome, int status,
                   const struct td_flow_times *t, const char *text) {
    struct td_serve *s = r->s;
    if (r->stage == TD_REQUEST_RUNNING && r->answer.params.sampling.selections) s->n_topk--;
    r->stage = TD_REQUEST_ENDED;
    r->conn = NULL;
    s->n_requests--;
    s->metrics.requests[outcome]++;
    td_list_remove(&r->link);
    td_list_push_back(&s->dead, &r->link);
    log_end(r, outcome, status, t, text);
    if (r->key) td_api_key_give(r->key);
    r->key = NULL;
}

static void name_worker(const struct td_request *r, uint64_t epoch, char out[TD_NAME_MAX]) {
    const char *name = epoch ? worker_name(r->s, epoch) : "";
    *td_put(out, strcmp(name, "-") == 0 ? "" : name) = 0; /* a fleet's name is no longer */
}

static void count_time(struct td_request *r, const struct td_flow_times *t) {
    struct td_metrics *m = &r->s->metrics;
    struct td_ledger *l = &r->answer.ledger;
    memcpy(l->phase_ns, t->phase_ns, sizeof l->phase_ns);
    l->phase_ns[TD_PHASE_PREPARE] = t->submitted - r->arrived_ns;
    l->total_ns = t->ended - r->arrived_ns;
    l->first_ns = r->first_ns - r->arrived_ns;
    l->attempts = t->attempts;
    name_worker(r, t->pair.prefill, l->prefill);
    name_worker(r, t->pair.decode, l->decode);
    for (int i = 0; i < TD_PHASES; i++)
        td_histogram_add(&m->phase[i], (double)l->phase_ns[i] * 1e-9);
    td_histogram_add(&m->total, (double)l->total_ns * 1e-9);
}

static void add_timing(const struct td_request *r, struct td_http_conn *c) {
    char text[TD_LEDGER_HEADER_MAX];
    td_ledger_header(&r->answer.ledger, text);
    td_http_add_header(c, "Server-Timing", text);
}

void td_request_reap(struct td_serve *s) {
    if (s->pumping) return; /* actions not yet taken may refer to prompts; the pump reaps */
    TD_LIST_EACH_SAFE (&s->dead, it, tmp) {
        struct td_request *r = TD_CONTAINER(it, struct td_request, link);
        if (r->held) continue;
        td_list_remove(&r->link);
        td_answer_finish(&r->answer);
        td_prompts_free(&r->prompts);
        free(r->choice);
        free(r->body);
        free(r);
    }
}

static enum td_outcome outcome_of(int status) {
    return status == 429   ? TD_OUTCOME_OVERLOADED
           : status == 503 ? TD_OUTCOME_UNAVAILABLE
           : status < 500  ? TD_OUTCOME_INVALID
                           : TD_OUTCOME_FAILED;
}

/* Answers with an error, in the form that the state of the answer allows. */
static void refuse(struct td_request *r, const struct td_api_error *e,
                   const struct td_flow_times *t) {
    struct td_http_conn *c = r->conn;
    bool begun = r->begun;
    r->conn = NULL;
    td_http_set_owner(c, NULL);
    finish(r, begun ? TD_OUTCOME_FAILED : outcome_of(e->status), begun ? 200 : e->status, t,
           e->message);
    r->held++; /* the connection may go on to its next request */
    td_answer_fail(&r->answer, c, &r->s->scratch, begun, e);
    r->held--;
}

/* ---- preparation ---- */

/* A body of so many bytes costs the loop some 20 us at most, which is less than the way to the pool
 * and back; see is_long. */
enum { SMALL_BODY_BYTES = 2048 };

static void set_out_of_memory(struct td_api_error *e) {
    (void)td_api_no_memory(e);
    e->retry_after_s = 1;
}

/* Without a seed each prompt has its own: equal prompts are not meant to have equal answers. It need
 * not be secret, only another one each time: the mixing of splitmix64 over the prompt's number. */
static uint64_t draw_seed(const struct td_request *r, uint64_t prompt) {
    uint64_t z = r->s->epoch + (r->id + prompt) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

/* What depends on the prompt. */
static td_status prepare_sampling(struct td_request *r, const json_t *root, struct td_api_params p,
                                  struct td_prompt *prompt) {
    int32_t vocab = td_tokenizer_size(r->s->chat.t);
    TD_TRY(td_api_guide_make(root, &p, &prompt->ids, vocab, &r->prompts.grammar, &prompt->guide,
                             &r->error));
    if (p.min_new) p.sampling.end_from = (uint32_t)prompt->ids.n + p.min_new;
    if (!p.seed_given) p.sampling.seed = draw_seed(r, (uint64_t)(prompt - r->prompts.p));
    prompt->sampling = p.sampling;
    return TD_OK;
}

/* A request whose body is short and whose preparation may not be: a grammar, a look at the whole
 * vocabulary, many answers. */
static bool is_long(const struct td_request *r, const json_t *root, const struct td_api_params *p) {
    return p->enforced || p->sampling.repetition_penalty != 0 || p->n > 1 ||
           (r->kind == TD_API_COMPLETIONS && json_is_array(json_object_get(root, "prompt")));
}

/* `root` is a chat request, or completions'. BUSY: small only in bytes, nothing was begun. */
static td_status prepare_root(struct td_request *r, const json_t *root) {
    struct td_api_params p;
    struct td_error err;
    const struct td_chat *chat = &r->s->chat;
    bool completions = r->kind == TD_API_COMPLETIONS;
    TD_TRY(td_api_params_read(root, completions ? r->kind : TD_API_CHAT, &r->s->defaults, &p,
                              &r->error));
    p.kind = r->kind;
    if (r->on_loop && is_long(r, root, &p)) return TD_BUSY;
    bool has_usage = !p.stream || p.include_usage || (!completions && r->kind != TD_API_CHAT);
    if (p.timings && !has_usage)
        return td_api_refuse(&r->error, 400, NULL, "return_timings",
                             "return_timings: expected stream_options.include_usage to be true, "
                             "since usage carries them, found it is not");
    struct td_ids *prompt = completions ? NULL : td_prompts_add(&r->prompts, &r->error);
    if (completions)
        TD_TRY(td_api_completions_prompts(root, chat, &r->prompts, &r->error));
    else if (!prompt)
        return TD_INVALID;
    else
        TD_TRY(td_api_chat_prompt(root, &p, chat, prompt, &r->error));
    bool reasoning = !completions && td_chat_opens_reasoning(chat, prompt);
    TD_TRY(td_api_grammar_make(root, &p, chat, reasoning, &r->prompts.grammar, &r->error));
    for (uint32_t i = 0; i < r->prompts.n; i++)
        TD_TRY(prepare_sampling(r, root, p, &r->prompts.p[i]));
    td_status st = td_answer_init(&r->answer, &p, chat, &r->prompts, r->s->defaults.model, &err);
    if (st == TD_NO_MEMORY)
        set_out_of_memory(&r->error);
    else if (st != TD_OK)
        (void)td_api_refuse(&r->error, 400, NULL, "stop", "%s", err.text);
    return st;
}

_Static_assert((int)TD_RESPONSE_OWNER_MAX >= (int)TD_API_KEY_NAME_MAX, "owners are keys' names");

/* Requests of the other APIs become the chat requests that they mean. */
static td_status prepare_as_chat(struct td_request *r, const json_t *root) {
    struct td_answer *a = &r->answer;
    json_t *chat = NULL;
    bool responses = r->kind == TD_API_RESPONSES;
    const struct td_kept kept = {r->s->responses, td_api_key_owner(r->key),
                                 r->s->config->router_max_body};
    td_status st = responses ? td_api_responses_read(root, &kept, a->id, &chat, &a->responses, &r->error)
                             : td_api_anthropic_read(root, false, &chat, &r->error);
    if (st != TD_OK) return st;
    st = prepare_root(r, chat);
    if (st != TD_OK && responses) td_api_responses_rename(&r->error);
    if (st == TD_OK && responses)
        st = td_api_responses_echo(a->responses, root, &a->params, &r->error);
    json_decref(chat);
    return st;
}

/* False: not here on the loop. */
static bool prepare_request(struct td_request *r) {
    json_t *root = NULL;
    bool chat = r->kind == TD_API_CHAT || r->kind == TD_API_COMPLETIONS;
    td_status st = td_request_parse(r->body, r->body_n, &root, &r->error);
    if (st == TD_OK) st = chat ? prepare_root(r, root) : prepare_as_chat(r, root);
    json_decref(root);
    if (st == TD_BUSY && r->on_loop) return false;
    if (st != TD_OK && r->error.status == 0) set_out_of_memory(&r->error);
    free(r->body);
    r->body = NULL;
    return true;
}

/* In the thread pool. Only the request itself, the store of responses and what the loading job left
 * are touched: all stay until `prepared`, whatever becomes of the client. */
static void prepare(uv_work_t *work) {
    (void)prepare_request(work->data); /* true there */
}

/* ---- submission, back on the loop ---- */

/* What the flow still has of it. */
static void cancel_choices(struct td_request *r) {
    r->held++;
    for (uint32_t c = 0; c < r->answer.n; c++) {
        struct td_flow_event ev = {
            .kind = TD_FLOW_CANCEL, .now_ns = td_now_ns(), .request = td_request_flow_id(r, c)};
        if (!r->choice[c].over) td_serve_step(r->s, &ev);
        r->choice[c].over = true;
    }
    r->held--;
}

static void cancel(struct td_request *r, const char *why) {
    cancel_choices(r);
    if (r->stage == TD_REQUEST_RUNNING)
        finish(r, TD_OUTCOME_CLIENT_GONE, r->begun ? 200 : 0, NULL, why);
    td_request_reap(r->s);
}

/* The flow writes the answers behind the prompt, each with a place for the prompt before it. */
static td_status make_room(struct td_request *r) {
    size_t n = r->answer.params.n;
    r->choice = calloc(r->answer.n, sizeof *r->choice);
    td_status st = r->choice ? TD_OK : TD_NO_MEMORY;
    for (uint32_t i = 0; st == TD_OK && i < r->prompts.n; i++) {
        struct td_prompt *p = &r->prompts.p[i];
        st = td_ids_reserve(&p->ids, n * (p->ids.n + p->max_new) - p->ids.n);
    }
    if (st != TD_OK) set_out_of_memory(&r->error);
    return st;
}

static void submit_prompt(struct td_request *r, uint32_t i) {
    struct td_serve *s = r->s;
    struct td_prompt *p = &r->prompts.p[i];
    struct td_flow_event ev = {
        .kind = TD_FLOW_SUBMIT,
        .now_ns = td_now_ns(),
        .submit = {.request = td_request_flow_id(r, i * r->answer.params.n),
                   .user = r,
                   .ids = p->ids.ids,
                   .n_prompt = (uint32_t)p->ids.n,
                   .max_new = p->max_new,
                   .n = r->answer.params.n,
                   .priority = r->answer.params.priority,
                   .sampling = p->sampling,
                   .colocate = s->config->router_colocate,
                   .whole = !r->answer.params.stream},
    };
    td_serve_step(s, &ev);
}

/* Equal ones promise equal bits: what the workers compute with, and how. */
static void name_workers(struct td_request *r) {
    const struct td_fleet *f = td_flow_fleet(r->s->flow);
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++) {
        const struct td_fleet_worker *w = &f->worker[i];
        if (!w->epoch || w->role != TD_ROLE_DECODE) continue;
        uint64_t h = w->fingerprint * 0x9E3779B97F4A7C15ull ^ w->numerics_id;
        *td_put_hex(td_put(r->answer.fingerprint, "fp_"), h, 16) = 0;
        return;
    }
}

static void submit(struct td_request *r) {
    struct td_serve *s = r->s;
    name_workers(r);
    r->stage = TD_REQUEST_RUNNING;
    if (r->answer.params.sampling.selections) s->n_topk++;
    r->held++;
    for (uint32_t i = 0; i < r->prompts.n && r->stage == TD_REQUEST_RUNNING; i++)
        submit_prompt(r, i);
    r->held--;
    if (r->stage == TD_REQUEST_ENDED) {
        td_request_reap(s);
        return;
    }
    /* A refusal above still had its status line; from here on the client sees a stream. */
    r->begun = r->answer.params.stream;
    r->quiet_since_ns = td_now_ns();
    r->answer.ledger.phase_ns[TD_PHASE_PREPARE] = r->prepared_ns - r->arrived_ns;
    if (r->begun) add_timing(r, r->conn);
    td_answer_begin(&r->answer, r->conn, &s->scratch);
    if (r->answer.broken) {
        r->conn = NULL;
        cancel(r, "out of memory");
    }
}

static void take_prepared(struct td_request *r) {
    struct td_serve *s = r->s;
    r->prepared_ns = td_now_ns();
    if (r->error.status || td_request_check(r) != TD_OK || make_room(r) != TD_OK) {
        refuse(r, &r->error, NULL);
        td_request_reap(s);
        return;
    }
    submit(r);
}

static void prepared(uv_work_t *work, int status) {
    struct td_request *r = work->data;
    if (r->conn && status != UV_ECANCELED) {
        take_prepared(r);
        return;
    }
    finish(r, TD_OUTCOME_CLIENT_GONE, 0, NULL, NULL);
    td_request_reap(r->s);
}

/* The client left. */
static void gone(struct td_conn_owner *o) {
    struct td_request *r = TD_CONTAINER(o, struct td_request, owner);
    r->conn = NULL;
    if (r->stage == TD_REQUEST_PREPARING)
        (void)uv_cancel((uv_req_t *)&r->work); /* `prepared` comes either way */
    else if (r->stage == TD_REQUEST_RUNNING)
        cancel(r, "the client left");
}

static void reply_error(struct td_serve *s, struct td_http_conn *c, enum td_api_kind kind,
                        const struct td_api_error *e) {
    if (kind == TD_API_MESSAGES)
        td_api_anthropic_error_reply(c, e, &s->scratch);
    else
        td_api_error_reply(c, e, &s->scratch);
}

static void refuse_early(struct td_serve *s, struct td_http_conn *c, enum td_api_kind kind,
                         int status, const char *code, uint32_t retry_after_s, const char *text) {
    struct td_api_error e;
    (void)td_api_refuse(&e, status, code, NULL, "%s", text);
    e.retry_after_s = retry_after_s;
    s->metrics.requests[outcome_of(status)]++;
    reply_error(s, c, kind, &e);
}

/* Without keys, who knows the id of a kept response may read it: it cannot be guessed. Others only tell
 * answers apart. */
static void name_answer(struct td_request *r) {
    static const char *const prefix[] = {[TD_API_CHAT] = "chatcmpl-",
                                         [TD_API_COMPLETIONS] = "cmpl-",
                                         [TD_API_MESSAGES] = "msg_",
                                         [TD_API_RESPONSES] = "resp_"};
    uint64_t n[2] = {r->s->epoch & 0xffffffff, r->id};
    bool secret = r->kind == TD_API_RESPONSES;
    if (secret && getrandom(n, sizeof n, 0) != sizeof n)
        (void)td_api_refuse(&r->error, 500, NULL, NULL, "no random numbers from the system");
    char *at = td_put(r->answer.id, prefix[r->kind]);
    at = td_put_hex(at, n[0], secret ? 16 : 8);
    *td_put_hex(at, n[1], secret ? 16 : 8) = 0;
}

void td_request_start(struct td_serve *s, struct td_http_conn *c, enum td_api_kind kind,
                      const char *request_id, struct td_api_key *key) {
    struct td_error err;
    uint32_t retry_s;
    if (s->phase != TD_SERVE_RUNNING) {
        refuse_early(s, c, kind, 503, "not_ready", 1, td_serve_not_ready(s));
        return;
    }
    if (s->n_requests >= s->config->router_max_requests) {
        char text[120];
        snprintf(text, sizeof text, "%u requests are in flight, the limit is %llu; try again later",
                 s->n_requests, (unsigned long long)s->config->router_max_requests);
        refuse_early(s, c, kind, 429, "overloaded", 1, text);
        return;
    }
    if (key && td_api_key_take(key, td_now_ns(), &retry_s, &err) != TD_OK) {
        refuse_early(s, c, kind, 429, "rate_limit_exceeded", retry_s, err.text);
        return;
    }
    struct td_request *r = calloc(1, sizeof *r);
    if (!r) {
        if (key) td_api_key_give(key);
        refuse_early(s, c, kind, 503, NULL, 1, "out of memory");
        return;
    }
    r->owner.gone = gone;
    r->s = s;
    r->key = key;
    r->conn = c;
    r->kind = r->answer.params.kind = kind; /* an error has the form of its API from the start */
    r->id = s->next_request + 1;
    s->next_request += TD_PROMPTS_MAX * TD_CHOICES_MAX; /* how many it wants is in the body */
    r->arrived_ns = td_now_ns();
    *td_put(r->request_id, request_id) = 0; /* as long, at most */
    name_answer(r);
    r->answer.created = td_wall_s();
    r->body = td_http_take_body(c, &r->body_n);
    r->work.data = r;
    td_http_set_owner(c, &r->owner);
    td_list_push_back(&s->requests, &r->link);
    s->n_requests++;
    /* What continues a kept response is as long as that. */
    r->on_loop = r->body_n <= SMALL_BODY_BYTES && kind != TD_API_RESPONSES;
    if (r->on_loop && prepare_request(r)) {
        take_prepared(r);
        return;
    }
    r->on_loop = false;
    if (uv_queue_work(s->loop, &r->work, prepare, prepared) != 0) {
        set_out_of_memory(&r->error);
        refuse(r, &r->error, NULL);
        td_request_reap(s);
    }
}

/* ---- events of a running request ---- */

void td_request_abandon(struct td_request *r) {
    struct td_http_conn *c = r->conn;
    if (!c) return; /* its client left before */
    struct td_api_error e;
    (void)td_api_refuse(&e, 503, "not_ready", NULL, "the router is stopping");
    e.retry_after_s = 1;
    if (r->stage == TD_REQUEST_RUNNING) {
        cancel_choices(r);
        if (r->stage == TD_REQUEST_RUNNING) refuse(r, &e, NULL);
        td_request_reap(r->s);
    } else if (r->stage == TD_REQUEST_PREPARING) {
        td_http_set_owner(c, NULL);
        gone(&r->owner); /* what the answer is made of belongs to the pool's thread now */
        reply_error(r->s, c, r->kind, &e);
    }
}

/* A request that failed, or whose client left, has ended while actions of its choices were still on
 * their way here. */
static bool is_over(const struct td_request *r) {
    return r->stage != TD_REQUEST_RUNNING;
}

/* The choice of the answer that an action is about. */
static uint32_t choice_of(const struct td_request *r, const struct td_flow_action *a) {
    return (uint32_t)((a->request - r->id) / TD_CHOICES_MAX) * r->answer.params.n + a->choice;
}

void td_request_hold(struct td_request *r, const struct td_flow_action *a) {
    if (is_over(r)) return;
    struct td_topk_json *topk = &r->answer.text[choice_of(r, a)].topk;
    for (uint32_t i = 0; r->answer.params.sampling.selections && i < a->hold.n; i++)
        td_topk_hold(topk, a->hold.first && i == 0, a->hold.index + i, &a->hold.selections[i]);
}

static void count_tokens(struct td_request *r, uint32_t choice, uint32_t n) {
    struct td_request_choice *c = &r->choice[choice];
    c->last_ns = r->s->now_ns;
    if (c->n_tokens == 0) c->first_ns = c->last_ns;
    if (r->n_tokens == 0) {
        r->first_ns = c->last_ns;
        td_histogram_add(&r->s->metrics.ttft, ms(r->arrived_ns, r->first_ns) * 1e-3);
    }
    c->n_tokens += n;
    r->n_tokens += n;
}

void td_request_deliver(struct td_request *r, const struct td_flow_action *a) {
    if (is_over(r)) return;
    struct td_serve *s = r->s;
    uint32_t choice = choice_of(r, a);
    const struct td_answer_text *t = &r->answer.text[choice];
    bool stopped = t->stopped;
    count_tokens(r, choice, a->deliver.n);
    td_answer_tokens(&r->answer, r->conn, &s->scratch, choice, a->deliver.tokens,
                     a->deliver.selections, a->deliver.n);
    if (r->answer.broken) {
        r->conn = NULL;
        cancel(r, "out of memory");
        return;
    }
    if (t->stopped && !stopped) {
        struct td_flow_event ev = {
            .kind = TD_FLOW_STOP, .now_ns = td_now_ns(), .request = a->request + a->choice};
        td_serve_step(s, &ev);
    }
}

static void count_end(struct td_request *r, uint32_t choice, const struct td_flow_action *a) {
    struct td_serve *s = r->s;
    struct td_request_choice *c = &r->choice[choice];
    c->over = true;
    s->metrics.completion_tokens += a->end.n_tokens;
    if (c->n_tokens > 1)
        td_histogram_add(&s->metrics.tpot,
                         ms(c->first_ns, c->last_ns) * 1e-3 / (double)(c->n_tokens - 1));
    if (a->end.reason == TD_FINISH_LENGTH && !r->answer.text[choice].stopped) r->cut = true;
}

void td_request_end(struct td_request *r, const struct td_flow_action *a) {
    if (is_over(r)) return;
    struct td_serve *s = r->s;
    struct td_http_conn *c = r->conn;
    uint32_t choice = choice_of(r, a);
    bool last = r->answer.n_ended + 1 == r->answer.n;
    count_end(r, choice, a);
    if (last) {
        s->metrics.prompt_tokens += r->answer.n_prompt;
        count_time(r, &a->end.times);
        if (!r->answer.params.stream) add_timing(r, c);
        td_http_set_owner(c, NULL);
        finish(r, r->cut ? TD_OUTCOME_LENGTH : TD_OUTCOME_STOP, 200, &a->end.times, NULL);
    }
    r->held++; /* the connection may go on to its next request */
    td_answer_end(&r->answer, c, &s->scratch, choice, a->end.reason, a->end.n_tokens);
    r->held--;
    if (!last && r->answer.broken) {
        r->conn = NULL;
        cancel(r, "out of memory");
    }
}

static int http_status(td_status st) {
    switch (st) {
    case TD_TOO_LONG:
    case TD_INVALID:
        return 400;
    case TD_BUSY:
        return 429;
    case TD_UNREACHABLE:
    case TD_PEER_LOST:
    case TD_TIMEOUT:
    case TD_PREEMPTED:
        return 503;
    default:
        return 500;
    }
}

/* One choice that cannot be completed fails the answer: there is no other way to say so. */
void td_request_fail(struct td_request *r, const struct td_flow_action *a) {
    if (is_over(r)) return;
    r->choice[choice_of(r, a)].over = true;
    int status = http_status(a->fail.status);
    const char *code = a->fail.status == TD_TOO_LONG ? "context_length_exceeded"
                       : a->fail.status == TD_BUSY   ? "overloaded"
                                                     : td_status_name(a->fail.status);
    struct td_api_error e;
    (void)td_api_refuse(&e, status, code, NULL, "%s", a->fail.text);
    if (status == 429 || status == 503)
        e.retry_after_s = a->fail.retry_ms > 1000 ? (a->fail.retry_ms + 999) / 1000 : 1;
    refuse(r, &e, &a->fail.times);
    cancel_choices(r);
}

void td_request_tick(struct td_request *r, uint64_t now_ns) {
    if (!r->begun || !r->conn) return;
    if (r->answer.n_sent != r->n_seen) {
        r->n_seen = r->answer.n_sent;
        r->quiet_since_ns = now_ns;
    } else if (now_ns - r->quiet_since_ns >= TD_KEEP_ALIVE_MS * 1000000ull) {
        r->quiet_since_ns = now_ns;
        td_sse_keep_alive(r->conn);
    }
}
