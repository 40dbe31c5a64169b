/* config.json: every value the engine relies on is read with a range, and every value that says
 * "this is another architecture" must say ours. */
#include "kernels/model/config.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/file.h"
#include "kernels/model/safetensors.h"

/* Old NVFP4 releases list every quantised linear in config.json. */
enum { MAX_CONFIG_BYTES = 64 << 20, PATH_BYTES = 4096 };

struct reader {
    const char *path;
    const json_t *obj;
    const char *section; /* "" or "rope_scaling." */
    bool reference;      /* the keys of the reference code's configuration */
    struct td_error *err;
};

/* The reference code's words; keys that are not here have the same name. */
static const struct {
    const char *key, *reference;
} reference_keys[] = {
    {"hidden_size", "dim"},
    {"moe_intermediate_size", "moe_inter_dim"},
    {"num_hidden_layers", "n_layers"},
    {"num_hash_layers", "n_hash_layers"},
    {"num_attention_heads", "n_heads"},
    {"num_experts_per_tok", "n_activated_experts"},
    {"scoring_func", "score_func"},
    {"routed_scaling_factor", "route_scale"},
    {"qk_rope_head_dim", "rope_head_dim"},
    {"rms_norm_eps", "norm_eps"},
    {"sliding_window", "window_size"},
    {"factor", "rope_factor"},
    {"original_max_position_embeddings", "original_seq_len"},
    {"max_position_embeddings", "max_seq_len"},
};

static const char *key_text(const struct reader *r, const char *key) {
    for (size_t i = 0; r->reference && i < sizeof reference_keys / sizeof *reference_keys; i++)
        if (strcmp(reference_keys[i].key, key) == 0) return reference_keys[i].reference;
    return key;
}

static const json_t *value_of(const struct reader *r, const char *key) {
    return json_object_get(r->obj, key_text(r, key));
}

static td_status wrong(const struct reader *r, const char *key, const char *expected,
                       const json_t *found) {
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    char shown[104];
    td_status s =
        td_fail(r->err, TD_FORMAT, "%.120s: %s%s: expected %.100s, found %s", r->path, r->section,
                key_text(r, key), expected, text ? td_name_text(text, shown) : "nothing");
    free(text);
    return s;
}

static td_status get_u32(const struct reader *r, const char *key, uint32_t lo, uint32_t hi,
                         uint32_t *ret) {
    const json_t *v = value_of(r, key);
    if (!json_is_integer(v) || json_integer_value(v) < (json_int_t)lo ||
        json_integer_value(v) > (json_int_t)hi) {
        char expected[64];
        snprintf(expected, sizeof expected, lo == hi ? "%u" : "an integer from %u to %u", lo, hi);
        return wrong(r, key, expected, v);
    }
    *ret = (uint32_t)json_integer_value(v);
    return TD_OK;
}

static td_status get_f32(const struct reader *r, const char *key, float lo, float hi, float *ret) {
    const json_t *v = value_of(r, key);
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= (double)lo) || !(x <= (double)hi)) {
        char expected[64];
        snprintf(expected, sizeof expected, "a number from %g to %g", (double)lo, (double)hi);
        return wrong(r, key, expected, v);
    }
    *ret = (float)x;
    return TD_OK;
}

/* What the reference code takes for granted it does not say. Sizes among it show in the tensors'
 * shapes. */
static bool unsaid(const struct reader *r, const char *key) {
    return r->reference && !value_of(r, key);
}

static td_status must_be(const struct reader *r, const char *key, uint32_t value) {
    uint32_t found;
    if (unsaid(r, key)) return TD_OK;
    return get_u32(r, key, value, value, &found);
}

static td_status must_say(const struct reader *r, const char *key, const char *text) {
    const json_t *v = value_of(r, key);
    const char *s = json_string_value(v);
    char expected[64];
    snprintf(expected, sizeof expected, "\"%s\"", text);
    if (unsaid(r, key)) return TD_OK;
    return s && strcmp(s, text) == 0 ? TD_OK : wrong(r, key, expected, v);
}

static td_status must_be_bool(const struct reader *r, const char *key, bool value) {
    const json_t *v = value_of(r, key);
    if (unsaid(r, key) || (json_is_boolean(v) && json_is_true(v) == value)) return TD_OK;
    return wrong(r, key, value ? "true" : "false", v);
}

static td_status read_fixed(const struct reader *r) {
    TD_TRY(must_say(r, "model_type", "deepseek_v4"));
    TD_TRY(must_be(r, "head_dim", TD_HEAD_DIM));
    TD_TRY(must_be(r, "qk_rope_head_dim", TD_ROPE_DIM));
    TD_TRY(must_be(r, "index_head_dim", TD_INDEX_DIM));
    TD_TRY(must_be(r, "sliding_window", TD_WINDOW));
    TD_TRY(must_be(r, "hc_mult", TD_HC_STREAMS));
    TD_TRY(must_be(r, "num_key_value_heads", 1));
    TD_TRY(must_say(r, "hidden_act", "silu"));
    TD_TRY(must_say(r, "scoring_func", "sqrtsoftplus"));
    TD_TRY(must_say(r, "topk_method", "noaux_tc"));
    TD_TRY(must_be_bool(r, "norm_topk_prob", true));
    TD_TRY(must_be_bool(r, "attention_bias", false));
    return must_be_bool(r, "tie_word_embeddings", false);
}

/* One ratio per layer; further ones (draft blocks) must be 0. */
static td_status read_kinds(const struct reader *r, struct td_model_config *c) {
    const json_t *v = value_of(r, "compress_ratios");
    char expected[64];
    snprintf(expected, sizeof expected, "an array of at least %u ratios", c->layers);
    if (!json_is_array(v) || json_array_size(v) < c->layers)
        return wrong(r, "compress_ratios", expected, v);
    if (json_array_size(v) > 2 * TD_MAX_LAYERS)
        return wrong(r, "compress_ratios", "an array of at most 256 ratios", v);
    c->draft_layers = (uint32_t)json_array_size(v) - c->layers;
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *e = json_array_get(v, i);
        json_int_t ratio = json_is_integer(e) ? json_integer_value(e) : -1;
        bool draft = i >= c->layers;
        if (ratio != 0 && (draft || (ratio != TD_CSA_RATIO && ratio != TD_HCA_RATIO)))
            return wrong(r, "compress_ratios",
                         draft ? "0 after the last layer" : "ratios 0, 4 or 128", e);
        if (!draft)
            c->kind[i] = ratio == 0              ? TD_LAYER_SWA
                         : ratio == TD_CSA_RATIO ? TD_LAYER_CSA
                                                 : TD_LAYER_HCA;
    }
    return TD_OK;
}

/* The reference code leaves the ids to the tokenizer, where they are the same in every release. */
static td_status get_id(const struct reader *r, const char *key, uint32_t usual, uint32_t vocab,
                        int32_t *ret) {
    uint32_t id = usual;
    if (!unsaid(r, key)) TD_TRY(get_u32(r, key, 0, vocab - 1, &id));
    *ret = (int32_t)id;
    return TD_OK;
}

static td_status read_sizes(const struct reader *r, struct td_model_config *c) {
    enum { MAX_DIM = 1 << 16 };
    TD_TRY(get_u32(r, "vocab_size", 2, 1 << 24, &c->vocab));
    TD_TRY(get_u32(r, "hidden_size", 1, MAX_DIM, &c->hidden));
    TD_TRY(get_u32(r, "num_hidden_layers", 1, TD_MAX_LAYERS, &c->layers));
    TD_TRY(get_u32(r, "num_attention_heads", 1, 1024, &c->heads));
    TD_TRY(get_u32(r, "q_lora_rank", 1, MAX_DIM, &c->q_lora_rank));
    TD_TRY(get_u32(r, "o_groups", 1, c->heads, &c->o_groups));
    TD_TRY(get_u32(r, "o_lora_rank", 1, MAX_DIM, &c->o_lora_rank));
    TD_TRY(get_u32(r, "index_n_heads", 1, 1024, &c->index_heads));
    TD_TRY(get_u32(r, "index_topk", 1, TD_MAX_INDEX_TOPK, &c->index_topk));
    TD_TRY(get_u32(r, "n_routed_experts", 1, TD_MAX_EXPERTS, &c->experts));
    uint32_t most = c->experts < TD_MAX_EXPERTS_PER_TOKEN ? c->experts : TD_MAX_EXPERTS_PER_TOKEN;
    TD_TRY(get_u32(r, "num_experts_per_tok", 1, most, &c->experts_per_token));
    TD_TRY(get_u32(r, "n_shared_experts", 1, 1, &c->shared_experts));
    TD_TRY(get_u32(r, "moe_intermediate_size", 1, MAX_DIM, &c->expert_inner));
    TD_TRY(get_u32(r, "num_hash_layers", 0, c->layers, &c->hash_layers));
    TD_TRY(get_u32(r, "hc_sinkhorn_iters", 1, 1000, &c->sinkhorn_iters));
    if (c->heads % c->o_groups != 0)
        return wrong(r, "o_groups", "a divisor of num_attention_heads", value_of(r, "o_groups"));
    TD_TRY(get_id(r, "bos_token_id", 0, c->vocab, &c->bos_id));
    return get_id(r, "eos_token_id", 1, c->vocab, &c->eos_id);
}

static td_status read_numbers(struct reader r, struct td_model_config *c) {
    TD_TRY(get_f32(&r, "routed_scaling_factor", 1e-6f, 1e6f, &c->routed_scale));
    TD_TRY(get_f32(&r, "swiglu_limit", 1e-6f, 1e6f, &c->swiglu_limit));
    TD_TRY(get_f32(&r, "rms_norm_eps", 1e-12f, 1.0f, &c->rms_eps));
    TD_TRY(get_f32(&r, "hc_eps", 1e-12f, 1.0f, &c->hc_eps));
    TD_TRY(get_f32(&r, "rope_theta", 1.0f, 1e12f, &c->rope_theta));
    TD_TRY(get_f32(&r, "compress_rope_theta", 1.0f, 1e12f, &c->compress_rope_theta));
    if (!r.reference) {
        const json_t *rope = json_object_get(r.obj, "rope_scaling");
        if (!json_is_object(rope)) return wrong(&r, "rope_scaling", "an object", rope);
        r.obj = rope;
        r.section = "rope_scaling.";
        TD_TRY(must_say(&r, "type", "yarn"));
    }
    TD_TRY(get_f32(&r, "factor", 1.0f, 1e6f, &c->yarn_factor));
    TD_TRY(get_f32(&r, "beta_fast", 1e-3f, 1e6f, &c->yarn_beta_fast));
    TD_TRY(get_f32(&r, "beta_slow", 1e-3f, 1e6f, &c->yarn_beta_slow));
    return get_u32(&r, "original_max_position_embeddings", 1, 1 << 30, &c->yarn_original_positions);
}

/* Without a limit of its own the reference code reaches as far as its rotary scaling. */
static td_status read_positions(const struct reader *r, struct td_model_config *c) {
    enum { MAX_POSITIONS = 1 << 24 };
    double reach = (double)c->yarn_original_positions * (double)c->yarn_factor;
    if (!unsaid(r, "max_position_embeddings"))
        return get_u32(r, "max_position_embeddings", 1, MAX_POSITIONS, &c->max_positions);
    c->max_positions = reach < MAX_POSITIONS ? (uint32_t)reach : MAX_POSITIONS;
    return TD_OK;
}

/* Keys of one kind decide which; keys of both are two configurations in one. */
static td_status read_style(struct reader *r) {
    bool reference = json_object_get(r->obj, "dim") != NULL;
    if (reference && json_object_get(r->obj, "hidden_size"))
        return td_fail(r->err, TD_FORMAT,
                       "%.200s: expected either the key hidden_size or the reference code's dim, "
                       "found both",
                       r->path);
    r->reference = reference;
    return TD_OK;
}

td_status td_model_config_parse(const char *path, const char *text, size_t size,
                                struct td_model_config *ret, struct td_error *err) {
    char shown[104];
    json_error_t je;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(err, TD_FORMAT, "%.150s: expected a JSON object, found: %s (line %d)", path,
                       root ? "another value" : td_name_text(je.text, shown), root ? 1 : je.line);
    }
    struct td_model_config c = {0};
    struct reader r = {.path = path, .obj = root, .section = "", .err = err};
    td_status st = read_style(&r);
    if (st == TD_OK) st = read_fixed(&r);
    if (st == TD_OK) st = read_sizes(&r, &c);
    if (st == TD_OK) st = read_kinds(&r, &c);
    if (st == TD_OK) st = read_numbers(r, &c);
    if (st == TD_OK) st = read_positions(&r, &c);
    json_decref(root);
    if (st == TD_OK) *ret = c;
    return st;
}

static td_status read_text(const char *dir, char *path, size_t cap, char **ret, size_t *ret_size,
                           struct td_error *err) {
    int n = snprintf(path, cap, "%s/config.json", dir);
    if (n < 0 || (size_t)n >= cap)
        return td_fail(err, TD_TOO_LONG, "%.200s...: the path is too long", dir);
    return td_file_read(path, MAX_CONFIG_BYTES, ret, ret_size, err);
}

td_status td_model_config_load(const char *dir, struct td_model_config *ret, struct td_error *err) {
    char path[PATH_BYTES], *text = NULL;
    size_t size;
    TD_TRY(read_text(dir, path, sizeof path, &text, &size, err));
    td_status st = td_model_config_parse(path, text, size, ret, err);
    free(text);
    return st;
}

td_status td_model_config_format(const char *dir, enum td_outline *ret, struct td_error *err) {
    char path[PATH_BYTES], *text = NULL;
    json_error_t je;
    size_t size;
    TD_TRY(read_text(dir, path, sizeof path, &text, &size, err));
    json_t *root = json_loadb(text, size, 0, &je);
    free(text);
    if (!root) return td_fail(err, TD_FORMAT, "%.200s: %s", path, je.text);
    json_t *q = json_object_get(root, "quantization_config");
    const char *dtype = json_string_value(json_object_get(root, "dtype"));
    char *said = json_is_object(q) ? json_dumps(q, 0) : NULL; /* null is none */
    *ret = said && strstr(said, "NVFP4")                  ? TD_OUTLINE_NVFP4
           : said || (dtype && strcmp(dtype, "fp8") == 0) ? TD_OUTLINE_FP4
                                                          : TD_OUTLINE_BF16;
    free(said);
    json_decref(root);
    return TD_OK;
}
