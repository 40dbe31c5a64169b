/* From a configuration to systemd: which units to enable, and for each worker a drop-in that keeps
 * it near its GPUs where the machine has more than one memory node. */
#ifndef TD_DEPLOY_TOOL_TOPOLOGY_UNITS_H
#define TD_DEPLOY_TOOL_TOPOLOGY_UNITS_H

#include <stdio.h>

#include "deploy/tool/topology.h"

enum { TD_PLACES = 64 };

/* The GPUs of a machine in the order of their PCI addresses, which is how CUDA numbers equal cards.
 */
struct td_gpu_place {
    char address[16]; /* "0000:c1:00.0" */
    char cpus[256];   /* near it, as "0-31,64-95" */
    int node;         /* memory near it; -1: not known */
};
struct td_gpu_places {
    struct td_gpu_place at[TD_PLACES];
    uint32_t n;
};

/* NVIDIA's GPUs by the sysfs mounted at `sys`; none: n = 0. */
void td_gpu_places_read(const char *sys, struct td_gpu_places *ret);

/* The commands that make systemd run exactly so many workers, each behind `prefix`; those that are
 * enabled in `wants` (or NULL: not looked for) and are others are disabled first. */
void td_units_commands(uint32_t prefill, uint32_t decode, const char *wants, const char *prefix,
                       FILE *out);

/* The text of a worker's drop-in; false: there is nothing to say, since it has no GPU, or its GPUs'
 * node is not known or is the only one. */
bool td_units_dropin(const struct td_topology *t, const struct td_topology_worker *w,
                     const struct td_gpu_places *places, char *ret, size_t cap);

/* Writes DIR/tandem-ROLE@N.service.d/topology.conf for every worker with a drop-in and says which.
 */
TD_MUST_USE td_status td_units_write(const struct td_topology *t,
                                     const struct td_gpu_places *places, const char *dir,
                                     struct td_error *err);

#endif
