/* Choice of the op table, ops by name, and the sizes of the ops' working memory. */
#include "kernels/ops.h"

#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/scratch.h"

/* The fast variants that were built (kernels/meson.build), the best one first as a rule. */
#define VARIANTS(X) TD_CPU_VARIANTS(X)
#define X(name) extern const struct td_ops td_ops_##name;
VARIANTS(X)
#undef X

#if defined(__x86_64__)
/* What each is compiled with. */
static bool runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}
static bool runs_avx512(void) {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

/* AMD's family 19h (Zen 4) executes 512 bits as twice 256, and its L1 cache has eight ways: twelve
 * rows of a wide tile, a power of two apart, push each other out. AVX2 is the faster one there. */
static bool second_choice(const struct td_ops *ops) {
    uint32_t a, b, c, d;
    if (ops != &td_ops_avx512 || !__builtin_cpu_is("amd")) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 0xf) + (a >> 20 & 0xff) == 0x19;
}
#else
static bool runs_plain(void) {
    return true;
}
static bool second_choice(const struct td_ops *ops) {
    (void)ops;
    return false;
}
#endif

const struct td_ops *td_ops_table(uint32_t i) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (int second = 0; second < 2; second++) {
#define X(name)                                                                                    \
    if (runs_##name() && second_choice(&td_ops_##name) == second && i-- == 0) return &td_ops_##name;
        VARIANTS(X)
    }
#undef X
    return i == 0 ? &td_ops_ref : NULL;
}

const struct td_ops *td_ops_select(void) {
    return td_ops_table(0);
}

/* ---- ops by name ---- */

static const char *const op_name[] = {
#define X(op) #op,
    TD_OPS_MAP(X)
#undef X
};
enum { N_OPS = sizeof op_name / sizeof *op_name };
_Static_assert(N_OPS < 64, "a mask has a bit per op");
static const uint64_t every_op = ((uint64_t)1 << N_OPS) - 1;

static uint64_t mask_of(const char *name, size_t len) {
    if (len == 3 && memcmp(name, "all", 3) == 0) return every_op;
    for (uint32_t i = 0; i < N_OPS; i++)
        if (strlen(op_name[i]) == len && memcmp(op_name[i], name, len) == 0)
            return (uint64_t)1 << i;
    return 0;
}

td_status td_ops_mask(const char *list, uint64_t *ret, struct td_error *err) {
    static const char between[] = ", \t";
    uint64_t mask = 0;
    for (const char *at = list + strspn(list, between); *at; at += strspn(at, between)) {
        size_t len = strcspn(at, between);
        uint64_t bit = mask_of(at, len);
        if (!bit) {
            char names[512];
            td_ops_names(every_op & ~(uint64_t)1, names, sizeof names);
            return td_fail(err, TD_CONFIG, "force_ref: expected all, %s %s, found %.*s", op_name[0],
                           names, len > 60 ? 60 : (int)len, at);
        }
        mask |= bit;
        at += len;
    }
    *ret = mask;
    return TD_OK;
}

void td_ops_names(uint64_t mask, char *buf, size_t cap) {
    size_t used = 0;
    if ((mask & every_op) == every_op) {
        snprintf(buf, cap, "all");
        return;
    }
    buf[0] = 0;
    for (uint32_t i = 0; i < N_OPS && used < cap; i++)
        if (mask >> i & 1)
            used += (size_t)snprintf(buf + used, cap - used, "%s%s", used ? " " : "", op_name[i]);
}

void td_ops_init(struct td_ops *ret, uint64_t force_ref) {
    uint32_t i = 0;
    *ret = *td_ops_select();
#define X(op)                                                                                      \
    if (force_ref >> i++ & 1) ret->op = td_ops_ref.op;
    TD_OPS_MAP(X)
#undef X
}

/* ---- working memory ---- */

static size_t round64(size_t n) {
    return (n + 63) & ~(size_t)63;
}

size_t td_index_workspace(uint32_t heads, uint32_t topk) {
    size_t lanes = (size_t)TD_INDEX_ROWS * td_lanes(heads);
    size_t floats = lanes * (TD_INDEX_DIM + 1) + (size_t)TD_INDEX_TILE * TD_INDEX_ROWS;
    /* Per query: two lists of topk + a tile of 64-bit candidates, and 16 bytes of bookkeeping. */
    size_t lists = (size_t)TD_INDEX_ROWS * (2 * ((size_t)topk + TD_INDEX_TILE) * 8 + 16);
    return round64(floats * sizeof(float) + lists);
}

size_t td_op_scratch(uint32_t heads, uint32_t index_heads, uint32_t max_entries, bool split) {
    size_t set = td_lanes(TD_WINDOW + max_entries), lanes = td_lanes(heads);
    size_t queries = lanes > TD_ATTEND_QUERIES ? lanes : TD_ATTEND_QUERIES;
    size_t rows = (size_t)TD_ATTEND_BLOCKS * TD_BLOCK + TD_ATTEND_SPAN;
    size_t attend = rows * TD_ATTEND_ROW + TD_HEAD_DIM * lanes + set * queries + TD_ATTEND_DOTS +
                    (size_t)TD_ATTEND_SPAN * TD_HEAD_DIM;
    if (split) attend += (TD_KV_MAX_SPLIT + 1) * lanes * (TD_HEAD_DIM + 2) + set;
    size_t index =
        (size_t)TD_INDEX_KEYS * TD_INDEX_DIM + 12 * (size_t)TD_INDEX_ROWS * td_lanes(index_heads);
    return round64((attend > index ? attend : index) * sizeof(float));
}
