/* Mixture of experts around its products: choice, grouping, activation, sum. The reference's bits.
 */
#include "kernels/cuda/op.h"

enum { THREADS = 128, CHOICE_THREADS = 256, GROUP_WARPS = TD_MAX_EXPERTS / 32 };

/* ---- choice ---- */

/* The greatest of key[0..n-1] that is not taken, ties to the lower: by the whole block. */
static __device__ uint32_t greatest(const float *key, const uint8_t *taken, uint32_t n,
                                    float *best_key, uint32_t *best_at) {
    uint32_t t = threadIdx.x, at = n;
    float v = 0.0f;
    for (uint32_t e = t; e < n; e += CHOICE_THREADS)
        if (!taken[e] && (at == n || key[e] > v)) {
            v = key[e];
            at = e;
        }
    best_key[t] = v;
    best_at[t] = at;
    for (uint32_t half = CHOICE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            float w = best_key[t + half];
            uint32_t b = best_at[t + half], m = best_at[t];
            if (b < n && (m == n || w > best_key[t] || (w == best_key[t] && b < m))) {
                best_key[t] = w;
                best_at[t] = b;
            }
        }
    }
    __syncthreads();
    return best_at[0];
}

static __global__ void route_rows(struct td_route_args a) {
    __shared__ float score[TD_MAX_EXPERTS], key[TD_MAX_EXPERTS], best_key[CHOICE_THREADS];
    __shared__ uint32_t best_at[CHOICE_THREADS], chosen[TD_MAX_EXPERTS_PER_TOKEN];
    __shared__ uint8_t taken[TD_MAX_EXPERTS];
    uint32_t i = blockIdx.x, t = threadIdx.x;
    for (uint32_t e = t; e < a.experts; e += CHOICE_THREADS) {
        score[e] = sqrtf(td_softplus(a.logits[(size_t)i * a.experts + e]));
        key[e] = a.bias ? score[e] + a.bias[e] : 0.0f;
        taken[e] = 0;
    }
    __syncthreads();
    if (a.tid2eid) {
        if (t < a.k) chosen[t] = (uint32_t)a.tid2eid[(size_t)a.ids[i] * a.k + t];
    } else {
        for (uint32_t j = 0; j < a.k; j++) {
            uint32_t at = greatest(key, taken, a.experts, best_key, best_at);
            if (t == 0) {
                chosen[j] = at;
                taken[at] = 1;
            }
            __syncthreads();
        }
    }
    __syncthreads();
    if (t != 0) return;
    float sum = 0.0f;
    for (uint32_t j = 1; j < a.k; j++) { /* ascending */
        uint32_t e = chosen[j], at = j;
        for (; at > 0 && chosen[at - 1] > e; at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    for (uint32_t j = 0; j < a.k; j++)
        sum += score[chosen[j]];
    for (uint32_t j = 0; j < a.k; j++) {
        a.expert[(size_t)i * a.k + j] = chosen[j];
        a.weight[(size_t)i * a.k + j] = score[chosen[j]] / sum * a.scale;
    }
}

void TD_PLAIN(route)(const struct td_device *d, const struct td_route_args *a) {
    if (a->n) TD_LAUNCH(d, "route", route_rows, a->n, CHOICE_THREADS, 0, *a);
}

/* ---- grouping ---- */

/* One block. Each warp has a stretch of the choices and counts those of every expert of the range,
 * which are known by their distance from its first; from the sums
 * over experts and over the warps before it follows where its first one of an expert goes. Then it
 * walks through its stretch again, 32 choices at a time, so that the order inside an expert is that
 * of the tokens. */
static __global__ void group_rows(struct td_group_args a) {
    __shared__ uint32_t next[GROUP_WARPS][TD_MAX_EXPERTS], start[2][TD_MAX_EXPERTS];
    uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, all = a.n * a.k, own = 0, turn = 0;
    uint32_t span = (td_ceil(all, GROUP_WARPS) + 31) & ~31u, from = warp * span;
    uint32_t end = from + span < all ? from + span : all;
    for (uint32_t w = 0; w < GROUP_WARPS; w++)
        next[w][t] = 0;
    __syncthreads();
    for (uint32_t i = from + lane; i < end; i += 32) {
        uint32_t e = a.expert[i] - a.first;
        if (e < a.count) atomicAdd(&next[warp][e], 1u);
    }
    __syncthreads();
    for (uint32_t w = 0; w < GROUP_WARPS; w++) {
        uint32_t count = next[w][t];
        next[w][t] = own;
        own += count;
    }
    start[0][t] = own;
    __syncthreads();
    for (uint32_t by = 1; by < TD_MAX_EXPERTS; by *= 2, turn ^= 1) {
        start[turn ^ 1][t] = start[turn][t] + (t >= by ? start[turn][t - by] : 0);
        __syncthreads();
    }
    uint32_t first = start[turn][t] - own;
    if (t < a.count) a.offset[t] = first;
    if (t == 0) a.offset[a.count] = start[turn][TD_MAX_EXPERTS - 1];
    for (uint32_t w = 0; w < GROUP_WARPS; w++)
        next[w][t] += first;
    __syncthreads();
    for (uint32_t i = from; i < end; i += 32) {
        uint32_t at = i + lane, e = at < end ? a.expert[at] - a.first : 0xffffffffu;
        uint32_t same = __match_any_sync(0xffffffffu, e), to = 0;
        if (e < a.count) to = next[warp][e] + (uint32_t)__popc(same & ((1u << lane) - 1u));
        __syncwarp();
        if (e < a.count) {
            if (same >> lane == 1u) next[warp][e] = to + 1; /* the last of them */
            a.token[to] = at / a.k;
            a.row_weight[to] = a.weight[at];
            a.place[at] = to;
        }
        __syncwarp();
    }
}

void TD_PLAIN(group)(const struct td_device *d, const struct td_group_args *a) {
    TD_LAUNCH(d, "group", group_rows, 1, TD_MAX_EXPERTS, 0, *a);
}

/* ---- activation, sum ---- */

static __global__ void swiglu_values(struct td_swiglu_args a) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (size_t)(a.rows ? *a.rows : a.n) * a.inner) return;
    float g = a.a[at], u = a.b[at];
    g = g > a.limit ? a.limit : g;
    u = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
    float t = g * td_sigmoid(g) * u;
    a.t[at] = a.weight ? t * a.weight[at / a.inner] : t;
}

void TD_PLAIN(swiglu)(const struct td_device *d, const struct td_swiglu_args *a) {
    size_t all = (size_t)a->n * a->inner;
    if (all) TD_LAUNCH(d, "swiglu", swiglu_values, td_ceil(all, THREADS), THREADS, 0, *a);
}

template <uint32_t SHARDS> static __global__ void combine_values(struct td_combine_args a) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, i = at / a.hidden;
    uint32_t c = (uint32_t)(at % a.hidden), of[TD_MAX_EXPERTS_PER_TOKEN];
    float v[TD_MAX_EXPERTS_PER_TOKEN];
    if (i >= a.n) return;
    const uint32_t *expert = a.expert + i * a.k, *place = a.place + i * a.k;
    /* all at once: one after the other would be a wait each */
#pragma unroll
    for (uint32_t j = 0; j < TD_MAX_EXPERTS_PER_TOKEN; j++) {
        of[j] = j < a.k ? expert[j] * a.shards / a.experts - a.first_shard : 0xffffffffu;
        v[j] = of[j] < a.shards_here ? a.rows[(size_t)place[j] * a.hidden + c] : 0.0f;
    }
    auto shard = [&](uint32_t s) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < TD_MAX_EXPERTS_PER_TOKEN; j++)
            sum = of[j] == s ? sum + v[j] : sum;
        return sum;
    };
    float total = td_tree_sum<SHARDS>(shard, a.shards_here);
    a.y[at] = a.shared ? total + a.shared[at] : total;
}

void TD_PLAIN(combine)(const struct td_device *d, const struct td_combine_args *a) {
    size_t all = (size_t)a->n * a->hidden;
    if (!all) return;
    TD_LAUNCH(d, "combine", TD_BY_SHARDS(combine_values, a->shards_here), td_ceil(all, THREADS),
              THREADS, 0, *a);
}
