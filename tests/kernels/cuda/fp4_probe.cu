/* One block-scaled FP4 product per block from operands in memory, so that a test can find out which
 * place of which lane counts where: on the chip, or over the emulator. */
#include "kernels/cuda/mma_fp4.h"
#include "kernels/cuda/op.h"

/* Operands of a lane, 8 words (fp4.h's order); `c` is [blocks][32 lanes][4]. */
struct operands {
    uint32_t v[8];
};

template <int THREAD_A, int THREAD_B>
static __global__ void fp4_products(const struct operands *in, float *c) {
#ifdef TD_HAS_MMA_FP4
    const uint32_t *v = in[blockIdx.x * 32 + threadIdx.x].v;
    uint32_t a[4] = {v[0], v[1], v[2], v[3]}, b[2] = {v[4], v[5]};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    td_mma_fp4<THREAD_A, THREAD_B>(sum, a, b, v[6], v[7]);
    for (int i = 0; i < 4; i++)
        c[(blockIdx.x * 32 + threadIdx.x) * 4 + i] = sum[i];
#endif
}

extern "C" void td_test_fp4_products(const struct td_device *d, uint32_t thread_a,
                                     uint32_t thread_b, const void *in, float *c, uint32_t n) {
    const struct operands *o = (const struct operands *)in;
#define FORM(a, b)                                                                                 \
    if (thread_a == a && thread_b == b) TD_LAUNCH(d, "fp4", (fp4_products<a, b>), n, 32, 0, o, c)
    FORM(0, 0);
    FORM(0, 1);
    FORM(0, 2);
    FORM(0, 3);
    FORM(1, 0);
    FORM(1, 1);
    FORM(1, 2);
    FORM(1, 3);
#undef FORM
}
