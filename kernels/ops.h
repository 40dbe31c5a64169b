/* The op table: every computation of the forward pass, and its contract.
 *
 * One struct of function pointers per device. The definitions are kernels/ref: a variant must
 * give the same bits for the same arguments on the CPU, and stay inside the op's tolerance on a
 * device with its own rounding. Sections (s.) refer to the model's forward-pass description.
 *
 * Common to all ops: shapes are outermost first; arrays are fp32 and dense unless a stride is
 * given (strides count floats); outputs do not alias inputs unless said; pointers are 4-aligned
 * at least, into device memory. `n` is the number of token rows of the step, all sequences
 * together, and a row's result never depends on n, on the other rows, or on the number of threads.
 *
 * One order of summation, the same for one row and for many:
 *   block sum   a sum over k (inputs, head dims, members of an attention set) is cut into blocks
 *               of TD_BLOCK; inside a block one fmaf chain from 0 in ascending k; the block sums
 *               are added in ascending order (the first one starts the total).
 *   lane sum    sums inside a norm: 16 fmaf chains (element i in chain i mod 16), then chains
 *               i and i+8, i and i+4, i and i+2, i and i+1 are added, in this order.
 *   tree sum    of n logical shards, one per output group: one is itself, more are the tree sum of
 *               the first n / 2 (rounded down) + the tree sum of the others.
 *
 * A worker of 2, 4 or 8 ranks: each has an equal stretch of the shards, and the ranks' tree sums,
 * added by td_backend.all_reduce, are the bits of one rank that has them all. A rank has the output
 * groups and the experts of its shards, and an equal stretch of the vocabulary. What ops do with a
 * part of a thing is said at their arguments; a worker of one rank passes the whole. */
#ifndef TD_KERNELS_OPS_H
#define TD_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/kv/layout.h"
#include "common/kv/split.h"
#include "kernels/device.h"
#include "kernels/matrix.h"
#include "kernels/model/config.h"
#include "kernels/model/weight.h"

enum {
    TD_BLOCK = 128,       /* of the block sum; also the FP8 linears' scale block */
    TD_LINEAR_PARTS = 8,  /* products that share one input */
    TD_INDEX_ROWS = 16,   /* queries scored together */
    TD_INDEX_TILE = 1024, /* keys scored before the running top-k is updated */
    TD_MAX_HEADS = 256,   /* query or index heads */
};

/* The sequences of a step; `kv` and the numbers are the host's, the rest is in device memory. Row i
 * of the step is position row[i].pos of run[row[i].run]; rows of a run are consecutive and
 * ascending. */
struct td_op_row {
    uint32_t run, pos;
};
struct td_op_run {
    uint32_t first, n, pos; /* rows first..first+n-1 are positions pos..pos+n-1 */
    const uint32_t *pages;  /* page `a` of the sequence is pages[a >> batch->split] */
    void *slot;
};
struct td_op_batch {
    const struct td_kv_layout *kv;
    void *pool;
    uint32_t split, rank; /* the pool has those pages that are rank `rank`'s of 1 << split ranks
                             (common/kv/split.h); 0, 0: all */
    const struct td_op_row *row; /* [n] */
    const struct td_op_run *run; /* [runs] */
    uint32_t n, runs;
    uint32_t max_pos; /* no row's position is greater */
};
TD_HD static inline bool td_op_has_page(const struct td_op_batch *b, uint32_t a) {
    return td_kv_page_rank(a, b->split) == b->rank;
}
TD_HD static inline uint32_t td_op_page(const struct td_op_batch *b, const struct td_op_run *run,
                                        uint32_t a) {
    return run->pages[a >> b->split];
}

/* y[i] = w[ids[i] - first], or zeros (+0) where a rank's rows first..first + w->rows - 1 of the
 * vocabulary have no ids[i]. */
struct td_embed_args {
    const struct td_weight *w; /* [rank's vocabulary, hidden] */
    const int32_t *ids;        /* [n] */
    float *y;                  /* [n, hidden] */
    uint32_t n, first;
};
/* x[i][s] = y[i] for the four streams s (s.4). */
struct td_expand_args {
    const float *y; /* [n, hidden] */
    float *x;       /* [n, 4, hidden] */
    uint32_t n, hidden;
};

/* Device memory, 256-aligned, that nobody needs during a call: a device may leave anything there,
 * or not look at it. It decides over time, never over a result. bytes 0: none. */
struct td_spare {
    void *at;
    size_t bytes;
};

/* y[i][o] = block sum over k of x[i][x_at + k] * w[o][k]. Several products of one input, or of
 * stretches of it, in one call. */
struct td_linear_part {
    const struct td_matrix *w;
    float *y; /* [n, y_stride >= w->rows]; only the first w->rows of a row are written */
    size_t y_stride, x_at;
};
struct td_linear_args {
    const float *x; /* [n, x_stride >= x_at + cols] */
    size_t x_stride;
    struct td_spare spare;
    uint32_t n, parts;
    struct td_linear_part part[TD_LINEAR_PARTS]; /* equal cols */
};

/* y = x as the FP8 and FP4 linears of `ref` numerics see it (s.2): per 128 values, the last group
 * of a row shorter where dim ends inside it, x becomes e4m3_rne(x / s) * s with
 * s = 2^ceil(log2(max(max|x|, 1e-4) / 448)); kernels/ref/quant.h has the definition to the bit. The
 * products themselves are plain ones with dequantised weights: a scale is a power of two and, for
 * FP8 weights, the same for a whole block of 128 inputs, so a block sum of dequantised values is
 * the block sum of e4m3 products times both scales, to the bit (nothing is subnormal). FP4 weights
 * have a scale per 32 inputs; their products share the block's one chain. y may be x. */
struct td_round_fp8_args {
    const float *x;       /* [n, dim] */
    float *y;             /* [n, dim] */
    const uint32_t *rows; /* [1] how many rows count, up to n; the others stay. NULL: all n */
    uint32_t n, dim;      /* dim: a multiple of 8 */
};

/* Rows of round_nvfp4 as what their values are made of: value = e2m1 code * (e4m3 scale *
 * input_scale), in fp32 to the bit (but for the payload of NaNs, which are in the scale alone). In
 * device memory, dense, 16-aligned; code NULL: there are none. */
struct td_nvfp4_codes {
    uint8_t *code;  /* [rows, dim / 2] two e2m1 a byte, the even element in the low half */
    uint8_t *scale; /* [rows, dim / 16] e4m3, not negative; with a zero step: 0, and zero codes */
};

/* Row r of y = input row x_row[r] (NULL: r) as the NVFP4 linear of its expert sees it when
 * activations are rounded too: per 16 values b = e4m3_rne((max|x| / 6) / input_scale),
 * d = b * input_scale, x becomes e2m1_rne(clamp(x / d, -6, 6)) * d, or 0 where d is 0
 * (checkpoint s.7). Rows are grouped by expert: row r of expert e, offset[e] <= r < offset[e+1]
 * (`experts` and `w`: those of td_group_args' range). y is the definition: the products are plain
 * ones of it with dequantised weights. Codes are written beside it when asked for. */
struct td_round_nvfp4_args {
    const float *x;              /* [.., dim] */
    const uint32_t *x_row;       /* [offset[experts]] or NULL: then y may be x */
    const uint32_t *offset;      /* [experts + 1] */
    const struct td_matrix *w;   /* [experts]: their input_scale counts */
    float *y;                    /* [offset[experts], dim] */
    struct td_nvfp4_codes codes; /* wanted too, or code NULL */
    uint32_t experts, dim;       /* experts: one at least; dim: a multiple of 16 */
};

/* A linear for rows grouped by expert: row r of expert e, offset[e] <= r < offset[e+1],
 * takes input row x_row[r] (NULL: r) and matrix w[part][e]. `experts` and `w` are those of
 * td_group_args' range; there may be no rows at all.
 *
 * With `codes`, x is what round_nvfp4 wrote beside them for these experts (x_row is NULL, x_stride
 * the columns), and a device may multiply them with NVFP4 weights as both are stored. The products
 * of 16 inputs, their sum and that times both block scales are exact; a chain from 0 takes four
 * such blocks at a time, ascending, in each of 8 parts of K (whole 128s); the parts are added in
 * ascending order; the sum is multiplied with (scale2 * input_scale). In what order four blocks are
 * added and how that rounds is the chip's (the emulator's: one by one, ascending); a row's bits
 * depend on its codes, scales and weights alone. Without codes weights are dequantised as ever, and
 * so they are where this form does not fit. */
struct td_expert_linear_args {
    const float *x;
    size_t x_stride;
    const uint32_t *x_row;   /* [offset[experts]] or NULL */
    const uint32_t *offset;  /* [experts + 1] */
    uint32_t experts, parts; /* one at least */
    uint32_t most, all;      /* no expert has more rows, nor all together; 0: unknown */
    struct td_spare spare;
    struct td_nvfp4_codes codes;  /* of x, or code NULL */
    const struct td_matrix *w[2]; /* [parts][experts], equal shapes */
    float *y[2];                  /* [parts][rows, w->rows] dense */
};

/* y = (x * r) * w with r = 1 / sqrt(lane sum of x^2 / dim + eps); w NULL: no weight (s.2). y may
 * be x. dim is a multiple of 16. */
struct td_rms_norm_args {
    const float *x;
    size_t x_stride;
    float *y;
    size_t y_stride;
    const float *w; /* [dim] or NULL */
    uint32_t n, dim;
    float eps;
};

/* Parameters of one hyper-connection (s.5). */
struct td_hc {
    struct td_matrix fn; /* [24 or 4, 4 * hidden] */
    const float *base;   /* [24 or 4] */
    const float *scale;  /* [3 or 1] */
};
/* pre, post and comb from the 24 raw products m (before r; r is the lane-sum norm factor over all
 * 4 * hidden values), Sinkhorn included; y = sum over streams i ascending of pre[i] * x[i], an
 * fmaf chain from 0. hidden is a multiple of 16. */
struct td_hc_pre_args {
    const float *x; /* [n, 4, hidden] */
    const float *m; /* [n, 24] */
    const float *base, *scale;
    float *y;    /* [n, hidden] */
    float *post; /* [n, 4] */
    float *comb; /* [n, 4 source, 4 destination] */
    uint32_t n, hidden, iters;
    float eps, hc_eps;
};
/* x[k] = post[k] * o + sum over source streams j ascending of comb[j][k] * x[j], fmaf; in place. */
struct td_hc_post_args {
    float *x;       /* [n, 4, hidden] */
    const float *o; /* [n, hidden] */
    const float *post, *comb;
    uint32_t n, hidden;
};
/* y = sum over streams of (sigmoid(m[i] * r * scale + base[i]) + hc_eps) * x[i]. */
struct td_hc_head_args {
    const float *x; /* [n, 4, hidden] */
    const float *m; /* [n, 4] */
    const float *base, *scale;
    float *y; /* [n, hidden] */
    uint32_t n, hidden;
    float eps, hc_eps;
};

/* cs[i][j] = cos, sin of the fp32 product pos * freq[j] (s.3). */
struct td_rope_angles_args {
    const struct td_op_row *row; /* [n] */
    const float *freq;           /* [32] */
    float *cs;                   /* [n, 32, 2] */
    uint32_t n;
};
/* Rotates the last 64 values of each head by the row's angles, in place; `inverse` conjugates. */
struct td_rope_args {
    float *x;        /* [n, heads, dim] */
    const float *cs; /* [n, 32, 2] */
    uint32_t n, heads, dim;
    bool inverse;
};

/* Window rows in their stored form, and back into the rings.
 * row_store: rows[i] = kv[i] rounded to kv->row_dtype, in canonical form (td_kv_dense_row); with
 * `sim8` the first 448 values go through the rounding of round_fp8, per 64 values, before that.
 * Attention reads a step's own rows from there; the rings still hold what earlier steps wrote.
 * ring_write: the last 128 rows of every run go to their ring places. After attention. */
struct td_row_store_args {
    const float *kv; /* [n, 512] */
    void *rows;      /* [n] rows of kv->row_bytes */
    const struct td_kv_layout *layout;
    uint32_t n;
    bool sim8;
};
struct td_ring_write_args {
    const struct td_op_batch *batch;
    uint32_t layer;
    const void *rows;
};

/* Compressor (s.7), one call per family: adds ape to g in place; every window a row of the step
 * completes becomes an entry: pooled, normalised, rotated at the window's first position, rounded
 * and stored in its page in one go, by the rank that has the page; then the open state goes to the
 * slot's ring, on every rank.
 * Pool per channel: m = max g; e = exp(g - m); v = (fmaf chain of e * u) / (sum of e), tokens
 * ascending. d = 512, or 128 for TD_KV_INDEX; coff = 2 when the ratio is 4, else 1.
 * Between rotation and storing, as asked for: `sim8` (rows; see row_store); `hadamard` over the 128
 * values of a key, then `sim4`: per 32 values v becomes e2m1_rne(v / s) * s with
 * s = 2^ceil(log2(max(max|v|, 6 * 2^-126) / 6)).
 * FP8 keys: scale = max|v| / 448, or 1 when all are zero; byte = e4m3_rne(v / scale). FP4 keys and
 * FP8 rows are stored as sim4 and sim8 round. */
struct td_compress_args {
    const struct td_op_batch *batch;
    uint32_t layer;
    enum td_kv_family family; /* TD_KV_CSA, TD_KV_INDEX, TD_KV_HCA: where entries go */
    const float *u;           /* [n, coff * d] */
    float *g;                 /* [n, coff * d] */
    const float *ape;         /* [ratio, coff * d] */
    const float *norm;        /* [d] */
    const float *freq;        /* [32] */
    float eps;
    bool sim8;           /* TD_KV_CSA, TD_KV_HCA */
    bool hadamard, sim4; /* TD_KV_INDEX */
};

/* Index queries after rotation, in place: the same Hadamard transform and sim4 as the keys. */
struct td_index_query_args {
    float *q; /* [n, heads, 128] */
    uint32_t n, heads;
    bool hadamard, sim4;
};

/* Lightning indexer (s.8.1): selected[i] = the min(topk, visible) keys with the greatest
 * score = fmaf chain over heads ascending of (wt[h] * wt_scale) * max(dot, 0), dot = block sum;
 * with `score_bf16` the finished score is rounded to bf16 before any comparison. Equal scores: the
 * lower entry; ascending, then -1. Entry w is visible to position p when w < (p + 1) / 4. Keys are
 * read as stored. Only rows first..first + rows - 1 of the step: of q, wt and selected, which are
 * those of all rows, no others are touched. The workspace has the backend's index_workspace bytes
 * (on a CPU td_index_workspace) whatever the context length, 64-aligned, and holds anything.
 *
 * With `candidate` a rank looks through the keys it has, and `selected` is not touched: of row
 * first + i, candidate[i] = those of its best min(topk, visible ones it has) keys, by ascending
 * entry, then zeros; a candidate is td_index_candidate of score and entry. Rows whose `visible` is
 * at most topk are selected whatever their scores, and their candidates not touched. index_merge
 * makes `selected` of all ranks' candidates: to the bit what one rank with all keys selects. */
struct td_index_args {
    const struct td_op_batch *batch;
    uint32_t layer;
    uint32_t first, rows; /* first + rows <= batch->n */
    const float *q;       /* [n, heads, 128] */
    const float *wt;      /* [n, heads] */
    float wt_scale;
    uint32_t heads, topk;
    bool score_bf16;
    int32_t *selected;   /* [n, topk] */
    uint64_t *candidate; /* [rows, topk], or NULL: selected is wanted; not with batch->split > 0 */
    void *workspace;
};
size_t td_index_workspace(uint32_t heads, uint32_t topk);
/* Greater: the greater score (fp32 bits as they are; -0 is +0), or the lower entry. Any two keys
 * differ, and none is 0. */
TD_HD static inline uint64_t td_index_candidate(uint32_t score, uint32_t entry) {
    uint32_t u = score == 0x80000000u ? 0 : score;
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - entry);
}
TD_HD static inline uint32_t td_index_entry(uint64_t candidate) {
    return 0xffffffffu - (uint32_t)candidate;
}
/* Of rows first..first + rows - 1: selected[first + i] = the entries of the topk greatest of the
 * ranks' candidates of row i, or all visible ones where they are at most topk; ascending, then -1.
 */
struct td_index_merge_args {
    const struct td_op_batch *batch;
    uint32_t first, rows, ranks, topk;
    const uint64_t *candidate; /* [ranks, rows, topk] */
    int32_t *selected;         /* [n, topk] */
};

/* Sparse core (s.8.3). The set of a row: window positions max(0, p - 127)..p ascending, then
 * entries ascending: `selected` in a CSA layer, all visible ones (w < (p + 1) / 128) in an HCA
 * layer, none in an SWA layer. s = dot (block sum over 512) * 512^-0.5; max over s and sink;
 * e = exp(s - max); den = sum of e in set order, then + exp(sink - max);
 * o = (block sum over the set of e * row) / den.
 *
 * With `ml` it is the window's part of a softmax in parts (below): the set is the window alone in
 * every layer; ml[i][h] = max, den; o is not divided. */
struct td_attend_args {
    const struct td_op_batch *batch;
    uint32_t layer, heads;
    const float *q;          /* [n, heads, 512] */
    const void *rows;        /* [n] this step's window rows as stored */
    const float *sink;       /* [heads] */
    const int32_t *selected; /* [n, topk] in CSA layers, else NULL */
    uint32_t topk;
    float *o;  /* [n, heads, 512] */
    float *ml; /* [n, heads, 2] or NULL */
};

/* The sparse core where ranks share the entries (common/kv/split.h). A part is (m, l, acc) of some
 * members of a set: m = max of s, l = sum of e = exp(s - m) in set order, acc = block sum of
 * e * row. A part without members is empty: m = l = 0, and acc is not written. Two parts merged: of
 * an empty one and another the other; else, with b the one of the lesser m (if equal, either) and
 * f = exp(b.m - a.m): (a.m, fmaf(b.l, f, a.l), fmaf(b.acc, f, a.acc)).
 *
 *   shard's part  the row's entries (as in attend: selected or all visible ones) in the pages of
 *                 one logical shard, ascending
 *   rank's part   the tree sum of its shards' parts, merged for added: attend_part
 *   window's part window rows and sink: attend with ml
 *   o             acc / l of the window's part merged with the tree sum of the ranks' parts:
 *                 attend_merge
 *
 * Shards are 8 whatever the number of ranks, so o has the same bits for 1, 2, 4 and 8.
 *
 * Parts of the heads of every rank, for one of them: acc [rows, heads, 512], then m, l
 * [rows, heads, 2]; td_attend_part_floats in all. The ranks' parts lie one after the other. */
static inline size_t td_attend_part_floats(uint32_t rows, uint32_t heads) {
    return ((size_t)rows * heads * (512 + 2) + 3) & ~(size_t)3;
}
/* Rows first..first + rows - 1 of the step; CSA and HCA layers. */
struct td_attend_part_args {
    const struct td_op_batch *batch;
    uint32_t layer, first, rows;
    uint32_t ranks, heads;   /* heads of each rank; ranks is 1 << batch->split */
    const float *q;          /* [ranks, rows, heads, 512] */
    const int32_t *selected; /* [n, topk] in CSA layers, else NULL */
    uint32_t topk;
    float *part; /* [ranks] parts of this rank's shards, for the heads of each rank; 16-aligned */
};
struct td_attend_merge_args {
    uint32_t first, rows, ranks, heads; /* heads of this rank */
    const float *part;                  /* [ranks] each rank's part for these heads; 16-aligned */
    const float *ml;                    /* [n, heads, 2] window's parts */
    float *o; /* [n, heads, 512] window's parts' acc, then o; rows first.. alone */
};
/* Bytes of a thread's scratch: enough for every op, with attention sets of up to
 * 128 + max_entries members. A multiple of 64. Where entries are split, `heads` are those of all
 * ranks. */
size_t td_op_scratch(uint32_t heads, uint32_t index_heads, uint32_t max_entries, bool split);

/* y = tree sum of the shards: the rank's output groups (s.8.4). */
struct td_add_shards_args {
    const float *shard; /* [shards, n, dim] */
    float *y;           /* [n, dim] */
    uint32_t shards, n, dim;
};

/* Router (s.9.1). score = sqrt(softplus(logit)); the k greatest of score + bias (equal: the lower
 * expert), or tid2eid[id]; listed by ascending expert. weight = score / (sum of chosen scores,
 * ascending expert) * scale. */
struct td_route_args {
    const float *logits;    /* [n, experts] */
    const float *bias;      /* [experts]; NULL in hash layers */
    const int64_t *tid2eid; /* [vocab, k]; hash layers only */
    const int32_t *ids;     /* [n] */
    uint32_t n, experts, k;
    float scale;
    uint32_t *expert; /* [n, k] */
    float *weight;    /* [n, k] */
};
/* The choices of the rank's experts first..first + count - 1 as rows from 0, grouped by expert,
 * inside an expert by ascending token: expert first + e has rows offset[e]..offset[e + 1] - 1, and
 * offset[count] says how many there are. place[i][j] = grouped row of the j-th choice of token i.
 * Rows beyond, and places of other experts' choices, are not written. */
struct td_group_args {
    const uint32_t *expert; /* [n, k] */
    const float *weight;    /* [n, k] */
    uint32_t n, k, first, count;
    uint32_t *offset;  /* [count + 1] */
    uint32_t *token;   /* [n * k] */
    float *row_weight; /* [n * k] */
    uint32_t *place;   /* [n, k] */
};
/* Expert e belongs to shard e * shards / experts. The first one of a shard; of shard `shards`: how
 * many there are. */
static inline uint32_t td_shard_expert(uint32_t shard, uint32_t shards, uint32_t experts) {
    return (shard * experts + shards - 1) / shards;
}
/* t = silu(min(a, limit)) * clamp(b, -limit, limit) * weight (s.9.2); weight NULL: not applied.
 * t may be a. */
struct td_swiglu_args {
    const float *a, *b;   /* [n, inner] */
    const float *weight;  /* [n] or NULL */
    float *t;             /* [n, inner] */
    const uint32_t *rows; /* [1] how many rows count, up to n; the others stay. NULL: all n */
    uint32_t n, inner;
    float limit;
};
/* y[i] = (tree sum over the rank's shards of (sum over the token's experts of that shard,
 * ascending, from 0)) + shared[i]. Whole experts belong to a shard, so that splitting them over
 * ranks changes no bit. */
struct td_combine_args {
    const float *rows;      /* [.., hidden] grouped expert outputs */
    const uint32_t *expert; /* [n, k] ascending */
    const uint32_t *place;  /* [n, k]; those of other ranks' experts do not count */
    const float *shared;    /* [n, hidden]; NULL: nothing is added */
    float *y;               /* [n, hidden] */
    uint32_t n, k, hidden, experts, shards;
    uint32_t first_shard, shards_here; /* the rank's, one at least */
};

/* y[i] = x[index[i]]. */
struct td_gather_args {
    const float *x;        /* [.., dim] */
    const uint32_t *index; /* [n] */
    float *y;              /* [n, dim] */
    uint32_t n, dim;
};

#define TD_OPS_MAP(X)                                                                              \
    X(embed)                                                                                       \
    X(expand)                                                                                      \
    X(linear)                                                                                      \
    X(round_fp8)                                                                                   \
    X(round_nvfp4)                                                                                 \
    X(expert_linear)                                                                               \
    X(rms_norm)                                                                                    \
    X(hc_pre)                                                                                      \
    X(hc_post)                                                                                     \
    X(hc_head)                                                                                     \
    X(rope_angles)                                                                                 \
    X(rope)                                                                                        \
    X(row_store)                                                                                   \
    X(ring_write)                                                                                  \
    X(compress)                                                                                    \
    X(index_query)                                                                                 \
    X(index)                                                                                       \
    X(index_merge)                                                                                 \
    X(attend)                                                                                      \
    X(attend_part)                                                                                 \
    X(attend_merge)                                                                                \
    X(add_shards)                                                                                  \
    X(route)                                                                                       \
    X(group)                                                                                       \
    X(swiglu)                                                                                      \
    X(combine)                                                                                     \
    X(gather)

struct td_ops {
    const char *name; /* "ref", "avx2", "avx512" */
#define X(op) void (*op)(const struct td_device *d, const struct td_##op##_args *a);
    TD_OPS_MAP(X)
#undef X
};

/* The definitions. */
extern const struct td_ops td_ops_ref;
/* Number i of the tables this processor runs, the best one first and td_ops_ref last; NULL beyond
 * them. All have the same bits. */
const struct td_ops *td_ops_table(uint32_t i);
/* The best one. */
const struct td_ops *td_ops_select(void);

/* Ops by name: bit i stands for op i of TD_OPS_MAP. `list`: names separated by commas or blanks, or
 * "all", or nothing. CONFIG with a sentence for a name that does not exist. */
TD_MUST_USE td_status td_ops_mask(const char *list, uint64_t *ret, struct td_error *err);
/* The names of a mask, separated by blanks ("all" for all), into `buf` [cap]. */
void td_ops_names(uint64_t mask, char *buf, size_t cap);
/* td_ops_select's table with the ops of the mask taken from td_ops_ref. */
void td_ops_init(struct td_ops *ret, uint64_t force_ref);

#endif
