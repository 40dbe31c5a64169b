/* `tandem plan`: what a prefill and a decode worker will take in memory, and how many sequences of
 * which length they hold, from config.json and settings alone: before weights are there. */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/config.h"
#include "deploy/tool/tool.h"
#include "kernels/device.h"
#include "kernels/worker_plan.h"

enum { MAX_SETS = 64 };

static const char help[] =
    "usage: tandem plan [--model DIR] [--format F] [--memory GB [--gpus N]] [--role ROLE]\n"
    "                   [--config FILE] [--set key=value]...\n"
    "\n"
    "Prints per role every part of a worker's memory and how many sequences of which context run "
    "at\n"
    "once, by the code that workers size themselves with. Needs DIR/config.json, no weights.\n"
    "\n"
    "  --model DIR      checkpoint folder; default: model.dir of the settings\n"
    "  --format F       how weights are stored: bf16, fp4 (the official release: FP8, and FP4\n"
    "                   experts) or nvfp4 (NVFP4 experts); default: what config.json says\n"
    "  --memory GB      a GPU's memory in 10^9 bytes; without it a worker on the CPU is planned\n"
    "  --gpus N         GPUs that share one worker's weights; the KV pool is on each of them\n"
    "  --role ROLE      prefill or decode alone\n"
    "  --config FILE    settings\n"
    "  --set key=value  one more; max_context, max_running, mem_fraction, chunk_tokens, "
    "pool_pages,\n"
    "                   kv_dtype and index_key_dtype weigh most\n"
    "\n"
    "Exit codes: 0 everything fits, 1 something does not (the sentence says which setting to "
    "change)\n"
    "or the run failed, 2 wrong usage.\n";

struct arguments {
    const char *model, *config, *set[MAX_SETS];
    uint32_t sets, gpus;
    double memory;
    int format; /* enum td_outline, -1: config.json's */
    bool prefill, decode;
};

static int usage(const char *sentence, const char *what) {
    fprintf(stderr, "tandem plan: %s%s\n`tandem plan --help` explains.\n", sentence, what);
    return TD_EXIT_USAGE;
}

static const char *const formats[] = {
    [TD_OUTLINE_BF16] = "bf16", [TD_OUTLINE_FP4] = "fp4", [TD_OUTLINE_NVFP4] = "nvfp4"};

static int read_format(const char *word) {
    for (int i = 0; i < (int)(sizeof formats / sizeof formats[0]); i++)
        if (strcmp(word, formats[i]) == 0) return i;
    return -1;
}

static int option(int o, struct arguments *a) {
    char *end = NULL;
    switch (o) {
    case 'm':
        a->model = optarg;
        return TD_EXIT_OK;
    case 'f':
        a->format = read_format(optarg);
        return a->format >= 0 ? TD_EXIT_OK
                              : usage("--format: expected bf16, fp4 or nvfp4, found ", optarg);
    case 'g':
        a->memory = strtod(optarg, &end);
        return !*end && a->memory >= 1 && a->memory <= 4096
                   ? TD_EXIT_OK
                   : usage("--memory: expected 1 to 4096 GB, found ", optarg);
    case 'n':
        a->gpus = (uint32_t)strtoul(optarg, &end, 10);
        return !*end && a->gpus >= 1 && a->gpus <= 64
                   ? TD_EXIT_OK
                   : usage("--gpus: expected 1 to 64, found ", optarg);
    case 'r':
        a->prefill = strcmp(optarg, "prefill") == 0;
        a->decode = strcmp(optarg, "decode") == 0;
        return a->prefill || a->decode
                   ? TD_EXIT_OK
                   : usage("--role: expected prefill or decode, found ", optarg);
    case 'c':
        a->config = optarg;
        return TD_EXIT_OK;
    case 's':
        if (a->sets == MAX_SETS) return usage("--set: too many", "");
        a->set[a->sets++] = optarg;
        return TD_EXIT_OK;
    default:
        return usage("unknown option or missing value", "");
    }
}

static int parse(int argc, char **argv, struct arguments *a, bool *ret_done) {
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"format", required_argument, NULL, 'f'},
                                            {"memory", required_argument, NULL, 'g'},
                                            {"gpus", required_argument, NULL, 'n'},
                                            {"role", required_argument, NULL, 'r'},
                                            {"config", required_argument, NULL, 'c'},
                                            {"set", required_argument, NULL, 's'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    int o;
    *a = (struct arguments){.gpus = 1, .format = -1, .prefill = true, .decode = true};
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
    if (optind < argc) return usage("unexpected argument ", argv[optind]);
    if (a->gpus > 1 && a->memory == 0) return usage("--gpus: --memory is missing", "");
    return TD_EXIT_OK;
}

static td_status settings(const struct arguments *a, const char *role, struct td_config *c,
                          struct td_error *err) {
    td_config_defaults(c);
    if (a->config) TD_TRY(td_config_load(c, a->config, role, "0", err));
    for (uint32_t i = 0; i < a->sets; i++)
        TD_TRY(td_config_set(c, a->set[i], err));
    if (a->model) snprintf(c->model_dir, sizeof c->model_dir, "%s", a->model);
    if (!c->model_dir[0]) return td_fail(err, TD_CONFIG, "model.dir is not set: give --model DIR");
    return TD_OK;
}

/* ---- output ---- */

static void print_rows(const struct td_worker_plan *p) {
    bool device = p->device.bytes != 0;
    struct td_plan_row row;
    for (int host = 0; host < 2; host++) {
        if (device) printf(host ? "  of the host:\n" : "  of each GPU:\n");
        for (uint32_t i = 0; td_worker_plan_row(p, i, &row); i++)
            if (row.host == host && (device || row.bytes != 0))
                printf("  %-22s %16zu bytes  %9.3f GB\n", row.what, row.bytes,
                       (double)row.bytes / 1e9);
        size_t sum = td_worker_plan_bytes(p, host);
        if (device) printf("  %-22s %16zu bytes  %9.3f GB\n", "sum", sum, (double)sum / 1e9);
    }
    size_t sum = td_worker_plan_bytes(p, false);
    if (device)
        printf("  %-22s %16zu bytes  %9.3f GB  (mem_fraction %u)\n", "left free",
               (size_t)(p->device.bytes - sum), (double)(p->device.bytes - sum) / 1e9,
               p->device.fraction);
    else
        printf("  %-22s %16zu bytes\n", "total", sum + td_worker_plan_bytes(p, true));
}

static void print_table(const struct td_worker_plan *p) {
    const struct td_engine_options *o = &p->options;
    printf("  %u pages of %d tokens, %llu tokens\n", o->pages, TD_KV_PAGE_TOKENS,
           (unsigned long long)o->pages * TD_KV_PAGE_TOKENS);
    printf("  %10s  %s\n", "context", "sequences at once");
    for (uint64_t n = 2048; n / 4 < o->max_context; n *= 4) {
        uint32_t tokens = n < o->max_context ? (uint32_t)n : o->max_context;
        printf("  %10u  %u\n", tokens, td_worker_plan_sequences(p, tokens));
    }
}

static td_status role(const struct arguments *a, const char *name, struct td_error *err) {
    struct td_config c;
    struct td_model_config m;
    struct td_model *model = NULL;
    struct td_engine_options o;
    struct td_worker_plan p;
    enum td_outline kind = TD_OUTLINE_BF16;
    td_status st;
    TD_TRY(settings(a, name, &c, err));
    TD_TRY(td_model_config_from(&c, &m, &kind, err));
    if (a->format >= 0) kind = (enum td_outline)a->format;
    const struct td_plan_device device = {.bytes = (uint64_t)(a->memory * 1e9),
                                          .fraction = (uint32_t)c.mem_fraction,
                                          .ranks = a->gpus};
    TD_TRY(td_model_outline(&m, kind, a->gpus, &model, err));
    TD_TRY_GOTO(td_engine_options_from(&c, &model->config, &o, err), close);
    if (device.bytes) {
        o.backend = td_worker_plan_cuda();
        o.pages = (uint32_t)c.pool_pages;
    }
    bool prefill = strcmp(name, "prefill") == 0;
    TD_TRY_GOTO(
        td_worker_plan(model, &o, &device, c.slab_bytes,
                       (uint32_t)(prefill ? c.send_slabs : c.max_prefill_peers * c.landing_slabs),
                       c.grammar_mask_bytes, &p, err),
        close);
    printf("%s: %s weights", name, formats[kind]);
    if (device.bytes) printf(", %u GPU%s of %.1f GB", a->gpus, a->gpus > 1 ? "s" : "", a->memory);
    printf("; max_context %u, max_running %u, chunk_tokens %u\n", o.max_context, o.slots,
           o.max_tokens);
    print_rows(&p);
    print_table(&p);
close:
    td_model_close(model);
    return st;
}

int td_cmd_plan(int argc, char **argv) {
    struct arguments a;
    struct td_error err;
    bool done = false;
    int rc = parse(argc, argv, &a, &done);
    if (rc != TD_EXIT_OK || done) return rc;
    static const char *const roles[] = {"prefill", "decode"};
    for (int i = 0; i < 2; i++) {
        if (!(i ? a.decode : a.prefill)) continue;
        if (role(&a, roles[i], &err) == TD_OK) continue;
        fprintf(stderr, "tandem plan: %s: %s\n", roles[i], err.text);
        rc = TD_EXIT_FAILED;
    }
    return rc;
}
