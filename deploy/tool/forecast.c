/* See forecast.h. */
#include "deploy/tool/forecast.h"

#include <math.h>

/* Tokens per entry of a layer of either kind. */
enum { CSA = 4, HCA = 128 };

static double least(double a, double b) {
    return a < b ? a : b;
}

/* ---- decode ---- */

double td_forecast_experts(const struct td_forecast_model *m, double batch) {
    double missed = 1 - (double)m->experts_per_token / m->experts;
    return m->experts * (1 - pow(missed, batch));
}

double td_forecast_kv_held(const struct td_forecast_model *m, double tokens) {
    return m->layers * (double)m->window * m->row_bytes +
           m->csa_layers * (tokens / CSA) * (m->row_bytes + m->key_bytes) +
           m->hca_layers * (tokens / HCA) * m->row_bytes;
}

/* Every layer reads its window; CSA all keys and the rows chosen by them; HCA all rows. */
double td_forecast_kv_read(const struct td_forecast_model *m, double tokens) {
    double entries = tokens / CSA;
    return m->layers * least(tokens, m->window) * m->row_bytes +
           m->csa_layers * (entries * m->key_bytes + least(entries, m->index_topk) * m->row_bytes) +
           m->hca_layers * (tokens / HCA) * m->row_bytes;
}

static double weight_bytes(const struct td_forecast_model *m, double batch) {
    return m->dense_bytes + m->layers * td_forecast_experts(m, batch) * m->expert_bytes;
}

double td_forecast_step_bytes(const struct td_forecast_model *m, double batch, double tokens) {
    return weight_bytes(m, batch) + batch * td_forecast_kv_read(m, tokens);
}

double td_forecast_rank_bytes(const struct td_forecast_model *m, double batch, double tokens,
                              uint32_t ranks, enum td_forecast_kv kv) {
    double read = batch * td_forecast_kv_read(m, tokens);
    double whole = ranks > 1 ? m->whole_bytes : 0;
    return (weight_bytes(m, batch) - whole) / ranks + whole +
           (kv == TD_FORECAST_KV_SPLIT ? read / ranks : read);
}

double td_forecast_step_floor(const struct td_forecast_model *m, const struct td_forecast_rates *r,
                              double batch, double tokens, uint32_t ranks, enum td_forecast_kv kv) {
    return td_forecast_rank_bytes(m, batch, tokens, ranks, kv) / r->gpu_bytes;
}

/* ---- prefill ---- */

struct td_forecast_flop td_forecast_flop(const struct td_forecast_model *m, double tokens) {
    /* A row meets every head twice (score, sum), a key every index head once; 2 FLOP a product. */
    double row = 4.0 * m->heads * m->head_dim, key = 2.0 * m->index_heads * m->index_dim;
    double window_only = m->layers - m->csa_layers - m->hca_layers;
    double visible = tokens / 2; /* on average */
    double rows = window_only * m->window +
                  m->csa_layers * (m->window + least(m->index_topk, tokens / CSA)) +
                  m->hca_layers * (m->window + visible / HCA);
    return (struct td_forecast_flop){.weights = 2 * m->parameters,
                                     .core = row * rows,
                                     .index = key * m->csa_layers * (visible / CSA)};
}

/* ---- reductions between ranks ---- */

uint32_t td_forecast_reductions(const struct td_forecast_model *m) {
    return 2 * m->layers;
}

double td_forecast_reduced_bytes(const struct td_forecast_model *m, double rows,
                                 double value_bytes) {
    return rows * m->hidden * value_bytes;
}

double td_forecast_ring_bytes(double reduced, uint32_t ranks) {
    return 2.0 * (ranks - 1) / ranks * reduced;
}

double td_forecast_gather_bytes(double reduced, uint32_t ranks) {
    return (ranks - 1) * reduced;
}

/* ---- balance ---- */

double td_forecast_prefill_cost(const struct td_forecast_rates *r, double tokens) {
    return tokens / r->prefill_tokens;
}

double td_forecast_decode_cost(const struct td_forecast_model *m, const struct td_forecast_rates *r,
                               double batch, double tokens, uint32_t ranks,
                               enum td_forecast_kv kv) {
    double step = td_forecast_step_floor(m, r, batch, tokens, ranks, kv) / r->floor_share;
    return r->output_tokens * step * ranks / batch;
}

struct td_forecast_balance td_forecast_balance(double prefill_gpus, double decode_gpus,
                                               double prefill_cost, double decode_cost) {
    struct td_forecast_balance b = {.prefill = prefill_gpus / prefill_cost,
                                    .decode = decode_gpus / decode_cost};
    b.goodput = least(b.prefill, b.decode);
    b.share = b.goodput * (prefill_cost + decode_cost) / (prefill_gpus + decode_gpus);
    return b;
}
