/* `tandem doctor`: options and output of the examination (doctor.h). */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/doctor.h"
#include "deploy/tool/tool.h"
#include "kernels/probe.h"

enum { MAX_SETS = 64, LIMIT_S = 30, LIMIT_MAX_S = 600 };

static const char help[] =
    "usage: tandem doctor [--config FILE] [--set key=value]... [--json] [--quiet] [--still]\n"
    "                     [--all-gpus] [--limit SECONDS]\n"
    "\n"
    "Looks for what would go wrong with a configuration on this machine before weights load, and\n"
    "prints a line for each finding with its cure: settings, model files, the memory plan, "
    "limits,\n"
    "shared memory, run_dir, keys, ports, units, lanes; of GPUs their kernels, memory, health and\n"
    "links, right bytes and GB/s from and to the host and between every two, and a sum over all.\n"
    "What may hang is done in a process of its own with a time limit. Starts and stops nothing;\n"
    "best run as the user that runs the roles, before they run.\n"
    "\n"
    "  --config FILE    default: the installed configuration\n"
    "  --set key=value  one more setting\n"
    "  --quiet          only what is not fine\n"
    "  --json           all findings, for programs\n"
    "  --still          copy nothing to or between GPUs: fast, and beside work that runs\n"
    "  --all-gpus       also GPUs that no worker is configured for\n"
    "  --limit SECONDS  for each thing that may hang; default: 30\n"
    "\n"
    "Exit codes: 0 no errors (there may be warnings), 1 at least one error, 2 wrong usage.\n";

static int usage(const char *sentence, const char *what) {
    fprintf(stderr, "tandem doctor: %s%s\n`tandem doctor --help` explains.\n", sentence, what);
    return TD_EXIT_USAGE;
}

struct arguments {
    struct td_doctor_options o;
    const char *set[MAX_SETS];
    bool json, quiet, done;
};

static int parse(int argc, char **argv, struct arguments *a) {
    static const struct option options[] = {{"config", required_argument, NULL, 'c'},
                                            {"set", required_argument, NULL, 's'},
                                            {"json", no_argument, NULL, 'j'},
                                            {"quiet", no_argument, NULL, 'u'},
                                            {"still", no_argument, NULL, 'q'},
                                            {"all-gpus", no_argument, NULL, 'g'},
                                            {"limit", required_argument, NULL, 'l'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    int c;
    char *end;
    unsigned long v;
    optind = 1;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'c':
            a->o.config = optarg;
            break;
        case 's':
            if (a->o.n_sets == MAX_SETS) return usage("--set: too many", "");
            a->set[a->o.n_sets++] = optarg;
            break;
        case 'j':
            a->json = true;
            break;
        case 'u':
            a->quiet = true;
            break;
        case 'q':
            a->o.still = true;
            break;
        case 'g':
            a->o.all_gpus = true;
            break;
        case 'l':
            v = strtoul(optarg, &end, 10);
            if (end == optarg || *end || v < 1 || v > LIMIT_MAX_S)
                return usage("--limit: expected seconds from 1 to 600, found ", optarg);
            a->o.limit_s = (uint32_t)v;
            break;
        case 'h':
            fputs(help, stdout);
            a->done = true;
            return TD_EXIT_OK;
        default:
            return usage("unknown option or missing value", "");
        }
    }
    if (optind < argc) return usage("unexpected argument ", argv[optind]);
    a->o.sets = a->set;
    return TD_EXIT_OK;
}

int td_cmd_doctor_with(int argc, char **argv, const struct td_doctor_options *base) {
    struct arguments a = {.o = *base};
    if (a.o.limit_s == 0) a.o.limit_s = LIMIT_S;
    int rc = parse(argc, argv, &a);
    if (rc != TD_EXIT_OK || a.done) return rc;
    struct td_report *r = calloc(1, sizeof *r);
    if (!r) {
        fprintf(stderr, "tandem doctor: no memory for findings\n");
        return TD_EXIT_FAILED;
    }
    td_doctor(&a.o, r);
    rc = r->count[TD_ERROR] ? TD_EXIT_FAILED : TD_EXIT_OK;
    if (!a.json)
        td_report_text(r, a.quiet, stdout);
    else if (!td_report_json(r, stdout))
        rc = TD_EXIT_FAILED;
    free(r);
    return rc;
}

int td_cmd_doctor(int argc, char **argv) {
    static const struct td_doctor_options here = {
        .bytes = 64u << 20, /* far beyond any cache between two GPUs */
        .times = 8,
#ifdef TD_HAVE_CUDA
        .gpus = &td_gpu_probe_cuda,
#endif
    };
    return td_cmd_doctor_with(argc, argv, &here);
}
