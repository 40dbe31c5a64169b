/* A slice of the real model on one GPU, in the dimensions of its config.json and with random
 * weights: a prefill of half a million tokens in the planned memory, and decode steps beside the
 * bytes that they have to read.
 *
 * usage: bench_slice CONFIG_DIR [key=value ...]     settings of tandem.conf; tokens=N besides
 * Prints the plan and what the driver says was taken; per power of two of context the time of each
 * layer for a chunk and tokens per second; decode after it; decode of 8 streams at 8K tokens,
 * replayed and launched, against bytes over the copy rate of the same run; kernels per layer; what
 * logits cost on their way to the host and in the sampler. Fails when memory is taken after the
 * start. */
#include "kernels/cuda/rt.h"

#include <cuda_profiler_api.h>

#include <algorithm>
#include <stdlib.h>
#include <vector>

#define _Static_assert static_assert /* C's word in C's headers */
extern "C" {
#include "common/base/clock.h"
#include "common/base/config.h"
#include "kernels/device.h"
#include "kernels/engine.h"
#include "kernels/sampler.h"
#include "kernels/worker_plan.h"
}

enum { STREAMS = 8, STREAM_TOKENS = 8192, STEPS = 48, MARK = 2048 };

static struct td_error err;
static struct td_config config;
static struct td_model *model;
static struct td_engine *engine;
static struct td_engine_options options;
static std::vector<double> layer_s;
static std::vector<int32_t> ids;
static std::vector<uint32_t> page_ids;
static double copy_rate, last;
static bool profiled;
static uint64_t free_at_start;
static int rc;

static void die(const char *what) {
    fprintf(stderr, "bench_slice: %s\n", what);
    exit(1);
}

static void ok(td_status st) {
    if (st != TD_OK) die(err.text);
}

static double now(void) {
    return (double)td_now_ns() * 1e-9;
}

static uint64_t free_bytes(void) {
    uint64_t all, left;
    ok(options.backend->memory(options.device[0], &all, &left, &err));
    return left;
}

static void layer_done(void *user, uint32_t layer) {
    (void)user;
    double t = now();
    layer_s[layer] += t - last;
    last = t;
}

/* Read and written, device to device. */
static double measure_copy(void) {
    size_t bytes = (size_t)2 << 30;
    void *a, *b;
    cudaEvent_t e[2];
    double best = 0;
    if (cudaMalloc(&a, bytes) || cudaMalloc(&b, bytes)) die("no memory to measure copies");
    cudaEventCreate(&e[0]);
    cudaEventCreate(&e[1]);
    for (int i = 0; i < 7; i++) {
        float ms;
        cudaEventRecord(e[0]);
        cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice);
        cudaEventRecord(e[1]);
        cudaEventSynchronize(e[1]);
        cudaEventElapsedTime(&ms, e[0], e[1]);
        best = std::max(best, 2e3 * (double)bytes / ms);
    }
    cudaFree(a);
    cudaFree(b);
    return best;
}

static void create(bool eager, bool watched) {
    struct td_engine_options o = options;
    o.eager = eager || options.eager;
    if (watched) o.layer_done = layer_done;
    uint64_t before = free_bytes();
    double t = now();
    ok(td_engine_create(model, &o, &engine, &err));
    struct td_engine_memory m;
    td_engine_memory(engine, &m);
    free_at_start = free_bytes();
    size_t own = m.weights + m.pool + m.slots + m.index_workspace + m.scratch;
    printf(
        "start %s: %.1f s; taken %zu bytes, of them %zu by the plan's lines (weights %zu, pool "
        "%zu, "
        "slots %zu, index workspace %zu, scratch %zu), %zd beside; %u recorded steps of up to %u "
        "kernels\n",
        eager ? "eager" : "recorded", now() - t, (size_t)(before - free_at_start), own, m.weights,
        m.pool, m.slots, m.index_workspace, m.scratch, (ssize_t)(before - free_at_start - own),
        m.graphs, m.graph_launches);
    fflush(stdout);
}

static void check_memory(const char *when) {
    uint64_t left = free_bytes();
    printf("  taken since the start, %s: %lld bytes\n", when,
           (long long)free_at_start - (long long)left);
    fflush(stdout);
    if (left < free_at_start) rc = 1;
}

static const uint32_t *pages_of(uint32_t slot) {
    uint32_t split = td_engine_split(&options), own = td_kv_pages(options.max_context, split),
             each = td_kv_pages(STREAM_TOKENS, split) + 1;
    return page_ids.data() + (slot == 0 ? 0 : own + (slot - 1) * each);
}

static struct td_run run_of(uint32_t slot, uint32_t pos, uint32_t n, bool logits) {
    struct td_run r = {};
    r.slot = slot;
    r.pos = pos;
    r.n = n;
    r.ids = ids.data() + (slot * 977u + pos) % (ids.size() - n);
    r.pages = pages_of(slot);
    r.want_logits = logits;
    return r;
}

static double step(const struct td_run *runs, uint32_t n, const float **logits) {
    const float *out;
    last = now();
    double t = last;
    ok(td_engine_step(engine, runs, n, logits ? logits : &out, NULL, &err));
    return now() - t;
}

/* Operations of one layer for one token at position t: weights, core, indexer. */
static double layer_flop(uint32_t layer, double t) {
    const struct td_model_config *c = &model->config;
    double h = c->hidden, heads = c->heads * (double)TD_HEAD_DIM,
           rows = std::min(t, (double)TD_WINDOW);
    double n = 2 * 24 * 4 * h + c->q_lora_rank * (h + heads) + TD_HEAD_DIM * h;
    n += c->o_lora_rank * heads + h * c->o_groups * c->o_lora_rank + c->experts * h;
    n += 3.0 * (c->experts_per_token + c->shared_experts) * c->expert_inner * h;
    if (c->kind[layer] == TD_LAYER_HCA) {
        n += 2 * TD_KV_HCA_STATE_DIM * h;
        rows += t / TD_HCA_RATIO;
    }
    if (c->kind[layer] == TD_LAYER_CSA) {
        double seen = t / TD_CSA_RATIO;
        n += 2 * (TD_KV_CSA_STATE_DIM + TD_KV_INDEX_STATE_DIM) * h + c->index_heads * h +
             c->index_heads * (double)TD_INDEX_DIM * (c->q_lora_rank + seen);
        rows += std::min(seen, (double)options.index_topk);
    }
    return 2 * (n + 2 * heads * rows);
}

static void prefill(uint32_t tokens) {
    static const char *const kind[] = {"SWA", "CSA", "HCA"};
    uint32_t layers = model->config.layers, mark = MARK;
    double all = 0;
    printf("prefill in chunks of %u tokens: context, tok/s of the chunk, per layer ms (TFLOP/s)\n",
           options.max_tokens);
    for (uint32_t pos = 0; pos < tokens;) {
        uint32_t n =
            std::min(std::min(options.max_tokens, tokens - pos), mark > pos ? mark - pos : ~0u);
        const float *logits = NULL;
        struct td_run r = run_of(0, pos, n, pos + n == tokens);
        std::fill(layer_s.begin(), layer_s.end(), 0);
        double s = step(&r, 1, &logits);
        all += s;
        pos += n;
        if (pos == tokens && !(logits[0] == logits[0])) die("the logits are no numbers");
        if (pos != mark) continue;
        mark *= 2;
        printf("  %7u %8.0f ", pos, n / s);
        for (uint32_t l = 0; l < layers; l++) {
            double flop = 0;
            for (uint32_t t = pos - n; t < pos; t += 64)
                flop += 64 * layer_flop(l, t);
            printf("  %s %.2f (%.0f)", kind[model->config.kind[l]], layer_s[l] * 1e3,
                   flop / layer_s[l] * 1e-12);
        }
        printf("\n");
        char when[32];
        snprintf(when, sizeof when, "%u tokens", pos);
        check_memory(when);
    }
    printf("prefill of %u tokens: %.2f s, %.0f tok/s through %u layers\n", tokens, all,
           tokens / all, layers);
}

static double weight_bytes(const struct td_weight *w) {
    return (double)(td_weight_data_bytes(w) + td_weight_scale_bytes(w));
}

/* What a step of `n` tokens at position t has to read: weights once, of experts those that n tokens
 * choose when all are as likely, KV rows of every token. */
static double step_bytes(uint32_t n, double t) {
    const struct td_model_config *c = &model->config;
    double miss = 1, all = weight_bytes(&model->head);
    struct td_kv_layout kv = *td_engine_layout(engine);
    for (uint32_t i = 0; i < n; i++)
        miss *= 1 - (double)c->experts_per_token / c->experts;
    for (uint32_t l = 0; l < c->layers; l++) {
        const struct td_layer_weights *w = &model->layer[l];
        const struct td_weight *dense[] = {&w->hc_attn.fn,
                                           &w->hc_ffn.fn,
                                           &w->wq_a,
                                           &w->wq_b,
                                           &w->wkv,
                                           &w->wo_a,
                                           &w->wo_b,
                                           &w->comp.wkv,
                                           &w->comp.wgate,
                                           &w->index_wq_b,
                                           &w->index_weights_proj,
                                           &w->index_comp.wkv,
                                           &w->index_comp.wgate,
                                           &w->gate,
                                           &w->shared.w1,
                                           &w->shared.w3,
                                           &w->shared.w2};
        for (const struct td_weight *d : dense)
            all += weight_bytes(d);
        all += c->experts * (1 - miss) *
               (weight_bytes(&w->experts[0].w1) + weight_bytes(&w->experts[0].w3) +
                weight_bytes(&w->experts[0].w2));
        double rows = TD_WINDOW;
        if (c->kind[l] == TD_LAYER_HCA) rows += t / TD_HCA_RATIO;
        if (c->kind[l] == TD_LAYER_CSA) {
            rows += std::min(t / TD_CSA_RATIO, (double)options.index_topk);
            all += n * t / TD_CSA_RATIO * kv.key_bytes;
        }
        all += n * rows * kv.row_bytes;
    }
    return all;
}

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static void decode(const char *what, uint32_t first_slot, uint32_t n, uint32_t pos) {
    struct td_run run[STREAMS];
    std::vector<double> took;
    const float *logits = NULL;
    uint64_t sum = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < STEPS; i++) {
        for (uint32_t s = 0; s < n; s++)
            run[s] = run_of(first_slot + s, pos + i, 1, true);
        bool watched = profiled && i == STEPS - 1;
        if (watched) cudaProfilerStart();
        double t = step(run, n, &logits);
        if (watched) cudaProfilerStop();
        if (i >= 4) took.push_back(t);
        for (size_t k = 0; k < (size_t)n * model->config.vocab; k++)
            sum = (sum ^ td_f32_bits(logits[k])) * 0x100000001b3u;
    }
    double t = median(took), floor = step_bytes(n, pos) / copy_rate;
    printf("decode %s: %u streams at %u tokens: %.3f ms a step (least %.3f), %.0f tok/s; %.3f GB "
           "to read, "
           "floor %.3f ms: %.1f %% of it; logits %016llx\n",
           what, n, pos, t * 1e3, *std::min_element(took.begin(), took.end()) * 1e3, n / t,
           floor * copy_rate * 1e-9, floor * 1e3, 100 * floor / t, (unsigned long long)sum);
    fflush(stdout);
}

static void fill_streams(void) {
    for (uint32_t s = 0; s < STREAMS; s++)
        for (uint32_t pos = 0; pos < STREAM_TOKENS; pos += options.max_tokens) {
            struct td_run r =
                run_of(s, pos, std::min(options.max_tokens, STREAM_TOKENS - pos), false);
            step(&r, 1, NULL);
        }
}

/* Milliseconds for a token of every stream; logits as spread as a model's, three at one sigma. */
static double drawn(const float *logits, const struct td_sampling *how, uint32_t threads) {
    struct td_samplers_params p = {};
    struct td_samplers s;
    struct td_worker_sample sample[STREAMS] = {};
    struct td_token token[STREAMS];
    struct td_error failed[STREAMS];
    std::vector<double> took;
    p.slots = STREAMS;
    p.vocab = model->config.vocab;
    p.eos = model->config.eos_id;
    p.threads = threads;
    ok(td_samplers_init(&s, &p, &err));
    for (int round = 0; round < 7; round++) {
        for (uint32_t i = 0; i < STREAMS; i++) {
            sample[i].sampling = how;
            sample[i].position = (uint32_t)round;
            sample[i].row = i;
        }
        double t = now();
        td_samplers_draw_all(&s, logits, sample, STREAMS, token, failed);
        took.push_back(now() - t);
    }
    td_samplers_finish(&s);
    return median(took) * 1e3;
}

static void logits_to_host(void) {
    static const char *const name[] = {"greedy", "temperature 1", "temperature 1, top_p 0.9"};
    uint32_t vocab = model->config.vocab;
    size_t n = (size_t)STREAMS * vocab, bytes = n * sizeof(float);
    float *from, *to;
    std::vector<double> copy;
    if (cudaMalloc(&from, bytes) || cudaHostAlloc(&to, bytes, cudaHostAllocDefault))
        die("no memory");
    for (int i = 0; i < 9; i++) {
        double t = now();
        cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
        copy.push_back(now() - t);
    }
    printf("logits of %d streams to the host: %.3f ms (%.1f GB/s)\n", STREAMS, median(copy) * 1e3,
           bytes / median(copy) * 1e-9);
    uint64_t r = 1;
    for (size_t i = 0; i < n; i++) {
        float sum = -6.0f; /* twelve uniforms: about normal */
        for (int k = 0; k < 12; k++) {
            r = r * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(r >> 40) * 0x1p-24f;
        }
        to[i] = 3 * sum;
    }
    struct td_sampling how[3] = {};
    how[0].top_p = how[1].top_p = 1;
    how[1].temperature = how[2].temperature = 1;
    how[2].top_p = 0.9f;
    for (int k = 0; k < 3; k++)
        printf("  a token of each, %s: %.3f ms by one thread, %.3f by %d\n", name[k],
               drawn(to, &how[k], 1), drawn(to, &how[k], STREAMS), STREAMS);
    cudaFree(from);
    cudaFreeHost(to);
}

static void configure(int argc, char **argv, uint32_t *tokens) {
    static const char *const usual[] = {"load_format=random",      "random.format=nvfp4",
                                        "random.layers=0,4,128,4", "device=cuda:0",
                                        "chunk_tokens=8192",       "max_running=8"};
    td_config_defaults(&config);
    snprintf(config.model_dir, sizeof config.model_dir, "%s", argv[1]);
    for (const char *s : usual)
        ok(td_config_set(&config, s, &err));
    for (int i = 2; i < argc; i++)
        if (strncmp(argv[i], "tokens=", 7) == 0)
            *tokens = (uint32_t)strtoul(argv[i] + 7, NULL, 10);
        else if (strcmp(argv[i], "profile") == 0)
            profiled = true;
        else
            ok(td_config_set(&config, argv[i], &err));
    config.max_context = *tokens + STEPS;
}

static void plan(void) {
    struct td_plan_device card = {};
    struct td_worker_plan p;
    uint64_t left;
    char text[2048];
    ok(options.backend->memory(options.device[0], &card.bytes, &left, &err));
    printf("card %llu bytes, %llu taken by the context and others\n",
           (unsigned long long)card.bytes, (unsigned long long)(card.bytes - left));
    ok(td_worker_plan_card(model, &config, &options, &err));
    card.fraction = (uint32_t)config.mem_fraction;
    ok(td_worker_plan(model, &options, &card, config.slab_bytes, 0, 0, &p, &err));
    td_worker_plan_text(&p, text, sizeof text);
    printf("%splanned on the device: %zu bytes, %u pages\n", text, td_worker_plan_bytes(&p, false),
           options.pages);
}

int main(int argc, char **argv) {
    uint32_t tokens = 524288, n;
    if (argc < 2) die("usage: bench_slice CONFIG_DIR [key=value ...]");
    configure(argc, argv, &tokens);
    ok(td_model_open_from(&config, NULL, &model, &err));
    ok(td_engine_options_from(&config, &model->config, &options, &err));
    if (options.backend->host) die("expected device = cuda:N");
    free_bytes(); /* the context is made */
    copy_rate = measure_copy();
    printf("copy %.0f GB/s, read and written\n", copy_rate * 1e-9);
    plan();
    uint32_t seed = 12345;
    ids.resize(tokens + 65536);
    for (auto &id : ids) {
        seed = seed * 1664525u + 1013904223u;
        id = (int32_t)((seed >> 8) % model->config.vocab);
    }
    n = td_kv_pages(options.max_context, td_engine_split(&options)) +
        STREAMS * (td_kv_pages(STREAM_TOKENS, td_engine_split(&options)) + 1);
    if (n > options.pages) die("the pool is too small");
    for (uint32_t i = 0; i < n; i++)
        page_ids.push_back(i);
    for (uint32_t i = n - 1; i > 0; i--)
        std::swap(page_ids[i], page_ids[(uint32_t)ids[i] % (i + 1)]);
    layer_s.resize(model->config.layers);
    if (profiled) {
        create(true, false);
        fill_streams();
        decode("launched", 0, STREAMS, STREAM_TOKENS);
        return 0;
    }
    create(false, true);
    for (uint32_t l = 0; l < model->config.layers; l++) {
        ok(td_engine_launches(engine, l, &n, &err));
        printf("layer %u: %u kernels a step\n", l, n);
    }
    prefill(tokens);
    decode("after the prefill", 0, 1, tokens);
    check_memory("decoded");
    for (int eager = 0; eager < 2; eager++) {
        if (eager) create(true, false);
        fill_streams();
        decode(eager ? "launched" : "replayed", 0, STREAMS, STREAM_TOKENS);
        decode(eager ? "launched" : "replayed", 0, 1, STREAM_TOKENS + STEPS);
        check_memory("decoded");
        td_engine_destroy(engine);
    }
    logits_to_host();
    td_model_close(model);
    return rc;
}
