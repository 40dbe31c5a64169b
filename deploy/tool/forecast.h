/* What the model's shapes allow on given GPUs, as formulas: bytes a decode step reads, arithmetic
 * of a prompt, bytes of the reductions between ranks, and how a split of GPUs between prefill and
 * decode balances. Pure arithmetic over stated assumptions, so that it can be held against numbers
 * worked by hand; everything that comes from here is shown as predicted. Bytes, seconds, tokens, as
 * doubles. */
#ifndef TD_DEPLOY_TOOL_FORECAST_H
#define TD_DEPLOY_TOOL_FORECAST_H

#include <stdbool.h>
#include <stdint.h>

/* The numbers of a model, whole (not of a rank). */
struct td_forecast_model {
    uint32_t layers, csa_layers, hca_layers; /* the rest has the window alone */
    uint32_t hidden, heads, head_dim, window;
    uint32_t index_heads, index_dim, index_topk;
    uint32_t experts, experts_per_token;
    double dense_bytes;  /* what every step reads: all weights but embedding and routed experts */
    double whole_bytes;  /* of these, what each of several ranks reads whole */
    double expert_bytes; /* one routed expert of one layer */
    double parameters;   /* that each token of a prompt is multiplied with: no embedding, no head */
    double row_bytes, key_bytes; /* a stored row, an indexer key */
};

/* What is assumed of the hardware and of the load. */
struct td_forecast_rates {
    double gpu_bytes;      /* memory a GPU reads, per second */
    double prefill_tokens; /* prompt tokens a GPU of a prefill worker computes, per second */
    double floor_share;    /* how near decode comes to what its bytes allow, 0..1 */
    double output_tokens;  /* of a request */
    double link_bytes;     /* a rank receives in the reductions of a prompt's chunk, per second */
    double reduction_s;    /* one small reduction of a decode step */
};

/* How ranks hold the KV state of a sequence. */
enum td_forecast_kv { TD_FORECAST_KV_REPLICATED, TD_FORECAST_KV_SPLIT };

/* ---- decode ---- */

/* Different experts of a layer that `batch` tokens choose, each choosing evenly. */
double td_forecast_experts(const struct td_forecast_model *m, double batch);
/* KV state of one sequence of `tokens`: what is held (without open compressor state), and what one
 * decode step reads of it. */
double td_forecast_kv_held(const struct td_forecast_model *m, double tokens);
double td_forecast_kv_read(const struct td_forecast_model *m, double tokens);
/* All bytes of one step of `batch` sequences of `tokens`. */
double td_forecast_step_bytes(const struct td_forecast_model *m, double batch, double tokens);
/* What each of `ranks` reads of them. */
double td_forecast_rank_bytes(const struct td_forecast_model *m, double batch, double tokens,
                              uint32_t ranks, enum td_forecast_kv kv);
/* The least time of a step by those bytes. */
double td_forecast_step_floor(const struct td_forecast_model *m, const struct td_forecast_rates *r,
                              double batch, double tokens, uint32_t ranks, enum td_forecast_kv kv);

/* ---- prefill ---- */

/* FLOP of one prompt token, averaged over a prompt of `tokens`. */
struct td_forecast_flop {
    double weights, core, index; /* index: of the indexer's scores */
};
struct td_forecast_flop td_forecast_flop(const struct td_forecast_model *m, double tokens);

/* ---- reductions between ranks ---- */

/* Of one step or chunk: two per layer, of attention and of the experts. */
uint32_t td_forecast_reductions(const struct td_forecast_model *m);
/* Bytes of what one of them sums, over `rows` tokens in values of `value_bytes`. */
double td_forecast_reduced_bytes(const struct td_forecast_model *m, double rows,
                                 double value_bytes);
/* What a rank receives for one of them: when each sums a part and they exchange the parts, and when
 * each gathers what all others have and sums alone. */
double td_forecast_ring_bytes(double reduced, uint32_t ranks);
double td_forecast_gather_bytes(double reduced, uint32_t ranks);

/* ---- balance ---- */

/* GPU-seconds of one request of `tokens`. */
double td_forecast_prefill_cost(const struct td_forecast_rates *r, double tokens);
double td_forecast_decode_cost(const struct td_forecast_model *m, const struct td_forecast_rates *r,
                               double batch, double tokens, uint32_t ranks, enum td_forecast_kv kv);

struct td_forecast_balance {
    double prefill, decode; /* requests per second that the GPUs of each role can do */
    double goodput;         /* the lesser of the two */
    double share;           /* of what the same GPUs would do were both roles busy, 0..1 */
};
/* Of `prefill_gpus` and `decode_gpus` for requests that cost so many GPU-seconds in each role. */
struct td_forecast_balance td_forecast_balance(double prefill_gpus, double decode_gpus,
                                               double prefill_cost, double decode_cost);

#endif
