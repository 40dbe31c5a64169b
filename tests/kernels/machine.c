/* Peak arithmetic and read bandwidth by the plainest loops that reach them: independent chains of
 * vector fma; a sum over memory. */
#include "tests/kernels/machine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS_MAX = 256, CHAINS = 12, ROUNDS = 5 };

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx2,fma")))
typedef float lanes __attribute__((vector_size(32)));
#define FMA(a, b, c) __builtin_ia32_vfmaddps256(a, b, c)
#else
#define WIDE
typedef float lanes __attribute__((vector_size(16)));
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
enum { LANES = sizeof(lanes) / sizeof(float) };

bool td_machine_avx512(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f");
#else
    return false;
#endif
}

struct part {
    pthread_t thread;
    const float *data;
    size_t floats;
    uint64_t repeats;
    float sink;
    double s; /* processor time of the last run */
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

#if defined(__x86_64__)
/* The same with twice the lanes. */
__attribute__((target("avx512f"))) static void *multiply512(void *arg) {
    typedef float lanes16 __attribute__((vector_size(64)));
    struct part *p = arg;
    lanes16 acc[CHAINS], a, b;
    for (int j = 0; j < 16; j++) {
        a[j] = 0.999f;
        b[j] = 0.001f;
    }
    for (int i = 0; i < CHAINS; i++)
        acc[i] = a;
    for (uint64_t r = 0; r < p->repeats; r++)
        for (int i = 0; i < CHAINS; i++)
            acc[i] = (lanes16)_mm512_fmadd_ps((__m512)acc[i], (__m512)a, (__m512)b);
    for (int i = 0; i < CHAINS; i++)
        p->sink += acc[i][0];
    return NULL;
}
#else
#define multiply512 multiply
#endif

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

static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct call {
    void *(*fn)(void *);
    struct part *part;
};

static void *timed(void *arg) {
    struct call *c = arg;
    double t0 = cpu_s();
    c->fn(c->part);
    c->part->s = cpu_s() - t0;
    return NULL;
}

/* Runs `fn` on all parts at once; the best of several sums of `work` of a part per second. */
static double best(void *(*fn)(void *), struct part *part, uint32_t threads, double work) {
    static struct call call[THREADS_MAX];
    double most = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double rate = 0;
        for (uint32_t i = 0; i < threads; i++) {
            call[i] = (struct call){fn, &part[i]};
            if (pthread_create(&part[i].thread, NULL, timed, &call[i]) != 0) abort();
        }
        for (uint32_t i = 0; i < threads; i++) {
            pthread_join(part[i].thread, NULL);
            rate += work / part[i].s;
        }
        if (rate > most) most = rate;
    }
    return most;
}

double td_machine_gflops(uint32_t threads, bool avx512) {
    static struct part part[THREADS_MAX];
    uint64_t repeats = 10u << 20;
    for (uint32_t i = 0; i < threads; i++)
        part[i].repeats = repeats;
    double flop = 2e-9 * CHAINS * (avx512 ? 2 * LANES : LANES) * (double)repeats;
    return best(avx512 ? multiply512 : multiply, part, threads, flop);
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
    double rate = best(sum, part, threads, 1e-9 * (double)(repeats * floats * sizeof(float)));
    for (uint32_t i = 0; i < threads; i++)
        free((void *)part[i].data);
    return rate;
}
