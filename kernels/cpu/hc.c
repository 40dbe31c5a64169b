/* Hyper-connections: four residual streams mixed down before a sub-layer and up after it.
 *
 * The Sinkhorn iterations are hundreds of divisions a token in one chain: eight tokens share them,
 * one a lane. */
#include "kernels/cpu/norm.h"
#include "kernels/cpu/op.h"

enum { S = TD_HC_STREAMS, TOKENS = 8 };

/* Makes rows, then columns, sum to about one; the first column step belongs to the softmax. */
static void sinkhorn(v8 c[S][S], uint32_t iters, float eps) {
    for (uint32_t it = 0; it < iters; it++) {
        for (uint32_t j = 0; it > 0 && j < S; j++) {
            v8 sum = ((c[j][0] + c[j][1]) + c[j][2]) + c[j][3] + splat8(eps);
            for (uint32_t k = 0; k < S; k++)
                c[j][k] /= sum;
        }
        for (uint32_t k = 0; k < S; k++) {
            v8 sum = ((c[0][k] + c[1][k]) + c[2][k]) + c[3][k] + splat8(eps);
            for (uint32_t j = 0; j < S; j++)
                c[j][k] /= sum;
        }
    }
}

static void comb_softmax(v8 c[S][S], float eps) {
    for (uint32_t j = 0; j < S; j++) {
        v8 max = c[j][0], sum = splat8(0.0f);
        for (uint32_t k = 1; k < S; k++)
            max = max8(c[j][k], max);
        for (uint32_t k = 0; k < S; k++) {
            c[j][k] = exp8(c[j][k] - max);
            sum += c[j][k];
        }
        for (uint32_t k = 0; k < S; k++)
            c[j][k] = c[j][k] / sum + splat8(eps);
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

/* Tokens first..first+n-1, n <= TOKENS. */
static void pre_tokens(const struct td_hc_pre_args *a, uint32_t first, uint32_t n) {
    v8 r = splat8(0.0f), m[24], comb[S][S], pre[S], post[S];
    for (uint32_t t = 0; t < n; t++)
        r[t] = rms_factor8(a->x + (size_t)(first + t) * S * a->hidden, S * a->hidden, a->eps);
    for (uint32_t i = 0; i < 24; i++) {
        m[i] = splat8(0.0f);
        for (uint32_t t = 0; t < n; t++)
            m[i][t] = a->m[(size_t)(first + t) * 24 + i];
        uint32_t kind = i < S ? 0 : i < 2 * S ? 1 : 2;
        m[i] = fma8(m[i] * r, splat8(a->scale[kind]), splat8(a->base[i]));
    }
    for (uint32_t s = 0; s < S; s++) {
        pre[s] = sigmoid8(m[s]) + splat8(a->hc_eps);
        post[s] = splat8(2.0f) * sigmoid8(m[S + s]);
        for (uint32_t k = 0; k < S; k++)
            comb[s][k] = m[2 * S + S * s + k];
    }
    comb_softmax(comb, a->hc_eps);
    sinkhorn(comb, a->iters, a->hc_eps);
    for (uint32_t t = 0; t < n; t++) {
        size_t i = first + t;
        float weight[S];
        for (uint32_t s = 0; s < S; s++) {
            weight[s] = pre[s][t];
            a->post[i * S + s] = post[s][t];
            for (uint32_t k = 0; k < S; k++)
                a->comb[(i * S + s) * S + k] = comb[s][k][t];
        }
        mix_down(a->x + i * S * a->hidden, weight, a->y + i * a->hidden, a->hidden);
    }
}

static void pre_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_hc_pre_args *a = arg;
    for (uint32_t piece = begin; piece < end; piece++) {
        uint32_t first = piece * TOKENS, left = a->n - first;
        pre_tokens(a, first, left < TOKENS ? left : TOKENS);
    }
}

void TD_OP(hc_pre)(const struct td_device *d, const struct td_hc_pre_args *a) {
    td_threads_run(d->threads, pre_pieces, a, (a->n + TOKENS - 1) / TOKENS);
}

static void post_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_hc_post_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        float *x = a->x + (size_t)i * S * a->hidden;
        float post[S], comb[S * S]; /* of the token, and nobody's whom a store could change */
        memcpy(post, a->post + (size_t)i * S, sizeof post);
        memcpy(comb, a->comb + (size_t)i * S * S, sizeof comb);
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
