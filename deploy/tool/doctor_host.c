/* Finding facts about the host: /proc, limits, /dev/shm, sockets, files. No judgement. */
#include "deploy/tool/doctor_host.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/magic.h>

/* First number of a file; `missing` when there is none. "max" is UINT64_MAX. */
static uint64_t number_in(const char *path, uint64_t missing) {
    char line[64];
    FILE *f = fopen(path, "re");
    if (!f) return missing;
    bool got = fgets(line, sizeof line, f) != NULL;
    fclose(f);
    if (!got) return missing;
    if (strncmp(line, "max", 3) == 0) return UINT64_MAX;
    char *end;
    unsigned long long v = strtoull(line, &end, 10);
    return end == line ? missing : v;
}

/* ---- memory ---- */

static void memory(struct td_host_facts *f) {
    char line[128];
    unsigned long long v, free_pages = 0, page_kb = 0;
    FILE *m = fopen("/proc/meminfo", "re");
    while (m && fgets(line, sizeof line, m)) {
        if (sscanf(line, "MemTotal: %llu", &v) == 1) f->memory = v << 10;
        if (sscanf(line, "MemAvailable: %llu", &v) == 1) f->available = v << 10;
        if (sscanf(line, "HugePages_Free: %llu", &v) == 1) free_pages = v;
        if (sscanf(line, "Hugepagesize: %llu", &v) == 1) page_kb = v;
    }
    if (m) fclose(m);
    f->huge_free = free_pages * page_kb << 10;
    uint64_t o = number_in("/proc/sys/vm/overcommit_memory", UINT64_MAX);
    f->overcommit = o == UINT64_MAX ? -1 : (int)o;
}

/* The tightest limit on the way from a control group to the root. */
static void tightest(const char *root, char *path, const char *limit, const char *used,
                     struct td_host_facts *f) {
    char file[600];
    for (;;) {
        snprintf(file, sizeof file, "%s%s/%s", root, path, limit);
        uint64_t most = number_in(file, UINT64_MAX);
        if (most < f->group_limit && most < (uint64_t)1 << 62) { /* v1 says none by a huge number */
            snprintf(file, sizeof file, "%s%s/%s", root, path, used);
            f->group_limit = most;
            f->group_used = number_in(file, 0);
        }
        char *slash = strrchr(path, '/');
        if (!slash) return;
        *slash = 0;
    }
}

static void control_group(struct td_host_facts *f) {
    char line[400];
    f->group_limit = UINT64_MAX;
    FILE *g = fopen("/proc/self/cgroup", "re");
    while (g && fgets(line, sizeof line, g)) {
        line[strcspn(line, "\n")] = 0;
        char *kind = strchr(line, ':'), *path = kind ? strchr(kind + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        if (strcmp(kind, ":memory") == 0)
            tightest("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                     "memory.usage_in_bytes", f);
        else if (kind[1] == 0)
            tightest("/sys/fs/cgroup", path, "memory.max", "memory.current", f);
    }
    if (g) fclose(g);
}

/* ---- limits ---- */

static void limits(struct td_host_facts *f) {
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) == 0) {
        f->files_soft = l.rlim_cur;
        f->files_hard = l.rlim_max;
    }
    if (getrlimit(RLIMIT_MEMLOCK, &l) == 0)
        f->memlock = l.rlim_cur == RLIM_INFINITY ? UINT64_MAX : l.rlim_cur;
}

/* ---- shared memory and other processes ---- */

static void shared_memory(struct td_host_facts *f) {
    struct statfs s;
    char path[] = "/dev/shm/tandem-doctor-XXXXXX";
    if (statfs("/dev/shm", &s) != 0) {
        f->shm_errno = errno;
        return;
    }
    f->shm_mounted = s.f_type == TMPFS_MAGIC;
    f->shm_free = (uint64_t)s.f_bavail * (uint64_t)s.f_bsize;
    int fd = mkstemp(path);
    f->shm_errno = fd < 0 ? errno : 0;
    if (fd < 0) return;
    unlink(path);
    close(fd);
}

/* Another process of ours holds a nameless file; can this one open it, and see that one's end? It
 * is what UCX's posix transport and our quarantine do between a prefill and a decode worker. The
 * other one is a grandchild's kin, not an ancestor: those have rights of their own under some
 * modules. */
static void other_process(struct td_host_facts *f) {
    int ready[2];
    char byte = 0, path[64];
    f->peer_fd = f->pidfd = ECHILD;
    if (pipe2(ready, O_CLOEXEC) != 0) return;
    pid_t pid = fork();
    if (pid == 0) {
        /* A number that the opener does not have by itself. */
        int fd = (int)syscall(SYS_memfd_create, "tandem-doctor", 0);
        if (fd < 0 || dup2(fd, 99) < 0) _exit(1);
        if (write(ready[1], "r", 1) == 1) pause();
        _exit(0);
    }
    close(ready[1]);
    if (pid > 0 && read(ready[0], &byte, 1) == 1) {
        snprintf(path, sizeof path, "/proc/%d/fd/99", (int)pid);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        f->peer_fd = fd < 0 ? errno : 0;
        if (fd >= 0) close(fd);
        fd = (int)syscall(SYS_pidfd_open, pid, 0);
        f->pidfd = fd < 0 ? errno : 0;
        if (fd >= 0) close(fd);
    }
    close(ready[0]);
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
}

void td_host_look(struct td_host_facts *f) {
    *f = (struct td_host_facts){0};
    memory(f);
    control_group(f);
    limits(f);
    shared_memory(f);
    other_process(f);
    uint64_t scope = number_in("/proc/sys/kernel/yama/ptrace_scope", UINT64_MAX);
    f->ptrace_scope = scope == UINT64_MAX ? -1 : (int)scope;
}

void td_run_dir_look(const char *path, struct td_run_dir_facts *f) {
    struct stat st;
    struct statfs s;
    *f = (struct td_run_dir_facts){0};
    snprintf(f->path, sizeof f->path, "%s", path);
    f->stat_errno = stat(path, &st) == 0 ? 0 : errno;
    if (f->stat_errno == 0) {
        f->folder = S_ISDIR(st.st_mode);
        f->writable = access(path, W_OK | X_OK) == 0;
        if (statfs(path, &s) == 0) f->free = (uint64_t)s.f_bavail * (uint64_t)s.f_bsize;
        return;
    }
    char parent[TD_CONFIG_STRING_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) slash[slash == parent] = 0; /* of "/x" it is "/" */
    f->parent_writable = access(slash ? parent : ".", W_OK | X_OK) == 0;
}

/* ---- keys ---- */

void td_key_look(const char *setting, const char *path, uint64_t least, struct td_key_facts *f) {
    *f = (struct td_key_facts){.setting = setting, .least = least, .as = geteuid()};
    snprintf(f->path, sizeof f->path, "%s", path);
    if (stat(path, &f->stat) != 0) {
        f->open_errno = errno;
        return;
    }
    /* root looks for the user of the units: their files are right when they are right for it. */
    const struct passwd *user = f->as == 0 ? getpwnam("tandem") : NULL;
    if (user && f->stat.st_uid == user->pw_uid) f->as = user->pw_uid;
    if (access(path, R_OK) != 0) f->open_errno = errno;
}

/* ---- addresses ---- */

static bool parse_address(const char *text, struct sockaddr_storage *a, socklen_t *len) {
    char host[TD_CONFIG_STRING_MAX], *end;
    const char *colon = strrchr(text, ':');
    if (!colon) return false;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (end == colon + 1 || *end || port > UINT16_MAX) return false;
    snprintf(host, sizeof host, "%.*s", (int)(colon - text), text);
    size_t n = strlen(host);
    memset(a, 0, sizeof *a);
    if (n > 2 && host[0] == '[' && host[n - 1] == ']') {
        struct sockaddr_in6 *six = (struct sockaddr_in6 *)a;
        host[n - 1] = 0;
        *six = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
        *len = sizeof *six;
        return inet_pton(AF_INET6, host + 1, &six->sin6_addr) == 1;
    }
    struct sockaddr_in *four = (struct sockaddr_in *)a;
    *four = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    *len = sizeof *four;
    return inet_pton(AF_INET, host, &four->sin_addr) == 1;
}

void td_port_look(const char *setting, const char *address, bool ours, struct td_port_facts *f) {
    struct sockaddr_storage a;
    socklen_t len;
    int on = 1;
    *f = (struct td_port_facts){.setting = setting};
    snprintf(f->address, sizeof f->address, "%s", address);
    if (!parse_address(address, &a, &len)) {
        snprintf(f->bad, sizeof f->bad, "expected a numeric address and a port, found %.100s",
                 address);
        return;
    }
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* As libuv does: sockets of ended connections do not count. */
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) != 0 || listen(fd, 1) != 0)
        f->bind_errno = errno;
    if (fd >= 0) close(fd);
    if (f->bind_errno == EADDRINUSE) f->holder = ours ? TD_HELD_BY_OURS : TD_HELD_BY_OTHERS;
}

/* ---- service manager ---- */

void td_unit_look(bool installed, struct td_unit_facts *f) {
    static const char *const places[] = {"/etc/systemd/system", "/usr/local/lib/systemd/system",
                                         "/usr/lib/systemd/system", "/lib/systemd/system"};
    char path[200];
    *f = (struct td_unit_facts){.installed = installed};
    f->systemd = access("/run/systemd/system", F_OK) == 0;
    f->user = getpwnam("tandem") != NULL;
    for (int i = 0; i < TD_UNITS; i++)
        for (size_t k = 0; k < sizeof places / sizeof *places; k++) {
            snprintf(path, sizeof path, "%s/%s", places[k], td_unit_names[i]);
            f->unit[i] = f->unit[i] || access(path, F_OK) == 0;
        }
}
