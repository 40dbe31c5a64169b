/* Finding the process that a command means. */
#include "deploy/tool/target.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/tool/tool.h"

/* ---- options ---- */

static bool read_number(const char *command, const char *option, const char *text, long max,
                        long *ret) {
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (isdigit((unsigned char)text[0]) && !*end && !errno && v <= max) {
        *ret = v;
        return true;
    }
    fprintf(stderr, "tandem %s: --%s: expected a number from 0 to %ld, found '%s'\n", command,
            option, max, text);
    return false;
}

int td_target_options(int argc, char **argv, const char *help, const char *allowed,
                      struct td_target_options *o) {
    static const struct option longs[] = {{"config", required_argument, NULL, 'c'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"timeout", required_argument, NULL, 't'},
                                          {"lines", required_argument, NULL, 'n'},
                                          {"drain", no_argument, NULL, 'd'},
                                          {"follow", no_argument, NULL, 'f'},
                                          {0}};
    enum { DAY_S = 86400, LINES_MAX = 1000000 };
    int c;
    *o = (struct td_target_options){.timeout_s = -1, .lines = -1};
    optind = 1;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 'h') {
            fputs(help, stdout);
            return TD_EXIT_OK;
        }
        if (c == '?') return TD_EXIT_USAGE;
        if (c != 'c' && !strchr(allowed, c)) {
            const struct option *l = longs;
            while (l->val != c)
                l++;
            fprintf(stderr, "tandem %s: this command has no option --%s\n\n%s", argv[0], l->name,
                    help);
            return TD_EXIT_USAGE;
        }
        if (c == 'c') o->config = optarg;
        if (c == 'd') o->drain = true;
        if (c == 'f') o->follow = true;
        if (c == 't' && !read_number(argv[0], "timeout", optarg, DAY_S, &o->timeout_s))
            return TD_EXIT_USAGE;
        if (c == 'n' && !read_number(argv[0], "lines", optarg, LINES_MAX, &o->lines))
            return TD_EXIT_USAGE;
    }
    if (optind < argc) o->role = argv[optind++];
    if (optind == argc) return -1;
    fprintf(stderr, "tandem %s: unexpected argument %s\n\n%s", argv[0], argv[optind], help);
    return TD_EXIT_USAGE;
}

/* ---- programs ---- */

static pid_t start(const char *const argv[], int out) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) return pid;
    if (out >= 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(out, STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
    }
    execvp(argv[0], (char *const *)argv);
    if (out < 0) dprintf(STDERR_FILENO, "%s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static int exit_code(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return 127;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int td_target_run(const char *const argv[]) {
    pid_t pid = start(argv, -1);
    return pid < 0 ? 127 : exit_code(pid);
}

bool td_target_ask(const char *const argv[], char *ret, size_t cap) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    pid_t pid = start(argv, ends[1]);
    close(ends[1]);
    FILE *f = fdopen(ends[0], "r");
    if (pid < 0 || !f) {
        if (f) fclose(f);
        return false;
    }
    if (!fgets(ret, (int)cap, f)) ret[0] = '\0';
    while (fgetc(f) != EOF) { /* or it would die of a closed pipe */
    }
    fclose(f);
    ret[strcspn(ret, "\n")] = '\0';
    return exit_code(pid) == 0;
}

/* ---- finding ---- */

/* "decode" is "decode@0" where there is one decode worker. */
static td_status name_process(struct td_target *t, const char *role, struct td_error *err) {
    size_t n = strcspn(role, "@"), instance = role[n] ? strlen(role + n + 1) : 0;
    bool router = n == 6 && strncmp(role, "router", n) == 0;
    bool prefill = n == 7 && strncmp(role, "prefill", n) == 0;
    bool decode = n == 6 && strncmp(role, "decode", n) == 0;
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
    bool good = router ? role[n] == '\0' : prefill || decode;
    if (good && role[n])
        good = instance >= 1 && instance < sizeof t->procs.proc[0].instance &&
               strspn(role + n + 1, plain) == instance;
    if (!good)
        return td_fail(err, TD_INVALID, "expected router, prefill[@N] or decode[@N], found '%.60s'",
                       role);
    uint64_t several = prefill ? t->config.cluster_prefill : t->config.cluster_decode;
    if (!router && !role[n] && several > 1)
        return td_fail(err, TD_INVALID, "there are %d %s workers; which one, %s@0 to %s@%d?",
                       (int)several, role, role, role, (int)several - 1);
    snprintf(t->name, sizeof t->name, "%s%s", role, router || role[n] ? "" : "@0");
    snprintf(t->unit, sizeof t->unit, "tandem-%s.service", t->name);
    return TD_OK;
}

/* A pid file says that `tandem up` started the cluster, also when that process has died since. */
static bool has_pid_file(const struct td_procs *p, int i) {
    char path[TD_CONFIG_STRING_MAX + TD_PROC_NAME_MAX + 8];
    snprintf(path, sizeof path, "%s/%s.pid", p->run_dir, p->proc[i].name);
    return access(path, F_OK) == 0;
}

static void unit_property(const char *unit, const char *property, char *ret, size_t cap) {
    const char *const argv[] = {"systemctl", "show", "-p", property, "--value", unit, NULL};
    if (!td_target_ask(argv, ret, cap)) ret[0] = '\0';
}

/* A template would make an instance of any name: what was neither started nor enabled is none. */
static bool unit_is_known(const char *unit) {
    char load[32], active[32], file[32];
    unit_property(unit, "LoadState", load, sizeof load);
    if (strcmp(load, "loaded") != 0) return false;
    unit_property(unit, "ActiveState", active, sizeof active);
    unit_property(unit, "UnitFileState", file, sizeof file);
    return strcmp(active, "inactive") != 0 || strncmp(file, "enabled", 7) == 0;
}

td_status td_target_find(struct td_target *t, const char *config, const char *role,
                         struct td_error *err) {
    memset(t, 0, sizeof *t);
    t->config_path = config ? config : TD_SYSTEM_CONFIG;
    t->index = -1;
    td_config_defaults(&t->config);
    TD_TRY(td_config_load(&t->config, t->config_path, "router", "", err));
    snprintf(t->url, sizeof t->url, "http://%s", t->config.router_listen);
    td_procs_init(&t->procs, &t->config);
    snprintf(t->unit, sizeof t->unit, "tandem-*");
    if (role) TD_TRY(name_process(t, role, err));
    for (int i = 0; i < t->procs.n; i++) {
        t->local |= has_pid_file(&t->procs, i);
        if (strcmp(t->procs.proc[i].name, t->name) == 0) t->index = i;
    }
    if (t->local && role && t->index < 0)
        return td_fail(err, TD_INVALID, "%s: %s describes no such worker", t->name, t->config_path);
    if (t->local || unit_is_known(role ? t->unit : "tandem-router.service")) return TD_OK;
    return td_fail(err, TD_NOT_FOUND,
                   "%s: `tandem up --config %s` has not started it (no pid file in %s), and no "
                   "unit %s is active or enabled",
                   role ? t->name : "cluster", t->config_path, t->config.run_dir,
                   role ? t->unit : "tandem-router.service");
}

pid_t td_target_pid(const struct td_target *t) {
    if (t->local) return td_proc_pid(&t->procs, t->index);
    char text[32];
    unit_property(t->unit, "MainPID", text, sizeof text);
    return (pid_t)strtol(text, NULL, 10);
}
