/* The spellings of every tensor name, as tables, and the rewriting by them. */
#include "kernels/model/names.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/safetensors.h"

struct word {
    enum td_name_group group;
    const char *official, *other;
};

/* A word stands for a whole stem: up to the end of the name or a dot. */
static const struct word top_words[] = {
    {TD_NAMES_OUTER, "embed", "embed_tokens"},
    {TD_NAMES_OUTER, "head", "lm_head"},
    {TD_NAMES_HC, "hc_head_fn", "hc_head.hc_fn"},
    {TD_NAMES_HC, "hc_head_base", "hc_head.hc_base"},
    {TD_NAMES_HC, "hc_head_scale", "hc_head.hc_scale"},
    {0, NULL, NULL},
};

static const struct word layer_words[] = {
    {TD_NAMES_OUTER, "attn_norm", "input_layernorm"},
    {TD_NAMES_OUTER, "ffn_norm", "post_attention_layernorm"},
    {TD_NAMES_HC, "hc_attn_fn", "attn_hc.fn"},
    {TD_NAMES_HC, "hc_attn_base", "attn_hc.base"},
    {TD_NAMES_HC, "hc_attn_scale", "attn_hc.scale"},
    {TD_NAMES_HC, "hc_ffn_fn", "ffn_hc.fn"},
    {TD_NAMES_HC, "hc_ffn_base", "ffn_hc.base"},
    {TD_NAMES_HC, "hc_ffn_scale", "ffn_hc.scale"},
    {0, NULL, NULL},
};

/* transformers puts the indexer below the compressor and its compressor's parts into it. */
static const struct word attention_words[] = {
    {TD_NAMES_ATTENTION, "attn_sink", "sinks"},
    {TD_NAMES_ATTENTION, "wq_a", "q_a_proj"},
    {TD_NAMES_ATTENTION, "q_norm", "q_a_norm"},
    {TD_NAMES_ATTENTION, "wq_b", "q_b_proj"},
    {TD_NAMES_ATTENTION, "wkv", "kv_proj"},
    {TD_NAMES_ATTENTION, "wo_a", "o_a_proj"},
    {TD_NAMES_ATTENTION, "wo_b", "o_b_proj"},
    {TD_NAMES_ATTENTION, "compressor.wkv", "compressor.kv_proj"},
    {TD_NAMES_ATTENTION, "compressor.wgate", "compressor.gate_proj"},
    {TD_NAMES_ATTENTION, "compressor.norm", "compressor.kv_norm"},
    {TD_NAMES_ATTENTION, "compressor.ape", "compressor.position_bias"},
    {TD_NAMES_ATTENTION, "indexer.compressor.wkv", "compressor.indexer.kv_proj"},
    {TD_NAMES_ATTENTION, "indexer.compressor.wgate", "compressor.indexer.gate_proj"},
    {TD_NAMES_ATTENTION, "indexer.compressor.norm", "compressor.indexer.kv_norm"},
    {TD_NAMES_ATTENTION, "indexer.compressor.ape", "compressor.indexer.position_bias"},
    {TD_NAMES_ATTENTION, "indexer.wq_b", "compressor.indexer.q_b_proj"},
    {TD_NAMES_ATTENTION, "indexer.wq_b", "compressor.indexer.wq_b"},
    {TD_NAMES_ATTENTION, "indexer.weights_proj", "compressor.indexer.weights_proj"},
    {0, NULL, NULL},
};

static const struct word ffn_words[] = {
    {TD_NAMES_BIAS, "gate.bias", "gate.e_score_correction_bias"},
    {TD_NAMES_IDS, "gate.tid2eid", "topk.tid2eid"},
    {0, NULL, NULL},
};

static const struct word expert_words[] = {
    {TD_NAMES_EXPERT, "w1", "gate_proj"},
    {TD_NAMES_EXPERT, "w2", "down_proj"},
    {TD_NAMES_EXPERT, "w3", "up_proj"},
    {0, NULL, NULL},
};

static const char scale_other[] = ".weight_scale_inv";

/* The name as read so far. */
struct rewriting {
    const char *at; /* what is left of the stored name */
    char *to;
    size_t n;
    int8_t style[TD_NAMES_GROUPS]; /* -1 not met, 0 official, 1 other */
};

static void put(struct rewriting *r, const char *s, size_t n) {
    if (n > TD_NAME_MAX - 1 - r->n) n = TD_NAME_MAX - 1 - r->n;
    memcpy(r->to + r->n, s, n);
    r->n += n;
    r->to[r->n] = '\0';
}

static void copy(struct rewriting *r, size_t n) {
    put(r, r->at, n);
    r->at += n;
}

static bool starts(const char *s, const char *with) {
    return strncmp(s, with, strlen(with)) == 0;
}

static bool stem_is(const char *s, const char *stem) {
    size_t n = strlen(stem);
    return strncmp(s, stem, n) == 0 && (s[n] == '\0' || s[n] == '.');
}

/* Puts the official word where `at` stands on a word of the table. */
static void rewrite(struct rewriting *r, const struct word *words) {
    for (const struct word *w = words; w->official; w++) {
        bool other = stem_is(r->at, w->other);
        if (!other && !stem_is(r->at, w->official)) continue;
        r->style[w->group] = other;
        put(r, w->official, strlen(w->official));
        r->at += strlen(other ? w->other : w->official);
        return;
    }
}

static size_t digits(const char *s) {
    return strspn(s, "0123456789");
}

static void rewrite_ffn(struct rewriting *r) {
    if (starts(r->at, "shared_experts.")) {
        copy(r, strlen("shared_experts."));
        rewrite(r, expert_words);
    } else if (starts(r->at, "experts.")) {
        copy(r, strlen("experts."));
        size_t n = digits(r->at);
        if (n > 0 && r->at[n] == '.') {
            copy(r, n + 1);
            rewrite(r, expert_words);
        } else if (stem_is(r->at, "gate_up_proj") || stem_is(r->at, "down_proj")) {
            r->style[TD_NAMES_EXPERT] = 1; /* stacked: taken apart when bound */
        }
    } else {
        rewrite(r, ffn_words);
    }
}

static void rewrite_layer(struct rewriting *r) {
    static const struct {
        const char *official, *other;
        bool attention;
    } modules[] = {{"attn.", "self_attn.", true}, {"ffn.", "mlp.", false}};
    for (size_t i = 0; i < 2; i++) {
        bool other = starts(r->at, modules[i].other);
        if (!other && !starts(r->at, modules[i].official)) continue;
        r->style[TD_NAMES_MODULE] = other;
        put(r, modules[i].official, strlen(modules[i].official));
        r->at += strlen(other ? modules[i].other : modules[i].official);
        if (modules[i].attention)
            rewrite(r, attention_words);
        else
            rewrite_ffn(r);
        return;
    }
    rewrite(r, layer_words);
}

static void rewrite_name(struct rewriting *r) {
    bool prefixed = starts(r->at, "model.");
    if (prefixed) r->at += strlen("model.");
    if (starts(r->at, "mtp.")) {
        copy(r, strlen(r->at));
        return;
    }
    size_t n = starts(r->at, "layers.") ? digits(r->at + strlen("layers.")) : 0;
    if (n > 0 && r->at[strlen("layers.") + n] == '.') {
        r->style[TD_NAMES_PREFIX] = prefixed;
        copy(r, strlen("layers.") + n + 1);
        rewrite_layer(r);
    } else {
        rewrite(r, top_words);
    }
    bool other = strcmp(r->at, scale_other) == 0;
    if (other || strcmp(r->at, ".scale") == 0) {
        r->style[TD_NAMES_SCALE] = other;
        put(r, ".scale", strlen(".scale"));
    } else {
        copy(r, strlen(r->at));
    }
}

td_status td_name_official(struct td_name_styles *styles, const char *path, const char *stored,
                           char ret[TD_NAME_MAX], struct td_error *err) {
    struct rewriting r = {.at = stored, .to = ret};
    memset(r.style, -1, sizeof r.style);
    ret[0] = '\0';
    rewrite_name(&r);
    for (int g = 0; g < TD_NAMES_GROUPS; g++) {
        if (r.style[g] < 0) continue;
        const char **seen = styles->seen[g];
        if (!seen[r.style[g]]) seen[r.style[g]] = stored;
        if (!seen[0] || !seen[1]) continue;
        char a[104], b[104];
        return td_fail(err, TD_FORMAT,
                       "%.100s: expected the names of one layout throughout, found %s beside %s",
                       path, td_name_text(seen[0], a), td_name_text(seen[1], b));
    }
    return TD_OK;
}

bool td_name_is_draft(const char *official, uint32_t layers, uint32_t drafts) {
    if (starts(official, "mtp.")) return true;
    if (!starts(official, "layers.")) return false;
    const char *at = official + strlen("layers.");
    size_t n = digits(at);
    if (n == 0 || n > 9 || at[n] != '.') return false;
    unsigned long layer = strtoul(at, NULL, 10);
    return layer >= layers && layer - layers < drafts;
}
