/* Starting, finding and stopping the roles of a local cluster. */
#include "deploy/tool/procs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATH_CAP = 512 };

static void add(struct td_procs *p, const char *role, int instance) {
    struct td_proc *x = &p->proc[p->n++];
    snprintf(x->role, sizeof x->role, "%s", role);
    if (instance < 0) {
        x->instance[0] = '\0';
        snprintf(x->name, sizeof x->name, "%s", role);
    } else {
        snprintf(x->instance, sizeof x->instance, "%d", instance);
        snprintf(x->name, sizeof x->name, "%s@%d", role, instance);
    }
}

void td_procs_init(struct td_procs *p, const struct td_config *c) {
    memset(p, 0, sizeof *p);
    snprintf(p->run_dir, sizeof p->run_dir, "%s", c->run_dir);
    add(p, "router", -1);
    for (int i = 0; i < (int)c->cluster_decode; i++)
        add(p, "decode", i);
    for (int i = 0; i < (int)c->cluster_prefill; i++)
        add(p, "prefill", i);
}

static void pid_path(const struct td_procs *p, int i, char *path) {
    snprintf(path, PATH_CAP, "%s/%s.pid", p->run_dir, p->proc[i].name);
}

void td_proc_log(const struct td_procs *p, int i, char *path, size_t cap) {
    snprintf(path, cap, "%s/%s.log", p->run_dir, p->proc[i].name);
}

/* Start time in clock ticks since boot and the state letter; false when there is no such process.
 */
static bool stat_of(pid_t pid, unsigned long long *ret_start, char *ret_state) {
    char path[64], buf[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    size_t n = fread(buf, 1, sizeof buf - 1, f);
    fclose(f);
    buf[n] = '\0';
    char *s = strrchr(buf, ')'); /* the name before it may hold anything */
    if (!s) return false;
    *ret_state = s[2];
    s += 2;
    for (int field = 3; field < 22 && s; field++)
        s = strchr(s + 1, ' ');
    if (!s) return false;
    *ret_start = strtoull(s, NULL, 10);
    return true;
}

pid_t td_proc_pid(const struct td_procs *p, int i) {
    char path[PATH_CAP], state;
    pid_path(p, i, path);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    int pid = 0;
    unsigned long long want = 0, start = 0;
    int got = fscanf(f, "%d %llu", &pid, &want);
    fclose(f);
    if (got != 2 || pid <= 0 || !stat_of(pid, &start, &state)) return 0;
    return start == want && state != 'Z' ? pid : 0;
}

td_status td_proc_program(const char *role, char *out, size_t cap, struct td_error *err) {
    char self[PATH_CAP];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) return td_fail(err, TD_IO, "/proc/self/exe: %s", strerror(errno));
    self[n] = '\0';
    char *slash = strrchr(self, '/');
    *slash = '\0';
    /* installed side by side; in a build folder each program stands in its role's folder */
    int side = snprintf(out, cap, "%s/tandem-%s", self, role);
    if (side > 0 && (size_t)side < cap && access(out, X_OK) == 0) return TD_OK;
    int built = snprintf(out, cap, "%s/../%s/tandem-%s", self, role, role);
    if (built > 0 && (size_t)built < cap && access(out, X_OK) == 0) return TD_OK;
    return td_fail(err, TD_NOT_FOUND, "program tandem-%s: expected beside %s, found none", role,
                   self);
}

td_status td_procs_lock(const struct td_procs *p, int *ret_fd, struct td_error *err) {
    int fd = open(p->run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return td_fail(err, TD_IO, "run_dir %s: %s", p->run_dir, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int why = errno;
        close(fd);
        if (why != EWOULDBLOCK)
            return td_fail(err, TD_IO, "run_dir %s: lock: %s", p->run_dir, strerror(why));
        return td_fail(err, TD_BUSY, "another tandem is starting processes in %s just now",
                       p->run_dir);
    }
    *ret_fd = fd;
    return TD_OK;
}

void td_procs_unlock(int fd) {
    close(fd);
}

static void become_daemon(const char *program, const struct td_proc *x, const char *config,
                          int log) {
    int null = open("/dev/null", O_RDONLY);
    setsid();
    dup2(null, 0);
    dup2(log, 1);
    dup2(log, 2);
    if (x->instance[0])
        execl(program, program, "--config", config, "--name", x->instance, (char *)NULL);
    else
        execl(program, program, "--config", config, (char *)NULL);
    dprintf(2, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

td_status td_proc_start(const struct td_procs *p, int i, const char *config, struct td_error *err) {
    const struct td_proc *x = &p->proc[i];
    char program[2 * PATH_CAP], path[PATH_CAP], state;
    TD_TRY(td_proc_program(x->role, program, sizeof program, err));
    td_proc_log(p, i, path, sizeof path);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
    if (log < 0) return td_fail(err, TD_IO, "log %s: %s", path, strerror(errno));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) become_daemon(program, x, config, log);
    close(log);
    if (pid < 0) return td_fail(err, TD_IO, "%s: cannot start: %s", x->name, strerror(errno));
    unsigned long long start = 0;
    if (!stat_of(pid, &start, &state)) start = 0;
    pid_path(p, i, path);
    FILE *f = fopen(path, "we");
    if (!f || fprintf(f, "%d %llu\n", (int)pid, start) < 0 || fclose(f) != 0) {
        int why = errno;
        kill(pid, SIGTERM);
        return td_fail(err, TD_IO, "pid file %s: %s", path, strerror(why));
    }
    return TD_OK;
}

bool td_proc_stop(const struct td_procs *p, int i, int grace_ms) {
    char path[PATH_CAP];
    bool killed = false;
    pid_t pid = td_proc_pid(p, i);
    if (pid) {
        kill(pid, SIGTERM);
        for (int waited = 0; td_proc_pid(p, i); waited += 10) {
            if (waited >= grace_ms && !killed) {
                kill(pid, SIGKILL);
                killed = true;
            }
            nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
            (void)waitpid(pid, NULL, WNOHANG); /* when it is our own child */
        }
    }
    pid_path(p, i, path);
    unlink(path);
    return killed;
}
