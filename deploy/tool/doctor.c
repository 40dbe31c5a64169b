/* The whole examination, in the order in which a person would go: settings, model, host, lanes,
 * GPUs. What could not be looked at because of what came before says so. */
#include "deploy/tool/doctor.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/tool/doctor_host.h"
#include "deploy/tool/doctor_lane.h"
#include "deploy/tool/doctor_model.h"
#include "deploy/tool/doctor_roles.h"
#include "deploy/tool/target.h"

/* What one examination knows. */
struct examination {
    const struct td_doctor_options *o;
    struct td_report *r;
    struct td_roles roles;
    bool installed; /* the configuration is the installed one: units run it */
    bool units;     /* and they are there */
    uint32_t pid[TD_PROCS_MAX];
    uint32_t pids;              /* of this configuration's processes that run */
    bool router;                /* its router does */
    struct td_machine *machine; /* NULL: no GPU was looked at */
};

/* ---- who runs ---- */

static uint32_t pid_of(const struct examination *x, int i) {
    struct td_target t;
    struct td_error unheard;
    pid_t pid = td_proc_pid(&x->roles.procs, i);
    if (pid == 0 && x->units &&
        td_target_find(&t, x->roles.path, x->roles.procs.proc[i].name, &unheard) == TD_OK)
        pid = td_target_pid(&t);
    return (uint32_t)pid;
}

static void who_runs(struct examination *x) {
    for (int i = 0; i < x->roles.procs.n; i++) {
        uint32_t pid = pid_of(x, i);
        if (pid == 0) continue;
        x->pid[x->pids++] = pid;
        if (i == 0) x->router = true;
    }
}

/* ---- model, keys, addresses, lanes ---- */

static void models(struct examination *x) {
    const struct td_roles *s = &x->roles;
    for (int i = 0; i < s->procs.n; i++) {
        const struct td_config *c = &s->role[i].config;
        bool seen = false;
        for (int k = 0; k < i; k++)
            seen = seen || (strcmp(s->role[k].config.model_dir, c->model_dir) == 0 &&
                            s->role[k].config.load_format == c->load_format);
        if (seen) continue;
        if (!c->model_dir[0]) {
            td_find(x->r, TD_ERROR, "model", "%s: model.dir is not set", s->role[i].name);
            td_cure(x->r, "model.dir = FOLDER of a checkpoint");
            continue;
        }
        struct td_model_facts *f = calloc(1, sizeof *f);
        if (!f) continue;
        td_model_look(c->model_dir, c->load_format == TD_LOAD_RANDOM, f);
        td_model_rules(f, x->r);
        td_model_facts_free(f);
        free(f);
    }
}

static void key(struct examination *x, const char *setting, const char *path, uint64_t least) {
    struct td_key_facts f;
    td_key_look(setting, path, least, &f);
    td_key_rules(&f, x->r);
}

static void keys(struct examination *x) {
    enum { CLUSTER_KEY = 32 };
    const struct td_roles *s = &x->roles;
    const char *api = s->role[0].config.router_api_keys_file;
    if (api[0]) key(x, "router.api_keys_file", api, 1);
    for (int i = 0; i < s->procs.n; i++) {
        const char *path = s->role[i].config.cluster_key_file;
        bool seen = !path[0];
        for (int k = 0; k < i; k++)
            seen = seen || strcmp(s->role[k].config.cluster_key_file, path) == 0;
        if (!seen) key(x, "cluster_key_file", path, CLUSTER_KEY);
    }
}

static void ports(struct examination *x) {
    const struct td_config *c = &x->roles.role[0].config;
    struct td_port_facts f;
    td_port_look("router.listen", c->router_listen, x->router, &f);
    td_port_rules(&f, x->r);
    if (!c->router_control[0] || c->router_control[0] == '/' ||
        strncmp(c->router_control, "unix:", 5) == 0)
        return;
    td_port_look("router.control", c->router_control, x->router, &f);
    f.elsewhere = true;
    td_port_rules(&f, x->r);
}

static bool same_lane(const struct td_config *a, const struct td_config *b) {
    return a->lane == b->lane && strcmp(a->lane_device, b->lane_device) == 0 &&
           strcmp(a->router_control, b->router_control) == 0 &&
           strcmp(a->cluster_key_file, b->cluster_key_file) == 0;
}

static void lanes(struct examination *x) {
    const struct td_roles *s = &x->roles;
    struct td_lane_facts f = {0};
    bool first = true;
    for (int i = 1; i < s->procs.n; i++) {
        const char *args[6 + 2 * 64] = {s->procs.proc[i].role, "--config", s->path, "--name",
                                        s->procs.proc[i].instance};
        bool seen = false;
        for (int k = 1; k < i; k++)
            seen = seen || same_lane(&s->role[k].config, &s->role[i].config);
        if (seen) continue;
        for (uint32_t k = 0; k < x->o->n_sets && k < 64; k++) {
            args[5 + 2 * k] = "--set";
            args[6 + 2 * k] = x->o->sets[k];
        }
        td_lane_look(s->role[i].name, &s->role[i].config, args, x->o->limit_s, &f);
        if (first) td_lane_ucx_rules(&f, x->r);
        first = false;
        td_lane_rules(&f, x->r);
    }
}

/* ---- the host ---- */

static bool shm_lane(const struct td_config *c) {
    if (c->lane != TD_LANE_AUTO) return c->lane == TD_LANE_SHM;
    return !c->router_control[0];
}

static void host(struct examination *x) {
    /* UCX's queues of a process, and again while they are renewed (common/xfer/xfer.h); what the router opens beside clients'
     * connections (router/serve.c). */
    enum { QUEUES = 2 * 21 << 20, BESIDE = 256 + 64, PER_REQUEST = 4, WATCHERS = 64 };
    const struct td_roles *s = &x->roles;
    struct td_host_needs n = {.running = x->pids > 0};
    struct td_host_facts f;
    for (int i = 0; s->role && i < s->procs.n; i++) {
        const struct td_role_facts *role = &s->role[i];
        if (!role->worker)
            n.files = PER_REQUEST * role->config.router_max_requests + WATCHERS + BESIDE;
        n.memory += role->on_host;
        if (role->gpus) n.pinned += role->slabs;
        n.gpus = n.gpus || role->gpus;
        if (!role->worker || !shm_lane(&role->config)) continue;
        n.shm = true;
        n.shm_bytes += role->slabs + QUEUES;
    }
    td_host_look(&f);
    td_host_rules(&f, &n, x->r);
}

static void run_dir(struct examination *x) {
    struct td_run_dir_facts f;
    td_run_dir_look(x->roles.role[0].config.run_dir, &f);
    td_run_dir_rules(&f, x->units, x->r);
}

/* ---- GPUs ---- */

/* Numbers of all GPUs that workers compute on, each once. */
static uint32_t wanted(const struct td_roles *s, uint32_t *gpu) {
    uint32_t n = 0;
    for (int i = 0; i < s->procs.n; i++)
        for (uint32_t k = 0; k < s->role[i].gpus; k++) {
            bool seen = false;
            for (uint32_t j = 0; j < n; j++)
                seen = seen || gpu[j] == s->role[i].gpu[k];
            if (!seen && n < TD_DOCTOR_GPUS) gpu[n++] = s->role[i].gpu[k];
        }
    return n;
}

static void gpus(struct examination *x) {
    const struct td_doctor_options *o = x->o;
    uint32_t gpu[TD_DOCTOR_GPUS], n = wanted(&x->roles, gpu);
    if (!o->gpus || (n == 0 && !o->all_gpus)) {
        td_find(x->r, TD_SKIPPED, "gpu", "GPUs: %s",
                o->gpus ? "no worker computes on one (device = cpu); --all-gpus looks at those "
                          "that are there"
                        : "this build has no CUDA (meson option cuda)");
        return;
    }
    x->machine = td_apart_memory(sizeof *x->machine);
    if (!x->machine) {
        td_find(x->r, TD_SKIPPED, "gpu", "GPUs: no memory to ask them");
        return;
    }
    *x->machine = (struct td_machine){.probe = o->gpus,
                                      .bytes = o->bytes,
                                      .times = o->times,
                                      .limit_ms = o->limit_s * 1000,
                                      .needed = n > 0,
                                      .timed = !o->still,
                                      .running = x->pids > 0};
    td_machine_look(x->machine, gpu, o->all_gpus ? 0 : n, x->pid, x->pids);
}

static void units(struct examination *x) {
    struct td_unit_facts f;
    td_unit_look(x->installed, &f);
    td_unit_rules(&f, x->r);
}

void td_doctor(const struct td_doctor_options *o, struct td_report *r) {
    struct examination x = {.o = o, .r = r};
    const char *path = o->config ? o->config : TD_SYSTEM_CONFIG;
    struct td_unit_facts u;
    x.installed = strcmp(path, TD_SYSTEM_CONFIG) == 0;
    td_unit_look(x.installed, &u);
    x.units = x.installed && u.systemd && u.unit[0];
    td_roles_look(path, o->sets, o->n_sets, &x.roles);
    if (x.roles.loaded.status != TD_OK) {
        td_roles_rules(&x.roles, r);
        td_find(
            r, TD_SKIPPED, "config",
            "model, plan, run_dir, keys, ports, lanes, GPUs: nothing is known of them without a "
            "configuration");
        td_roles_free(&x.roles);
        x.roles = (struct td_roles){0};
        host(&x);
        return;
    }
    who_runs(&x);
    gpus(&x);
    td_roles_plan(&x.roles, x.machine);
    td_roles_rules(&x.roles, r);
    if (o->n_sets)
        td_find(r, TD_SKIPPED, "config",
                "whether processes fit together: read from files only, not "
                "with --set");
    else
        td_agreement_rules(path, x.machine ? x.machine->count : 0, r);
    models(&x);
    host(&x);
    run_dir(&x);
    keys(&x);
    ports(&x);
    units(&x);
    lanes(&x);
    if (x.machine) td_machine_rules(x.machine, r);
    td_apart_memory_free(x.machine, sizeof *x.machine);
    td_roles_free(&x.roles);
}
