/* See topology_check.h: instances, GPUs and what processes must agree in. */
#include "deploy/tool/topology_check.h"

#include <dirent.h>
#include <stdarg.h>
#include <string.h>

void td_check_say(struct td_check *c, enum td_finding level, const char *who, const char *format,
                  ...) {
    static const char *const word[] = {
        [TD_FINDING_ERROR] = "error", [TD_FINDING_WARNING] = "warning", [TD_FINDING_NOTE] = "note"};
    va_list ap;
    c->n[level]++;
    fprintf(c->out, "%s: %s%s%s: ", word[level], c->t->path, *who ? ": " : "", who);
    va_start(ap, format);
    vfprintf(c->out, format, ap);
    va_end(ap);
    fputc('\n', c->out);
}

/* ---- instances ---- */

static const char *role_of(const struct td_topology_worker *w) {
    return w->prefill ? "prefill" : "decode";
}

/* The worker of that name, or NULL. */
static const struct td_topology_worker *worker_named(const struct td_topology *t,
                                                     const char *name) {
    for (uint32_t i = 0; i < t->workers; i++)
        if (strcmp(t->worker[i].name, name) == 0) return &t->worker[i];
    return NULL;
}

static const struct td_config_section *section_named(const struct td_topology *t,
                                                     const char *name) {
    for (uint32_t i = 0; i < t->sections; i++)
        if (strcmp(t->section[i].name, name) == 0) return &t->section[i];
    return NULL;
}

/* Section i against those before it: what stands later holds, be it about fewer or more. */
static void order(struct td_check *c, uint32_t i) {
    const struct td_config_section *s = &c->t->section[i], *before = c->t->section;
    size_t n = strlen(s->name);
    for (uint32_t k = 0; k < i; k++) {
        if (strcmp(before[k].name, s->name) == 0)
            td_check_say(
                c, TD_FINDING_WARNING, "",
                "section [%s] stands in lines %u and %u, and the later one holds: make one "
                "of them",
                s->name, before[k].line, s->line);
        else if (strncmp(before[k].name, s->name, n) == 0 && before[k].name[n] == '@')
            td_check_say(
                c, TD_FINDING_WARNING, "",
                "section [%s] in line %u undoes what it shares with [%s] in line %u, since "
                "the later one holds: move it before",
                s->name, s->line, before[k].name, before[k].line);
    }
}

static void sections(struct td_check *c) {
    const struct td_topology *t = c->t;
    for (uint32_t i = 0; i < t->sections; i++) {
        const struct td_config_section *s = &t->section[i];
        const char *at = strchr(s->name, '@');
        order(c, i);
        if (at && !worker_named(t, s->name)) {
            int n = (int)(at - s->name);
            td_check_say(c, TD_FINDING_ERROR, "",
                         "section [%s] in line %u is nobody's: cluster.%.*s = %u names the workers "
                         "0 to N - 1: raise it, or delete the section",
                         s->name, s->line, n, s->name,
                         (uint32_t)(s->name[0] == 'p' ? t->router.cluster_prefill
                                                      : t->router.cluster_decode));
        }
    }
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        char first[32];
        snprintf(first, sizeof first, "%s@", role_of(w));
        bool others = false;
        for (uint32_t k = 0; k < t->sections; k++)
            others |= strncmp(t->section[k].name, first, strlen(first)) == 0;
        if (others && !section_named(t, w->name))
            td_check_say(c, TD_FINDING_WARNING, w->name,
                         "it has no section, though others of its role have one: write [%s] with "
                         "its device, or lower cluster.%s",
                         w->name, role_of(w));
    }
}

/* "tandem-decode@1.service" as "decode@1"; false: no unit of a worker. */
static bool unit_worker(const char *file, char *name, size_t cap) {
    const char *start = file + strlen("tandem-"), *end = strstr(file, ".service");
    if (strncmp(file, "tandem-", strlen("tandem-")) != 0 || !end || !strchr(start, '@'))
        return false;
    snprintf(name, cap, "%.*s", (int)(end - start), start);
    return true;
}

static void units(struct td_check *c) {
    DIR *d = c->wants ? opendir(c->wants) : NULL;
    if (!d) return;
    bool enabled[TD_TOPOLOGY_WORKERS] = {false}, any = false;
    for (const struct dirent *e; (e = readdir(d));) {
        char name[64];
        if (!unit_worker(e->d_name, name, sizeof name)) continue;
        const struct td_topology_worker *w = worker_named(c->t, name);
        any = true;
        if (w)
            enabled[w - c->t->worker] = true;
        else
            td_check_say(c, TD_FINDING_ERROR, name,
                         "its unit is enabled, but the file has no such worker: sudo systemctl "
                         "disable --now tandem-%s",
                         name);
    }
    closedir(d);
    for (uint32_t i = 0; any && i < c->t->workers; i++)
        if (!enabled[i])
            td_check_say(c, TD_FINDING_WARNING, c->t->worker[i].name,
                         "its unit is not enabled, so it does not start with the others: sudo "
                         "systemctl enable --now tandem-%s",
                         c->t->worker[i].name);
}

void td_check_instances(struct td_check *c) {
    const struct td_config *r = &c->t->router;
    if (r->cluster_prefill == 0 && !r->router_colocate)
        td_check_say(c, TD_FINDING_ERROR, "",
                     "no prefill worker (cluster.prefill = 0): set it to 1 or more, or let decode "
                     "workers compute prompts themselves with router.colocate = on");
    sections(c);
    units(c);
}

/* ---- GPUs ---- */

static void gpus_of(struct td_check *c, const struct td_topology_worker *w) {
    uint32_t index[TD_MAX_RANKS];
    struct td_error err;
    bool cuda;
    if (td_devices_read(w->config.device, w->config.tp, &cuda, index, &err) != TD_OK)
        td_check_say(c, TD_FINDING_ERROR, w->name, "%s: set tp to the number of GPUs in device",
                     err.text);
    for (uint32_t i = 0; c->host_gpus && i < w->gpus; i++)
        if (w->gpu[i] >= c->host_gpus)
            td_check_say(c, TD_FINDING_ERROR, w->name,
                         "device: GPU %u is not there, this machine has 0 to %u: change %s",
                         w->gpu[i], c->host_gpus - 1, w->config.device);
}

/* A GPU of several ranks, told once, with the first two of them. */
static void shared_gpu(struct td_check *c, uint32_t gpu) {
    const struct td_topology_worker *owner[2] = {NULL, NULL};
    uint32_t n = 0, percent = 0;
    for (uint32_t i = 0; i < c->t->workers; i++) {
        const struct td_topology_worker *w = &c->t->worker[i];
        for (uint32_t k = 0; k < w->gpus; k++) {
            if (w->gpu[k] != gpu) continue;
            if (n < 2) owner[n] = w;
            n++;
            percent += (uint32_t)w->config.mem_fraction;
        }
    }
    if (n < 2) return;
    if (percent > 100)
        td_check_say(
            c, TD_FINDING_ERROR, "",
            "GPU %u is given to %u ranks (of %s and %s), whose mem_fraction add up to %u "
            "%%: give each its own GPU, or set mem_fraction so that the sum is at most 100",
            gpu, n, owner[0]->name, owner[1]->name, percent);
    else
        td_check_say(c, TD_FINDING_NOTE, "",
                     "GPU %u is shared by %u ranks (of %s and %s), which plan with %u %% of its "
                     "memory",
                     gpu, n, owner[0]->name, owner[1]->name, percent);
}

void td_check_gpus(struct td_check *c) {
    uint32_t end = 0;
    for (uint32_t i = 0; i < c->t->workers; i++) {
        const struct td_topology_worker *w = &c->t->worker[i];
        gpus_of(c, w);
        for (uint32_t k = 0; k < w->gpus; k++)
            if (w->gpu[k] >= end) end = w->gpu[k] + 1;
    }
    for (uint32_t gpu = 0; gpu < end; gpu++)
        shared_gpu(c, gpu);
}

/* ---- agreement ---- */

static void value_of(const struct td_config *c, const char *key, char *value) {
    const char *found;
    for (size_t i = 0; td_config_row(c, i, &found, value, NULL); i++)
        if (strcmp(found, key) == 0) return;
    value[0] = '\0';
}

/* First worker `i` from `from` on whose `key` is not `expected`; all: t->workers. */
static uint32_t other_value(const struct td_topology *t, uint32_t from, const char *key,
                            const char *expected, char *value) {
    for (uint32_t i = from; i < t->workers; i++) {
        value_of(&t->worker[i].config, key, value);
        if (strcmp(value, expected) != 0) return i;
    }
    return t->workers;
}

static bool on_cpu(const struct td_topology_worker *w) {
    return strcmp(w->config.device, "cpu") == 0;
}

static void kinds_of_device(struct td_check *c) {
    const struct td_topology *t = c->t;
    for (uint32_t i = 1; i < t->workers; i++)
        if (on_cpu(&t->worker[i]) != on_cpu(&t->worker[0])) {
            td_check_say(c, TD_FINDING_ERROR, t->worker[i].name,
                         "device is %s, and %s of %s: the CPU and GPUs round differently, so the "
                         "router would not pair them: put both on the same kind",
                         t->worker[i].config.device, t->worker[0].config.device, t->worker[0].name);
            return;
        }
}

void td_check_agreement(struct td_check *c) {
    /* What every process reads, and what is part of the workers' fingerprint or numerics. */
    static const char *const all[] = {"model.dir",        "run_dir",         "router.control",
                                      "cluster_key_file", "cluster.prefill", "cluster.decode"};
    static const char *const workers[] = {
        "load_format", "random.seed", "random.format",   "random.layers",
        "numerics",    "kv_dtype",    "index_key_dtype", "nvfp4_activations",
        "index_sim4",  "score_dtype", "index_topk",      "kv_layout",
        "lane"};
    const struct td_topology *t = c->t;
    char expected[TD_CONFIG_STRING_MAX], found[TD_CONFIG_STRING_MAX];
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        value_of(&t->router, all[i], expected);
        uint32_t k = other_value(t, 0, all[i], expected, found);
        if (k < t->workers)
            td_check_say(c, TD_FINDING_ERROR, t->worker[k].name,
                         "%s is '%s', and '%s' of the router: write it once, above the first "
                         "section",
                         all[i], found, expected);
    }
    for (size_t i = 0; t->workers && i < sizeof workers / sizeof workers[0]; i++) {
        value_of(&t->worker[0].config, workers[i], expected);
        uint32_t k = other_value(t, 1, workers[i], expected, found);
        if (k < t->workers)
            td_check_say(c, TD_FINDING_ERROR, t->worker[k].name,
                         "%s is '%s', and '%s' of %s: workers that differ in it are no pair: write "
                         "it once, above the first section",
                         workers[i], found, expected, t->worker[0].name);
    }
    kinds_of_device(c);
}

void td_check_all(struct td_check *c) {
    td_check_instances(c);
    td_check_gpus(c);
    td_check_limits(c);
    td_check_agreement(c);
    td_check_model(c);
}
