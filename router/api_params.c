/* See api_params.h. */
#include "router/api_params.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "router/api_grammar.h"
#include "router/api_messages.h"

/* The lists hold the whole API of this day; a name outside is a client's mistake. */
static const struct td_param common_params[] = {
    {"model", TD_PARAM_READ, NULL},
    {"stream", TD_PARAM_READ, NULL},
    {"stream_options", TD_PARAM_READ, NULL},
    {"temperature", TD_PARAM_READ, NULL},
    {"top_p", TD_PARAM_READ, NULL},
    {"top_k", TD_PARAM_READ, NULL},
    {"min_p", TD_PARAM_READ, NULL},
    {"seed", TD_PARAM_READ, NULL},
    {"stop", TD_PARAM_READ, NULL},
    {"max_tokens", TD_PARAM_READ, NULL},
    {"logprobs", TD_PARAM_READ, NULL},
    {"ignore_eos", TD_PARAM_READ, NULL},
    {"return_indexer_topk", TD_PARAM_READ, NULL},
    {"return_timings", TD_PARAM_READ, NULL},
    {"user", TD_PARAM_HARMLESS, NULL},
    {"metadata", TD_PARAM_HARMLESS, NULL},
    {"n", TD_PARAM_READ, NULL},
    {"frequency_penalty", TD_PARAM_READ, NULL},
    {"presence_penalty", TD_PARAM_READ, NULL},
    {"repetition_penalty", TD_PARAM_READ, NULL},
    {"logit_bias", TD_PARAM_READ, NULL},
    {"min_tokens", TD_PARAM_READ, NULL},
    {"response_format", TD_PARAM_READ, NULL},
    {"structured_outputs", TD_PARAM_READ, NULL},
    {"guided_json", TD_PARAM_READ, NULL},
    {"guided_regex", TD_PARAM_READ, NULL},
    {"guided_choice", TD_PARAM_READ, NULL},
    {"regex", TD_PARAM_READ, NULL},
    {"guided_grammar", TD_PARAM_REFUSED, NULL},
    {"guided_whitespace_pattern", TD_PARAM_REFUSED, NULL},
    {"structural_tag", TD_PARAM_REFUSED, NULL},
    {"ebnf", TD_PARAM_REFUSED, NULL},
    {"priority", TD_PARAM_READ, NULL},
    {0},
};

static const struct td_param chat_params[] = {
    {"messages", TD_PARAM_READ, NULL},
    {"max_completion_tokens", TD_PARAM_READ, NULL},
    {"top_logprobs", TD_PARAM_READ, NULL},
    {"reasoning_effort", TD_PARAM_READ, NULL},
    {"chat_template_kwargs", TD_PARAM_READ, NULL},
    {"prompt_cache_key", TD_PARAM_HARMLESS, NULL},
    {"prompt_cache_options", TD_PARAM_HARMLESS, NULL},
    {"prompt_cache_retention", TD_PARAM_HARMLESS, NULL},
    {"safety_identifier", TD_PARAM_HARMLESS, NULL},
    {"prediction", TD_PARAM_HARMLESS, NULL},
    {"parallel_tool_calls", TD_PARAM_READ, NULL},
    {"service_tier", TD_PARAM_WORD, "auto|default"},
    {"verbosity", TD_PARAM_WORD, "medium"},
    {"modalities", TD_PARAM_WORD, "text"},
    {"tools", TD_PARAM_READ, NULL},
    {"tool_choice", TD_PARAM_READ, NULL},
    {"function_call", TD_PARAM_WORD, "none|auto"},
    {"store", TD_PARAM_FALSE, NULL},
    {"functions", TD_PARAM_EMPTY, NULL},
    {"audio", TD_PARAM_REFUSED, NULL},
    {"moderation", TD_PARAM_REFUSED, NULL},
    {"web_search_options", TD_PARAM_REFUSED, NULL},
    {0},
};

static const struct td_param completion_params[] = {
    {"prompt", TD_PARAM_READ, NULL},
    {"best_of", TD_PARAM_READ, NULL},
    {"echo", TD_PARAM_READ, NULL},
    {"suffix", TD_PARAM_EMPTY, NULL},
    {0},
};

static td_status read_model(const struct td_fields *f, const struct td_api_defaults *d) {
    const char *model = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "model", &model, &n));
    if (!model) return td_field_wrong(f, "model", "the name of a model");
    if (n == strlen(d->model) && memcmp(model, d->model, n) == 0) return TD_OK;
    return td_api_refuse(f->e, 404, "model_not_found", "model",
                         "the model '%.100s' does not exist here; this server has '%s'", model,
                         d->model);
}

static td_status read_penalties(const struct td_fields *f, struct td_sampling *s) {
    double frequency = 0, presence = 0, repetition = 1;
    TD_TRY(td_field_num(f, "frequency_penalty", -2, 2, &frequency));
    TD_TRY(td_field_num(f, "presence_penalty", -2, 2, &presence));
    TD_TRY(td_field_num(f, "repetition_penalty", 0.01, 10, &repetition));
    s->frequency_penalty = (float)frequency;
    s->presence_penalty = (float)presence;
    s->repetition_penalty = repetition == 1 ? 0 : (float)repetition; /* 0: off */
    return TD_OK;
}

static td_status read_sampling(const struct td_fields *f, struct td_api_params *p) {
    double temperature = (double)p->sampling.temperature, top_p = (double)p->sampling.top_p;
    double min_p = 0;
    uint64_t top_k = p->sampling.top_k;
    TD_TRY(td_field_num(f, "temperature", 0, 2, &temperature));
    TD_TRY(td_field_num(f, "top_p", 0, 1, &top_p));
    TD_TRY(td_field_num(f, "min_p", 0, 1, &min_p));
    if (json_integer_value(td_field(f, "top_k")) == -1) /* vLLM's way to say: off */
        top_k = 0;
    else
        TD_TRY(td_field_u64(f, "top_k", 0, INT32_MAX, &top_k));
    TD_TRY(read_penalties(f, &p->sampling));
    TD_TRY(td_field_bool(f, "ignore_eos", &p->sampling.ignore_eos));
    TD_TRY(td_field_bool(f, "return_indexer_topk", &p->sampling.selections));
    const float least_top_p = 1e-6f; /* 0 means the most likely token alone, and so does this */
    p->sampling.temperature = (float)temperature;
    p->sampling.top_p = (float)top_p > least_top_p ? (float)top_p : least_top_p;
    p->sampling.min_p = (float)min_p < 1.0f ? (float)min_p : 0x1.fffffep-1f;
    p->sampling.top_k = (uint32_t)top_k;
    const json_t *seed = td_field(f, "seed");
    if (seed && !json_is_integer(seed)) return td_field_wrong(f, "seed", "an integer");
    if (seed) p->sampling.seed = (uint64_t)json_integer_value(seed);
    p->seed_given = seed != NULL;
    return TD_OK;
}

/* Choosing the best of more than are returned would throw away what was paid for. */
static td_status read_choices(const struct td_fields *f, struct td_api_params *p) {
    uint64_t n = 1;
    TD_TRY(td_field_u64(f, "n", 1, TD_CHOICES_MAX, &n));
    p->n = (uint32_t)n;
    if (p->kind != TD_API_COMPLETIONS) return TD_OK;
    uint64_t best_of = n;
    TD_TRY(td_field_u64(f, "best_of", 1, TD_CHOICES_MAX, &best_of));
    if (best_of == n) return TD_OK;
    return td_api_refuse(f->e, 400, NULL, "best_of",
                         "best_of: expected the same as n (%llu), found %llu; every answer is "
                         "returned",
                         (unsigned long long)n, (unsigned long long)best_of);
}

static td_status read_limits(const struct td_fields *f, struct td_api_params *p) {
    uint64_t max_new = 0, newer = 0;
    TD_TRY(td_field_u64(f, "max_tokens", 1, INT32_MAX, &max_new));
    if (p->kind == TD_API_CHAT)
        TD_TRY(td_field_u64(f, "max_completion_tokens", 1, INT32_MAX, &newer));
    if (max_new && newer && max_new != newer)
        return td_api_refuse(f->e, 400, NULL, "max_completion_tokens",
                             "max_completion_tokens (%llu) and max_tokens (%llu) contradict",
                             (unsigned long long)newer, (unsigned long long)max_new);
    if (newer) max_new = newer;
    if (max_new) p->max_new = (uint32_t)max_new;
    p->max_new_given = max_new != 0;
    uint64_t least = 0;
    TD_TRY(td_field_u64(f, "min_tokens", 0, p->max_new, &least));
    p->min_new = (uint32_t)least;
    return TD_OK;
}

td_status td_api_stops_check(const struct td_fields *f, const char *name) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if ((!json_is_array(v) && !json_is_string(v)) || n > TD_STOP_MAX)
        return td_api_refuse(f->e, 400, NULL, name,
                             "%s: expected a string or an array of up to %d strings, found %zu "
                             "%s",
                             name, TD_STOP_MAX, n,
                             json_is_array(v) ? "elements" : "value of another type");
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        size_t len = json_is_string(s) ? json_string_length(s) : 0;
        char found[40];
        if (!json_is_string(s) || len == 0 || len > TD_STOP_BYTES_MAX)
            return td_api_refuse(f->e, 400, NULL, name,
                                 "%s[%zu]: expected a string of 1 to %d bytes, found %s (%zu "
                                 "bytes)",
                                 name, i, TD_STOP_BYTES_MAX, td_request_found(s, found), len);
    }
    return TD_OK;
}

/* Whoever asks may step back, but not before others: it is everybody's queue. */
static td_status read_priority(const struct td_fields *f, struct td_api_params *p) {
    uint64_t priority = 0;
    TD_TRY(td_field_u64(f, "priority", 0, INT32_MAX, &priority));
    p->priority = (uint32_t)priority;
    return TD_OK;
}

static td_status read_stops(const struct td_fields *f, struct td_api_params *p) {
    TD_TRY(td_api_stops_check(f, "stop"));
    const json_t *v = td_field(f, "stop");
    size_t n = !v ? 0 : json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        p->stops[p->n_stops++] = (struct td_stop){json_string_value(s), json_string_length(s)};
    }
    return TD_OK;
}

static td_status read_logprobs(const struct td_fields *f, struct td_api_params *p) {
    uint64_t top = 0;
    if (p->kind == TD_API_COMPLETIONS) {
        if (!td_field(f, "logprobs")) return TD_OK;
        TD_TRY(td_field_u64(f, "logprobs", 0, TD_TOP_LOGPROBS_MAX, &top));
        p->sampling.logprobs = true;
    } else {
        TD_TRY(td_field_bool(f, "logprobs", &p->sampling.logprobs));
        TD_TRY(td_field_u64(f, "top_logprobs", 0, TD_TOP_LOGPROBS_MAX, &top));
        if (top && !p->sampling.logprobs)
            return td_api_refuse(f->e, 400, NULL, "top_logprobs",
                                 "top_logprobs: expected logprobs to be true, found it is not");
    }
    p->sampling.top_logprobs = (uint32_t)top;
    return TD_OK;
}

static td_status read_stream(const struct td_fields *f, struct td_api_params *p) {
    static const struct td_param known[] = {
        {"include_usage", TD_PARAM_READ, NULL}, {"include_obfuscation", TD_PARAM_FALSE, NULL}, {0}};
    const json_t *options = NULL;
    TD_TRY(td_field_bool(f, "stream", &p->stream));
    TD_TRY(td_field_bool(f, "return_timings", &p->timings));
    TD_TRY(td_field_object(f, "stream_options", &options));
    if (!options) return TD_OK;
    struct td_fields o = {options, "stream_options.", f->e};
    if (!p->stream)
        return td_api_refuse(f->e, 400, NULL, "stream_options",
                             "stream_options: expected stream to be true, found it is not");
    TD_TRY(td_fields_known(&o, known, NULL));
    return td_field_bool(&o, "include_usage", &p->include_usage);
}

/* What a word means to the model is the checkpoint's matter (td_chat_effort_table). */
static td_status read_effort(const struct td_fields *f, int *ret_thinking,
                             enum td_chat_effort *ret) {
    static const struct {
        const char *word;
        int thinking;
        enum td_chat_effort effort;
    } words[] = {
        {"none", 0, TD_EFFORT_DEFAULT}, {"minimal", 1, TD_EFFORT_LOW}, {"low", 1, TD_EFFORT_LOW},
        {"medium", 1, TD_EFFORT_LOW},   {"high", 1, TD_EFFORT_HIGH},   {"xhigh", 1, TD_EFFORT_MAX},
        {"max", 1, TD_EFFORT_MAX},
    };
    const char *word = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "reasoning_effort", &word, &n));
    if (!word) return TD_OK;
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(word, words[i].word) == 0) {
            *ret_thinking = words[i].thinking;
            *ret = words[i].effort;
            return TD_OK;
        }
    return td_field_wrong(f, "reasoning_effort", "none, minimal, low, medium, high, xhigh or max");
}

static td_status read_mode(const struct td_fields *f, struct td_api_params *p) {
    static const struct td_param known[] = {{"thinking", TD_PARAM_READ, NULL}, {0}};
    const json_t *kwargs = NULL;
    int effort = -1;
    TD_TRY(read_effort(f, &effort, &p->effort));
    if (effort >= 0) p->thinking = effort;
    TD_TRY(td_field_object(f, "chat_template_kwargs", &kwargs));
    if (!kwargs) return TD_OK;
    struct td_fields k = {kwargs, "chat_template_kwargs.", f->e};
    TD_TRY(td_fields_known(&k, known, NULL));
    if (!td_field(&k, "thinking")) return TD_OK;
    TD_TRY(td_field_bool(&k, "thinking", &p->thinking));
    if (effort >= 0 && p->thinking != (effort != 0))
        return td_api_refuse(f->e, 400, NULL, "chat_template_kwargs.thinking",
                             "chat_template_kwargs.thinking and reasoning_effort contradict");
    return TD_OK;
}

static td_status read_echo(const struct td_fields *f, struct td_api_params *p) {
    TD_TRY(td_field_bool(f, "echo", &p->echo));
    if (!p->echo || !p->sampling.logprobs) return TD_OK;
    return td_api_refuse(f->e, 400, "unsupported_value", "echo",
                         "echo: logprobs of the prompt need logits of all its rows, and a worker "
                         "computes those of the last one; expected echo or logprobs, found both");
}

td_status td_api_params_read(const json_t *root, enum td_api_kind kind,
                             const struct td_api_defaults *d, struct td_api_params *p,
                             struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    *p = (struct td_api_params){
        .kind = kind,
        .thinking = kind == TD_API_CHAT && d->thinking,
        .efforts = d->efforts,
        .max_new = d->max_new,
        .sampling = {.temperature = d->temperature, .top_p = d->top_p, .top_k = d->top_k},
    };
    TD_TRY(
        td_fields_known(&f, common_params, kind == TD_API_CHAT ? chat_params : completion_params));
    TD_TRY(read_model(&f, d));
    TD_TRY(read_sampling(&f, p));
    TD_TRY(read_choices(&f, p));
    TD_TRY(read_limits(&f, p));
    TD_TRY(read_priority(&f, p));
    TD_TRY(read_stops(&f, p));
    TD_TRY(read_logprobs(&f, p));
    TD_TRY(read_stream(&f, p));
    if (kind == TD_API_CHAT) TD_TRY(td_api_tools_check(&f, p));
    TD_TRY(td_api_form_check(&f, p));
    return kind == TD_API_CHAT ? read_mode(&f, p) : read_echo(&f, p);
}

td_status td_api_defaults_load(struct td_api_defaults *d, const char *dir, struct td_error *err) {
    char path[PATH_MAX];
    struct td_api_error e = {0};
    json_error_t je;
    d->temperature = d->top_p = 1.0f;
    d->top_k = 0;
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    if (access(path, F_OK) != 0) return TD_OK;
    json_t *root = json_load_file(path, 0, &je);
    if (!root) return td_fail(err, TD_FORMAT, "%s: %s (line %d)", path, je.text, je.line);
    struct td_fields f = {root, "", &e};
    bool sample = true;
    double temperature = 1, top_p = 1;
    uint64_t top_k = 0;
    td_status st;
    TD_TRY_GOTO(td_field_bool(&f, "do_sample", &sample), drop_root);
    TD_TRY_GOTO(td_field_num(&f, "temperature", 0, 2, &temperature), drop_root);
    TD_TRY_GOTO(td_field_num(&f, "top_p", 1e-6, 1, &top_p), drop_root);
    TD_TRY_GOTO(td_field_u64(&f, "top_k", 0, INT32_MAX, &top_k), drop_root);
    d->temperature = sample ? (float)temperature : 0.0f;
    d->top_p = (float)top_p;
    d->top_k = (uint32_t)top_k;
drop_root:
    json_decref(root);
    return st == TD_OK ? TD_OK : td_fail(err, TD_FORMAT, "%s: %s", path, e.message);
}
