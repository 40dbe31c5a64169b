/* Hyper-connections: four residual streams mixed down before a sub-layer and up after it. */
#include "kernels/cpu/norm.h"
#include "kernels/cpu/op.h"

enum { S = TD_HC_STREAMS };

/* Makes rows, then columns, sum to about one; the first column step belongs to the softmax. */
static void sinkhorn(float c[S][S], uint32_t iters, float eps) {
    for (uint32_t it = 0; it < iters; it++) {
        for (uint32_t j = 0; it > 0 && j < S; j++) {
            float sum = ((c[j][0] + c[j][1]) + c[j][2]) + c[j][3] + eps;
            for (uint32_t k = 0; k < S; k++)
                c[j][k] /= sum;
        }
        for (uint32_t k = 0; k < S; k++) {
            float sum = ((c[0][k] + c[1][k]) + c[2][k]) + c[3][k] + eps;
            for (uint32_t j = 0; j < S; j++)
                c[j][k] /= sum;
        }
    }
}

static void comb_softmax(float c[S][S], float eps) {
    for (uint32_t j = 0; j < S; j++) {
        float max = c[j][0], sum = 0.0f;
        for (uint32_t k = 1; k < S; k++)
            max = c[j][k] > max ? c[j][k] : max;
        for (uint32_t k = 0; k < S; k++) {
            c[j][k] = exp1(c[j][k] - max);
            sum += c[j][k];
        }
        for (uint32_t k = 0; k < S; k++)
            c[j][k] = c[j][k] / sum + eps;
    }
}

/* y = sum over streams of weight[s] * x[s]. */
static void mix_down(const float *x, const float *weight, float *y, uint32_t hidden) {
    for (uint32_t c = 0; c < hidden; c += 8) {
        v8 sum = splat8(0.0f);
        for (uint32_t s = 0; s < S; s++)
            sum = fma8(splat8(weight[s]), load8(x + s * hidden + c), sum);
        store8(y + c, sum);
    }
}

static void pre_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_hc_pre_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *x = a->x + (size_t)i * S * a->hidden, *m = a->m + (size_t)i * 24;
        float r = rms_factor8(x, S * a->hidden, a->eps), pre[S], comb[S][S];
        for (uint32_t s = 0; s < S; s++) {
            pre[s] = sigmoid1(fmaf(m[s] * r, a->scale[0], a->base[s])) + a->hc_eps;
            a->post[(size_t)i * S + s] =
                2.0f * sigmoid1(fmaf(m[S + s] * r, a->scale[1], a->base[S + s]));
            for (uint32_t k = 0; k < S; k++) {
                uint32_t at = 2 * S + S * s + k;
                comb[s][k] = fmaf(m[at] * r, a->scale[2], a->base[at]);
            }
        }
        comb_softmax(comb, a->hc_eps);
        sinkhorn(comb, a->iters, a->hc_eps);
        memcpy(a->comb + (size_t)i * S * S, comb, sizeof comb);
        mix_down(x, pre, a->y + (size_t)i * a->hidden, a->hidden);
    }
}

void TD_OP(hc_pre)(const struct td_device *d, const struct td_hc_pre_args *a) {
    td_threads_run(d->threads, pre_rows, a, a->n);
}

static void post_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_hc_post_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        float *x = a->x + (size_t)i * S * a->hidden;
        const float *post = a->post + (size_t)i * S, *comb = a->comb + (size_t)i * S * S;
        for (uint32_t c = 0; c < a->hidden; c += 8) {
            v8 o = load8(a->o + (size_t)i * a->hidden + c), old[S];
            for (uint32_t j = 0; j < S; j++)
                old[j] = load8(x + j * a->hidden + c);
            for (uint32_t k = 0; k < S; k++) {
                v8 sum = splat8(post[k]) * o;
                for (uint32_t j = 0; j < S; j++)
                    sum = fma8(splat8(comb[S * j + k]), old[j], sum);
                store8(x + k * a->hidden + c, sum);
            }
        }
    }
}

void TD_OP(hc_post)(const struct td_device *d, const struct td_hc_post_args *a) {
    td_threads_run(d->threads, post_rows, a, a->n);
}

static void head_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_hc_head_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *x = a->x + (size_t)i * S * a->hidden, *m = a->m + (size_t)i * S;
        float r = rms_factor8(x, S * a->hidden, a->eps), w[S];
        for (uint32_t s = 0; s < S; s++)
            w[s] = sigmoid1(fmaf(m[s] * r, a->scale[0], a->base[s])) + a->hc_eps;
        mix_down(x, w, a->y + (size_t)i * a->hidden, a->hidden);
    }
}

void TD_OP(hc_head)(const struct td_device *d, const struct td_hc_head_args *a) {
    td_threads_run(d->threads, head_rows, a, a->n);
}
