/* The processes that a configuration describes: their settings, where they compute, and what each
 * will take by the plan that workers size themselves with. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_ROLES_H
#define TD_DEPLOY_TOOL_DOCTOR_ROLES_H

#include "deploy/tool/doctor_gpu.h"
#include "deploy/tool/procs.h"

struct td_role_facts {
    char name[TD_PROC_NAME_MAX];
    bool worker;
    struct td_config config;
    struct td_error settings;   /* of the engine's settings; status OK: valid */
    uint32_t gpu[TD_MAX_RANKS]; /* numbers of those that its ranks compute on, each once */
    uint32_t gpus;              /* 0: on the CPU */
    bool planned;               /* the plan could be asked for */
    struct td_error plan;       /* status OK: it fits */
    uint64_t on_gpu;            /* bytes on each, beside its context */
    uint64_t on_host, slabs;    /* of all of it, slabs */
    uint32_t pages, max_context;
};

struct td_roles {
    char path[512]; /* the file */
    struct td_error loaded;
    struct td_procs procs;
    struct td_role_facts *role; /* [procs.n]; [0] is the router */
};

/* "decode@0" is a decode worker. */
bool td_role_is(const struct td_role_facts *f, const char *role);

/* Loads `path` with `sets` for every process. */
void td_roles_look(const char *path, const char *const *sets, uint32_t n_sets, struct td_roles *r);
void td_roles_free(struct td_roles *r);
/* Plans every worker; those on GPUs with the memory of the smallest of theirs among m->gpu (m may
 * be NULL), and adds what they will take to those. */
void td_roles_plan(struct td_roles *r, struct td_machine *m);

void td_role_rules(const struct td_role_facts *f, struct td_report *r);
/* Whether the processes of `path` fit together; `host_gpus` of this machine, 0: unknown. */
void td_agreement_rules(const char *path, uint32_t host_gpus, struct td_report *r);
void td_roles_rules(const struct td_roles *f, struct td_report *r);

#endif
