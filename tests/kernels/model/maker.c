/* The tensor list below is written from the checkpoint's description, not from the loader. */
#include "tests/kernels/model/maker.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HIDDEN = 64,
    Q_LORA = 32,
    HEADS = 2,
    GROUPS = 2,
    O_LORA = 16,
    INDEX_HEADS = 2,
    EXPERTS = 2,
    PER_TOKEN = 1,
    INNER = 32,
    VOCAB = 8,
    LAYERS = 3
};

static const char config_text[] =
    "{\"model_type\": \"deepseek_v4\", \"attention_bias\": false, \"bos_token_id\": 0,\n"
    "\"eos_token_id\": 1, \"compress_ratios\": [0, 4, 128, 0], \"compress_rope_theta\": 160000,\n"
    "\"hc_eps\": 1e-06, \"hc_mult\": 4, \"hc_sinkhorn_iters\": 20, \"head_dim\": 512,\n"
    "\"hidden_act\": \"silu\", \"hidden_size\": 64, \"index_head_dim\": 128,\n"
    "\"index_n_heads\": 2, \"index_topk\": 16, \"max_position_embeddings\": 4096,\n"
    "\"moe_intermediate_size\": 32, \"n_routed_experts\": 2, \"n_shared_experts\": 1,\n"
    "\"norm_topk_prob\": true, \"num_attention_heads\": 2, \"num_experts_per_tok\": 1,\n"
    "\"num_hash_layers\": 1, \"num_hidden_layers\": 3, \"num_key_value_heads\": 1,\n"
    "\"o_groups\": 2, \"o_lora_rank\": 16, \"q_lora_rank\": 32, \"qk_rope_head_dim\": 64,\n"
    "\"rms_norm_eps\": 1e-06, \"rope_scaling\": {\"beta_fast\": 32, \"beta_slow\": 1,\n"
    "\"factor\": 16, \"original_max_position_embeddings\": 65536, \"type\": \"yarn\"},\n"
    "\"rope_theta\": 10000, \"routed_scaling_factor\": 1.5, \"scoring_func\": \"sqrtsoftplus\",\n"
    "\"sliding_window\": 128, \"swiglu_limit\": 10.0, \"tie_word_embeddings\": false,\n"
    "\"topk_method\": \"noaux_tc\", \"vocab_size\": 8}\n";

static size_t unit(const char *dtype) {
    return strcmp(dtype, "I64") == 0    ? 8
           : strcmp(dtype, "F32") == 0  ? 4
           : strcmp(dtype, "BF16") == 0 ? 2
                                        : 1;
}

struct maker_tensor *maker_add(struct maker *m, const char *name, const char *dtype, uint32_t rank,
                               const uint64_t *shape, size_t bytes) {
    assert(m->n < sizeof m->t / sizeof *m->t);
    struct maker_tensor *t = &m->t[m->n++];
    *t = (struct maker_tensor){.dtype = dtype, .rank = rank};
    snprintf(t->name, sizeof t->name, "%s", name);
    memcpy(t->shape, shape, rank * sizeof *shape);
    t->begin = m->bytes;
    t->end = m->bytes += bytes;
    m->data = realloc(m->data, m->bytes + 1);
    memset(m->data + t->begin, 0, bytes);
    return t;
}

/* rows == 0: a vector; cols == 0 too: a scalar. Bytes are 1..100: no NaN in any format used. */
static struct maker_tensor *put(struct maker *m, const char *dtype, uint64_t rows, uint64_t cols,
                                const char *fmt, ...) __attribute__((format(printf, 5, 6)));
static struct maker_tensor *put(struct maker *m, const char *dtype, uint64_t rows, uint64_t cols,
                                const char *fmt, ...) {
    char name[96];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    uint64_t shape[2] = {rows ? rows : cols, cols};
    uint32_t rank = rows ? 2 : cols ? 1 : 0;
    size_t n = (rows ? rows : 1) * (cols ? cols : 1) * unit(dtype);
    struct maker_tensor *t = maker_add(m, name, dtype, rank, shape, n);
    bool ids = strcmp(dtype, "I64") == 0;
    for (size_t i = 0; i < n; i++)
        m->data[t->begin + i] =
            (uint8_t)(ids ? (i % 8 == 0 ? i / 8 % EXPERTS : 0) : 1 + (i * 37 + m->n * 11) % 100);
    return t;
}

static void put_linear(struct maker *m, enum maker_kind kind, bool expert, uint64_t rows,
                       uint64_t cols, const char *base) {
    if (kind == MAKER_BF16) {
        put(m, "BF16", rows, cols, "%s.weight", base);
    } else if (!expert) {
        put(m, "F8_E4M3", rows, cols, "%s.weight", base);
        put(m, "F8_E8M0", (rows + 127) / 128, (cols + 127) / 128, "%s.scale", base);
    } else if (kind == MAKER_FP8FP4) {
        put(m, "I8", rows, cols / 2, "%s.weight", base);
        put(m, "F8_E8M0", rows, cols / 32, "%s.scale", base);
    } else {
        float one = 1.0f;
        put(m, "U8", rows, cols / 2, "%s.weight", base);
        put(m, "F8_E4M3", rows, cols / 16, "%s.weight_scale", base);
        const struct maker_tensor *s2 = put(m, "F32", 0, 0, "%s.weight_scale_2", base);
        const struct maker_tensor *in = put(m, "F32", 0, 0, "%s.input_scale", base);
        memcpy(m->data + s2->begin, &one, 4);
        memcpy(m->data + in->begin, &one, 4);
    }
}

static void put_hc(struct maker *m, const char *base, uint64_t rows, uint64_t scales) {
    put(m, "F32", rows, 4 * HIDDEN, "%s_fn", base);
    put(m, "F32", 0, rows, "%s_base", base);
    put(m, "F32", 0, scales, "%s_scale", base);
}

static void put_compressor(struct maker *m, const char *base, uint64_t ratio, uint64_t width,
                           uint64_t d) {
    put(m, "F32", ratio, width, "%s.ape", base);
    put(m, "BF16", width, HIDDEN, "%s.wkv.weight", base);
    put(m, "BF16", width, HIDDEN, "%s.wgate.weight", base);
    put(m, "BF16", 0, d, "%s.norm.weight", base);
}

static void put_layer(struct maker *m, enum maker_kind kind, int l) {
    char b[64];
#define NAME(...) (snprintf(b, sizeof b, __VA_ARGS__), b)
    put(m, "BF16", 0, HIDDEN, "layers.%d.attn_norm.weight", l);
    put(m, "BF16", 0, HIDDEN, "layers.%d.ffn_norm.weight", l);
    put_hc(m, NAME("layers.%d.hc_attn", l), 24, 3);
    put_hc(m, NAME("layers.%d.hc_ffn", l), 24, 3);
    put(m, "F32", 0, HEADS, "layers.%d.attn.attn_sink", l);
    put_linear(m, kind, false, Q_LORA, HIDDEN, NAME("layers.%d.attn.wq_a", l));
    put(m, "BF16", 0, Q_LORA, "layers.%d.attn.q_norm.weight", l);
    put_linear(m, kind, false, HEADS * 512, Q_LORA, NAME("layers.%d.attn.wq_b", l));
    put_linear(m, kind, false, 512, HIDDEN, NAME("layers.%d.attn.wkv", l));
    put(m, "BF16", 0, 512, "layers.%d.attn.kv_norm.weight", l);
    put_linear(m, kind, false, GROUPS * O_LORA, HEADS / GROUPS * 512,
               NAME("layers.%d.attn.wo_a", l));
    put_linear(m, kind, false, HIDDEN, GROUPS * O_LORA, NAME("layers.%d.attn.wo_b", l));
    if (l == 1) {
        put_compressor(m, NAME("layers.%d.attn.compressor", l), 4, 1024, 512);
        put_compressor(m, NAME("layers.%d.attn.indexer.compressor", l), 4, 256, 128);
        put_linear(m, kind, false, INDEX_HEADS * 128, Q_LORA,
                   NAME("layers.%d.attn.indexer.wq_b", l));
        put(m, "BF16", INDEX_HEADS, HIDDEN, "layers.%d.attn.indexer.weights_proj.weight", l);
    } else if (l == 2) {
        put_compressor(m, NAME("layers.%d.attn.compressor", l), 128, 512, 512);
    }
    put(m, "BF16", EXPERTS, HIDDEN, "layers.%d.ffn.gate.weight", l);
    if (l == 0)
        put(m, "I64", VOCAB, PER_TOKEN, "layers.%d.ffn.gate.tid2eid", l);
    else
        put(m, "F32", 0, EXPERTS, "layers.%d.ffn.gate.bias", l);
    for (int e = -1; e < EXPERTS; e++) {
        char at[48];
        snprintf(at, sizeof at, e < 0 ? "layers.%d.ffn.shared_experts" : "layers.%d.ffn.experts.%d",
                 l, e);
        put_linear(m, kind, e >= 0, INNER, HIDDEN, NAME("%s.w1", at));
        put_linear(m, kind, e >= 0, HIDDEN, INNER, NAME("%s.w2", at));
        put_linear(m, kind, e >= 0, INNER, HIDDEN, NAME("%s.w3", at));
    }
#undef NAME
}

void maker_init(struct maker *m, enum maker_kind kind) {
    *m = (struct maker){0};
    snprintf(m->dir, sizeof m->dir, "/tmp/tandem-model-XXXXXX");
    if (!mkdtemp(m->dir)) {
        perror("mkdtemp");
        exit(1);
    }
    put(m, "BF16", VOCAB, HIDDEN, "embed.weight");
    put(m, "BF16", VOCAB, HIDDEN, "head.weight");
    put(m, "BF16", 0, HIDDEN, "norm.weight");
    put_hc(m, "hc_head", 4, 1);
    for (int l = 0; l < LAYERS; l++)
        put_layer(m, kind, l);
}

void maker_finish(struct maker *m) {
    static const char *const files[] = {"config.json", "model.safetensors", "a.safetensors",
                                        "b.safetensors", "model.safetensors.index.json"};
    char path[160];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", m->dir, files[i]);
        unlink(path);
    }
    rmdir(m->dir);
    free(m->data);
}

struct maker_tensor *maker_find(struct maker *m, const char *name) {
    for (size_t i = 0; i < m->n; i++)
        if (strcmp(m->t[i].name, name) == 0) return &m->t[i];
    fprintf(stderr, "the test asks for an unknown tensor %s\n", name);
    exit(1);
}

void maker_remove(struct maker *m, const char *name) {
    struct maker_tensor *t = maker_find(m, name);
    memmove(t, t + 1, (size_t)(m->t + m->n - (t + 1)) * sizeof *t);
    m->n--;
}

char *maker_header(const struct maker *m, size_t first, size_t n) {
    size_t cap = 64 + n * 256, at = 0;
    char *s = malloc(cap);
    at += (size_t)snprintf(s, cap, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = first; i < first + n; i++) {
        const struct maker_tensor *t = &m->t[i];
        at += (size_t)snprintf(s + at, cap - at, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name,
                               t->dtype);
        for (uint32_t k = 0; k < t->rank; k++)
            at += (size_t)snprintf(s + at, cap - at, "%s%llu", k ? "," : "",
                                   (unsigned long long)t->shape[k]);
        at += (size_t)snprintf(s + at, cap - at, "],\"data_offsets\":[%zu,%zu]}",
                               t->begin - m->t[first].begin, t->end - m->t[first].begin);
    }
    snprintf(s + at, cap - at, "}");
    return s;
}

void maker_write_file(const struct maker *m, const char *name, const char *header, size_t header_n,
                      int64_t length, const void *data, size_t bytes) {
    char path[160];
    uint64_t n = length < 0 ? header_n : (uint64_t)length;
    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(&n, 8, 1, f) != 1 || fwrite(header, 1, header_n, f) != header_n ||
        fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

void maker_write_text(const struct maker *m, const char *name, const char *text) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

/* `text` with the first `from` replaced (heap); a missing `from` is a mistake in the test. */
static char *replaced(const char *text, const char *from, const char *to) {
    if (!from) return strdup(text);
    const char *at = strstr(text, from);
    if (!at) {
        fprintf(stderr, "the test replaces '%s', which is not there\n", from);
        exit(1);
    }
    size_t cap = strlen(text) + strlen(to) + 1;
    char *s = malloc(cap);
    snprintf(s, cap, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return s;
}

void maker_write_config(const struct maker *m, const char *from, const char *to) {
    char *s = replaced(config_text, from, to);
    maker_write_text(m, "config.json", s);
    free(s);
}

void maker_write(const struct maker *m) {
    char *h = maker_header(m, 0, m->n);
    maker_write_config(m, NULL, NULL);
    maker_write_file(m, "model.safetensors", h, strlen(h), -1, m->data, m->bytes);
    free(h);
}

void maker_write_shards(const struct maker *m, const char *from, const char *to) {
    size_t half = m->n / 2, cut = m->t[half].begin, cap = 64 + m->n * 160;
    size_t at = 0;
    char *a = maker_header(m, 0, half), *b = maker_header(m, half, m->n - half);
    char *index = malloc(cap);
    maker_write_config(m, NULL, NULL);
    maker_write_file(m, "a.safetensors", a, strlen(a), -1, m->data, cut);
    maker_write_file(m, "b.safetensors", b, strlen(b), -1, m->data + cut, m->bytes - cut);
    at += (size_t)snprintf(index, cap, "{\"metadata\":{\"total_size\":%zu},\"weight_map\":{",
                           m->bytes);
    for (size_t i = 0; i < m->n; i++)
        at += (size_t)snprintf(index + at, cap - at, "%s\"%s\":\"%c.safetensors\"", i ? "," : "",
                               m->t[i].name, i < half ? 'a' : 'b');
    snprintf(index + at, cap - at, "}}");
    char *s = replaced(index, from, to);
    maker_write_text(m, "model.safetensors.index.json", s);
    free(s);
    free(index);
    free(a);
    free(b);
}
