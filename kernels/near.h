/* The processor cores beside a device, as Linux tells them: what a rank's thread writes for its GPU
 * then lies in the memory that the GPU reaches without crossing between sockets. */
#ifndef TD_KERNELS_NEAR_H
#define TD_KERNELS_NEAR_H

#include <stdbool.h>

/* A bitmap of cores: sched.h's cpu_set_t is for _GNU_SOURCE alone. */
enum { TD_NEAR_CORES = 1024 };
struct td_cores {
    unsigned long bit[TD_NEAR_CORES / (8 * sizeof(unsigned long))];
};

/* "0-31,64-95" with a newline or none, as in local_cpulist. False: anything else, and no core. */
bool td_near_parse(const char *list, struct td_cores *ret);
static inline bool td_near_has(const struct td_cores *c, unsigned core) {
    enum { BITS = 8 * sizeof(unsigned long) };
    return core < TD_NEAR_CORES && (c->bit[core / BITS] >> core % BITS & 1);
}

/* Keeps the calling thread on the cores beside PCI device `pci` ("0000:c1:00.0", any case), of
 * those that it may use. Where nothing is known it stays where it was. */
void td_near_stay(const char *pci);

#endif
