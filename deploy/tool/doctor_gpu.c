/* Asking GPUs: each question in a process of its own, its answer in memory that outlives it. */
#include "deploy/tool/doctor_gpu.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"

bool td_gpu_works(const struct td_gpu_facts *g) {
    return g->opened.end.how == TD_APART_DONE && g->opened.err.status == TD_OK && g->built &&
           g->wrong == 0;
}

/* The answer's status lies in shared memory: what was not said stays "not said". */
static bool answer(struct td_asked *a, td_status st, const struct td_error *err) {
    a->err.status = st;
    if (st != TD_OK) a->err = *err;
    return st == TD_OK || st == TD_NO_KERNEL || st == TD_CONFIG || st == TD_NOT_FOUND;
}

static void stage(struct td_gpu_facts *g, const char *what) {
    snprintf(g->stage, sizeof g->stage, "%s", what);
}

/* ---- questions: the functions that run in children ---- */

static bool ask_count(void *arg, uint32_t i) {
    (void)i;
    struct td_machine *m = arg;
    struct td_error err;
    return answer(&m->counted, m->probe->count(&m->count, &err), &err);
}

/* Every op has a kernel there, as an engine's start wants it. */
static td_status ask_ops(const struct td_backend *b, uint32_t gpu, struct td_error *err) {
    struct td_device d = {.backend = b, .ranks = 1};
    struct td_ops ops;
    if (!b) return TD_OK;
    TD_TRY(b->open(&d, gpu, err));
    td_status st = b->ops(&d, 0, &ops, err);
    b->close(&d);
    return st;
}

static td_status open_and_try(struct td_machine *m, struct td_gpu_facts *g, struct td_error *err) {
    const struct td_gpu_probe *p = m->probe;
    stage(g, "opening it");
    TD_TRY(p->look(g->index, &g->seen, err));
    stage(g, "loading kernels");
    TD_TRY(p->kernels(g->index, &g->built, err));
    stage(g, "running a kernel");
    TD_TRY(p->compute(g->index, m->bytes, &g->wrong, err));
    stage(g, "opening the op table");
    TD_TRY(ask_ops(p->backend, g->index, err));
    stage(g, "done");
    return TD_OK;
}

static bool ask_gpu(void *arg, uint32_t i) {
    struct td_machine *m = arg;
    struct td_error err;
    td_status st = open_and_try(m, &m->gpu[i], &err);
    return answer(&m->gpu[i].opened, st, &err);
}

static bool ask_host(void *arg, uint32_t i) {
    struct td_machine *m = arg;
    struct td_gpu_facts *g = &m->gpu[i];
    struct td_error err;
    if (!td_gpu_works(g)) return true;
    stage(g, "copying from and to the host");
    td_status st = m->probe->host(g->index, m->bytes, m->times, &g->host, &err);
    /* Before the link slows down again; of a library that has answered before. */
    if (g->nvml.there) g->generation_busy = td_nvml_generation(g->seen.bus);
    if (g->generation_busy < 0) g->generation_busy = td_pci_generation("", g->seen.bus);
    return answer(&g->timed, st, &err);
}

static bool ask_pair(void *arg, uint32_t i) {
    struct td_machine *m = arg;
    struct td_pair_facts *p = &m->pair[i];
    const struct td_gpu_facts *a = &m->gpu[p->a], *b = &m->gpu[p->b];
    struct td_error err;
    if (!td_gpu_works(a) || !td_gpu_works(b)) return true; /* it would cost its time limit again */
    td_status st = m->probe->pair(a->index, b->index, m->bytes, m->times, &p->pair, &err);
    return answer(&p->asked, st, &err);
}

static bool ask_sum(void *arg, uint32_t i) {
    (void)i;
    struct td_machine *m = arg;
    struct td_error err;
    td_status st = m->probe->reduce(m->rank, m->ranks, m->bytes, &m->reduce, &err);
    return answer(&m->reduced, st, &err);
}

struct with_ours {
    struct td_machine *m;
    const uint32_t *ours;
    uint32_t n;
};

static bool ask_nvml(void *arg, uint32_t i) {
    (void)i;
    struct with_ours *w = arg;
    td_nvml_look(w->m, w->ours, w->n);
    return true;
}

/* ---- asking ---- */

/* `n` questions of one kind; how each ended goes beside its answer. */
static void ask(struct td_machine *m, td_apart_fn *fn, uint32_t n, struct td_apart_end *ends) {
    td_apart(fn, m, n, m->limit_ms, ends);
}

static void choose(struct td_machine *m, const uint32_t *wanted, uint32_t n) {
    uint32_t all = n ? n : m->count;
    m->n = all < TD_DOCTOR_GPUS ? all : TD_DOCTOR_GPUS;
    for (uint32_t i = 0; i < m->n; i++) {
        struct td_gpu_facts *g = &m->gpu[i];
        g->index = n ? wanted[i] : i;
        g->generation_busy = -1;
        for (uint32_t k = 0; k < i; k++)
            m->pair[m->pairs++] = (struct td_pair_facts){.a = k, .b = i, .p2p = -1, .ancestor = -1};
    }
}

void td_machine_look(struct td_machine *m, const uint32_t *wanted, uint32_t n, const uint32_t *ours,
                     uint32_t n_ours) {
    struct td_apart_end ends[TD_DOCTOR_PAIRS];
    struct with_ours nvml = {m, ours, n_ours};
    td_iommu_look("", &m->iommu);
    ask(m, ask_count, 1, &m->counted.end);
    if (m->counted.end.how != TD_APART_DONE || m->counted.err.status != TD_OK) return;
    choose(m, wanted, n);
    ask(m, ask_gpu, m->n, ends);
    for (uint32_t i = 0; i < m->n; i++) {
        m->gpu[i].opened.end = ends[i];
        td_pci_look("", m->gpu[i].seen.bus, &m->gpu[i].pci);
    }
    td_apart(ask_nvml, &nvml, 1, m->limit_ms, &m->nvml_asked.end);
    for (uint32_t i = 0; i < m->n; i++)
        if (td_gpu_works(&m->gpu[i])) m->rank[m->ranks++] = m->gpu[i].index;
    if (!m->timed) return;
    ask(m, ask_host, m->n, ends);
    for (uint32_t i = 0; i < m->n; i++)
        m->gpu[i].timed.end = ends[i];
    ask(m, ask_pair, m->pairs, ends);
    for (uint32_t i = 0; i < m->pairs; i++)
        m->pair[i].asked.end = ends[i];
    if (m->ranks) ask(m, ask_sum, 1, &m->reduced.end);
}
