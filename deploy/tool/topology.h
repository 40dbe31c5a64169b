/* What a configuration file says about a cluster: which workers there are, what holds for each, and
 * which GPUs each takes. Read from the one file that roles read, so that a check, a plan and the
 * units cannot speak of another cluster than the one that runs. */
#ifndef TD_DEPLOY_TOOL_TOPOLOGY_H
#define TD_DEPLOY_TOOL_TOPOLOGY_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/config.h"
#include "kernels/device.h"

enum {
    TD_TOPOLOGY_WORKERS = 64 + 64, /* what cluster.prefill and cluster.decode allow */
    TD_TOPOLOGY_SECTIONS = 3 + TD_TOPOLOGY_WORKERS,
};

struct td_topology_worker {
    char name[32]; /* "prefill@0" */
    bool prefill;  /* else decode */
    char instance[16];
    struct td_config config;    /* what holds for it */
    uint32_t ranks;             /* of its model; setting tp */
    uint32_t gpus;              /* 0: it computes on the CPU */
    uint32_t gpu[TD_MAX_RANKS]; /* of rank 0, 1, ... */
};

struct td_topology {
    const char *path; /* outlives this */
    struct td_config router;
    struct td_config_section section[TD_TOPOLOGY_SECTIONS];
    uint32_t sections, workers;
    struct td_topology_worker worker[TD_TOPOLOGY_WORKERS]; /* prefill, then decode, by instance */
};

/* Reads `path` as every process of it will. Devices that td_devices_read refuses are kept as zero
 * GPUs: a check tells them all, not the first. */
TD_MUST_USE td_status td_topology_load(const char *path, struct td_topology **ret,
                                       struct td_error *err);
void td_topology_free(struct td_topology *t);

#endif
