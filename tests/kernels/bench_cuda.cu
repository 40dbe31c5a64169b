/* What the CUDA kernels reach on the shapes of the real model, beside what the machine copies per
 * second in the same run. Inputs are larger than the L2 or rotate through more than it holds.
 *
 * usage: bench_cuda [cuda:N [layout|index|attend|experts|linear]]
 *     layout: the pool layer-major beside page-major; the others: these kernels alone
 * A line: what, microseconds, bytes that have to move, their rate, its share of the copy rate; for
 * products of many rows also TFLOP/s. */
#include "kernels/cuda/rt.h"

#include <algorithm>
#include <stdlib.h>
#include <vector>

extern "C" {
#include "kernels/device.h"
}

enum { ROUNDS = 7, HIDDEN = 4096, INNER = 2048, EXPERTS = 256 };

static struct td_device dev;
static struct td_ops ops;
static double copy_rate; /* bytes per second, read and written counted */
static const size_t noise_bytes = (size_t)64 << 20;
static uint8_t *noise; /* host */

static void die(const char *what) {
    fprintf(stderr, "bench_cuda: %s\n", what);
    exit(1);
}

static void *take(size_t bytes) {
    struct td_error err;
    void *p;
    if (dev.backend->take(&dev, bytes, "an array", &p, &err) != TD_OK) die(err.text);
    return p;
}

/* Random bytes; `mask` and `set` make them harmless numbers: every byte is (r & mask) | set. */
static void *random_bytes(size_t bytes, uint8_t mask, uint8_t set) {
    uint8_t *p = (uint8_t *)take(bytes);
    static uint8_t *block;
    struct td_error err;
    if (!block) block = (uint8_t *)malloc(noise_bytes);
    for (size_t i = 0; i < std::min(noise_bytes, bytes); i++)
        block[i] = (noise[i] & mask) | set;
    for (size_t at = 0; at < bytes; at += noise_bytes)
        td_upload(&dev, p + at, block, std::min(noise_bytes, bytes - at));
    if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
    return p;
}

static void *random_floats(size_t n) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++)
        v[i] = (float)((int)(noise[i * 7 % noise_bytes]) - 128) / 128.0f;
    void *p = take(n * sizeof(float));
    struct td_error err;
    td_upload(&dev, p, v.data(), n * sizeof(float));
    if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
    return p;
}

/* Median seconds of one call; `call(i)` with a running number to rotate by. */
template <class F> static double seconds(int calls, F call) {
    cudaStream_t s = td_cuda_of(&dev)->stream[TD_LANE_STEP];
    cudaEvent_t a, b;
    std::vector<double> took;
    struct td_error err;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    int n = 0;
    for (int r = 0; r < ROUNDS; r++) {
        float ms = 0;
        cudaEventRecord(a, s);
        for (int i = 0; i < calls; i++)
            call(n++);
        cudaEventRecord(b, s);
        cudaEventSynchronize(b);
        cudaEventElapsedTime(&ms, a, b);
        took.push_back(ms * 1e-3 / calls);
    }
    if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    std::sort(took.begin() + 1, took.end()); /* the first one warms up */
    return took[1 + (ROUNDS - 1) / 2];
}

static void report(const char *what, double s, double bytes, double flops) {
    printf("%-44s %10.1f us %9.1f MB %7.0f GB/s %5.1f %% of copy", what, s * 1e6, bytes * 1e-6,
           bytes / s * 1e-9, 100 * bytes / s / copy_rate);
    if (flops > 0) printf(" %7.1f TFLOP/s", flops / s * 1e-12);
    printf("\n");
    fflush(stdout);
}

static struct td_weight random_weight(enum td_weight_format f, uint32_t rows, uint32_t cols) {
    struct td_weight w = {};
    w.format = f;
    w.rows = rows;
    w.cols = cols;
    w.scale2 = 0.5f;
    size_t bytes = td_weight_data_bytes(&w), scales = td_weight_scale_bytes(&w);
    /* bf16: exponents of 2^-1 and around; e4m3: no NaN. */
    w.data = f == TD_W_BF16 ? random_bytes(bytes, 0xbf, 0x00) : random_bytes(bytes, 0xf7, 0x00);
    if (scales) w.scale = random_bytes(scales, 0x03, f == TD_W_NVFP4 ? 0x30 : 0x78);
    return w;
}

static struct td_matrix matrix_of(const struct td_weight &w) {
    struct td_matrix m = {};
    m.rows = w.rows;
    m.cols = w.cols;
    m.stored = w;
    return m;
}

static void linears(void) {
    static const struct {
        const char *what;
        enum td_weight_format f;
        uint32_t rows, cols, copies;
    } shapes[] = {
        {"wq_b fp8 32768 x 1024", TD_W_FP8_BLOCK, 32768, 1024, 4},
        {"wq_a fp8 1024 x 4096", TD_W_FP8_BLOCK, 1024, 4096, 24},
        {"head bf16 129280 x 4096", TD_W_BF16, 129280, 4096, 1},
    };
    static const uint32_t ns[] = {1, 8, 32, 8192};
    struct td_spare spare = {take((size_t)128 << 20), (size_t)128 << 20};
    float *x = (float *)random_floats((size_t)8192 * 4096),
          *y = (float *)take((size_t)8192 * 32768 * 4);
    for (auto &s : shapes) {
        std::vector<struct td_matrix> m;
        for (uint32_t i = 0; i < s.copies; i++)
            m.push_back(matrix_of(random_weight(s.f, s.rows, s.cols)));
        for (uint32_t n : ns) {
            char what[64];
            if (n > 32 && s.rows > 32768) continue;
            snprintf(what, sizeof what, "linear %s, %u rows", s.what, n);
            double t = seconds(n > 32 ? 2 : 24, [&](int i) {
                struct td_linear_args a = {};
                a.x = x;
                a.x_stride = s.cols;
                a.n = n;
                a.parts = 1;
                a.spare = spare;
                a.part[0].w = &m[(size_t)i % m.size()];
                a.part[0].y = y;
                a.part[0].y_stride = s.rows;
                ops.linear(&dev, &a);
            });
            double bytes = (double)td_weight_data_bytes(&m[0].stored) +
                           (double)td_weight_scale_bytes(&m[0].stored) +
                           4.0 * n * (s.rows + s.cols);
            report(what, t, bytes, n >= 32 ? 2.0 * n * s.rows * s.cols : 0);
        }
        for (auto &one : m) {
            dev.backend->give(&dev, (void *)one.stored.data, 0);
            if (one.stored.scale) dev.backend->give(&dev, (void *)one.stored.scale, 0);
        }
    }
    dev.backend->give(&dev, x, 0);
    dev.backend->give(&dev, y, 0);
    dev.backend->give(&dev, spare.at, 0);
}

static void experts(enum td_weight_format f, const char *name, uint32_t tokens) {
    std::vector<struct td_matrix> w13[2], w2;
    std::vector<uint32_t> offset(EXPERTS + 1), row(tokens * 6);
    uint32_t used = 0, rows = tokens * 6;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        for (int p = 0; p < 2; p++)
            w13[p].push_back(matrix_of(random_weight(f, INNER, HIDDEN)));
        w2.push_back(matrix_of(random_weight(f, HIDDEN, INNER)));
    }
    /* Rows fall on experts at random. */
    std::vector<uint32_t> count(EXPERTS);
    for (uint32_t i = 0; i < rows; i++)
        count[(noise[2 * i] | (uint32_t)noise[2 * i + 1] << 8) % EXPERTS]++;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        offset[e + 1] = offset[e] + count[e];
        used += count[e] > 0;
    }
    for (uint32_t i = 0; i < rows; i++)
        row[i] = i / 6;
    auto up = [](const void *from, size_t bytes) {
        struct td_error err;
        void *p = take(bytes);
        td_upload(&dev, p, from, bytes);
        if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
        return p;
    };
    for (auto *v : {&w13[0], &w13[1], &w2}) {
        const struct td_matrix *table =
            (const struct td_matrix *)up(v->data(), v->size() * sizeof(struct td_matrix));
        for (uint32_t e = 0; e < EXPERTS; e++)
            (*v)[e].device = table + e;
    }
    struct td_expert_linear_args a = {}, b;
    a.x = (const float *)random_floats((size_t)tokens * HIDDEN);
    a.x_stride = HIDDEN;
    a.x_row = (const uint32_t *)up(row.data(), rows * 4);
    a.offset = (const uint32_t *)up(offset.data(), offset.size() * 4);
    a.experts = EXPERTS;
    a.most = tokens; /* of an expert, as an engine knows it */
    a.all = rows;
    a.spare.bytes = ((size_t)rows + 2304) * HIDDEN * 2;
    a.spare.at = take(a.spare.bytes);
    a.parts = 2;
    for (int p = 0; p < 2; p++) {
        a.w[p] = w13[p].data();
        a.y[p] = (float *)take((size_t)rows * INNER * 4);
    }
    b = a;
    b.x = a.y[0];
    b.x_stride = INNER;
    b.x_row = NULL;
    b.parts = 1;
    b.w[0] = w2.data();
    b.y[0] = (float *)take((size_t)rows * HIDDEN * 4);
    double t = seconds(tokens > 64 ? 2 : 10, [&](int) {
        ops.expert_linear(&dev, &a);
        ops.expert_linear(&dev, &b);
    });
    double each =
        (double)td_weight_data_bytes(&w2[0].stored) + (double)td_weight_scale_bytes(&w2[0].stored);
    char what[64];
    snprintf(what, sizeof what, "experts %s, %u tokens on %u experts", name, tokens, used);
    dev.backend->give(&dev, a.spare.at, 0);
    report(what, t, 3 * each * used, tokens > 8 ? 6.0 * rows * HIDDEN * INNER : 0);
    for (auto *v : {&w13[0], &w13[1], &w2})
        for (auto &m : *v) {
            dev.backend->give(&dev, (void *)m.stored.data, 0);
            dev.backend->give(&dev, (void *)m.stored.scale, 0);
        }
}

/* ---- KV ---- */

struct sequences {
    struct td_kv_layout kv;
    struct td_op_batch batch;
};

/* All pages of a layer side by side, as the pool is; or all layers of a page, by the same functions:
 * a pool of one page, and every page id stands for as many as there are layers. */
enum order { LAYER_MAJOR, PAGE_MAJOR };

/* `n` sequences, each at position pos with pages of its own, one row each. */
static struct sequences sequences(uint32_t n, uint32_t pos, uint32_t layers,
                                  enum td_kv_row_dtype type, enum order order) {
    struct sequences s = {};
    struct td_error err;
    uint32_t per = pos / TD_KV_PAGE_TOKENS + 1;
    std::vector<uint8_t> ratio(layers, TD_CSA_RATIO);
    if (td_kv_layout_init(&s.kv, layers, ratio.data(), type, TD_KV_KEY_BF16, n * per, 1, &err) !=
        TD_OK)
        die(err.text);
    std::vector<struct td_op_run> run(n);
    std::vector<struct td_op_row> row(n);
    std::vector<uint32_t> pages((size_t)n * per);
    uint32_t *device_pages = (uint32_t *)take(pages.size() * 4);
    uint8_t *slots = (uint8_t *)random_bytes(s.kv.slot_bytes * n, 0xb7, 0);
    for (size_t i = 0; i < pages.size(); i++)
        pages[i] = (uint32_t)i;
    for (size_t i = pages.size() - 1; i > 0; i--)
        std::swap(pages[i], pages[(noise[i % noise_bytes] * 977u + i * 31u) % (i + 1)]);
    if (order == PAGE_MAJOR) {
        s.kv.pages = 1;
        for (auto &page : pages)
            page *= layers;
    }
    for (uint32_t i = 0; i < n; i++) {
        run[i].first = i;
        run[i].n = 1;
        run[i].pos = pos;
        run[i].pages = device_pages + (size_t)i * per;
        run[i].slot = slots + s.kv.slot_bytes * i;
        row[i].run = i;
        row[i].pos = pos;
    }
    void *device_run = take(n * sizeof run[0]), *device_row = take(n * sizeof row[0]);
    td_upload(&dev, device_pages, pages.data(), pages.size() * 4);
    td_upload(&dev, device_run, run.data(), n * sizeof run[0]);
    td_upload(&dev, device_row, row.data(), n * sizeof row[0]);
    if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
    s.batch.pool = random_bytes(s.kv.pool_bytes, 0xb7, 0);
    s.batch.row = (const struct td_op_row *)device_row;
    s.batch.run = (const struct td_op_run *)device_run;
    s.batch.n = s.batch.runs = n;
    s.batch.max_pos = pos;
    return s;
}

static const char *const order_names[] = {"", ", page-major"};

static void index_bench(uint32_t n, uint32_t tokens, uint32_t topk, uint32_t layers,
                        enum order order) {
    enum { HEADS = 64 };
    struct sequences s = sequences(n, tokens - 1, layers,
                                   layers > 2 ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16, order);
    struct td_index_args a = {};
    s.batch.kv = &s.kv;
    a.batch = &s.batch;
    a.rows = n;
    a.q = (const float *)random_floats((size_t)n * HEADS * TD_INDEX_DIM);
    a.wt = (const float *)random_floats((size_t)n * HEADS);
    a.wt_scale = 0.01f;
    a.heads = HEADS;
    a.topk = topk;
    a.selected = (int32_t *)take((size_t)n * topk * 4);
    a.workspace = take(dev.backend->index_workspace(HEADS, topk, n));
    double t = seconds(8, [&](int i) {
        a.layer = (uint32_t)i % layers;
        ops.index(&dev, &a);
    });
    char what[96];
    snprintf(what, sizeof what, "index %u queries, %uK tokens, top %u%s", n, tokens >> 10, topk,
             order_names[order]);
    report(what, t, (double)n * (tokens / 4) * 256, 0);
    dev.backend->give(&dev, s.batch.pool, 0);
}

static void attend_bench(uint32_t n, enum td_kv_row_dtype type, const char *name, uint32_t layers,
                         enum order order) {
    enum { HEADS = 64, TOPK = 512, TOKENS = 8192 };
    struct sequences s = sequences(n, TOKENS - 1, layers, type, order);
    std::vector<int32_t> chosen((size_t)n * TOPK);
    for (size_t i = 0; i < chosen.size(); i++)
        chosen[i] = (int32_t)(i % TOPK * 4 + noise[i % noise_bytes] % 4);
    struct td_attend_args a = {};
    int32_t *selected = (int32_t *)take(chosen.size() * 4);
    struct td_error err;
    td_upload(&dev, selected, chosen.data(), chosen.size() * 4);
    if (dev.backend->wait(&dev, TD_LANE_STEP, &err) != TD_OK) die(err.text);
    s.batch.kv = &s.kv;
    a.batch = &s.batch;
    a.heads = HEADS;
    a.q = (const float *)random_floats((size_t)n * HEADS * TD_HEAD_DIM);
    a.rows = random_bytes((size_t)n * s.kv.row_bytes, 0xb7, 0);
    a.sink = (const float *)random_floats(HEADS);
    a.selected = selected;
    a.topk = TOPK;
    a.o = (float *)take((size_t)n * HEADS * TD_HEAD_DIM * 4);
    double t = seconds(20, [&](int i) {
        a.layer = (uint32_t)i % layers;
        ops.attend(&dev, &a);
    });
    char what[96];
    double set = TOPK + TD_WINDOW;
    snprintf(what, sizeof what, "attend %u tokens, 64 heads, 640 %s rows%s", n, name,
             order_names[order]);
    report(what, t, n * set * s.kv.row_bytes, 4.0 * n * HEADS * set * TD_HEAD_DIM);
    dev.backend->give(&dev, s.batch.pool, 0);
}

/* The real model's 21 CSA layers in turn, the pool in both orders, in turns. */
static void layouts(void) {
    enum { LAYERS = 21 };
    for (int round = 0; round < 2; round++)
        for (int order = LAYER_MAJOR; order <= PAGE_MAJOR; order++) {
            index_bench(32, 131072, 512, LAYERS, (enum order)order);
            index_bench(1, 131072, 512, LAYERS, (enum order)order);
            attend_bench(64, TD_KV_ROW_FP8, "fp8", LAYERS, (enum order)order);
            attend_bench(8, TD_KV_ROW_BF16, "bf16", LAYERS, (enum order)order);
        }
}

int main(int argc, char **argv) {
    struct td_error err;
    const struct td_backend *backend;
    uint32_t index[TD_MAX_RANKS];
    if (td_backend_find(argc > 1 ? argv[1] : "cuda:0", 1, &backend, index, &err) != TD_OK ||
        backend->host)
        die("expected cuda:N");
    if (backend->open(&dev, index[0], &err) != TD_OK) die(err.text);
    if (dev.backend->ops(&dev, 0, &ops, &err) != TD_OK) die(err.text);
    noise = (uint8_t *)malloc(noise_bytes);
    uint64_t r = 1;
    for (size_t i = 0; i < noise_bytes; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        noise[i] = (uint8_t)(r >> 56);
    }
    size_t bytes = (size_t)4 << 30;
    uint8_t *a = (uint8_t *)random_bytes(bytes, 0xff, 0), *b = (uint8_t *)take(bytes);
    cudaStream_t stream = td_cuda_of(&dev)->stream[TD_LANE_STEP];
    double t = seconds(4, [&](int i) {
        cudaMemcpyAsync(i % 2 ? a : b, i % 2 ? b : a, bytes, cudaMemcpyDeviceToDevice, stream);
    });
    copy_rate = 2.0 * (double)bytes / t;
    printf("copy %.0f GB/s, read and written\n", copy_rate * 1e-9);
    dev.backend->give(&dev, a, 0);
    dev.backend->give(&dev, b, 0);
    if (argc > 2 && strcmp(argv[2], "layout") == 0) {
        layouts();
        return 0;
    }
    auto wanted = [&](const char *what) { return argc <= 2 || strcmp(argv[2], what) == 0; };
    if (wanted("index")) {
        index_bench(32, 131072, 512, 2, LAYER_MAJOR);
        index_bench(1, 131072, 512, 2, LAYER_MAJOR);
        index_bench(32, 131072, 2048, 2, LAYER_MAJOR);
    }
    if (wanted("attend")) {
        attend_bench(64, TD_KV_ROW_BF16, "bf16", 4, LAYER_MAJOR);
        attend_bench(64, TD_KV_ROW_FP8, "fp8", 4, LAYER_MAJOR);
        attend_bench(8, TD_KV_ROW_BF16, "bf16", 4, LAYER_MAJOR);
        attend_bench(1024, TD_KV_ROW_BF16, "bf16", 4, LAYER_MAJOR);
    }
    if (wanted("experts")) {
        experts(TD_W_NVFP4, "nvfp4", 8);
        experts(TD_W_FP4, "fp4", 8);
        experts(TD_W_FP8_BLOCK, "fp8", 8);
        experts(TD_W_NVFP4, "nvfp4", 4096);
    }
    if (wanted("linear")) linears();
    return 0;
}
