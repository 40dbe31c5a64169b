/* A whole small model: dtypes, shapes, scales and names of every tensor, and each row decoded.
 *
 * The input is the header's text, then optionally a NUL and bytes with which the data area is
 * filled over and over: so that a short input describes a file of 1 MiB. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/model.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

enum { DATA_BYTES = 1 << 20, MAX_HEADER = 1 << 17 };

static const char config_text[] =
    "{\"dim\": 32, \"moe_inter_dim\": 32, \"n_layers\": 2, \"n_hash_layers\": 1, \"n_heads\": 1,"
    "\"n_activated_experts\": 1, \"route_scale\": 1.5, \"q_lora_rank\": 32, \"norm_eps\": 1e-6,"
    "\"o_groups\": 1, \"o_lora_rank\": 32, \"original_seq_len\": 4096, \"rope_factor\": 4,"
    "\"beta_fast\": 32, \"beta_slow\": 1, \"vocab_size\": 2, \"index_n_heads\": 1,"
    "\"index_topk\": 4, \"n_routed_experts\": 1, \"n_shared_experts\": 1, \"swiglu_limit\": 10,"
    "\"hc_sinkhorn_iters\": 20, \"hc_eps\": 1e-6, \"rope_theta\": 1e4,"
    "\"compress_rope_theta\": 16e4, \"compress_ratios\": [4, 128, 0]}";

static void fill(uint8_t *to, size_t n, const uint8_t *with, size_t with_n) {
    if (with_n == 0) {
        memset(to, 0, n);
        return;
    }
    size_t have = with_n < n ? with_n : n;
    memcpy(to, with, have);
    for (; have < n; have *= 2)
        memcpy(to + have, to, have < n - have ? have : n - have);
}

static void decode(const struct td_weight *w, bool scales_only) {
    float row[8192];
    PROMISE(w->cols <= sizeof row / sizeof *row);
    if (w->format == TD_W_NONE) return;
    for (uint32_t r = 0; r<w->rows; r += w->rows> 1 ? w->rows - 1 : 1) {
        td_weight_row(w, r, row);
        if (!scales_only) continue;
        for (uint32_t c = 0; c < w->cols; c++)
            PROMISE(!isnan(row[c]));
    }
}

static void decode_model(const struct td_model *m) {
    decode(&m->embed, false);
    decode(&m->head, false);
    decode(&m->norm, false);
    for (uint32_t l = 0; l < m->config.layers; l++) {
        const struct td_layer_weights *w = &m->layer[l];
        const struct td_weight *all[] = {
            &w->wq_a,          &w->wq_b,       &w->wkv,       &w->wo_a,          &w->wo_b,
            &w->shared.w1,     &w->shared.w2,  &w->shared.w3, &w->experts[0].w1, &w->experts[0].w2,
            &w->experts[0].w3, &w->index_wq_b, &w->comp.wkv,  &w->comp.ape,      &w->index_comp.ape,
            &w->hc_attn.fn};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            decode(all[i], all[i]->format >= TD_W_FP8_BLOCK && all[i]->format != TD_W_NVFP4);
        for (uint32_t v = 0; w->tid2eid && v < m->config.vocab; v++)
            PROMISE(w->tid2eid[v] == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct td_model_config config;
    struct td_model *m;
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t header = nul ? (size_t)(nul - data) : size, total = 8 + header + DATA_BYTES;
    td_fuzz_accepted = 0;
    if (header > MAX_HEADER) return 0;
    if (!config.layers)
        PROMISE(td_model_config_parse("config", config_text, sizeof config_text - 1, &config,
                                      &td_fuzz_error) == TD_OK);
    uint8_t *file = malloc(total);
    PROMISE(file);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(header >> 8 * i);
    if (header) memcpy(file + 8, data, header);
    fill(file + 8 + header, DATA_BYTES, nul ? nul + 1 : NULL, nul ? size - header - 1 : 0);
    td_status st = td_model_parse("input", &config, file, total, &m, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st == TD_OK) {
        decode_model(m);
        td_model_close(m);
    } else {
        PROMISE(st == TD_FORMAT && td_fuzz_error.text[0]);
    }
    free(file);
    return 0;
}
