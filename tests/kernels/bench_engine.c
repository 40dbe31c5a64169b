/* Tokens per second of the engine: prefill at 1K, 4.5K and 16K tokens, and single-stream decode.
 *
 * Usage: bench_engine MODEL_DIR [threads] [chunk]. Prints wall time and, because benchmarks share
 * their machine, the processor time of all threads per token. Not a test: nothing is asserted. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "common/base/clock.h"
#include "kernels/engine.h"

enum { MAX_TOKENS = 16384 + 256, PAGES = (MAX_TOKENS + 255) / 256, DECODE = 128 };

static struct td_engine *engine;
static uint32_t pages[PAGES], chunk;
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

static int measure(uint32_t prompt) {
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
    int rc = measure(1024) || measure(4509) || measure(16384);
    td_engine_destroy(engine);
    td_model_close(model);
    return rc;
}
