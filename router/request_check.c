/* What a prepared request is held against before it is submitted: readiness, lengths, numbers. */
#include "router/serve_parts.h"

/* Holds the prompt and the output limit against what the workers can hold. */
static td_status check_length(struct td_request *r, struct td_prompt *prompt) {
    struct td_serve *s = r->s;
    const struct td_api_params *p = &r->answer.params;
    uint64_t n = prompt->ids.n;
    uint64_t limit = td_fleet_limit(td_flow_fleet(s->flow), s->config->router_colocate);
    if (s->config->max_context && s->config->max_context < limit) limit = s->config->max_context;
    const char *param = r->kind == TD_API_COMPLETIONS ? "prompt"
                        : r->kind == TD_API_RESPONSES ? "input"
                                                      : "messages";
    if (n + 1 > limit)
        return td_api_refuse(&r->error, 400, "context_length_exceeded", param,
                             "the prompt is %llu tokens long; the limit is %llu tokens, prompt and "
                             "answer together",
                             (unsigned long long)n, (unsigned long long)limit);
    prompt->max_new = p->max_new;
    if (n + p->max_new <= limit) return TD_OK;
    if (p->max_new_given)
        return td_api_refuse(&r->error, 400, "context_length_exceeded", param,
                             "the prompt is %llu tokens long and up to %u more are wanted, %llu "
                             "together; the limit is %llu tokens",
                             (unsigned long long)n, p->max_new,
                             (unsigned long long)(n + p->max_new), (unsigned long long)limit);
    prompt->max_new = (uint32_t)(limit - n);
    return TD_OK;
}

/* Selections are large: few requests may ask for them at a time, and an answer that is kept until
 * its end has a bound. What is streamed is bounded by what the client may leave unread. */
static td_status check_topk(struct td_request *r) {
    enum { KEPT_BYTES_MAX = 128 << 20 };
    struct td_serve *s = r->s;
    const struct td_api_params *p = &r->answer.params;
    uint64_t most = s->config->router_max_topk_requests;
    if (!p->sampling.selections) return TD_OK;
    if (s->n_topk >= most) {
        (void)td_api_refuse(&r->error, 429, "overloaded", "return_indexer_topk",
                            "%u requests with return_indexer_topk are in flight, the limit is "
                            "%llu; try again later",
                            s->n_topk, (unsigned long long)most);
        r->error.retry_after_s = 1;
        return TD_BUSY;
    }
    uint64_t each = td_topk_token_bytes(td_fleet_selection_max(td_flow_fleet(s->flow)));
    uint64_t tokens = KEPT_BYTES_MAX / each / r->answer.n; /* of every choice */
    if (p->stream || p->max_new <= tokens) return TD_OK;
    if (p->max_new_given)
        return td_api_refuse(&r->error, 400, NULL, "return_indexer_topk",
                             "return_indexer_topk of up to %u tokens is too much for an answer "
                             "that is not streamed; expected at most %llu tokens, or stream",
                             p->max_new, (unsigned long long)tokens);
    for (uint32_t i = 0; i < r->prompts.n; i++)
        if (r->prompts.p[i].max_new > tokens) r->prompts.p[i].max_new = (uint32_t)tokens;
    return TD_OK;
}

/* Holds the number of choices against what can be in flight at a time. */
static td_status check_choices(struct td_request *r, const struct td_prompt *prompt) {
    struct td_serve *s = r->s;
    uint32_t n = r->answer.params.n;
    const struct td_fleet_need need = {(uint32_t)prompt->ids.n, prompt->max_new, 0};
    uint64_t most = td_fleet_choices(td_flow_fleet(s->flow), need, s->config->router_colocate);
    if (n == 1 || n <= most) return TD_OK;
    return td_api_refuse(&r->error, 400, NULL, "n",
                         "n is %u; at most %llu answers to a prompt of %zu tokens fit into a "
                         "worker at a time",
                         n, (unsigned long long)most, prompt->ids.n);
}

static td_status check_in_flight(struct td_request *r) {
    uint64_t most = r->s->config->router_max_requests;
    if (r->answer.n <= most) return TD_OK;
    return td_api_refuse(&r->error, 400, NULL, r->prompts.n > 1 ? "prompt" : "n",
                         "%u answers are wanted; at most %llu may be in flight", r->answer.n,
                         (unsigned long long)most);
}

static td_status check_ready(struct td_request *r) {
    const char *why = td_serve_not_ready(r->s);
    if (!why) return TD_OK;
    (void)td_api_refuse(&r->error, 503, "not_ready", NULL, "not ready: %s", why);
    r->error.retry_after_s = 1;
    return TD_INVALID;
}

td_status td_request_check(struct td_request *r) {
    TD_TRY(check_ready(r));
    for (uint32_t i = 0; i < r->prompts.n; i++) {
        TD_TRY(check_length(r, &r->prompts.p[i]));
        TD_TRY(check_choices(r, &r->prompts.p[i]));
    }
    TD_TRY(check_in_flight(r));
    return check_topk(r);
}
