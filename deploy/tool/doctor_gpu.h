/* GPUs and what lies between them: facts from the runtime (kernels/probe.h), from NVML and from
 * /sys, and the rules. Numbers that nobody could tell are -1. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_GPU_H
#define TD_DEPLOY_TOOL_DOCTOR_GPU_H

#include "deploy/tool/doctor.h"
#include "deploy/tool/doctor_apart.h"
#include "kernels/device.h"
#include "kernels/probe.h"

enum { TD_DOCTOR_GPUS = 16, TD_DOCTOR_PAIRS = TD_DOCTOR_GPUS * (TD_DOCTOR_GPUS - 1) / 2 };
enum { TD_OTHERS_MAX = 8 };

/* What the driver's library says of one. */
struct td_nvml_facts {
    bool there;
    int persistence, ecc, ecc_pending; /* 0, 1 */
    int64_t ecc_volatile, ecc_ever;    /* uncorrected errors, since the driver started and ever */
    int pages_pending;                 /* retired pages or remapped rows that wait for a reset */
    int rows_failed;                   /* a row could not be remapped */
    int clock, clock_max, memory_clock, memory_clock_max; /* MHz */
    int power, power_default, power_max;              /* W; the cap in force, and what may be set */
    int64_t throttle;                                 /* reasons, NVML's bits */
    int generation, generation_max, lanes, lanes_max; /* PCIe, now and at best */
    int compute_mode;                                 /* 0 shared, 2 prohibited, 3 exclusive */
    int mig;
    uint64_t used;                 /* bytes */
    uint32_t others;               /* processes that compute on it, ours aside */
    uint32_t other[TD_OTHERS_MAX]; /* pids */
};

/* What /sys says. */
struct td_pci_facts {
    bool there;
    int generation_max, lanes, lanes_max; /* of the link; -1 */
    int node;                             /* NUMA; -1: the machine has one, or nobody knows */
    int near_cores;  /* of those this process may use, how many are of that node; -1: unknown */
    int group;       /* IOMMU group; -1: none */
    char domain[16]; /* of the group: "identity", "DMA", "DMA-FQ", "" unknown */
    int bridges;     /* above it */
    int redirecting; /* of them: ACS sends traffic between devices up to the root;
                        -1: only root may look */
};

/* What was asked in a process of its own: how it ended, and its sentence when it failed. */
struct td_asked {
    struct td_apart_end end;
    struct td_error err; /* status OK: fine */
};

struct td_gpu_facts {
    uint32_t index;
    char stage[40]; /* what is being done with it, or was when its process ended */
    struct td_asked opened, timed;
    struct td_gpu_seen seen;
    int built;      /* architecture of the kernels that it takes; 0: none */
    uint64_t wrong; /* of a kernel's results */
    struct td_gpu_host host;
    int generation_busy; /* PCIe, right after copies */
    struct td_nvml_facts nvml;
    struct td_pci_facts pci;
    uint64_t planned; /* bytes that the workers on it will take beside their contexts; 0: no plan */
};

struct td_pair_facts {
    uint32_t a, b; /* places in gpu[] */
    struct td_asked asked;
    struct td_gpu_pair pair;
    int p2p;      /* NVML's status, 0: may; -1 */
    int ancestor; /* NVML's topology level; -1 */
};

struct td_iommu_facts {
    char words[200]; /* of the kernel's command line that are about it */
    int groups;      /* 0: none is active */
    bool guest;      /* a virtual machine */
};

/* All of it; in memory that children write (td_apart_memory). */
struct td_machine {
    const struct td_gpu_probe *probe;
    size_t bytes;
    uint32_t times, limit_ms;
    struct td_asked counted;
    uint32_t count; /* GPUs of the runtime */
    uint32_t n, pairs;
    struct td_gpu_facts gpu[TD_DOCTOR_GPUS];
    struct td_pair_facts pair[TD_DOCTOR_PAIRS];
    struct td_asked nvml_asked;
    struct td_error nvml; /* of its library */
    char driver[80];
    struct td_iommu_facts iommu;
    bool needed;  /* some worker computes on one */
    bool timed;   /* copies and sums were asked for */
    bool running; /* this configuration's workers run: they have their memory */
    struct td_asked reduced;
    uint32_t ranks;                /* that were summed over; 0: not asked */
    uint32_t rank[TD_DOCTOR_GPUS]; /* their numbers */
    struct td_gpu_reduce reduce;
};

/* Fills m->n GPUs of the numbers `wanted` (all that there are when n is 0), their pairs, and a sum
 * over those that compute. Set before, all else zero: probe, bytes, times, limit_ms, needed, timed,
 * running.
 * `ours` [n_ours]: pids that may compute there. */
void td_machine_look(struct td_machine *m, const uint32_t *wanted, uint32_t n, const uint32_t *ours,
                     uint32_t n_ours);

/* Whether it was opened, takes our kernels and computes right. */
bool td_gpu_works(const struct td_gpu_facts *g);

/* Each fills its part. */
void td_nvml_look(struct td_machine *m, const uint32_t *ours, uint32_t n_ours);
/* PCIe generation of a bus address right now, -1. Loads and leaves the library. */
int td_nvml_generation(const char *bus);
/* `root` is "" on a machine; tests have another. */
int td_pci_generation(const char *root, const char *bus);
void td_pci_look(const char *root, const char *bus, struct td_pci_facts *f);
void td_iommu_look(const char *root, struct td_iommu_facts *f);
/* Whether a bridge of this configuration space [n] redirects what its devices send each other; -1:
 * too little of it can be read. */
int td_acs_redirects(const uint8_t *config, size_t n);

/* Rules. */
void td_gpu_rules(const struct td_machine *m, const struct td_gpu_facts *g, struct td_report *r);
void td_pair_rules(const struct td_machine *m, const struct td_pair_facts *p, struct td_report *r);
void td_iommu_rules(const struct td_machine *m, struct td_report *r);
void td_reduce_rules(const struct td_machine *m, struct td_report *r);
/* What is common to all: no GPU, no library. Then all of the above. */
void td_machine_rules(const struct td_machine *m, struct td_report *r);

/* 10^9 bytes a second that so many lanes of a generation carry each way; 0: unknown. */
double td_pcie_rate(int generation, int lanes);

#endif
