/* Children with a time limit. */
#include "deploy/tool/doctor_apart.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

enum { TURN_MS = 5, KILL_MS = 10000 };

void *td_apart_memory(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

void td_apart_memory_free(void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
}

static void turn(void) {
    nanosleep(&(struct timespec){.tv_nsec = TURN_MS * 1000000}, NULL);
}

static pid_t begin(void) {
    pid_t parent = getpid(), pid = fork();
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nothing outlives the doctor */
    if (getppid() != parent) _exit(1);
    return 0;
}

static void exited(int status, struct td_apart_end *end) {
    end->how = TD_APART_DIED;
    end->code = WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

/* Kills; false when it will not end. */
static bool put_down(pid_t pid) {
    uint64_t until = td_now_ns() + KILL_MS * 1000000ull;
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, WNOHANG) == 0) {
        if (td_now_ns() > until) return false;
        turn();
    }
    return true;
}

/* ---- items ---- */

struct progress {
    _Atomic uint32_t done; /* items, from 0 on */
};

static void child(td_apart_fn *fn, void *arg, uint32_t first, uint32_t n, struct progress *p) {
    int null = open("/dev/null", O_RDWR);
    dup2(null, 1);
    dup2(null, 2);
    for (uint32_t i = first; i < n; i++) {
        bool go_on = fn(arg, i);
        atomic_store(&p->done, i + 1);
        if (!go_on) break;
    }
    _exit(0);
}

/* Watches one child that began with item `at`; returns the item that the next one begins with. */
static uint32_t watch(pid_t pid, struct progress *p, uint32_t at, uint32_t n, uint32_t limit_ms,
                      struct td_apart_end *ends) {
    uint32_t first = at;
    uint64_t since = td_now_ns();
    for (;;) {
        int status = 0;
        pid_t ended = waitpid(pid, &status, WNOHANG);
        uint32_t done = atomic_load(&p->done);
        while (at < done) {
            ends[at++].how = TD_APART_DONE;
            since = td_now_ns();
        }
        if (ended == pid) {
            bool orderly = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            if (orderly && at > first) return at; /* it was of no further use */
            if (at < n) exited(status, &ends[at++]);
            return at;
        }
        if (at < n && td_now_ns() - since > limit_ms * 1000000ull) {
            ends[at].how = TD_APART_LATE;
            ends[at].stuck = !put_down(pid);
            return at + 1;
        }
        turn();
    }
}

void td_apart(td_apart_fn *fn, void *arg, uint32_t n, uint32_t limit_ms,
              struct td_apart_end *ends) {
    struct progress *p = td_apart_memory(sizeof *p);
    memset(ends, 0, n * sizeof *ends);
    for (uint32_t at = 0; p && at < n;) {
        atomic_store(&p->done, at);
        pid_t pid = begin();
        if (pid == 0) child(fn, arg, at, n, p);
        if (pid < 0) break;
        at = watch(pid, p, at, n, limit_ms, ends);
    }
    td_apart_memory_free(p, sizeof *p);
}

/* ---- programs ---- */

struct td_apart_end td_apart_program(const char *const argv[], uint32_t limit_ms, char *out,
                                     size_t cap) {
    struct td_apart_end end = {.how = TD_APART_NEVER};
    int pipes[2], status = 0;
    size_t used = 0;
    out[0] = 0;
    if (pipe2(pipes, O_CLOEXEC) != 0) return end;
    pid_t pid = begin();
    if (pid == 0) {
        dup2(pipes[1], 1);
        dup2(pipes[1], 2);
        execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    close(pipes[1]);
    uint64_t until = td_now_ns() + limit_ms * 1000000ull;
    bool open = pid > 0, gone = false;
    while (pid > 0 && (open || !gone)) {
        struct pollfd f = {.fd = pipes[0], .events = POLLIN};
        if (open && poll(&f, 1, TURN_MS) > 0) {
            char more[512];
            ssize_t n = read(pipes[0], more, sizeof more);
            if (n <= 0) open = n < 0 && errno == EINTR;
            for (ssize_t i = 0; i < n && used + 1 < cap; i++)
                out[used++] = more[i];
            out[used] = 0;
        } else if (!gone && waitpid(pid, &status, WNOHANG) == pid) {
            gone = true;
        } else if (gone) {
            break; /* whoever still holds the pipe is not waited for */
        } else {
            turn();
        }
        if (!gone && td_now_ns() > until) {
            end.how = TD_APART_LATE;
            end.stuck = !put_down(pid);
            close(pipes[0]);
            return end;
        }
    }
    close(pipes[0]);
    if (pid <= 0) return end;
    exited(status, &end);
    if (end.code == 0) end.how = TD_APART_DONE;
    return end;
}
