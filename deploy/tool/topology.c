/* See topology.h. */
#include "deploy/tool/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_status add_workers(struct td_topology *t, const char *role, uint64_t n,
                             struct td_error *err) {
    for (uint64_t i = 0; i < n; i++) {
        struct td_topology_worker *w = &t->worker[t->workers++];
        snprintf(w->instance, sizeof w->instance, "%u", (uint32_t)i);
        snprintf(w->name, sizeof w->name, "%s@%u", role, (uint32_t)i);
        w->prefill = strcmp(role, "prefill") == 0;
        td_config_defaults(&w->config);
        TD_TRY(td_config_load(&w->config, t->path, role, w->instance, err));
        struct td_error told_by_checks;
        bool cuda;
        td_status st =
            td_devices_read(w->config.device, w->config.tp, &cuda, w->gpu, &told_by_checks);
        w->ranks = (uint32_t)w->config.tp;
        w->gpus = st == TD_OK && cuda ? w->ranks : 0;
    }
    return TD_OK;
}

td_status td_topology_load(const char *path, struct td_topology **ret, struct td_error *err) {
    struct td_topology *t = calloc(1, sizeof *t);
    td_status st;
    if (!t) return td_fail(err, TD_NO_MEMORY, "no memory for the workers of %s", path);
    t->path = path;
    td_config_defaults(&t->router);
    TD_TRY_GOTO(td_config_load(&t->router, path, "router", "", err), failed);
    TD_TRY_GOTO(td_config_sections(path, t->section, TD_TOPOLOGY_SECTIONS, &t->sections, err),
                failed);
    TD_TRY_GOTO(add_workers(t, "prefill", t->router.cluster_prefill, err), failed);
    TD_TRY_GOTO(add_workers(t, "decode", t->router.cluster_decode, err), failed);
    *ret = t;
    return TD_OK;
failed:
    td_topology_free(t);
    return st;
}

void td_topology_free(struct td_topology *t) {
    free(t);
}
