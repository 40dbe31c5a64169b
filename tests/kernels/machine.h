/* What this machine can do, measured: the limits that benchmarks divide by, in the same run. Each
 * thread's rate is taken over its own processor time, so that neighbours on a shared machine do not
 * lower the limit by taking turns. */
#ifndef TD_TESTS_KERNELS_MACHINE_H
#define TD_TESTS_KERNELS_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

/* Whether it multiplies 16 lanes at once. */
bool td_machine_avx512(void);
/* fp32 multiply-adds on `threads` threads at once, GFLOP/s (an fma counts 2), best of five; with
 * the 16 lanes of AVX-512 or with what every machine of this kind has (8, AVX2). */
double td_machine_gflops(uint32_t threads, bool avx512);
/* Reading `bytes` (split among the threads, each part read repeatedly), GB/s, best of five. A
 * working set below the last cache's size gives the cache's bandwidth, as it would a model's. */
double td_machine_read_gbs(uint32_t threads, uint64_t bytes);

#endif
