/* `tandem topology`: a configuration for eight GPUs from a preset, a check of any configuration,
 * and what systemd needs beside it. */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "deploy/tool/preset.h"
#include "deploy/tool/tool.h"
#include "deploy/tool/topology_check.h"
#include "deploy/tool/topology_units.h"

enum { MAX_SETS = 64 };
#define UNIT_FOLDER "/etc/systemd/system"
#define WANTS UNIT_FOLDER "/tandem.target.wants"

static const char help[] =
    "usage: tandem topology PRESET [--model DIR] [--set [WHO:]key=value]... [--out FILE]\n"
    "       tandem topology --check FILE [--memory GB]\n"
    "       tandem topology --units FILE [--dir DIR]\n"
    "\n"
    "One file says which workers there are, which GPUs each has, addresses and limits: the\n"
    "configuration that every process reads.\n"
    "\n"
    "PRESET divides eight GPUs, prints such a file with what each line is for, and the commands "
    "that\n"
    "make systemd run it:\n"
    "  4+4       1 prefill worker of 4 GPUs, 1 decode worker of 4 GPUs; take this without a "
    "reason\n"
    "  2x2+4     2 prefill workers of 2 GPUs, 1 decode worker of 4 GPUs: long prompts\n"
    "  2+2+2+2   2 prefill workers of 2 GPUs, 2 decode workers of 2 GPUs: a worker may be lost\n"
    "`tandem plan --presets` shows what each holds and how it balances.\n"
    "\n"
    "  --model DIR     the checkpoint's folder\n"
    "  --set key=value wherever the preset has the key, else for all processes; WHO is a role or\n"
    "                  a worker, as decode:max_running=48 or decode@0:device=cuda:4,5,6,7\n"
    "  --out FILE      write it there instead; FILE must not exist\n"
    "\n"
    "--check reads FILE as the processes will and tells what does not fit together, each with the\n"
    "cure: GPUs of two workers, tp against devices and model, addresses, instances and sections,\n"
    "limits, settings in which workers differ, memory. Exit code 1 when any of it is an error.\n"
    "\n"
    "  --memory GB     a GPU's memory in 10^9 bytes; default: that of this machine's\n"
    "  --wants DIR     compare with the units enabled there; default for the installed "
    "configuration:\n"
    "                  " WANTS "\n"
    "\n"
    "--units writes drop-ins for the workers' units that keep each near its GPUs, where the "
    "machine\n"
    "shows several memory nodes, and prints the commands that follow.\n"
    "\n"
    "  --dir DIR       default: " UNIT_FOLDER "\n"
    "  --sys DIR       where sysfs is mounted; default: /sys\n"
    "\n"
    "Exit codes: 0 done, 1 an error was found or it failed, 2 wrong usage.\n";

enum what { PRESET, CHECK, UNITS };

struct arguments {
    enum what what;
    const char *subject; /* the preset's name, or the file */
    const char *model, *out, *dir, *sys, *wants, *set[MAX_SETS];
    uint32_t sets;
    double memory;
};

static int usage(const char *sentence, const char *what) {
    fprintf(stderr, "tandem topology: %s%s\n`tandem topology --help` explains.\n", sentence, what);
    return TD_EXIT_USAGE;
}

static int failed(const struct td_error *err) {
    fprintf(stderr, "tandem topology: %s\n", err->text);
    return TD_EXIT_FAILED;
}

static int option(int o, struct arguments *a) {
    char *end = NULL;
    switch (o) {
    case 'c':
    case 'u':
        if (a->subject) return usage("expected one of --check and --units, found both", "");
        a->what = o == 'c' ? CHECK : UNITS;
        a->subject = optarg;
        return TD_EXIT_OK;
    case 'm':
        a->model = optarg;
        return TD_EXIT_OK;
    case 'o':
        a->out = optarg;
        return TD_EXIT_OK;
    case 'd':
        a->dir = optarg;
        return TD_EXIT_OK;
    case 'y':
        a->sys = optarg;
        return TD_EXIT_OK;
    case 'w':
        a->wants = optarg;
        return TD_EXIT_OK;
    case 'g':
        a->memory = strtod(optarg, &end);
        return !*end && a->memory >= 1 && a->memory <= 4096
                   ? TD_EXIT_OK
                   : usage("--memory: expected 1 to 4096 GB, found ", optarg);
    case 's':
        if (a->sets == MAX_SETS) return usage("--set: expected at most 64 of them", "");
        a->set[a->sets++] = optarg;
        return TD_EXIT_OK;
    default:
        return TD_EXIT_USAGE;
    }
}

static int parse(int argc, char **argv, struct arguments *a, bool *ret_done) {
    static const struct option options[] = {{"check", required_argument, NULL, 'c'},
                                            {"units", required_argument, NULL, 'u'},
                                            {"model", required_argument, NULL, 'm'},
                                            {"out", required_argument, NULL, 'o'},
                                            {"dir", required_argument, NULL, 'd'},
                                            {"sys", required_argument, NULL, 'y'},
                                            {"wants", required_argument, NULL, 'w'},
                                            {"set", required_argument, NULL, 's'},
                                            {"memory", required_argument, NULL, 'g'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    int o;
    *a = (struct arguments){.dir = UNIT_FOLDER, .sys = "/sys"};
    optind = 0;
    while ((o = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (o == 'h') {
            fputs(help, stdout);
            *ret_done = true;
            return TD_EXIT_OK;
        }
        int rc = option(o, a);
        if (rc != TD_EXIT_OK) return rc;
    }
    if (!a->subject && optind < argc) a->subject = argv[optind++];
    if (optind < argc) return usage("unexpected argument ", argv[optind]);
    if (!a->subject) return usage("expected a preset, --check FILE or --units FILE", "");
    if (a->what != PRESET && (a->model || a->out || a->sets))
        return usage("--model, --set and --out go with a preset", "");
    return TD_EXIT_OK;
}

/* ---- presets ---- */

static td_status preset_of(const struct arguments *a, struct td_preset *p, struct td_error *err) {
    char text[TD_CONFIG_STRING_MAX + 16];
    TD_TRY(td_preset_find(a->subject, p, err));
    if (a->model) {
        snprintf(text, sizeof text, "model.dir=%s", a->model);
        TD_TRY(td_preset_set(p, text, err));
    }
    for (uint32_t i = 0; i < a->sets; i++)
        TD_TRY(td_preset_set(p, a->set[i], err));
    return TD_OK;
}

static td_status write_file(const struct td_preset *p, const char *path, struct td_error *err) {
    FILE *f = fopen(path, "wxe"); /* what an administrator wrote is not overwritten */
    if (!f && errno == EEXIST)
        return td_fail(err, TD_IO,
                       "--out: %s is there already: choose another name, or move it away", path);
    if (!f) return td_fail(err, TD_IO, "--out: %s: %s", path, strerror(errno));
    td_preset_write(p, f);
    if (fclose(f) != 0) return td_fail(err, TD_IO, "--out: %s: %s", path, strerror(errno));
    return TD_OK;
}

/* What to type next, in its order. */
static void next_steps(const char *path, const struct td_config *router, const char *wants) {
    printf("tandem topology --check %s\n", path);
    if (strcmp(path, TD_SYSTEM_CONFIG) != 0)
        printf("sudo install -m 644 %s %s\n", path, TD_SYSTEM_CONFIG);
    printf("sudo tandem topology --units %s && sudo systemctl daemon-reload\n", TD_SYSTEM_CONFIG);
    td_units_commands((uint32_t)router->cluster_prefill, (uint32_t)router->cluster_decode, wants,
                      "", stdout);
}

static int preset(const struct arguments *a) {
    struct td_preset p;
    struct td_config router;
    struct td_error err;
    if (preset_of(a, &p, &err) != TD_OK) {
        failed(&err);
        return TD_EXIT_USAGE;
    }
    if (!a->out) {
        td_preset_write(&p, stdout);
        return TD_EXIT_OK;
    }
    if (td_preset_config(&p, "router", "", &router, &err) != TD_OK ||
        write_file(&p, a->out, &err) != TD_OK)
        return failed(&err);
    next_steps(a->out, &router, a->wants ? a->wants : WANTS);
    return TD_EXIT_OK;
}

/* ---- files ---- */

/* The units read the installed file and no other. */
static bool installed(const char *path) {
    struct stat a, b;
    return stat(path, &a) == 0 && stat(TD_SYSTEM_CONFIG, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

static void print_workers(const struct td_topology *t) {
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        printf("%s%s: tp %u on %s", i ? ", " : "", w->name, w->ranks, w->gpus ? "GPU" : "the CPU");
        for (uint32_t k = 0; k < w->gpus; k++)
            printf("%s%u", k ? "," : " ", w->gpu[k]);
    }
    printf("\n");
}

static int check(const struct arguments *a, const struct td_topology *t) {
    struct td_gpu_places places;
    td_gpu_places_read(a->sys, &places);
    struct td_check c = {
        .t = t, .out = stdout, .host_gpus = places.n, .gpu_memory = a->memory * 1e9};
    c.wants = a->wants ? a->wants : installed(a->subject) ? WANTS : NULL;
    print_workers(t);
    td_check_all(&c);
    printf("%u error%s, %u warning%s\n", c.n[TD_FINDING_ERROR],
           c.n[TD_FINDING_ERROR] == 1 ? "" : "s", c.n[TD_FINDING_WARNING],
           c.n[TD_FINDING_WARNING] == 1 ? "" : "s");
    return c.n[TD_FINDING_ERROR] ? TD_EXIT_FAILED : TD_EXIT_OK;
}

static int units(const struct arguments *a, const struct td_topology *t) {
    struct td_gpu_places places;
    struct td_error err;
    td_gpu_places_read(a->sys, &places);
    if (td_units_write(t, &places, a->dir, &err) != TD_OK) return failed(&err);
    printf("sudo systemctl daemon-reload\n");
    td_units_commands((uint32_t)t->router.cluster_prefill, (uint32_t)t->router.cluster_decode,
                      a->wants ? a->wants : WANTS, "", stdout);
    return TD_EXIT_OK;
}

int td_cmd_topology(int argc, char **argv) {
    struct arguments a;
    struct td_topology *t = NULL;
    struct td_error err;
    bool done = false;
    int rc = parse(argc, argv, &a, &done);
    if (rc != TD_EXIT_OK || done) return rc;
    if (a.what == PRESET) return preset(&a);
    if (td_topology_load(a.subject, &t, &err) != TD_OK) return failed(&err);
    rc = a.what == CHECK ? check(&a, t) : units(&a, t);
    td_topology_free(t);
    return rc;
}
