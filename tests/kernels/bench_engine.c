/* Tokens per second of the engine: prefill at 1K, 4.5K and 16K tokens, and single-stream decode,
 * each as a share of what the same machine reaches in the same run: prefill of its fp32
 * multiply-add rate, decode of its bandwidth over a working set as large as the weights.
 *
 * Usage: bench_engine MODEL_DIR [threads] [chunk]. Prints wall time and, because benchmarks share
 * their machine, the processor time of all threads per token. Not a test: nothing is asserted. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "common/base/clock.h"
#include "kernels/engine.h"
#include "tests/kernels/machine.h"

enum { MAX_TOKENS = 16384 + 256, PAGES = (MAX_TOKENS + 255) / 256, DECODE = 128 };

static struct td_engine *engine;
static uint32_t pages[PAGES], chunk;
static double limit_gflops, limit_gbs;
static int32_t ids[MAX_TOKENS];

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int step(uint32_t pos, uint32_t n, bool logits) {
    struct td_error err;
    struct td_run run = {
        .pos = pos, .n = n, .ids = ids + pos, .pages = pages, .want_logits = logits};
    const float *out;
    if (td_engine_step(engine, &run, 1, &out, NULL, &err) == TD_OK) return 0;
    fprintf(stderr, "bench_engine: %s\n", err.text);
    return 1;
}

/* Weights a token is multiplied with: all linears, the chosen experts, no embedding. The head is
 * left out: prefill computes it once a prompt. */
static double weights_per_token(const struct td_model_config *c) {
    double h = c->hidden, n = 0, heads = c->heads * (double)TD_HEAD_DIM;
    for (uint32_t i = 0; i < c->layers; i++) {
        n += 2 * 24 * 4 * h + c->q_lora_rank * (h + heads) + TD_HEAD_DIM * h;
        n += c->o_lora_rank * heads + h * c->o_groups * c->o_lora_rank;
        n += c->experts * h + 3.0 * (c->experts_per_token + c->shared_experts) * c->expert_inner * h;
        if (c->kind[i] == TD_LAYER_HCA) n += 2 * TD_KV_HCA_STATE_DIM * h;
        if (c->kind[i] == TD_LAYER_CSA)
            n += 2 * (TD_KV_CSA_STATE_DIM + TD_KV_INDEX_STATE_DIM) * h + c->index_heads * h +
                 c->index_heads * (double)TD_INDEX_DIM * c->q_lora_rank;
    }
    return n;
}

/* Multiply-adds of attention and indexer for the token at position t. */
static double pairs_at(const struct td_model_config *c, uint32_t topk, double t) {
    double n = 0, window = t < TD_WINDOW ? t : TD_WINDOW;
    for (uint32_t i = 0; i < c->layers; i++) {
        double rows = window;
        if (c->kind[i] == TD_LAYER_HCA) rows += t / TD_HCA_RATIO;
        if (c->kind[i] == TD_LAYER_CSA) {
            double seen = t / TD_CSA_RATIO;
            rows += seen < topk ? seen : topk;
            n += c->index_heads * (double)TD_INDEX_DIM * seen;
        }
        n += 2.0 * c->heads * TD_HEAD_DIM * rows;
    }
    return n;
}

static void print_shares(const struct td_model_config *c, uint32_t topk, uint32_t prompt,
                         double prefill_s, double decode_s) {
    double work = weights_per_token(c) * prompt;
    for (uint32_t t = 0; t < prompt; t++)
        work += pairs_at(c, topk, t + 1);
    double bytes = 4 * (weights_per_token(c) + (double)c->vocab * c->hidden); /* packed as fp32 */
    printf("               prefill %.0f GFLOP/s, %.0f %% of the machine's %.0f; decode reads weights "
           "at %.1f GB/s, %.0f %% of %.1f\n",
           2e-9 * work / prefill_s, 200e-9 * work / prefill_s / limit_gflops, limit_gflops,
           1e-9 * bytes * DECODE / decode_s, 100e-9 * bytes * DECODE / decode_s / limit_gbs,
           limit_gbs);
}

static int measure(const struct td_model_config *c, uint32_t topk, uint32_t prompt) {
    double cpu0 = cpu_s();
    uint64_t t0 = td_now_ns();
    for (uint32_t pos = 0; pos < prompt; pos += chunk) {
        uint32_t n = prompt - pos < chunk ? prompt - pos : chunk;
        if (step(pos, n, pos + n == prompt)) return 1;
    }
    double s1 = (double)(td_now_ns() - t0) * 1e-9, cpu1 = cpu_s();
    t0 = td_now_ns();
    for (uint32_t i = 0; i < DECODE; i++)
        if (step(prompt + i, 1, true)) return 1;
    double s2 = (double)(td_now_ns() - t0) * 1e-9, cpu2 = cpu_s();
    printf("%6u tokens: prefill %7.0f tok/s (cpu %6.0f us/tok), decode %6.0f tok/s (cpu %6.0f "
           "us/tok)\n",
           prompt, prompt / s1, (cpu1 - cpu0) * 1e6 / prompt, DECODE / s2,
           (cpu2 - cpu1) * 1e6 / DECODE);
    print_shares(c, topk, prompt, s1, s2);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_engine MODEL_DIR [threads] [chunk]\n");
        return 2;
    }
    struct td_error err;
    struct td_model *model;
    chunk = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 512;
    if (td_model_open(argv[1], &model, &err) != TD_OK) {
        fprintf(stderr, "bench_engine: %s\n", err.text);
        return 1;
    }
    struct td_engine_options o = {
        .row_dtype = TD_KV_ROW_BF16,
        .key_dtype = TD_KV_KEY_BF16,
        .index_topk = model->config.index_topk,
        .max_context = MAX_TOKENS,
        .pages = PAGES,
        .slots = 1,
        .max_tokens = chunk,
        .max_runs = 1,
        .threads = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2,
    };
    if (td_engine_create(model, &o, &engine, &err) != TD_OK) {
        fprintf(stderr, "bench_engine: %s\n", err.text);
        return 1;
    }
    struct td_engine_memory m;
    td_engine_memory(engine, &m);
    printf("%s\nweights %zu, pool %zu, slots %zu, index workspace %zu, scratch %zu bytes\n",
           td_engine_numerics(engine, NULL), m.weights, m.pool, m.slots, m.index_workspace,
           m.scratch);
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    uint32_t state = 12345;
    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        state = state * 1664525u + 1013904223u;
        ids[i] = (int32_t)((state >> 8) % model->config.vocab);
    }
    limit_gflops = td_machine_gflops(o.threads);
    limit_gbs = td_machine_read_gbs(o.threads, m.weights);
    const struct td_model_config *c = &model->config;
    int rc = measure(c, o.index_topk, 1024) || measure(c, o.index_topk, 4509) ||
             measure(c, o.index_topk, 16384);
    td_engine_destroy(engine);
    td_model_close(model);
    return rc;
}
