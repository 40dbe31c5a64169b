/* Sparse core: one softmax over window rows, compressed entries and the sink, in the reference's
 * order. A block is one token and head; the scores of its whole set are in shared memory. */
#include "kernels/cuda/attend.h"

enum { THREADS = 128, D = TD_HEAD_DIM };

static __global__ void attend_heads(struct td_attend a, uint32_t most) {
    TD_SHARED(float, score); /* [most] */
    __shared__ float q[D], shared_max[THREADS / 32], den_max[2];
    struct td_attend_set s = td_attend_set_of(&a, blockIdx.x);
    uint32_t t = threadIdx.x, h = blockIdx.y;
    size_t at = ((size_t)blockIdx.x * a.heads + h) * D;
    for (uint32_t i = t; i < D; i += THREADS)
        q[i] = a.q[at + i];
    __syncthreads();
    float max = a.sink[h];
    for (uint32_t m = t; m < s.count && m < most; m += THREADS) {
        struct td_kv_row row = td_attend_member(&a, &s, m);
        float total = 0.0f;
        for (uint32_t b = 0; b < D; b += TD_BLOCK) {
            float sum = 0.0f;
            for (uint32_t i = b; i < b + TD_BLOCK; i++)
                sum = fmaf(td_row_value(row, a.kv.row_dtype, i), q[i], sum);
            total = b == 0 ? sum : total + sum;
        }
        total *= 0.04419417382415922f; /* 512^-0.5 */
        score[m] = total;
        max = total > max ? total : max;
    }
    max = td_group_max(max, 32);
    if (t % 32 == 0) shared_max[t / 32] = max;
    __syncthreads();
    for (uint32_t i = 0; i < THREADS / 32; i++)
        max = shared_max[i] > max ? shared_max[i] : max;
    for (uint32_t m = t; m < s.count; m += THREADS)
        score[m] = td_exp(score[m] - max);
    __syncthreads();
    if (t == 0) {
        float den = 0.0f;
        for (uint32_t m = 0; m < s.count; m++)
            den = den + score[m];
        den_max[0] = den + td_exp(a.sink[h] - max);
        if (a.ml) {
            float *ml = a.ml + 2 * ((size_t)blockIdx.x * a.heads + h);
            ml[0] = max;
            ml[1] = den_max[0];
            den_max[0] = 1.0f;
        }
    }
    float o[D / THREADS];
    for (uint32_t b = 0; b < s.count; b += TD_BLOCK) {
        uint32_t end = s.count - b < TD_BLOCK ? s.count : b + TD_BLOCK;
        float sum[D / THREADS] = {0.0f};
        for (uint32_t m = b; m < end; m++) {
            struct td_kv_row row = td_attend_member(&a, &s, m);
#pragma unroll
            for (uint32_t i = 0; i < D / THREADS; i++)
                sum[i] = fmaf(score[m], td_row_value(row, a.kv.row_dtype, i * THREADS + t), sum[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < D / THREADS; i++)
            o[i] = b == 0 ? sum[i] : o[i] + sum[i];
    }
    __syncthreads();
    for (uint32_t i = 0; i < D / THREADS; i++)
        a.o[at + i * THREADS + t] = o[i] / den_max[0];
}

void TD_PLAIN(attend)(const struct td_device *d, const struct td_attend_args *a) {
    struct td_attend p = td_attend_of(a);
    uint32_t most = td_attend_most(a);
    if (p.b.n == 0) return;
    td_cuda_allow_shared(d, (const void *)attend_heads, most * sizeof(float), "attend");
    TD_LAUNCH(d, "attend", attend_heads, dim3(p.b.n, a->heads), THREADS, most * sizeof(float), p,
              most);
}
