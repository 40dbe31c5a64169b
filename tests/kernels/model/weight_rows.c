/* Writes every weight of a checkpoint as floats, for check_rows.py and check_names.py: a line
 * "name rows cols", then rows * cols little-endian fp32. The fingerprint goes to stderr. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/model.h"

static void put(const struct td_weight *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static void put(const struct td_weight *w, const char *fmt, ...) {
    if (w->format == TD_W_NONE) return;
    float *row = malloc(w->cols * sizeof *row);
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf(" %u %u\n", w->rows, w->cols);
    for (uint32_t r = 0; r < w->rows; r++) {
        td_weight_row(w, r, row);
        fwrite(row, sizeof *row, w->cols, stdout);
    }
    free(row);
}

static void put_hc(const struct td_hc_weights *w, const char *prefix, const char *what) {
    put(&w->fn, "%shc_%s_fn", prefix, what);
    put(&w->base, "%shc_%s_base", prefix, what);
    put(&w->scale, "%shc_%s_scale", prefix, what);
}

static void put_compressor(const struct td_compressor_weights *w, const char *base) {
    put(&w->ape, "%s.ape", base);
    put(&w->wkv, "%s.wkv.weight", base);
    put(&w->wgate, "%s.wgate.weight", base);
    put(&w->norm, "%s.norm.weight", base);
}

static void put_expert(const struct td_expert_weights *w, const char *base) {
    put(&w->w1, "%s.w1.weight", base);
    put(&w->w2, "%s.w2.weight", base);
    put(&w->w3, "%s.w3.weight", base);
}

static void put_layer(const struct td_layer_weights *w, uint32_t l, uint32_t experts) {
    char p[32], base[80];
    snprintf(p, sizeof p, "layers.%u.", l);
    put(&w->attn_norm, "%sattn_norm.weight", p);
    put(&w->ffn_norm, "%sffn_norm.weight", p);
    put_hc(&w->hc_attn, p, "attn");
    put_hc(&w->hc_ffn, p, "ffn");
    put(&w->wq_a, "%sattn.wq_a.weight", p);
    put(&w->q_norm, "%sattn.q_norm.weight", p);
    put(&w->wq_b, "%sattn.wq_b.weight", p);
    put(&w->wkv, "%sattn.wkv.weight", p);
    put(&w->kv_norm, "%sattn.kv_norm.weight", p);
    put(&w->sink, "%sattn.attn_sink", p);
    put(&w->wo_a, "%sattn.wo_a.weight", p);
    put(&w->wo_b, "%sattn.wo_b.weight", p);
    snprintf(base, sizeof base, "%sattn.compressor", p);
    put_compressor(&w->comp, base);
    put(&w->index_wq_b, "%sattn.indexer.wq_b.weight", p);
    put(&w->index_weights_proj, "%sattn.indexer.weights_proj.weight", p);
    snprintf(base, sizeof base, "%sattn.indexer.compressor", p);
    put_compressor(&w->index_comp, base);
    put(&w->gate, "%sffn.gate.weight", p);
    put(&w->gate_bias, "%sffn.gate.bias", p);
    snprintf(base, sizeof base, "%sffn.shared_experts", p);
    put_expert(&w->shared, base);
    for (uint32_t e = 0; e < experts; e++) {
        snprintf(base, sizeof base, "%sffn.experts.%u", p, e);
        put_expert(&w->experts[e], base);
    }
}

int main(int argc, char **argv) {
    struct td_model *m;
    struct td_error err;
    if (argc != 2) return 2;
    if (td_model_open(argv[1], &m, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    put(&m->embed, "embed.weight");
    put(&m->head, "head.weight");
    put(&m->norm, "norm.weight");
    put_hc(&m->hc_head, "", "head");
    for (uint32_t l = 0; l < m->config.layers; l++)
        put_layer(&m->layer[l], l, m->config.experts);
    fprintf(stderr, "fingerprint %016llx\n", (unsigned long long)m->fingerprint);
    td_model_close(m);
    return ferror(stdout) || fflush(stdout) ? 1 : 0;
}
