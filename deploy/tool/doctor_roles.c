/* Facts about a configuration's processes, and what follows from them. */
#include "deploy/tool/doctor_roles.h"

#include <stdlib.h>
#include <string.h>

#include "deploy/tool/plan_worker.h"
#include "kernels/device.h"

/* ---- facts ---- */

/* None where the setting is wrong: the engine's settings say so. */
static void places(struct td_role_facts *f) {
    bool cuda = false;
    uint32_t index[TD_MAX_RANKS];
    struct td_error told_later;
    if (td_devices_read(f->config.device, f->config.tp, &cuda, index, &told_later) != TD_OK ||
        !cuda)
        return;
    for (uint32_t i = 0; i < f->config.tp; i++) {
        bool twice = false;
        for (uint32_t k = 0; k < f->gpus; k++)
            twice = twice || f->gpu[k] == index[i];
        if (!twice) f->gpu[f->gpus++] = index[i];
    }
}

bool td_role_is(const struct td_role_facts *f, const char *role) {
    size_t n = strlen(role);
    return strncmp(f->name, role, n) == 0 && (f->name[n] == 0 || f->name[n] == '@');
}

static td_status load(const char *path, const char *role, const char *instance,
                      const char *const *sets, uint32_t n, struct td_config *c,
                      struct td_error *err) {
    td_config_defaults(c);
    TD_TRY(td_config_load(c, path, role, instance, err));
    for (uint32_t i = 0; i < n; i++)
        TD_TRY(td_config_set(c, sets[i], err));
    return TD_OK;
}

void td_roles_look(const char *path, const char *const *sets, uint32_t n_sets, struct td_roles *r) {
    struct td_config c;
    *r = (struct td_roles){0};
    snprintf(r->path, sizeof r->path, "%s", path);
    if (load(path, "router", "", sets, n_sets, &c, &r->loaded) != TD_OK) return;
    td_procs_init(&r->procs, &c);
    r->role = calloc((size_t)r->procs.n, sizeof *r->role);
    if (!r->role) {
        td_fail(&r->loaded, TD_NO_MEMORY, "no memory for %d processes", r->procs.n);
        return;
    }
    for (int i = 0; i < r->procs.n; i++) {
        const struct td_proc *p = &r->procs.proc[i];
        struct td_role_facts *f = &r->role[i];
        snprintf(f->name, sizeof f->name, "%s", p->name);
        f->worker = strcmp(p->role, "router") != 0;
        if (load(path, p->role, p->instance, sets, n_sets, &f->config, &r->loaded) != TD_OK) return;
        if (f->worker) places(f);
    }
    r->loaded.status = TD_OK;
}

void td_roles_free(struct td_roles *r) {
    free(r->role);
    r->role = NULL;
}

/* Memory of the smallest of a worker's GPUs; 0: one of them is unknown. */
static uint64_t card(const struct td_role_facts *f, const struct td_machine *m) {
    uint64_t least = 0;
    for (uint32_t k = 0; k < f->gpus; k++) {
        uint64_t bytes = 0;
        for (uint32_t i = 0; m && i < m->n; i++)
            if (m->gpu[i].index == f->gpu[k]) bytes = m->gpu[i].seen.bytes;
        if (bytes == 0) return 0;
        least = least == 0 || bytes < least ? bytes : least;
    }
    return least;
}

static td_status plan(struct td_role_facts *f, const struct td_model_config *model,
                      enum td_outline kind, uint64_t memory, struct td_error *err) {
    struct td_worker_plan p;
    const struct td_plan_asked asked = {.config = &f->config,
                                        .model = model,
                                        .format = kind,
                                        .prefill = td_role_is(f, "prefill"),
                                        .ranks = (uint32_t)f->config.tp,
                                        .memory = memory};
    TD_TRY(td_plan_worker(&asked, &p, err));
    size_t on_gpu = td_worker_plan_bytes(&p, false);
    f->slabs = p.slabs;
    f->on_host = td_worker_plan_bytes(&p, true) + (memory ? 0 : on_gpu * f->config.tp);
    f->on_gpu = memory ? on_gpu - p.context : 0;
    f->pages = p.options.pages;
    f->max_context = p.options.max_context;
    return TD_OK;
}

/* What needs config.json. Without it the model's own finding says so. */
static void look_at(struct td_role_facts *f, const struct td_machine *m) {
    struct td_model_config config;
    struct td_engine_options o;
    struct td_error err;
    enum td_outline kind = TD_OUTLINE_BF16;
    if (td_model_config_from(&f->config, &config, &kind, &err) != TD_OK) return;
    f->settings.status = td_engine_options_from(&f->config, &config, &o, &f->settings);
    uint64_t memory = f->gpus ? card(f, m) : 0;
    if (f->settings.status != TD_OK || (f->gpus && memory == 0)) return;
    f->planned = true;
    f->plan.status = plan(f, &config, kind, memory, &f->plan);
}

void td_roles_plan(struct td_roles *r, struct td_machine *m) {
    for (int i = 0; i < r->procs.n; i++) {
        struct td_role_facts *f = &r->role[i];
        if (!f->worker) continue;
        look_at(f, m);
        for (uint32_t k = 0; m && k < f->gpus; k++)
            for (uint32_t g = 0; g < m->n; g++)
                if (m->gpu[g].index == f->gpu[k]) m->gpu[g].planned += f->on_gpu;
    }
}

/* ---- rules ---- */

void td_role_rules(const struct td_role_facts *f, struct td_report *r) {
    const struct td_config *c = &f->config;
    if (f->settings.status != TD_OK) {
        td_find(r, TD_ERROR, "config", "%s: %s", f->name, f->settings.text);
        td_cure(r, "change the setting that the sentence begins with: man tandem.conf");
    } else if (!f->planned)
        td_find(r, TD_SKIPPED, "plan", "%s: %s", f->name,
                f->gpus ? "no plan: the memory of its GPU is not known"
                        : "no plan: config.json cannot be read");
    else if (f->plan.status != TD_OK) {
        td_find(r, TD_ERROR, "plan", "%s: %s", f->name, f->plan.text);
        td_cure(r, "the setting and the number that the sentence gives; `tandem plan --config` "
                   "shows every part");
    } else
        td_find(r, TD_FINE, "plan", "%s on %s: %u pages, max_context %u; %.3f GB of the host%s",
                f->name, c->device, f->pages, f->max_context, (double)f->on_host / 1e9,
                f->gpus ? ", and of each GPU what mem_fraction leaves" : "");
}

void td_roles_rules(const struct td_roles *f, struct td_report *r) {
    char names[160] = "";
    if (f->loaded.status != TD_OK) {
        td_find(r, TD_ERROR, "config", "%s", f->loaded.text);
        td_cure(r, "man tandem.conf has every setting; deploy/tandem.conf is an example");
        return;
    }
    for (int i = 0; i < f->procs.n; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", f->procs.proc[i].name);
    }
    td_find(r, TD_FINE, "config", "%s: settings of %s", f->path, names);
    for (int i = 0; i < f->procs.n; i++)
        if (f->role[i].worker) td_role_rules(&f->role[i], r);
}
