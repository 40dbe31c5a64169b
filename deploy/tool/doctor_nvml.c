/* What the driver's management library says of GPUs. It is loaded by name: neither it nor its
 * header is needed to build, and a machine without it is a fact. Its calls, in the form of their
 * public interface; an older library that lacks one leaves that fact unknown. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/doctor_gpu.h"

typedef void *device;

struct memory {
    unsigned long long total, free, used;
};

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* X(field, symbol, arguments): each returns 0 when all is well. */
#define CALLS(X)                                                                                   \
    X(init, "nvmlInit_v2", (void))                                                                 \
    X(shutdown, "nvmlShutdown", (void))                                                            \
    X(driver, "nvmlSystemGetDriverVersion", (char *, unsigned))                                    \
    X(find, "nvmlDeviceGetHandleByPciBusId_v2", (const char *, device *))                          \
    X(memory, "nvmlDeviceGetMemoryInfo", (device, struct memory *))                                \
    X(persistence, "nvmlDeviceGetPersistenceMode", (device, unsigned *))                           \
    X(ecc, "nvmlDeviceGetEccMode", (device, unsigned *, unsigned *))                               \
    X(ecc_errors, "nvmlDeviceGetTotalEccErrors", (device, int, int, unsigned long long *))         \
    X(pages, "nvmlDeviceGetRetiredPagesPendingStatus", (device, unsigned *))                       \
    X(rows, "nvmlDeviceGetRemappedRows", (device, unsigned *, unsigned *, unsigned *, unsigned *)) \
    X(clock, "nvmlDeviceGetClockInfo", (device, int, unsigned *))                                  \
    X(clock_max, "nvmlDeviceGetMaxClockInfo", (device, int, unsigned *))                           \
    X(power, "nvmlDeviceGetEnforcedPowerLimit", (device, unsigned *))                              \
    X(power_default, "nvmlDeviceGetPowerManagementDefaultLimit", (device, unsigned *))             \
    X(power_range, "nvmlDeviceGetPowerManagementLimitConstraints",                                 \
      (device, unsigned *, unsigned *))                                                            \
    X(throttle, "nvmlDeviceGetCurrentClocksThrottleReasons", (device, unsigned long long *))       \
    X(generation, "nvmlDeviceGetCurrPcieLinkGeneration", (device, unsigned *))                     \
    X(generation_max, "nvmlDeviceGetMaxPcieLinkGeneration", (device, unsigned *))                  \
    X(lanes, "nvmlDeviceGetCurrPcieLinkWidth", (device, unsigned *))                               \
    X(lanes_max, "nvmlDeviceGetMaxPcieLinkWidth", (device, unsigned *))                            \
    X(compute_mode, "nvmlDeviceGetComputeMode", (device, unsigned *))                              \
    X(mig, "nvmlDeviceGetMigMode", (device, unsigned *, unsigned *))                               \
    X(processes, "nvmlDeviceGetComputeRunningProcesses_v3",                                        \
      (device, unsigned *, struct process *))                                                      \
    X(ancestor, "nvmlDeviceGetTopologyCommonAncestor", (device, device, int *))                    \
    X(p2p, "nvmlDeviceGetP2PStatus", (device, device, int, int *))

struct nvml {
#define X(field, symbol, arguments) int(*field) arguments;
    CALLS(X)
#undef X
    void *library;
};

static td_status load(struct nvml *l, struct td_error *err) {
    const char *(*why)(int) = NULL;
    *l = (struct nvml){.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!l->library) return td_fail(err, TD_NOT_FOUND, "%s", dlerror());
#define X(field, symbol, arguments) *(void **)(void *)&l->field = dlsym(l->library, symbol);
    CALLS(X)
#undef X
    *(void **)(void *)&why = dlsym(l->library, "nvmlErrorString");
    int e = l->init && l->find ? l->init() : -1;
    if (e == 0) return TD_OK;
    td_fail(err, TD_IO, "libnvidia-ml.so.1: %s", e > 0 && why ? why(e) : "too old");
    dlclose(l->library);
    return TD_IO;
}

static void leave(struct nvml *l) {
    if (l->shutdown) l->shutdown();
    dlclose(l->library);
}

/* A number by a call of (device, unsigned *). */
static int number(int (*call)(device, unsigned *), device d) {
    unsigned v = 0;
    return call && call(d, &v) == 0 ? (int)v : -1;
}

static int clock_of(int (*call)(device, int, unsigned *), device d, int kind) {
    unsigned v = 0;
    return call && call(d, kind, &v) == 0 ? (int)v : -1;
}

static int64_t uncorrected(const struct nvml *l, device d, int since) {
    enum { UNCORRECTED = 1 };
    unsigned long long v = 0;
    return l->ecc_errors && l->ecc_errors(d, UNCORRECTED, since, &v) == 0 ? (int64_t)v : -1;
}

static int watts(int milliwatts) {
    return milliwatts < 0 ? -1 : milliwatts / 1000;
}

static bool is_ours(uint32_t pid, const uint32_t *ours, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (ours[i] == pid) return true;
    return false;
}

static void processes(const struct nvml *l, device d, const uint32_t *ours, uint32_t n_ours,
                      struct td_nvml_facts *f) {
    enum { ROOM = 64 };
    struct process p[ROOM];
    unsigned n = ROOM;
    if (!l->processes || l->processes(d, &n, p) != 0) return;
    for (unsigned i = 0; i < n && i < ROOM; i++) {
        if (is_ours(p[i].pid, ours, n_ours)) continue;
        if (f->others < TD_OTHERS_MAX) f->other[f->others] = p[i].pid;
        f->others++;
    }
}

static void look(const struct nvml *l, device d, const uint32_t *ours, uint32_t n_ours,
                 struct td_nvml_facts *f) {
    enum { SM = 1, MEMORY = 2, VOLATILE = 0, EVER = 1 };
    unsigned a = 0, b = 0, corrected = 0, wrong = 0, pending = 0, failed = 0;
    unsigned long long reasons = 0;
    struct memory m = {0};
    f->there = true;
    f->persistence = number(l->persistence, d);
    bool ecc = l->ecc && l->ecc(d, &a, &b) == 0;
    f->ecc = ecc ? (int)a : -1;
    f->ecc_pending = ecc ? (int)b : -1;
    f->ecc_volatile = uncorrected(l, d, VOLATILE);
    f->ecc_ever = uncorrected(l, d, EVER);
    f->pages_pending = number(l->pages, d);
    bool rows = l->rows && l->rows(d, &corrected, &wrong, &pending, &failed) == 0;
    if (rows) f->pages_pending = (int)pending; /* newer GPUs remap in place of retiring */
    f->rows_failed = rows ? (int)failed : -1;
    f->clock = clock_of(l->clock, d, SM);
    f->clock_max = clock_of(l->clock_max, d, SM);
    f->memory_clock = clock_of(l->clock, d, MEMORY);
    f->memory_clock_max = clock_of(l->clock_max, d, MEMORY);
    f->power = watts(number(l->power, d));
    f->power_default = watts(number(l->power_default, d));
    bool range = l->power_range && l->power_range(d, &a, &b) == 0;
    f->power_max = range ? (int)(b / 1000) : -1;
    f->throttle = l->throttle && l->throttle(d, &reasons) == 0 ? (int64_t)reasons : -1;
    f->generation = number(l->generation, d);
    f->generation_max = number(l->generation_max, d);
    f->lanes = number(l->lanes, d);
    f->lanes_max = number(l->lanes_max, d);
    f->compute_mode = number(l->compute_mode, d);
    f->mig = l->mig && l->mig(d, &a, &b) == 0 ? (int)a : -1;
    f->used = l->memory && l->memory(d, &m) == 0 ? m.used : 0;
    processes(l, d, ours, n_ours, f);
}

static void look_between(const struct nvml *l, device a, device b, struct td_pair_facts *p) {
    enum { WRITE = 1 };
    if (!l->ancestor || l->ancestor(a, b, &p->ancestor) != 0) p->ancestor = -1;
    if (!l->p2p || l->p2p(a, b, WRITE, &p->p2p) != 0) p->p2p = -1;
}

void td_nvml_look(struct td_machine *m, const uint32_t *ours, uint32_t n_ours) {
    struct nvml l;
    device d[TD_DOCTOR_GPUS] = {0};
    for (uint32_t i = 0; i < m->pairs; i++)
        m->pair[i].p2p = m->pair[i].ancestor = -1;
    if (load(&l, &m->nvml) != TD_OK) return;
    m->nvml.status = TD_OK;
    if (!l.driver || l.driver(m->driver, sizeof m->driver) != 0) m->driver[0] = 0;
    for (uint32_t i = 0; i < m->n; i++)
        if (l.find(m->gpu[i].seen.bus, &d[i]) == 0) look(&l, d[i], ours, n_ours, &m->gpu[i].nvml);
    for (uint32_t i = 0; i < m->pairs; i++)
        if (m->gpu[m->pair[i].a].nvml.there && m->gpu[m->pair[i].b].nvml.there)
            look_between(&l, d[m->pair[i].a], d[m->pair[i].b], &m->pair[i]);
    leave(&l);
}

int td_nvml_generation(const char *bus) {
    struct nvml l;
    struct td_error unheard;
    device d;
    if (load(&l, &unheard) != TD_OK) return -1;
    int v = l.find(bus, &d) == 0 ? number(l.generation, d) : -1;
    leave(&l);
    return v;
}
