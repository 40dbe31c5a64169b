/* Compares every op of every variant with the definitions, and measures them; see compare.h.
 *
 * usage: compare_ops [--seed N] [--variant NAME] [--op NAME] [--rounds N] [--list]
 *        compare_ops --bench [--threads N] [--variant NAME] [--op NAME]
 * The variant ref (on several threads, compared with itself on one) runs only when it is named.
 *
 * Exit code 1 when a variant differs, with the op, its shape, the seed and the first difference.
 * --bench prints, per op and variant, the share of the machine's multiply-add rate (with the
 * variant's vectors) or read bandwidth (measured in the same run) that one call reaches: of the
 * limit that binds. */
#include "tests/kernels/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "tests/kernels/machine.h"

extern const struct td_ops td_ops_wide; /* the source for 16 lanes, on whatever runs here */

#ifdef TD_COMPARE_BACKEND
extern const struct td_backend TD_COMPARE_BACKEND;
#endif

struct variant {
    const char *name;
    const struct td_backend *backend;
    const struct td_ops *ops; /* NULL: what the backend chooses */
    bool rounds;              /* own rounding: the op's tolerance instead of its bits */
    bool check_only;          /* not worth measuring */
};

/* ---- what a case sees ---- */

static uint64_t next(struct td_case *c) { /* splitmix64 */
    uint64_t z = (c->rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t td_case_below(struct td_case *c, uint32_t n) {
    return (uint32_t)(next(c) >> 33) % n;
}

float td_case_uniform(struct td_case *c, float lo, float hi) {
    return lo + (hi - lo) * ((float)(next(c) >> 40) * 0x1p-24f);
}

static void *must(void *p) {
    if (!p) {
        fprintf(stderr, "compare_ops: out of memory\n");
        exit(2);
    }
    return p;
}

float *td_case_floats(struct td_case *c, size_t n, float lo, float hi) {
    float *p = must(malloc(n * sizeof *p));
    for (size_t i = 0; i < n; i++)
        p[i] = td_case_uniform(c, lo, hi);
    return p;
}

static void must_ok(td_status st, const struct td_error *err) {
    if (st == TD_OK) return;
    fprintf(stderr, "compare_ops: %s\n", err->text);
    exit(2);
}

static void *add_array(struct td_case *c, enum td_array_kind kind, uint8_t *before, size_t bytes) {
    struct td_error err;
    if (c->arrays == TD_CASE_ARRAYS) {
        fprintf(stderr, "compare_ops: more than %d arrays\n", TD_CASE_ARRAYS);
        exit(2);
    }
    struct td_array *a = &c->array[c->arrays++];
    *a = (struct td_array){.kind = kind, .bytes = bytes, .before = before};
    must_ok(
        c->device->backend->take(c->device, bytes + 2 * TD_CASE_GUARD, "case", &a->memory, &err),
        &err);
    td_upload(c->device, a->memory, before, bytes + 2 * TD_CASE_GUARD);
    return (uint8_t *)a->memory + TD_CASE_GUARD;
}

static uint8_t *guarded(size_t bytes) {
    uint8_t *p = must(malloc(bytes + 2 * TD_CASE_GUARD));
    memset(p, 0xa5, bytes + 2 * TD_CASE_GUARD);
    return p;
}

void *td_case_put(struct td_case *c, enum td_array_kind kind, const void *from, size_t bytes) {
    uint8_t *p = guarded(bytes);
    memcpy(p + TD_CASE_GUARD, from, bytes);
    return add_array(c, kind, p, bytes);
}

float *td_case_input(struct td_case *c, size_t n, float lo, float hi) {
    float *p = td_case_floats(c, n, lo, hi);
    float *to = td_case_put(c, TD_IN, p, n * sizeof *p);
    free(p);
    return to;
}

void *td_case_output(struct td_case *c, enum td_array_kind kind, size_t bytes) {
    uint8_t *p = guarded(bytes);
    memset(p + TD_CASE_GUARD, 0xff, bytes); /* NaN, and no index */
    return add_array(c, kind, p, bytes);
}

struct td_matrix td_case_matrix(struct td_case *c, uint32_t rows, uint32_t cols, bool bf16) {
    size_t n = (size_t)rows * cols;
    float *w = td_case_floats(c, n, -1.0f, 1.0f);
    struct td_matrix m = {.rows = rows, .cols = cols, .bf16 = bf16};
    for (size_t i = 0; bf16 && i < n; i++)
        w[i] = td_bf16_to_f32(td_f32_to_bf16(w[i]));
    if (c->device->backend->host) {
        size_t bytes = td_matrix_bytes(rows, cols, bf16);
        void *panels = must(calloc(1, bytes));
        for (uint32_t o = 0; o < rows; o++)
            td_matrix_set_row(panels, cols, bf16, o, w + (size_t)o * cols);
        m.panels = td_case_put(c, TD_IN, panels, bytes);
        free(panels);
    } else {
        m.stored = (struct td_weight){.format = TD_W_F32, .rows = rows, .cols = cols};
        m.stored.data = td_case_put(c, TD_IN, w, n * sizeof *w);
    }
    free(w);
    return m;
}

struct td_matrix *td_case_matrices(struct td_case *c, uint32_t n, uint32_t rows, uint32_t cols,
                                   bool bf16) {
    struct td_matrix *m = must(malloc(n * sizeof *m));
    for (uint32_t i = 0; i < n; i++) {
        m[i] = td_case_matrix(c, rows, cols, bf16);
        m[i].input_scale = 0.01f * (float)(i + 1);
    }
    if (!c->device->backend->host) {
        struct td_matrix *copy = td_case_put(c, TD_IN, m, n * sizeof *m);
        for (uint32_t i = 0; i < n; i++)
            m[i].device = copy + i;
    }
    return m;
}

/* On one thread of the host its processor time, which neighbours on the machine do not count in. */
static uint64_t clock_ns(const struct td_case *c) {
    struct timespec t;
    if (!c->device->backend->host || td_threads_count(c->device->threads) > 1) return td_now_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool td_case_more(struct td_case *c) {
    struct td_error err;
    if (c->budget_s == 0) return c->calls++ == 0;
    must_ok(c->device->backend->wait(c->device, TD_LANE_STEP, &err), &err);
    if (c->calls > 0) {
        double s = 1e-9 * (double)(clock_ns(c) - c->t0);
        if (c->calls > 1 && s < c->best_s) c->best_s = s; /* the first call warms up */
        c->budget_s -= s;
    }
    c->calls++;
    c->t0 = clock_ns(c);
    return c->budget_s > 0 || c->calls < 5;
}

/* ---- comparison ---- */

static void finish(struct td_case *c) {
    for (uint32_t i = 0; i < c->arrays; i++) {
        struct td_array *a = &c->array[i];
        c->device->backend->give(c->device, a->memory, a->bytes + 2 * TD_CASE_GUARD);
        free(a->before);
        free(a->after);
    }
    c->arrays = 0;
}

static void run(struct td_case *c, const struct td_op_cases *o, struct td_device *d,
                const struct td_ops *ops, uint64_t seed, uint32_t shape, double budget_s) {
    *c = (struct td_case){.device = d,
                          .ops = ops,
                          .rng = seed + shape * 0x632be59bd9b4e019u,
                          .shape = shape,
                          .budget_s = budget_s,
                          .best_s = 1e30};
    o->fn(c);
    struct td_error err;
    must_ok(d->backend->wait(d, TD_LANE_STEP, &err), &err);
    for (uint32_t i = 0; budget_s == 0 && i < c->arrays; i++) {
        struct td_array *a = &c->array[i];
        a->after = must(malloc(a->bytes + 2 * TD_CASE_GUARD));
        td_download(d, a->after, a->memory, a->bytes + 2 * TD_CASE_GUARD);
        must_ok(d->backend->wait(d, TD_LANE_STEP, &err), &err);
    }
}

/* First byte from..to-1 in which x and y differ, or `to`. */
static size_t first_difference(const uint8_t *x, const uint8_t *y, size_t from, size_t to) {
    while (from < to && x[from] == y[from])
        from++;
    return from;
}

static bool close_enough(const uint8_t *x, const uint8_t *y, double tolerance) {
    float a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, y, sizeof b);
    if (memcmp(&a, &b, sizeof a) == 0) return true;
    return fabs((double)a - b) <= tolerance * fmax(1.0, fabs((double)b));
}

/* Empty text: array i is as it should be. */
static void check_array(const struct td_array *want, const struct td_array *got, double tolerance,
                        char *text, size_t cap) {
    size_t end = TD_CASE_GUARD + got->bytes, all = end + TD_CASE_GUARD;
    size_t at = first_difference(got->before, got->after, 0, TD_CASE_GUARD);
    if (at == TD_CASE_GUARD) at = first_difference(got->before, got->after, end, all);
    if (at < TD_CASE_GUARD || (at >= end && at < all)) {
        snprintf(text, cap, "a byte %zu %s it was written",
                 at < end ? TD_CASE_GUARD - at : at - end + 1, at < end ? "before" : "after");
        return;
    }
    if (got->kind == TD_SCRATCH) return;
    if (got->kind == TD_IN) {
        at = first_difference(got->before, got->after, TD_CASE_GUARD, end);
        if (at < end) snprintf(text, cap, "an input was changed at byte %zu", at - TD_CASE_GUARD);
        return;
    }
    for (at = TD_CASE_GUARD; (at = first_difference(want->after, got->after, at, end)) < end;
         at++) {
        size_t value = (at - TD_CASE_GUARD) / 4, byte = TD_CASE_GUARD + value * 4;
        float w, g;
        if (got->kind != TD_FLOATS) {
            snprintf(text, cap, "byte %zu of %zu: expected %02x, found %02x", at - TD_CASE_GUARD,
                     got->bytes, want->after[at], got->after[at]);
            return;
        }
        memcpy(&w, want->after + byte, sizeof w);
        memcpy(&g, got->after + byte, sizeof g);
        if (tolerance > 0 && close_enough(got->after + byte, want->after + byte, tolerance)) {
            at = byte + 3;
            continue;
        }
        snprintf(text, cap, "value %zu of %zu: expected %.9g, found %.9g", value, got->bytes / 4,
                 (double)w, (double)g);
        return;
    }
}

static int compare(const struct td_op_cases *o, const struct variant *v, const struct td_ops *ops,
                   uint64_t seed, uint32_t shape, uint32_t threads) {
    static struct td_case want, got; /* too large for a stack */
    struct td_device d[2] = {0};
    struct td_error err;
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        const struct td_backend *b = i ? v->backend : &td_backend_cpu;
        must_ok(b->open(&d[i], 0, &err), &err);
        d[i].scratch_stride = td_op_scratch(TD_MAX_HEADS, TD_MAX_HEADS, 4096, true);
        d[i].scratch = must(aligned_alloc(64, d[i].scratch_stride * threads));
        must_ok(td_threads_create(i ? threads : 1, &d[i].threads, &err), &err);
    }
    run(&want, o, &d[0], &td_ops_ref, seed, shape, 0);
    run(&got, o, &d[1], ops, seed, shape, 0);
    for (uint32_t i = 0, j = 0; i < got.arrays && !failed; i++) {
        char text[200] = "";
        /* Devices may have more inputs; outputs are the same ones in the same order. */
        while (got.array[i].kind > TD_IN && want.array[j].kind == TD_IN)
            j++;
        check_array(&want.array[got.array[i].kind > TD_IN ? j++ : 0], &got.array[i],
                    v->rounds ? o->tolerance : 0, text, sizeof text);
        failed = text[0] != 0;
        if (failed)
            printf("FAIL %s of %s: %s; %u threads: array %u: %s\n    compare_ops --seed %llu "
                   "--variant "
                   "%s --op %s\n",
                   o->op, v->name, got.text, threads, i, text, (unsigned long long)seed, v->name,
                   o->op);
    }
    finish(&want);
    finish(&got);
    for (int i = 0; i < 2; i++) {
        td_threads_destroy(d[i].threads);
        free(d[i].scratch);
        d[i].backend->close(&d[i]);
    }
    return failed;
}

/* ---- measuring ---- */

static void measure(const struct td_op_cases *o, const struct variant *v, const struct td_ops *ops,
                    uint32_t threads, double gflops) {
    static struct td_case c;
    struct td_device d = {0};
    struct td_error err;
    must_ok(v->backend->open(&d, 0, &err), &err);
    d.scratch_stride = td_op_scratch(TD_MAX_HEADS, TD_MAX_HEADS, 4096, true);
    d.scratch = must(aligned_alloc(64, d.scratch_stride * threads));
    must_ok(td_threads_create(threads, &d.threads, &err), &err);
    run(&c, o, &d, ops, 1, TD_CASE_BENCH, 0.3);
    if (c.bytes > 0) {
        double gbs = td_machine_read_gbs(threads, (uint64_t)c.bytes);
        double flops = 1e-9 * c.flops / c.best_s, moved = 1e-9 * c.bytes / c.best_s;
        bool arithmetic = flops / gflops > moved / gbs;
        printf("%-14s %-7s %9.1f us  %7.1f GFLOP/s  %7.2f GB/s  %5.1f %% of %s  (%s)\n", o->op,
               v->name, 1e6 * c.best_s, flops, moved,
               100 * (arithmetic ? flops / gflops : moved / gbs),
               arithmetic ? "arithmetic" : "bandwidth", c.text);
        fflush(stdout);
    }
    finish(&c);
    td_threads_destroy(d.threads);
    free(d.scratch);
    d.backend->close(&d);
}

/* ---- the program ---- */

struct options {
    uint64_t seed;
    const char *variant, *op;
    uint32_t rounds, threads;
    bool bench, list;
};

static bool parse(int argc, char **argv, struct options *o) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    *o = (struct options){
        .seed = (uint64_t)t.tv_sec * 1000003u + (uint64_t)t.tv_nsec, .rounds = 1, .threads = 2};
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--bench") == 0)
            o->bench = true;
        else if (strcmp(argv[i], "--list") == 0)
            o->list = true;
        else if (more && strcmp(argv[i], "--seed") == 0)
            o->seed = strtoull(argv[++i], NULL, 10);
        else if (more && strcmp(argv[i], "--variant") == 0)
            o->variant = argv[++i];
        else if (more && strcmp(argv[i], "--op") == 0)
            o->op = argv[++i];
        else if (more && strcmp(argv[i], "--rounds") == 0)
            o->rounds = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (more && strcmp(argv[i], "--threads") == 0)
            o->threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        else
            return false;
    }
    return o->threads >= 1 && o->rounds >= 1;
}

/* Variants that run here: the CPU's tables, the 16-lane source, then devices. */
static uint32_t variants(struct variant *v, uint32_t cap) {
    uint32_t n = 0;
    for (uint32_t i = 0; n < cap && td_ops_table(i) != &td_ops_ref; i++)
        v[n++] =
            (struct variant){td_ops_table(i)->name, &td_backend_cpu, td_ops_table(i), false, false};
    if (n > 0) v[n++] = (struct variant){"wide", &td_backend_cpu, &td_ops_wide, false, true};
    v[n++] = (struct variant){"ref", &td_backend_cpu, &td_ops_ref, false, true}; /* threads */
#ifdef TD_COMPARE_BACKEND
    struct td_device d = {0};
    struct td_error err;
    if (TD_COMPARE_BACKEND.open(&d, 0, &err) == TD_OK) {
        d.backend->close(&d);
        v[n++] = (struct variant){"cuda", &TD_COMPARE_BACKEND, NULL, false, false};
    } else {
        printf("cuda: not compared: %s\n", err.text);
    }
#endif
    return n;
}

static bool has_op(const struct td_op_cases *o, const char *name) {
    return o->op && (!name || strcmp(o->op, name) == 0);
}

static void run_variant(const struct variant *v, const struct options *o, double gflops,
                        uint32_t *cases, uint32_t *failed) {
    static const struct td_op_cases *const list[] = {td_cases_dense, td_cases_kv};
    struct td_ops own;
    if (v->ops) {
        own = *v->ops;
    } else {
        struct td_device d = {0};
        struct td_error err;
        must_ok(v->backend->open(&d, 0, &err), &err);
        /* A device's plain kernels have the definitions' bits; its fast ones (test_cuda_ops.c) are
         * what is worth measuring. */
        uint64_t plain = 0;
        if (!o->bench) must_ok(td_ops_mask("all", &plain, &err), &err);
        must_ok(v->backend->ops(&d, plain, &own, &err), &err);
        d.backend->close(&d);
    }
    for (uint32_t i = 0; i < 2; i++)
        for (const struct td_op_cases *c = list[i]; c->op; c++) {
            if (!has_op(c, o->op)) continue;
            if (o->bench) {
                if (!v->check_only) measure(c, v, &own, o->threads, gflops);
                continue;
            }
            for (uint32_t round = 0; round < o->rounds; round++)
                for (uint32_t shape = 0; shape < c->shapes; shape++, ++*cases)
                    *failed += (uint32_t)compare(c, v, &own, o->seed + round, shape, 1 + shape % 3);
        }
}

/* Every op of the table has cases. */
static uint32_t without_cases(void) {
    uint32_t missing = 0;
#define X(name)                                                                                    \
    do {                                                                                           \
        bool found = false;                                                                        \
        for (const struct td_op_cases *c = td_cases_dense; c->op; c++)                             \
            found = found || strcmp(c->op, #name) == 0;                                            \
        for (const struct td_op_cases *c = td_cases_kv; c->op; c++)                                \
            found = found || strcmp(c->op, #name) == 0;                                            \
        if (!found) printf("FAIL %s: no cases\n", #name);                                          \
        missing += !found;                                                                         \
    } while (0);
    TD_OPS_MAP(X)
#undef X
    return missing;
}

int main(int argc, char **argv) {
    struct options o;
    struct variant v[16];
    if (!parse(argc, argv, &o)) {
        fprintf(stderr, "usage: compare_ops [--bench] [--seed N] [--variant NAME] [--op NAME] "
                        "[--rounds N] [--threads N] [--list]\n");
        return 2;
    }
    uint32_t n = variants(v, 8), cases = 0, failed = without_cases(), used = 0;
    if (o.bench)
        printf("bandwidth is measured over each op's own bytes, on %u threads\n", o.threads);
    else
        printf("seed: --seed %llu\n", (unsigned long long)o.seed);
    for (uint32_t i = 0; i < n; i++) {
        if (o.list) printf("%s\n", v[i].name);
        if (o.list || strcmp(v[i].name, o.variant ? o.variant : v[i].name) != 0) continue;
        if (!o.variant && v[i].ops == &td_ops_ref) continue;
        used++;
        double gflops = 0;
        if (o.bench) {
            gflops = td_machine_gflops(o.threads, strcmp(v[i].name, "avx512") == 0);
            printf("machine for %s: %.1f GFLOP/s\n", v[i].name, gflops);
        }
        run_variant(&v[i], &o, gflops, &cases, &failed);
    }
    if (!o.list && used == 0) {
        fprintf(stderr, "compare_ops: no variant %s on this machine\n", o.variant);
        return 2;
    }
    if (!o.bench && !o.list)
        printf("%u comparisons over %u variants, %u failed\n", cases, used, failed);
    return failed ? 1 : 0;
}
