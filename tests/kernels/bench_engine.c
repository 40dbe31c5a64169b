/* Tokens per second of the engine, and cost per token against context, each as a share of what the
 * same machine reaches in the same run: prefill of its fp32 multiply-add rate, decode of its read
 * bandwidth over a working set as large as the weights.
 *
 * Usage: bench_engine MODEL_DIR [threads] [chunk] [part ...]; parts, all of them without any:
 *   prompt    a prompt of 4,509 tokens, then one stream
 *   streams   16 streams of 1,024 tokens, one token each per step
 *   context   prefill and decode at 1K, 4K, 16K and 48K tokens
 *   prefill, decode   only that of `prompt`, for profilers
 *   ops       where the time of that prefill goes, op by op
 * With avx512, avx2 or ref before the parts: that variant of the ops instead of the best one
 * Prints wall time and, because benchmarks share their machine, the processor time of all threads
 * per token. Not a test: nothing is asserted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/base/clock.h"
#include "kernels/engine.h"
#include "tests/kernels/machine.h"
#include "tests/kernels/op_times.h"

enum {
    PROMPT = 4509,
    MARKS = 4,
    MAX_TOKENS = 49152 + 1024,
    PAGES = (MAX_TOKENS + 255) / 256,
    DECODE = 128,
    STREAMS = 16,
    STREAM_PROMPT = 1024,
    STREAM_PAGES = 5, /* PAGES holds all streams' */
    TAIL = 1024,      /* tokens over which prefill at a context is measured */
};
_Static_assert(STREAMS *STREAM_PAGES <= PAGES, "the streams' pages fit");
_Static_assert(STREAM_PROMPT + DECODE <= STREAM_PAGES * 256, "a stream fits its pages");

static struct td_engine *engine;
static const struct td_model_config *config;
static uint32_t pages[PAGES], chunk, chosen;
static double limit_gflops, limit_gbs, weight_bytes,
    read_bytes; /* all weights; those of one token */
static int32_t ids[MAX_TOKENS];

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

struct span {
    double wall, cpu;
};

static struct span now(void) {
    return (struct span){(double)td_now_ns() * 1e-9, cpu_s()};
}

static struct span since(struct span t0) {
    struct span t = now();
    return (struct span){t.wall - t0.wall, t.cpu - t0.cpu};
}

static int run_step(const struct td_run *runs, uint32_t n) {
    struct td_error err;
    const float *out;
    if (td_engine_step(engine, runs, n, &out, NULL, &err) == TD_OK) return 0;
    fprintf(stderr, "bench_engine: %s\n", err.text);
    return 1;
}

/* Positions from..to-1 of slot 0 in chunks. */
static int prefill(uint32_t from, uint32_t to) {
    for (uint32_t pos = from; pos < to; pos += chunk) {
        uint32_t n = to - pos < chunk ? to - pos : chunk;
        struct td_run run = {
            .pos = pos, .n = n, .ids = ids + pos, .pages = pages, .want_logits = pos + n == to};
        if (run_step(&run, 1)) return 1;
    }
    return 0;
}

static int decode(uint32_t from, uint32_t n) {
    for (uint32_t pos = from; pos < from + n; pos++) {
        struct td_run run = {
            .pos = pos, .n = 1, .ids = ids + pos, .pages = pages, .want_logits = true};
        if (run_step(&run, 1)) return 1;
    }
    return 0;
}

/* Weights a token is multiplied with: all linears, the chosen experts, no embedding. The head is
 * left out: prefill computes it once a prompt. */
static double weights_per_token(const struct td_model_config *c) {
    double h = c->hidden, n = 0, heads = c->heads * (double)TD_HEAD_DIM;
    for (uint32_t i = 0; i < c->layers; i++) {
        n += 2 * 24 * 4 * h + c->q_lora_rank * (h + heads) + TD_HEAD_DIM * h;
        n += c->o_lora_rank * heads + h * c->o_groups * c->o_lora_rank;
        n +=
            c->experts * h + 3.0 * (c->experts_per_token + c->shared_experts) * c->expert_inner * h;
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

static double head(void) {
    return (double)config->vocab * config->hidden;
}

static double all_weights(void) {
    double idle = config->experts - (double)config->experts_per_token;
    return weights_per_token(config) +
           config->layers * idle * 3.0 * config->expert_inner * config->hidden;
}

/* GFLOP of prefill of positions from..to-1. */
static double gflop(uint32_t from, uint32_t to) {
    double work = weights_per_token(config) * (to - from);
    for (uint32_t t = from; t < to; t++)
        work += pairs_at(config, chosen, t + 1);
    return 2e-9 * work;
}

static void print_rate(const char *what, uint32_t tokens, struct span s) {
    printf("%s: %.0f tok/s, %.0f us/token, processor time %.0f us/token\n", what, tokens / s.wall,
           1e6 * s.wall / tokens, 1e6 * s.cpu / tokens);
}

static void print_arithmetic(uint32_t from, uint32_t to, double s) {
    printf("    %.0f GFLOP/s, %.0f %% of the machine's %.0f\n", gflop(from, to) / s,
           100 * gflop(from, to) / s / limit_gflops, limit_gflops);
}

static void print_bandwidth(double bytes, uint32_t steps, double s) {
    double gbs = 1e-9 * bytes * steps / s;
    printf("    weights read at %.1f GB/s, %.0f %% of the machine's %.1f\n", gbs,
           100 * gbs / limit_gbs, limit_gbs);
}

static int prompt_part(bool with_prefill, bool with_decode) {
    struct span t = now();
    if (prefill(0, PROMPT)) return 1;
    t = since(t);
    if (with_prefill) {
        print_rate("prefill of 4,509 tokens", PROMPT, t);
        print_arithmetic(0, PROMPT, t.wall);
    }
    if (!with_decode) return 0;
    t = now();
    if (decode(PROMPT, DECODE)) return 1;
    t = since(t);
    print_rate("decode after it, one stream", DECODE, t);
    print_bandwidth(read_bytes, DECODE, t.wall);
    return 0;
}

static int streams_part(void) {
    struct td_run run[STREAMS];
    for (uint32_t i = 0; i < STREAMS; i++) {
        run[i] = (struct td_run){.slot = i, .pages = pages + i * STREAM_PAGES};
        for (uint32_t pos = 0; pos < STREAM_PROMPT; pos += chunk) {
            run[i].pos = pos;
            run[i].n = STREAM_PROMPT - pos < chunk ? STREAM_PROMPT - pos : chunk;
            run[i].ids = ids + i + pos;
            if (run_step(&run[i], 1)) return 1;
        }
        run[i].n = 1;
        run[i].want_logits = true;
    }
    struct span t = now();
    for (uint32_t pos = STREAM_PROMPT; pos < STREAM_PROMPT + DECODE; pos++) {
        for (uint32_t i = 0; i < STREAMS; i++) {
            run[i].pos = pos;
            run[i].ids = ids + i + pos;
        }
        if (run_step(run, STREAMS)) return 1;
    }
    t = since(t);
    print_rate("decode of 16 streams of 1,024 tokens", STREAMS * DECODE, t);
    double work = (weights_per_token(config) + head()) * DECODE;
    for (uint32_t i = 0; i < DECODE; i++)
        work += pairs_at(config, chosen, STREAM_PROMPT + i);
    work *= 2e-9 * STREAMS;
    printf("    %.0f GFLOP/s, %.0f %% of the machine's %.0f\n", work / t.wall,
           100 * work / t.wall / limit_gflops, limit_gflops);
    print_bandwidth(weight_bytes, DECODE, t.wall); /* together they choose nearly all experts */
    return 0;
}

/* One prompt that grows: at each mark the cost of the tokens before it, then of decoding there. */
static int context_part(void) {
    static const uint32_t mark[MARKS] = {1024, 4096, 16384, 49152};
    uint32_t pos = 0;
    printf("context  prefill us/token  %% of arithmetic  decode us/token  %% of bandwidth\n");
    for (int i = 0; i < MARKS; i++) {
        uint32_t from = mark[i] - TAIL > pos ? mark[i] - TAIL : pos;
        if (prefill(pos, from)) return 1;
        struct span t = now();
        if (prefill(from, mark[i])) return 1;
        struct span p = since(t);
        t = now();
        if (decode(mark[i], DECODE)) return 1;
        struct span d = since(t);
        pos = mark[i] + DECODE;
        printf("%7u  %16.0f  %15.0f  %15.0f  %14.0f\n", mark[i], 1e6 * p.wall / (mark[i] - from),
               100 * gflop(from, mark[i]) / p.wall / limit_gflops, 1e6 * d.wall / DECODE,
               100e-9 * read_bytes * DECODE / d.wall / limit_gbs);
        fflush(stdout);
    }
    return 0;
}

static int ops_part(void) {
    if (prefill(0, PROMPT)) return 1;
    td_op_times_start();
    struct span t = now();
    if (prefill(0, PROMPT)) return 1;
    t = since(t);
    td_op_times_stop();
    print_rate("prefill of 4,509 tokens", PROMPT, t);
    td_op_times_print(t.wall, limit_gflops);
    return 0;
}

static int part(const char *name) {
    if (strcmp(name, "prompt") == 0) return prompt_part(true, true);
    if (strcmp(name, "prefill") == 0) return prompt_part(true, false);
    if (strcmp(name, "decode") == 0) return prompt_part(false, true);
    if (strcmp(name, "streams") == 0) return streams_part();
    if (strcmp(name, "context") == 0) return context_part();
    if (strcmp(name, "ops") == 0) return ops_part();
    fprintf(stderr,
            "bench_engine: expected prompt, streams, context, prefill, decode or ops, "
            "found %s\n",
            name);
    return 2;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_engine MODEL_DIR [threads] [chunk] "
                        "[avx512|avx2|ref] [prompt|streams|context|prefill|decode|ops ...]\n");
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
        .slots = STREAMS,
        .max_tokens = chunk > STREAMS ? chunk : STREAMS,
        .max_runs = STREAMS,
        .threads = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2,
    };
    int parts = 4;
    bool given = parts < argc && td_op_times_choose(argv[parts]);
    bool avx512 = given ? strcmp(argv[parts], "avx512") == 0 : td_machine_avx512();
    if (given) parts++;
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
    config = &model->config;
    chosen = o.index_topk;
    read_bytes =
        (double)m.weights * (weights_per_token(config) + head()) / (all_weights() + head());
    weight_bytes = (double)m.weights;
    limit_gflops = td_machine_gflops(o.threads, avx512);
    limit_gbs = td_machine_read_gbs(o.threads, m.weights);
    int rc = 0;
    for (int i = parts; !rc && i < argc; i++)
        rc = part(argv[i]);
    if (argc <= parts) rc = part("prompt") || part("streams") || part("context");
    td_engine_destroy(engine);
    td_model_close(model);
    return rc;
}
