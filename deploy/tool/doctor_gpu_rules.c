/* What follows from facts about GPUs, pairs of them, the IOMMU and the collective. Pure. */
#include <string.h>

#include "deploy/tool/doctor_gpu.h"

static const char iommu_cure[] =
    "switch the IOMMU to pass-through or off (iommu=pt on the kernel's command line; then "
    "intel_iommu=off or amd_iommu=off) and ACS off on the bridges above the GPUs (BIOS, or setpci "
    "on their ACS control); in a virtual machine on its host. Until then no worker may span them";

static double gb(uint64_t bytes) {
    return (double)bytes / 1e9;
}

double td_pcie_rate(int generation, int lanes) {
    /* GT/s and coding: 8b/10b, 128b/130b, then flits. */
    static const double lane[] = {0, 0.25, 0.5, 0.985, 1.969, 3.938, 7.563};
    if (generation < 1 || generation >= (int)(sizeof lane / sizeof *lane) || lanes < 1) return 0;
    return lane[generation] * lanes;
}

/* How a process ended that did not answer, as the end of a sentence. */
static const char *how_it_ended(const struct td_machine *m, const struct td_apart_end *e,
                                char buf[96]) {
    if (e->how == TD_APART_LATE)
        snprintf(buf, 96, "did not end within %u s%s", m->limit_ms / 1000,
                 e->stuck ? ", and its process cannot be killed: the driver hangs" : "");
    else if (e->how == TD_APART_DIED && e->code > 0)
        snprintf(buf, 96, "ended the process (signal %d)", e->code);
    else if (e->how == TD_APART_DIED)
        snprintf(buf, 96, "ended the process (exit code %d)", -e->code);
    else
        snprintf(buf, 96, "could not be begun: no process can be made");
    return buf;
}

static bool silent(const struct td_asked *a) {
    return a->end.how != TD_APART_DONE;
}

/* ---- one GPU ---- */

/* False: nothing more can be said of it. */
static bool opened_rules(const struct td_machine *m, const struct td_gpu_facts *g,
                         struct td_report *r) {
    char end[96];
    if (silent(&g->opened)) {
        td_find(r, TD_ERROR, "gpu", "cuda:%u%s%s: %s %s", g->index, g->seen.name[0] ? " " : "",
                g->seen.name, g->stage[0] ? g->stage : "asking for it",
                how_it_ended(m, &g->opened.end, end));
        td_cure(r, "`nvidia-smi` and dmesg (Xid) say more; reset it (nvidia-smi --gpu-reset -i N) "
                   "or reboot");
        return false;
    }
    if (g->opened.err.status == TD_NO_KERNEL) {
        td_find(r, TD_ERROR, "gpu",
                "cuda:%u %s: this build has no kernels for compute capability %d.%d, only %s",
                g->index, g->seen.name, g->seen.major, g->seen.minor, m->probe->built_for);
        td_cure(r, "another GPU, or another -gencode in kernels/meson.build");
        return false;
    }
    if (g->opened.err.status != TD_OK) {
        td_find(r, TD_ERROR, "gpu", "%s (%s)", g->opened.err.text, g->stage);
        td_cure(r, g->index >= m->count
                       ? "`device` names a GPU that is not there; CUDA_VISIBLE_DEVICES hides some"
                       : "`nvidia-smi` and dmesg (Xid) say more; reset it or reboot");
        return false;
    }
    if (g->wrong) {
        td_find(r, TD_ERROR, "gpu", "cuda:%u %s: a kernel gave %llu wrong values of %zu", g->index,
                g->seen.name, (unsigned long long)g->wrong, m->bytes / 4);
        td_cure(r, "its memory or the GPU is broken: nvidia-smi -q -d ECC, then replace it");
        return false;
    }
    td_find(r, TD_FINE, "gpu", "cuda:%u %s (%s): sm_%d kernels run and compute right, %.1f GB",
            g->index, g->seen.name, g->seen.bus, g->built, gb(g->seen.bytes));
    return true;
}

static void memory_rules(const struct td_machine *m, const struct td_gpu_facts *g,
                         struct td_report *r) {
    const struct td_nvml_facts *n = &g->nvml;
    char pids[120] = "";
    for (uint32_t i = 0; i < n->others && i < TD_OTHERS_MAX; i++) {
        size_t used = strlen(pids);
        snprintf(pids + used, sizeof pids - used, " %u", n->other[i]);
    }
    if (g->planned && !m->running && g->planned > g->seen.free) {
        td_find(r, TD_ERROR, "gpu",
                "cuda:%u: its workers will take %.2f GB, %.2f GB of %.2f are free", g->index,
                gb(g->planned), gb(g->seen.free), gb(g->seen.bytes));
        td_cure(r, "end what holds it%s%s, or lower mem_fraction or pool_pages",
                pids[0] ? ": processes" : "", pids);
    } else if (n->others) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: %u other process%s compute%s on it:%s", g->index,
                n->others, n->others == 1 ? "" : "es", n->others == 1 ? "s" : "", pids);
        td_cure(r, "end them (ps -fp PID), or give them another GPU: steps will wait for them");
    } else if (g->planned)
        td_find(r, TD_FINE, "gpu", "cuda:%u: its workers will take %.2f GB, %.2f GB are free",
                g->index, gb(g->planned), gb(g->seen.free));
}

/* Memory that was wrong, or is going to be. */
static void ecc_rules(const struct td_gpu_facts *g, struct td_report *r) {
    const struct td_nvml_facts *n = &g->nvml;
    if (n->rows_failed > 0 || n->ecc_volatile > 0) {
        td_find(r, TD_ERROR, "gpu", "cuda:%u: its memory is failing: %lld uncorrected errors%s",
                g->index, (long long)n->ecc_volatile,
                n->rows_failed > 0 ? ", a row could not be remapped" : " since the driver started");
        td_cure(r, n->rows_failed > 0
                       ? "replace it"
                       : "nvidia-smi --gpu-reset -i N; if they come back, replace it");
    } else if (n->pages_pending > 0) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: memory waits for a reset to be replaced by spare",
                g->index);
        td_cure(r, "stop what uses it, nvidia-smi --gpu-reset -i N, or reboot");
    } else if (n->ecc_ever > 0) {
        td_find(r, TD_WARNING, "gpu",
                "cuda:%u: %lld uncorrected memory errors so far, none since "
                "the driver started",
                g->index, (long long)n->ecc_ever);
        td_cure(r, "watch it: nvidia-smi -q -d ECC,ROW_REMAPPER");
    }
    if (n->ecc == 0 || (n->ecc_pending >= 0 && n->ecc_pending != n->ecc)) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: ECC is %s%s: a flipped bit goes unseen", g->index,
                n->ecc ? "on" : "off",
                n->ecc_pending == n->ecc ? ""
                : n->ecc_pending         ? ", and on after a reboot"
                                         : ", and off after a reboot");
        td_cure(r, "nvidia-smi -e 1 -i N, then reboot");
    }
}

static void clock_rules(const struct td_gpu_facts *g, struct td_report *r) {
    enum { HARDWARE = 0x08, THERMAL = 0x20 | 0x40, BRAKE = 0x80 };
    const struct td_nvml_facts *n = &g->nvml;
    if (n->throttle > 0 && n->throttle & (HARDWARE | THERMAL | BRAKE)) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: its clock is held down now: %s (%d of %d MHz)",
                g->index,
                n->throttle & THERMAL ? "heat"
                : n->throttle & BRAKE ? "the power supply's brake"
                                      : "hardware slowdown",
                n->clock, n->clock_max);
        td_cure(r, n->throttle & THERMAL ? "cool it: fans, dust, distance between cards"
                                         : "check its power cables and the power supply");
    }
    if (n->power > 0 && n->power_default > 0 && n->power * 10 < n->power_default * 9) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: its power is capped at %d W of %d", g->index,
                n->power, n->power_default);
        td_cure(r, "nvidia-smi -pl %d -i N, unless it is meant to be", n->power_default);
    }
    if (n->persistence == 0) {
        td_find(
            r, TD_WARNING, "gpu",
            "cuda:%u: persistence mode is off: the driver lets go of it whenever nobody uses it, "
            "and a worker's start takes seconds more",
            g->index);
        td_cure(r, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1");
    }
}

static void mode_rules(const struct td_gpu_facts *g, struct td_report *r) {
    enum { PROHIBITED = 2, EXCLUSIVE = 3 };
    const struct td_nvml_facts *n = &g->nvml;
    if (n->compute_mode == PROHIBITED || n->compute_mode == EXCLUSIVE) {
        td_find(r, n->compute_mode == PROHIBITED ? TD_ERROR : TD_WARNING, "gpu",
                "cuda:%u: its compute mode %s", g->index,
                n->compute_mode == PROHIBITED ? "prohibits every process"
                                              : "allows one process: workers that share it shut "
                                                "each other out");
        td_cure(r, "nvidia-smi -c DEFAULT -i N");
    }
    if (n->mig == 1) {
        td_find(r, TD_WARNING, "gpu",
                "cuda:%u: MIG is on: a worker gets a part of it, and parts "
                "are no peers",
                g->index);
        td_cure(r, "nvidia-smi -mig 0 -i N");
    }
}

/* A link as the driver knows it, else as /sys does; zeros: unknown. */
struct link {
    int generation_max, lanes, lanes_max;
};

static struct link link_of(const struct td_gpu_facts *g) {
    const struct td_nvml_facts *n = &g->nvml;
    const struct td_pci_facts *p = &g->pci;
    if (n->there && n->lanes >= 0) return (struct link){n->generation_max, n->lanes, n->lanes_max};
    return p->there ? (struct link){p->generation_max, p->lanes, p->lanes_max} : (struct link){0};
}

/* Its way to the host. */
static void link_rules(const struct td_machine *m, const struct td_gpu_facts *g,
                       struct td_report *r) {
    struct link l = link_of(g);
    char end[96];
    if (l.lanes > 0 && l.lanes < l.lanes_max) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: PCIe x%d, it can x%d", g->index, l.lanes,
                l.lanes_max);
        td_cure(r, "seat the card again, another slot or riser, bifurcation in the BIOS");
    }
    if (g->generation_busy > 0 && g->generation_busy < l.generation_max) {
        td_find(r, TD_WARNING, "gpu", "cuda:%u: PCIe generation %d under load, it can %d", g->index,
                g->generation_busy, l.generation_max);
        td_cure(r, "riser or cable too long, link speed fixed in the BIOS, or errors on the link "
                   "(dmesg: AER)");
    }
    if (!m->timed) return;
    if (silent(&g->timed) || g->timed.err.status != TD_OK) {
        td_find(r, TD_ERROR, "gpu", "cuda:%u: copying from and to pinned memory %s", g->index,
                silent(&g->timed) ? how_it_ended(m, &g->timed.end, end) : g->timed.err.text);
        td_cure(r, "dmesg (Xid, AER, IOMMU faults) says more; reset it or reboot");
        return;
    }
    if (g->host.wrong) {
        td_find(r, TD_ERROR, "gpu", "cuda:%u: %llu of %zu words came back wrong from pinned memory",
                g->index, (unsigned long long)g->host.wrong, m->bytes / 4);
        td_cure(r, "errors on the link (dmesg: AER): another slot, riser or cable");
        return;
    }
    double best =
        td_pcie_rate(g->generation_busy > 0 ? g->generation_busy : l.generation_max, l.lanes);
    bool slow = g->host.rate[0] < best * 0.6 || g->host.rate[1] < best * 0.6;
    td_find(r, slow ? TD_WARNING : TD_FINE, "gpu",
            "cuda:%u: pinned memory %.1f GB/s to it, %.1f from it%s", g->index, g->host.rate[0],
            g->host.rate[1], slow ? ", less than 60 % of what its link carries" : "");
    if (slow)
        td_cure(r, "let the worker run on cores near it (CPUAffinity=, NUMAPolicy= in its unit); "
                   "power saving of PCIe (ASPM) off in the BIOS");
}

static void place_rules(const struct td_gpu_facts *g, struct td_report *r) {
    const struct td_pci_facts *p = &g->pci;
    if (p->near_cores == 0) {
        td_find(
            r, TD_WARNING, "gpu",
            "cuda:%u: of NUMA node %d, where this process may use no core: copies cross sockets",
            g->index, p->node);
        td_cure(r,
                "cores of node %d for its worker (CPUAffinity= in the unit, the container's "
                "cpuset)",
                p->node);
    } else if (p->near_cores > 0)
        td_find(r, TD_FINE, "gpu", "cuda:%u: of NUMA node %d, %d usable cores near it", g->index,
                p->node, p->near_cores);
}

void td_gpu_rules(const struct td_machine *m, const struct td_gpu_facts *g, struct td_report *r) {
    bool works = opened_rules(m, g, r);
    if (g->nvml.there) {
        ecc_rules(g, r);
        clock_rules(g, r);
        mode_rules(g, r);
    }
    if (!works) return;
    memory_rules(m, g, r);
    link_rules(m, g, r);
    place_rules(g, r);
}

/* ---- two GPUs ---- */

static const char *no_peer_reason(int status) {
    static const char *const why[] = {[1] = "the chipset does not let them",
                                      [2] = "one of them cannot",
                                      [3] = "they are on different I/O hubs",
                                      [4] = "it is switched off in the driver",
                                      [5] = "this pair does not support it"};
    return status >= 1 && status <= 5 ? why[status] : "the driver does not say why";
}

static void wrong_bytes(const struct td_machine *m, const struct td_gpu_facts *a,
                        const struct td_gpu_facts *b, const struct td_gpu_pair *x,
                        struct td_report *r) {
    uint64_t copied = x->copied[0] + x->copied[1];
    td_find(r, TD_ERROR, "pair",
            "cuda:%u and cuda:%u: wrong words of %zu: %llu copied, %llu stored by kernels, %llu "
            "loaded: peer traffic is corrupted%s",
            a->index, b->index, m->bytes / 4, (unsigned long long)copied,
            (unsigned long long)(x->stored[0] + x->stored[1]),
            (unsigned long long)(x->loaded[0] + x->loaded[1]),
            a->pci.redirecting > 0 || b->pci.redirecting > 0 || m->iommu.groups
                ? " (IOMMU or ACS is in its way)"
                : "");
    td_cure(r, "%s", iommu_cure);
}

static void rate_rules(const struct td_gpu_facts *a, const struct td_gpu_facts *b,
                       const struct td_gpu_pair *x, const char *as, struct td_report *r) {
    struct link la = link_of(a), lb = link_of(b);
    double of_a = td_pcie_rate(la.generation_max, la.lanes),
           of_b = td_pcie_rate(lb.generation_max, lb.lanes), best = of_a < of_b ? of_a : of_b;
    double slow = x->rate[0] < x->rate[1] ? x->rate[0] : x->rate[1];
    double fast = x->rate[0] < x->rate[1] ? x->rate[1] : x->rate[0];
    bool peers = x->peer[0] && x->peer[1];
    /* Where nobody knows the links, rates are told and not judged. */
    const char *but = peers && slow < best / 2        ? ", less than half of what their links carry"
                      : best > 0 && slow < fast * 0.7 ? ", one way much slower than the other"
                                                      : "";
    td_find(r, *but ? TD_WARNING : TD_FINE, "pair",
            "cuda:%u and cuda:%u: %s: %.1f GB/s there, %.1f back, %.1f both ways at once%s",
            a->index, b->index, as, x->rate[0], x->rate[1], x->both, but);
    if (*but)
        td_cure(r,
                "nvidia-smi topo -m: GPUs of one worker under one PCIe switch or root; IOMMU and "
                "ACS off (iommu=pt)");
}

void td_pair_rules(const struct td_machine *m, const struct td_pair_facts *p, struct td_report *r) {
    const struct td_gpu_facts *a = &m->gpu[p->a], *b = &m->gpu[p->b];
    const struct td_gpu_pair *x = &p->pair;
    char end[96];
    if (!td_gpu_works(a) || !td_gpu_works(b)) {
        td_find(r, TD_SKIPPED, "pair", "cuda:%u and cuda:%u: one of them does not work", a->index,
                b->index);
        return;
    }
    if (silent(&p->asked)) {
        td_find(r, TD_ERROR, "pair", "cuda:%u and cuda:%u: copying between them %s", a->index,
                b->index, how_it_ended(m, &p->asked.end, end));
        td_cure(r, "%s", iommu_cure);
        return;
    }
    if (p->asked.err.status != TD_OK) {
        td_find(r, TD_ERROR, "pair", "%s", p->asked.err.text);
        td_cure(r, "dmesg (Xid, IOMMU faults) says more; then %s", iommu_cure);
        return;
    }
    for (int i = 0; i < 2; i++)
        if (x->copied[i] || x->stored[i] || x->loaded[i]) {
            wrong_bytes(m, a, b, x, r);
            return;
        }
    if (x->peer[0] && x->peer[1]) {
        rate_rules(a, b, x, "P2P, right bytes", r);
        return;
    }
    td_find(r, TD_WARNING, "pair",
            "cuda:%u and cuda:%u: no P2P%s (%s): what they tell each other goes through the host",
            a->index, b->index, x->peer[0] != x->peer[1] ? " one way" : "", no_peer_reason(p->p2p));
    td_cure(r, "GPUs of one worker under one root complex (nvidia-smi topo -p2p w), a driver that "
               "allows P2P for this model");
    rate_rules(a, b, x, "through the host, right bytes", r);
}

/* ---- the IOMMU ---- */

void td_iommu_rules(const struct td_machine *m, struct td_report *r) {
    bool translates = false, unknown = false;
    int redirecting = 0;
    if (m->n < 2) return;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct td_pci_facts *p = &m->gpu[i].pci;
        translates = translates || strncmp(p->domain, "DMA", 3) == 0;
        unknown = unknown || !p->there || p->redirecting < 0;
        if (p->redirecting > 0) redirecting++;
    }
    if (translates) {
        td_find(
            r, TD_WARNING, "pair",
            "the IOMMU translates what GPUs send (%d groups%s%s): peer traffic may be slow, hang "
            "or be corrupted",
            m->iommu.groups, m->iommu.words[0] ? "; " : "", m->iommu.words);
        td_cure(r,
                "iommu=pt on the kernel's command line, or off (amd_iommu=off, "
                "intel_iommu=off)%s",
                m->iommu.guest ? "; this is a virtual machine: its host's too" : "");
    }
    if (redirecting) {
        td_find(r, TD_WARNING, "pair",
                "ACS above %d of %u GPUs sends traffic between devices up to the root", redirecting,
                m->n);
        td_cure(r, "ACS off in the BIOS, or setpci -s BRIDGE ECAP_ACS+6.w=0 on each bridge (lspci "
                   "-tv) at every boot");
    }
    if (unknown && !redirecting)
        td_find(r, TD_SKIPPED, "pair", "ACS: bridges above the GPUs %s",
                m->iommu.guest ? "are the virtual machine's, or only root may read them"
                               : "can be read by root only");
    if (!translates && !redirecting && !unknown)
        td_find(r, TD_FINE, "pair", "no IOMMU or ACS between GPUs%s%s",
                m->iommu.words[0] ? ": " : "", m->iommu.words);
}

/* ---- all of them ---- */

void td_reduce_rules(const struct td_machine *m, struct td_report *r) {
    const struct td_gpu_reduce *x = &m->reduce;
    char end[96], version[48] = "";
    if (x->version)
        snprintf(version, sizeof version, "NCCL %d.%d.%d", x->version / 10000,
                 x->version / 100 % 100, x->version % 100);
    if (silent(&m->reduced)) {
        td_find(r, TD_ERROR, "nccl", "%s: %s with %u ranks %s", version[0] ? version : "NCCL",
                x->stage, m->ranks, how_it_ended(m, &m->reduced.end, end));
        td_cure(r, "see the pairs above; NCCL_DEBUG=INFO with nccl-tests' all_reduce_perf shows "
                   "where; NCCL_P2P_DISABLE=1 proves that P2P is the cause");
    } else if (m->reduced.err.status == TD_NOT_FOUND) {
        /* A worker of one GPU has no use for it; of several it does nothing that mailboxes cannot.
         */
        td_find(r, m->ranks > 1 ? TD_WARNING : TD_SKIPPED, "nccl", "NCCL: %s", m->reduced.err.text);
        if (m->ranks > 1)
            td_cure(r, "install libnccl2 of this CUDA version: without it large sums of two ranks "
                       "take half as long again");
    } else if (m->reduced.err.status != TD_OK) {
        td_find(r, TD_ERROR, "nccl", "%s: %s", version[0] ? version : "NCCL", m->reduced.err.text);
        td_cure(r, "NCCL_DEBUG=WARN says more; a version made for this driver; /dev/shm of some "
                   "100 MB");
    } else if (x->wrong) {
        td_find(r, TD_ERROR, "nccl", "%s: %llu wrong values in a sum over %u ranks", version,
                (unsigned long long)x->wrong, m->ranks);
        td_cure(r, "%s", iommu_cure);
    } else
        td_find(r, TD_FINE, "nccl", "%s: a sum of %.1f MB over %u rank%s is right", version,
                (double)m->bytes / 1e6, m->ranks, m->ranks == 1 ? "" : "s");
}

void td_machine_rules(const struct td_machine *m, struct td_report *r) {
    char end[96];
    if (silent(&m->counted) || m->counted.err.status != TD_OK) {
        td_find(r, m->needed || silent(&m->counted) ? TD_ERROR : TD_SKIPPED, "gpu", "%s%s",
                silent(&m->counted) ? "asking the driver for GPUs " : "",
                silent(&m->counted) ? how_it_ended(m, &m->counted.end, end) : m->counted.err.text);
        if (m->needed || silent(&m->counted))
            td_cure(r,
                    "`nvidia-smi` and dmesg say more; the driver must be as new as the toolkit of "
                    "this build");
        return;
    }
    if (silent(&m->nvml_asked) || m->nvml.status != TD_OK) {
        td_find(r, silent(&m->nvml_asked) ? TD_ERROR : TD_SKIPPED, "gpu",
                "NVML (ECC, clocks, power, PCIe link, other processes): %s",
                silent(&m->nvml_asked) ? how_it_ended(m, &m->nvml_asked.end, end) : m->nvml.text);
        if (silent(&m->nvml_asked))
            td_cure(r, "the driver hangs: dmesg (Xid) says more; reset the GPU or reboot");
    } else
        td_find(r, TD_FINE, "gpu", "driver %s, %u GPUs", m->driver, m->count);
    for (uint32_t i = 0; i < m->n; i++)
        td_gpu_rules(m, &m->gpu[i], r);
    td_iommu_rules(m, r);
    if (!m->timed) {
        td_find(r, TD_SKIPPED, "pair", "copies between GPUs and collectives: --still");
        return;
    }
    for (uint32_t i = 0; i < m->pairs; i++)
        td_pair_rules(m, &m->pair[i], r);
    if (m->ranks) td_reduce_rules(m, r);
}
