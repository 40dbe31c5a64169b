/* Peak arithmetic and read bandwidth by the plainest loops that reach them: independent chains of
 * vector fma; a sum over memory. */
#include "tests/kernels/machine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"

enum { THREADS_MAX = 256, CHAINS = 12, ROUNDS = 5 };

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2,fma")))
typedef float lanes __attribute__((vector_size(32)));
#define FMA(a, b, c) __builtin_ia32_vfmaddps256(a, b, c)
#else
#define WIDE
typedef float lanes __attribute__((vector_size(16)));
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
enum { LANES = sizeof(lanes) / sizeof(float) };

struct part {
    pthread_t thread;
    const float *data;
    size_t floats;
    uint64_t repeats;
    float sink;
};

WIDE static void *multiply(void *arg) {
    struct part *p = arg;
    lanes acc[CHAINS], a, b;
    for (int j = 0; j < LANES; j++) {
        a[j] = 0.999f;
        b[j] = 0.001f;
    }
    for (int i = 0; i < CHAINS; i++)
        acc[i] = a;
    for (uint64_t r = 0; r < p->repeats; r++)
        for (int i = 0; i < CHAINS; i++)
            acc[i] = FMA(acc[i], a, b);
    for (int i = 0; i < CHAINS; i++)
        p->sink += acc[i][0];
    return NULL;
}

WIDE static void *sum(void *arg) {
    struct part *p = arg;
    lanes acc[4];
    memset(acc, 0, sizeof acc);
    for (uint64_t r = 0; r < p->repeats; r++) {
        for (size_t i = 0; i + 4 * LANES <= p->floats; i += 4 * LANES)
            for (int k = 0; k < 4; k++) {
                lanes v;
                memcpy(&v, p->data + i + (size_t)k * LANES, sizeof v);
                acc[k] += v;
            }
        __asm__ volatile("" : : : "memory");
    }
    for (int k = 0; k < 4; k++)
        p->sink += acc[k][0];
    return NULL;
}

/* Best seconds of one run of `fn` on all parts at once. */
static double best(void *(*fn)(void *), struct part *part, uint32_t threads) {
    double s = 1e30;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t t0 = td_now_ns();
        for (uint32_t i = 0; i < threads; i++)
            if (pthread_create(&part[i].thread, NULL, fn, &part[i]) != 0) abort();
        for (uint32_t i = 0; i < threads; i++)
            pthread_join(part[i].thread, NULL);
        double took = (double)(td_now_ns() - t0) * 1e-9;
        if (took < s) s = took;
    }
    return s;
}

double td_machine_gflops(uint32_t threads) {
    static struct part part[THREADS_MAX];
    uint64_t repeats = 20u << 20;
    for (uint32_t i = 0; i < threads; i++)
        part[i].repeats = repeats;
    return 2.0 * CHAINS * LANES * (double)repeats * threads / best(multiply, part, threads) * 1e-9;
}

double td_machine_read_gbs(uint32_t threads, uint64_t bytes) {
    static struct part part[THREADS_MAX];
    size_t floats = bytes / sizeof(float) / threads;
    uint64_t repeats = 1 + ((uint64_t)1 << 30) / (floats * sizeof(float));
    for (uint32_t i = 0; i < threads; i++) {
        float *data = malloc(floats * sizeof(float));
        if (!data) abort();
        for (size_t k = 0; k < floats; k++)
            data[k] = (float)k;
        part[i].data = data;
        part[i].floats = floats;
        part[i].repeats = repeats;
    }
    double s = best(sum, part, threads);
    for (uint32_t i = 0; i < threads; i++)
        free((void *)part[i].data);
    return (double)(repeats * floats * sizeof(float)) * threads / s * 1e-9;
}
