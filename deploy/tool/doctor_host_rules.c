/* What follows from facts about the host. Pure: no file, no socket. */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/un.h>

#include "common/auth/secret.h"
#include "deploy/tool/doctor_host.h"

static double gb(uint64_t bytes) {
    return (double)bytes / 1e9;
}

/* ---- memory ---- */

static void memory_rules(const struct td_host_facts *f, const struct td_host_needs *n,
                         struct td_report *r) {
    uint64_t group_left = f->group_limit == UINT64_MAX     ? UINT64_MAX
                          : f->group_limit > f->group_used ? f->group_limit - f->group_used
                                                           : 0;
    if (n->memory == 0 || f->memory == 0)
        td_find(r, TD_SKIPPED, "host", "memory: %s",
                f->memory ? "no worker could be planned" : "/proc/meminfo cannot be read");
    else if (n->memory > f->memory) {
        td_find(r, TD_ERROR, "host", "memory: the workers take %.2f GB, this machine has %.2f GB",
                gb(n->memory), gb(f->memory));
        td_cure(r, "lower max_context, max_running, pool_pages or the number of workers (`tandem "
                   "plan` shows the parts)");
    } else if (!n->running && n->memory > group_left) {
        td_find(r, TD_ERROR, "host",
                "memory: the workers take %.2f GB, the control group allows %.2f GB of which "
                "%.2f GB are used",
                gb(n->memory), gb(f->group_limit), gb(f->group_used));
        td_cure(r, "raise the container's memory limit (memory.max) or lower max_context and "
                   "max_running");
    } else if (!n->running && n->memory > f->available) {
        td_find(r, TD_WARNING, "host",
                "memory: the workers take %.2f GB, %.2f GB of %.2f GB are available now",
                gb(n->memory), gb(f->available), gb(f->memory));
        td_cure(r, "end what holds it, or lower max_context and max_running");
    } else
        td_find(r, TD_FINE, "host", "memory: the workers take %.2f GB of %.2f GB", gb(n->memory),
                gb(f->memory));
    if (f->memory && f->huge_free > f->memory / 10) {
        td_find(r, TD_WARNING, "host",
                "huge pages: %.2f GB of %.2f GB are reserved and unused; no role takes them",
                gb(f->huge_free), gb(f->memory));
        td_cure(r, "sysctl vm.nr_hugepages=0, unless another program needs them");
    }
    if (f->overcommit == 2) {
        td_find(r, TD_WARNING, "host",
                "vm.overcommit_memory: expected 0 or 1, found 2: mapped checkpoints and CUDA "
                "reserve far more address space than memory");
        td_cure(r, "sysctl vm.overcommit_memory=0");
    }
}

/* ---- limits ---- */

static void limit_rules(const struct td_host_facts *f, const struct td_host_needs *n,
                        struct td_report *r) {
    enum { FEWEST = 1024 }; /* links, files, some clients */
    if (f->files_hard < FEWEST) {
        td_find(r, TD_ERROR, "host", "open files (RLIMIT_NOFILE): expected at least %d, found %llu",
                FEWEST, (unsigned long long)f->files_hard);
        td_cure(r, "ulimit -Hn 65536 here, nofile in /etc/security/limits.conf; the units have "
                   "LimitNOFILE=65536");
    } else if (f->files_hard < n->files) {
        td_find(r, TD_WARNING, "host",
                "open files (RLIMIT_NOFILE): %llu; the router wants %llu for router.max_requests "
                "and will take fewer connections",
                (unsigned long long)f->files_hard, (unsigned long long)n->files);
        td_cure(r, "ulimit -Hn 65536 here, nofile in /etc/security/limits.conf, or lower "
                   "router.max_requests; the units have LimitNOFILE=65536");
    } else
        td_find(r, TD_FINE, "host", "open files: %llu (soft), %llu (hard), the router wants %llu",
                (unsigned long long)f->files_soft, (unsigned long long)f->files_hard,
                (unsigned long long)n->files);
    if (n->gpus && f->memlock < n->pinned) {
        td_find(r, TD_WARNING, "host",
                "locked memory (RLIMIT_MEMLOCK): %.3f GB; slabs that GPUs copy from take %.3f GB, "
                "and UCX and NCCL register such memory on some networks",
                gb(f->memlock), gb(n->pinned));
        td_cure(r, "ulimit -l unlimited, memlock in /etc/security/limits.conf; the units have "
                   "LimitMEMLOCK=infinity");
    } else if (n->gpus)
        td_find(r, TD_FINE, "host", "locked memory: enough for %.3f GB of slabs", gb(n->pinned));
}

/* ---- shared memory ---- */

static void shm_rules(const struct td_host_facts *f, const struct td_host_needs *n,
                      struct td_report *r) {
    if (!n->shm) {
        td_find(r, TD_SKIPPED, "host", "/dev/shm: no worker uses the shm lane");
        return;
    }
    if (!f->shm_mounted || f->shm_errno) {
        td_find(r, TD_ERROR, "host", "/dev/shm: expected a tmpfs that can be written, found %s",
                f->shm_mounted ? strerror(f->shm_errno) : "none");
        td_cure(r, "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; in a unit no "
                   "TemporaryFileSystem= or InaccessiblePaths= on it");
    } else if (!n->running && f->shm_free < n->shm_bytes) {
        td_find(r, TD_ERROR, "host",
                "/dev/shm: the workers' queues and slabs take %.3f GB, %.3f GB are free",
                gb(n->shm_bytes), gb(f->shm_free));
        td_cure(r,
                "mount -o remount,size=%lluM /dev/shm (docker run --shm-size), or lower "
                "slab_bytes, landing_slabs, max_prefill_peers",
                (unsigned long long)(2 * n->shm_bytes >> 20) + 1);
    } else
        td_find(r, TD_FINE, "host", "/dev/shm: %.3f GB free, the workers take %.3f GB",
                gb(f->shm_free), gb(n->shm_bytes));
    if (f->peer_fd) {
        td_find(r, TD_ERROR, "host",
                "/proc/PID/fd: a process cannot open another's memory: %s; the shm lane maps "
                "slabs that way",
                strerror(f->peer_fd));
        td_cure(r, "one user, one pid namespace and /proc for all roles; no security module, "
                   "capability or hidepid option between them");
    } else
        td_find(r, TD_FINE, "host",
                "/proc/PID/fd: processes of one user open each other's memory%s",
                f->ptrace_scope > 0 ? "; Yama's ptrace_scope does not hinder it" : "");
    if (f->pidfd) {
        td_find(r, TD_ERROR, "host", "pidfd_open: %s; a peer's exit is proven that way",
                strerror(f->pidfd));
        td_cure(r, f->pidfd == ENOSYS ? "Linux 5.3 or later"
                                      : "allow pidfd_open in the container's seccomp profile");
    }
}

void td_host_rules(const struct td_host_facts *f, const struct td_host_needs *n,
                   struct td_report *r) {
    memory_rules(f, n, r);
    limit_rules(f, n, r);
    shm_rules(f, n, r);
}

/* ---- run_dir ---- */

void td_run_dir_rules(const struct td_run_dir_facts *f, bool units, struct td_report *r) {
    enum { LOGS = 100000000 };
    struct sockaddr_un limit;
    size_t longest = sizeof limit.sun_path - sizeof "/router.sock";
    if (strlen(f->path) > longest) {
        td_find(r, TD_ERROR, "host", "run_dir %s: expected at most %zu bytes, found %zu", f->path,
                longest, strlen(f->path));
        td_cure(r, "a shorter run_dir: sockets are made in it");
    } else if (f->stat_errno == ENOENT && (f->parent_writable || units))
        td_find(r, TD_FINE, "host", "run_dir %s: not there yet, %s makes it", f->path,
                f->parent_writable ? "`tandem up`" : "the router's unit");
    else if (f->stat_errno || !f->folder || (!f->writable && !units)) {
        td_find(r, TD_ERROR, "host", "run_dir %s: expected a folder that can be written, found %s",
                f->path,
                f->stat_errno ? strerror(f->stat_errno)
                : !f->folder  ? "another kind of file"
                              : "one that cannot");
        td_cure(r, "another run_dir, or mkdir -m 750 it for the user that runs the roles");
    } else if (f->free && f->free < LOGS) {
        td_find(r, TD_WARNING, "host", "run_dir %s: %.3f GB of disk are free for logs", f->path,
                gb(f->free));
        td_cure(r, "free some, or move run_dir");
    } else
        td_find(r, TD_FINE, "host", "run_dir %s: can be written", f->path);
}

/* ---- keys ---- */

void td_key_rules(const struct td_key_facts *f, struct td_report *r) {
    struct td_error err = {.text = ""};
    if (f->open_errno) {
        td_find(r, TD_ERROR, "keys", "%s %s: %s", f->setting, f->path, strerror(f->open_errno));
        td_cure(r, "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE (0640 and "
                   "root:tandem for the units)");
    } else if (td_secret_allowed(f->setting, f->path, &f->stat, f->as, &err) != TD_OK) {
        td_find(r, TD_ERROR, "keys", "%s", err.text);
        td_cure(r, "chmod 600 %s, owned by the user that runs the roles or by root", f->path);
    } else if ((uint64_t)f->stat.st_size < f->least) {
        td_find(r, TD_ERROR, "keys", "%s %s: expected at least %llu bytes, found %lld", f->setting,
                f->path, (unsigned long long)f->least, (long long)f->stat.st_size);
        td_cure(r, "head -c 32 /dev/urandom | base64 > FILE, the same on every host");
    } else
        td_find(r, TD_FINE, "keys", "%s %s: mode %04o", f->setting, f->path,
                (unsigned)f->stat.st_mode & 07777u);
}

/* ---- addresses ---- */

void td_port_rules(const struct td_port_facts *f, struct td_report *r) {
    if (f->bad[0]) {
        td_find(r, TD_ERROR, "ports", "%s: %s", f->setting, f->bad);
        td_cure(r, "%s = ADDRESS:PORT", f->setting);
    } else if (f->bind_errno == 0)
        td_find(r, TD_FINE, "ports", "%s %s: free", f->setting, f->address);
    else if (f->bind_errno == EADDRINUSE && f->holder == TD_HELD_BY_OURS)
        td_find(r, TD_FINE, "ports", "%s %s: held by this configuration's router", f->setting,
                f->address);
    else if (f->bind_errno == EADDRINUSE) {
        td_find(r, TD_ERROR, "ports", "%s %s: held by another program", f->setting, f->address);
        td_cure(r, "`ss -ltnp` names it: end it, or choose another port");
    } else if (f->bind_errno == EADDRNOTAVAIL && f->elsewhere)
        td_find(r, TD_FINE, "ports", "%s %s: of another host; workers here dial it", f->setting,
                f->address);
    else {
        td_find(r, TD_ERROR, "ports", "%s %s: %s", f->setting, f->address, strerror(f->bind_errno));
        td_cure(r, f->bind_errno == EADDRNOTAVAIL ? "an address of this host (`ip addr`)"
                   : f->bind_errno == EACCES
                       ? "a port from 1024 on, with a proxy before it (deploy/nginx)"
                       : "another address");
    }
}

/* ---- service manager ---- */

const char *const td_unit_names[TD_UNITS] = {"tandem-router.service", "tandem-prefill@.service",
                                             "tandem-decode@.service", "tandem.target"};

void td_unit_rules(const struct td_unit_facts *f, struct td_report *r) {
    char missing[160] = "";
    for (int i = 0; i < TD_UNITS; i++)
        if (!f->unit[i]) {
            size_t used = strlen(missing);
            snprintf(missing + used, sizeof missing - used, " %s", td_unit_names[i]);
        }
    if (!f->installed)
        td_find(r, TD_SKIPPED, "units",
                "service manager: this configuration is not the installed one; `tandem up` runs "
                "it");
    else if (!f->systemd)
        td_find(r, TD_SKIPPED, "units", "service manager: systemd does not run this machine");
    else if (missing[0]) {
        td_find(r, TD_ERROR, "units", "units: not installed:%s", missing);
        td_cure(r, "meson install -C build; systemctl daemon-reload");
    } else if (!f->user) {
        td_find(r, TD_ERROR, "units", "user tandem: expected, found none; the units run as it");
        td_cure(r, "systemd-sysusers");
    } else
        td_find(r, TD_FINE, "units", "units and user tandem are there");
}
