/* What in a configuration does not fit together, told before anything starts: each finding is a
 * sentence with the cure. Processes refuse the same when they start, but one after the other and
 * after weights are read; and some of it nobody refuses, it only is not what was meant. */
#ifndef TD_DEPLOY_TOOL_TOPOLOGY_CHECK_H
#define TD_DEPLOY_TOOL_TOPOLOGY_CHECK_H

#include <stdio.h>

#include "deploy/tool/topology.h"

enum td_finding { TD_FINDING_ERROR, TD_FINDING_WARNING, TD_FINDING_NOTE, TD_FINDINGS };

struct td_check {
    const struct td_topology *t;
    FILE *out;               /* where findings are told, a line each */
    uint32_t host_gpus;      /* of this machine; 0: it has none, or is another one than is meant */
    double gpu_memory;       /* bytes of a card; 0: not known, and what fits is not checked */
    const char *wants;       /* folder with links to the enabled units, or NULL: not compared */
    uint32_t n[TD_FINDINGS]; /* findings so far */
};

/* Everything below. */
void td_check_all(struct td_check *c);

/* Roles and instances: those missing, sections of nobody, sections that undo others, enabled units.
 */
void td_check_instances(struct td_check *c);
/* Devices against `tp`, GPUs that are not there or that two workers have. */
void td_check_gpus(struct td_check *c);
/* Addresses, and limits that contradict each other. */
void td_check_limits(struct td_check *c);
/* Settings in which processes must agree. */
void td_check_agreement(struct td_check *c);
/* The model: whether every worker's plan is one, with its ranks, and fits its card. */
void td_check_model(struct td_check *c);

/* For those: tells a finding about `who` ("decode@0", "" for all). */
__attribute__((format(printf, 4, 5))) void td_check_say(struct td_check *c, enum td_finding level,
                                                        const char *who, const char *format, ...);

#endif
