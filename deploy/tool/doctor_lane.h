/* How KV state travels: what UCX makes of the lane that each worker chooses, and the network device
 * of the tcp lane. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_LANE_H
#define TD_DEPLOY_TOOL_DOCTOR_LANE_H

#include "common/base/config.h"
#include "deploy/tool/doctor.h"
#include "deploy/tool/doctor_apart.h"

struct td_lane_facts {
    char worker[32]; /* "decode@0" */
    bool program;    /* there is a tandem-lane to ask with */
    struct td_apart_end end;
    uint32_t limit_s;
    char version[32], components[400], lane[8], links[128];
    char failed[400]; /* its sentence */
    /* tcp lane: the device named in the settings */
    char device[TD_CONFIG_STRING_MAX];
    bool device_there, device_loopback;
    uint32_t address; /* IPv4, host order; 0: none */
    bool gpus;        /* the worker computes on one */
};

/* Runs tandem-lane for a worker of `c`; `argv` after the program's name. */
void td_lane_look(const char *worker, const struct td_config *c, const char *const args[],
                  uint32_t limit_s, struct td_lane_facts *f);
/* Lines "key value" of tandem-lane into *f. */
void td_lane_read(char *text, struct td_lane_facts *f);
void td_lane_rules(const struct td_lane_facts *f, struct td_report *r);
/* Of UCX itself: once, not for every worker. */
void td_lane_ucx_rules(const struct td_lane_facts *f, struct td_report *r);

#endif
