/* The clock around every op: the wrapped td_ops_init, the lines it counts into, and the table. */
#include "tests/kernels/op_times.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/ops.h"

void __real_td_ops_init(struct td_ops *ret, uint64_t force_ref);
void __wrap_td_ops_init(struct td_ops *ret, uint64_t force_ref);

enum { LINES = 128, NAME = 48 };

static struct line {
    char name[NAME];
    uint32_t calls;
    uint64_t ns;
    double flop; /* 0: not an op that is judged by arithmetic */
} line[LINES];
static uint32_t lines;
static const struct td_ops *chosen;
static struct td_ops real;
static bool on;

bool td_op_times_choose(const char *variant) {
    for (uint32_t i = 0; (chosen = td_ops_table(i)) != NULL; i++)
        if (strcmp(chosen->name, variant) == 0) return true;
    return false;
}

void td_op_times_start(void) {
    lines = 0;
    on = true;
}

void td_op_times_stop(void) {
    on = false;
}

static void count(const char *name, uint64_t t0, double flop) {
    uint64_t ns = td_now_ns() - t0;
    uint32_t i = 0;
    while (i < lines && strcmp(line[i].name, name) != 0)
        i++;
    if (i == lines) {
        if (lines == LINES) return;
        line[lines++] = (struct line){0};
        snprintf(line[i].name, NAME, "%s", name);
    }
    line[i].calls++;
    line[i].ns += ns;
    line[i].flop += flop;
}

/* What distinguishes calls of an op, and their arithmetic. */
#define PLAIN(op)                                                                                  \
    static double name_##op(const struct td_##op##_args *a, char *name) {                          \
        (void)a;                                                                                   \
        snprintf(name, NAME, #op);                                                                 \
        return 0;                                                                                  \
    }
PLAIN(embed)
PLAIN(expand)
PLAIN(round_fp8)
PLAIN(round_nvfp4)
PLAIN(hc_pre)
PLAIN(hc_post)
PLAIN(hc_head)
PLAIN(rope_angles)
PLAIN(row_store)
PLAIN(ring_write)
PLAIN(index_query)
PLAIN(index_merge)
PLAIN(attend_part)
PLAIN(attend_merge)
PLAIN(add_shards)
PLAIN(route)
PLAIN(group)
PLAIN(combine)
PLAIN(gather)

static double name_linear(const struct td_linear_args *a, char *name) {
    double rows = 0;
    for (uint32_t i = 0; i < a->parts; i++)
        rows += a->part[i].w->rows;
    snprintf(name, NAME, "linear %.0f x %u", rows, a->part[0].w->cols);
    return 2.0 * a->n * rows * a->part[0].w->cols;
}

static double name_expert_linear(const struct td_expert_linear_args *a, char *name) {
    const struct td_matrix *w = a->w[0];
    snprintf(name, NAME, "expert_linear %u x %u x %u", a->parts, w->rows, w->cols);
    return 2.0 * a->offset[a->experts] * a->parts * w->rows * w->cols;
}

static double name_rms_norm(const struct td_rms_norm_args *a, char *name) {
    snprintf(name, NAME, "rms_norm %u%s", a->dim, a->w ? "" : " of heads");
    return 0;
}

static double name_rope(const struct td_rope_args *a, char *name) {
    snprintf(name, NAME, "rope %u x %u%s", a->heads, a->dim, a->inverse ? " inverse" : "");
    return 0;
}

static double name_swiglu(const struct td_swiglu_args *a, char *name) {
    snprintf(name, NAME, "swiglu %s", a->weight ? "experts" : "shared");
    return 0;
}

static double name_compress(const struct td_compress_args *a, char *name) {
    snprintf(name, NAME, "compress %s",
             a->family == TD_KV_CSA     ? "csa"
             : a->family == TD_KV_INDEX ? "index"
                                        : "hca");
    return 0;
}

static double name_index(const struct td_index_args *a, char *name) {
    double pairs = 0;
    for (uint32_t i = a->first; i < a->first + a->rows; i++) {
        uint32_t seen = (a->batch->row[i].pos + 1) / TD_CSA_RATIO;
        pairs += seen > a->topk ? seen : 0;
    }
    snprintf(name, NAME, "index");
    return 2 * pairs * a->heads * TD_INDEX_DIM;
}

static double name_attend(const struct td_attend_args *a, char *name) {
    uint32_t ratio = a->ml ? 0 : a->batch->kv->ratio[a->layer]; /* a window's part */
    double pairs = 0;
    for (uint32_t i = 0; i < a->batch->n; i++) {
        uint32_t pos = a->batch->row[i].pos;
        pairs += pos + 1 < TD_WINDOW ? pos + 1 : TD_WINDOW;
        if (ratio == TD_HCA_RATIO) pairs += (pos + 1) / TD_HCA_RATIO;
        if (ratio == TD_CSA_RATIO) {
            uint32_t seen = (pos + 1) / TD_CSA_RATIO;
            pairs += seen < a->topk ? seen : a->topk;
        }
    }
    snprintf(name, NAME, "attend %s", ratio == 0 ? "swa" : ratio == TD_CSA_RATIO ? "csa" : "hca");
    return 4 * pairs * a->heads * TD_HEAD_DIM;
}

#define X(op)                                                                                      \
    static void timed_##op(const struct td_device *d, const struct td_##op##_args *a) {            \
        uint64_t t0 = td_now_ns();                                                                 \
        real.op(d, a);                                                                             \
        if (!on) return;                                                                           \
        char name[NAME];                                                                           \
        double flop = name_##op(a, name);                                                          \
        count(name, t0, flop);                                                                     \
    }
TD_OPS_MAP(X)
#undef X

void __wrap_td_ops_init(struct td_ops *ret, uint64_t force_ref) {
    if (chosen)
        real = *chosen;
    else
        __real_td_ops_init(&real, force_ref);
    ret->name = real.name;
#define X(op) ret->op = timed_##op;
    TD_OPS_MAP(X)
#undef X
}

static int longest_first(const void *a, const void *b) {
    const struct line *x = a, *y = b;
    return x->ns < y->ns ? 1 : x->ns > y->ns ? -1 : 0;
}

void td_op_times_print(double wall_s, double gflops) {
    qsort(line, lines, sizeof *line, longest_first);
    double rest = wall_s * 1e3;
    printf("%-32s %6s %9s %6s %8s %5s\n", "op", "calls", "ms", "share", "GFLOP/s", "peak");
    for (uint32_t i = 0; i < lines; i++) {
        double ms = 1e-6 * (double)line[i].ns, rate = 1e-6 * line[i].flop / ms;
        rest -= ms;
        printf("%-32s %6u %9.2f %5.1f%%", line[i].name, line[i].calls, ms, 0.1 * ms / wall_s);
        if (line[i].flop > 0) printf(" %8.0f %4.0f%%", rate, 100 * rate / gflops);
        printf("\n");
    }
    printf("%-32s %6s %9.2f %5.1f%%\n", "between the ops", "", rest, 0.1 * rest / wall_s);
}
