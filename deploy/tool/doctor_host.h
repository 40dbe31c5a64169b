/* The host as the roles need it: memory, limits, shared memory, what one process may see of
 * another, run_dir, keys, addresses, units. Facts, the probes that find them, and the rules. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_HOST_H
#define TD_DEPLOY_TOOL_DOCTOR_HOST_H

#include <sys/stat.h>

#include "common/base/config.h"
#include "deploy/tool/doctor.h"

/* ---- memory, limits, shared memory, processes ---- */

struct td_host_facts {
    uint64_t memory, available; /* bytes; 0: unknown */
    uint64_t group_limit,
        group_used;     /* of the control group and those above it; UINT64_MAX: none */
    uint64_t huge_free; /* bytes in reserved huge pages that nobody has */
    int overcommit;     /* vm.overcommit_memory; -1: unknown */
    uint64_t memlock;   /* soft limits; UINT64_MAX: none */
    uint64_t files_soft, files_hard;
    bool shm_mounted; /* /dev/shm is a tmpfs */
    uint64_t shm_free;
    int shm_errno;    /* of making a file there; 0: fine */
    int peer_fd;      /* errno of opening another process's memory through /proc/PID/fd; 0: fine */
    int pidfd;        /* errno of watching another process; 0: fine */
    int ptrace_scope; /* Yama; -1: none */
};

struct td_host_needs {
    bool shm;           /* some worker uses the shm lane */
    bool gpus;          /* some worker computes on one */
    bool running;       /* this configuration's processes run: they hold what they need */
    uint64_t memory;    /* of all workers here, bytes */
    uint64_t pinned;    /* of it: slabs */
    uint64_t shm_bytes; /* in /dev/shm */
    uint64_t files;     /* the router's descriptors at its limits */
};

void td_host_look(struct td_host_facts *f);
void td_host_rules(const struct td_host_facts *f, const struct td_host_needs *n,
                   struct td_report *r);

/* ---- run_dir ---- */

struct td_run_dir_facts {
    char path[TD_CONFIG_STRING_MAX];
    int stat_errno; /* 0: it is there */
    bool folder, writable;
    bool parent_writable; /* when it is not there: it can be made */
    uint64_t free;        /* bytes of its file system, 0: unknown */
};
void td_run_dir_look(const char *path, struct td_run_dir_facts *f);
/* `units`: the unit of the router makes it. */
void td_run_dir_rules(const struct td_run_dir_facts *f, bool units, struct td_report *r);

/* ---- keys ---- */

struct td_key_facts {
    const char *setting;
    char path[TD_CONFIG_STRING_MAX];
    int open_errno; /* ENOENT, ...: nobody could read it; EACCES with a stat: others may */
    struct stat stat;
    uid_t as;       /* the user the roles run as */
    uint64_t least; /* bytes */
};
void td_key_look(const char *setting, const char *path, uint64_t least, struct td_key_facts *f);
void td_key_rules(const struct td_key_facts *f, struct td_report *r);

/* ---- addresses ---- */

enum td_holder { TD_HELD_BY_NOBODY, TD_HELD_BY_OURS, TD_HELD_BY_OTHERS };

struct td_port_facts {
    const char *setting; /* "router.listen" */
    char address[TD_CONFIG_STRING_MAX];
    char bad[200];  /* the sentence when it is no address */
    int bind_errno; /* 0: free */
    enum td_holder holder;
    bool elsewhere; /* the router may be on another host: workers only dial it */
};
/* `ours` tells whether the router of this configuration runs. */
void td_port_look(const char *setting, const char *address, bool ours, struct td_port_facts *f);
void td_port_rules(const struct td_port_facts *f, struct td_report *r);

/* ---- service manager ---- */

enum { TD_UNITS = 4 };
struct td_unit_facts {
    bool systemd;        /* it runs this machine */
    bool installed;      /* the configuration is the installed one */
    bool user;           /* there is a user `tandem` */
    bool unit[TD_UNITS]; /* router, prefill@, decode@, target */
};
extern const char *const td_unit_names[TD_UNITS];
void td_unit_look(bool installed, struct td_unit_facts *f);
void td_unit_rules(const struct td_unit_facts *f, struct td_report *r);

#endif
