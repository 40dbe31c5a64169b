/* Sampling over the whole vocabulary without sorting it: a heap is popped only as far as the
 * filters reach. Sums run in a fixed order in double precision. */
#include "kernels/sample.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). */
void td_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]) {
    enum { ROUNDS = 10 };
    const uint32_t mul0 = 0xD2511F53u, mul1 = 0xCD9E8D57u;   /* multipliers and Weyl steps of the */
    const uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u; /* paper */
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k0 = key[0], k1 = key[1];
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t p0 = (uint64_t)mul0 * c[0], p1 = (uint64_t)mul1 * c[2];
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[0] = n0;
        c[1] = (uint32_t)p1;
        c[2] = n2;
        c[3] = (uint32_t)p0;
        k0 += weyl0;
        k1 += weyl1;
    }
    memcpy(ret, c, sizeof c);
}

/* Uniform in [0, 1) with 53 bits. */
static double uniform(uint64_t seed, uint64_t position) {
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, r[4];
    td_philox(counter, key, r);
    return (double)(((uint64_t)r[0] << 21) ^ (r[1] >> 11)) * 0x1p-53;
}

td_status td_sample_params_check(const struct td_sample_params *p, struct td_error *err) {
    if (!(p->temperature >= 0.0f) || isinf(p->temperature))
        return td_fail(err, TD_INVALID, "temperature: expected a finite number >= 0, found %g",
                       (double)p->temperature);
    if (!(p->top_p >= 0.0f && p->top_p <= 1.0f))
        return td_fail(err, TD_INVALID, "top_p: expected 0 to 1, found %g", (double)p->top_p);
    if (!(p->min_p >= 0.0f && p->min_p <= 1.0f))
        return td_fail(err, TD_INVALID, "min_p: expected 0 to 1, found %g", (double)p->min_p);
    if (p->top_logprobs > TD_SAMPLE_MAX_TOP)
        return td_fail(err, TD_INVALID, "top_logprobs: expected at most %d, found %u",
                       TD_SAMPLE_MAX_TOP, p->top_logprobs);
    if (p->top_logprobs && !p->logprobs)
        return td_fail(err, TD_INVALID, "top_logprobs: expected logprobs with it, found them off");
    return TD_OK;
}

struct work { /* the workspace, [vocab] each */
    float *weight;
    uint32_t *heap;
};

size_t td_sample_workspace(uint32_t vocab) {
    return (size_t)vocab * (sizeof(float) + sizeof(uint32_t));
}

/* e^x for x <= 0 to a few units in the last place; 0 below -87, where fp32 ends. Branch-free, so
 * that the loop over a vocabulary vectorises. */
static inline float exp_negative(float x) {
    const float log2_e = 1.44269504088896341f, round = 0x1.8p23f;
    const float ln2_hi = 0x1.62e4p-1f, ln2_lo = 0x1.7f7d1cp-20f; /* ln 2 in two parts */
    float z = x < -87.0f ? -87.0f : x;
    float n = (z * log2_e + round) - round; /* nearest integer */
    float r = (z - n * ln2_hi) - n * ln2_lo;
    float p = 1.0f / 5040.0f; /* Taylor series: |r| <= ln 2 / 2 */
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) * (1 << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

/* weight[i] = e^((logits[i] - max) / temperature). */
static void fill_weights(const float *logits, uint32_t n, float max, float temperature,
                         float *weight) {
    for (uint32_t i = 0; i < n; i++)
        weight[i] = exp_negative((logits[i] - max) / temperature);
}

/* Eight interleaved partial sums, always added in the same order. */
static double sum(const float *x, uint32_t n) {
    double s[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (uint32_t j = 0; j < 8; j++)
            s[j] += (double)x[i + j];
    for (; i < n; i++)
        s[i % 8] += (double)x[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* NaN and +inf have no place in a distribution; -inf has (probability 0). */
static td_status check_logits(const float *logits, uint32_t n, td_status why,
                              struct td_error *err) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; i++)
        bad |= !(logits[i] < INFINITY);
    if (!bad) return TD_OK;
    uint32_t i = 0;
    while (logits[i] < INFINITY)
        i++;
    return td_fail(err, why, "logits: expected numbers, found %g at token %u", (double)logits[i],
                   i);
}

/* Ties go to the lowest id. */
static uint32_t argmax(const float *logits, uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static inline bool before(const float *logits, uint32_t a, uint32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, uint32_t *heap, uint32_t n, uint32_t i) {
    uint32_t id = heap[i];
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && before(logits, heap[child + 1], heap[child])) child++;
        if (!before(logits, heap[child], id)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = id;
}

/* Moves the most likely token of heap[0..n-1] to heap[n-1]. */
static uint32_t pop(const float *logits, uint32_t *heap, uint32_t n) {
    uint32_t top = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = top;
    sift_down(logits, heap, n - 1, 0);
    return top;
}

/* The token at `u` of the cumulated weights of ids[0], ids[-1], ...: the popped run lies
 * backwards at the heap's end. */
static uint32_t pick(const float *weight, const uint32_t *last, uint32_t kept, double u) {
    double total = 0, at = 0;
    for (uint32_t i = 0; i < kept; i++)
        total += (double)weight[*(last - i)];
    for (uint32_t i = 0; i < kept; i++) {
        at += (double)weight[*(last - i)];
        if (at > u * total) return *(last - i);
    }
    return *last; /* u * total rounded up to the total: the most likely token */
}

static uint32_t draw_filtered(const float *logits, uint32_t n, const struct td_sample_params *p,
                              double u, struct work w) {
    uint32_t most = p->top_k && p->top_k < n ? p->top_k : n, popped = 0;
    for (uint32_t i = 0; i < n; i++)
        w.heap[i] = i;
    for (uint32_t i = n / 2; i-- > 0;)
        sift_down(logits, w.heap, n, i);
    const uint32_t *last = w.heap + n - 1;
    double total = 0;
    if (most < n && p->top_p < 1.0f) { /* top_p is relative to what top_k left */
        for (; popped < most; popped++)
            total += (double)w.weight[pop(logits, w.heap, n - popped)];
    } else {
        total = sum(w.weight, n);
    }
    double reach = p->top_p < 1.0f ? (double)p->top_p * total : INFINITY;
    float least = p->min_p; /* the most likely token has weight 1 */
    uint32_t kept = 0;
    for (double at = 0; kept < most && (kept == 0 || at < reach); kept++) {
        uint32_t id = kept < popped ? *(last - kept) : pop(logits, w.heap, n - kept);
        if (kept && (w.weight[id] < least || w.weight[id] == 0.0f)) break;
        at += (double)w.weight[id];
    }
    return pick(w.weight, last, kept, u);
}

static uint32_t draw_any(uint32_t n, double u, const float *weight, uint32_t best) {
    double target = u * sum(weight, n), at = 0;
    for (uint32_t i = 0; i < n; i++) {
        at += (double)weight[i];
        if (at > target) return i;
    }
    return best; /* the sums round differently: the rest belongs to nobody */
}

static void fill_logprobs(const float *logits, uint32_t n, float max,
                          const struct td_sample_params *p, float *weight, struct td_sampled *ret) {
    fill_weights(logits, n, max, 1.0f, weight);
    double norm = (double)max + log(sum(weight, n));
    ret->logprob = (float)((double)logits[ret->token] - norm);
    for (uint32_t i = 0; i < n && p->top_logprobs; i++) {
        uint32_t at = ret->n_top;
        if (at == p->top_logprobs) {
            if (!(logits[i] > logits[ret->top[at - 1].id])) continue;
            at--;
        } else {
            ret->n_top++;
        }
        for (; at > 0 && logits[i] > logits[ret->top[at - 1].id]; at--)
            ret->top[at] = ret->top[at - 1];
        ret->top[at] = (struct td_sampled_top){(int32_t)i, (float)((double)logits[i] - norm)};
    }
}

td_status td_sample(const float *logits, const float *shaped, uint32_t vocab,
                    const struct td_sample_params *p, uint64_t position, void *work,
                    struct td_sampled *ret, struct td_error *err) {
    assert(vocab > 0 && td_sample_params_check(p, NULL) == TD_OK);
    struct work w = {work, (uint32_t *)work + vocab};
    TD_TRY(check_logits(logits, vocab, TD_INTERNAL, err));
    uint32_t likely = argmax(logits, vocab);
    if (isinf(logits[likely]))
        return td_fail(err, TD_INTERNAL,
                       "logits: expected a finite one, found -inf for every token");
    if (shaped) TD_TRY(check_logits(shaped, vocab, TD_INVALID, err));
    const float *from = shaped ? shaped : logits;
    uint32_t best = shaped ? argmax(shaped, vocab) : likely, token = best;
    if (isinf(from[best]))
        return td_fail(err, TD_INVALID,
                       "logits: expected a finite one among the tokens that may "
                       "come, found none");
    if (p->temperature > 0.0f) {
        double u = uniform(p->seed, position);
        fill_weights(from, vocab, from[best], p->temperature, w.weight);
        bool filtered = (p->top_k && p->top_k < vocab) || p->top_p < 1.0f || p->min_p > 0.0f;
        token = filtered ? draw_filtered(from, vocab, p, u, w) : draw_any(vocab, u, w.weight, best);
    }
    struct td_sampled s = {.token = (int32_t)token};
    if (p->logprobs) fill_logprobs(logits, vocab, logits[likely], p, w.weight, &s);
    *ret = s;
    return TD_OK;
}
