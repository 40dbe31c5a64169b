/* `tandem plan`: what a prefill and a decode worker will take in memory, and how many sequences of
 * which length they hold, from config.json and settings alone: before weights are there. And what
 * each preset of `tandem topology` holds, with predictions. */
#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/config.h"
#include "deploy/tool/plan_presets.h"
#include "deploy/tool/plan_worker.h"
#include "deploy/tool/tool.h"

enum { MAX_SETS = 64 };

static const char help[] =
    "usage: tandem plan [--model DIR] [--format F] [--memory GB [--gpus N]] [--role ROLE]\n"
    "                   [--config FILE] [--set key=value]...\n"
    "       tandem plan --presets [--model DIR] [--format F] [--memory GB] [--config FILE]\n"
    "                   [--set [WHO:]key=value]... [ASSUMPTION]...\n"
    "\n"
    "Prints per role every part of a worker's memory and how many sequences of which context run "
    "at\n"
    "once, by the code that workers size themselves with. Needs DIR/config.json, no weights.\n"
    "\n"
    "  --model DIR      checkpoint folder; default: model.dir of the settings\n"
    "  --format F       how weights are stored: bf16, fp4 (the official release: FP8, and FP4\n"
    "                   experts) or nvfp4 (NVFP4 experts); default: what config.json says\n"
    "  --memory GB      a GPU's memory in 10^9 bytes; without it a worker on the CPU is planned\n"
    "  --gpus N         GPUs that share one worker's weights; what each kv_layout of them holds\n"
    "                   and exchanges is shown; default: tp of the settings\n"
    "  --role ROLE      prefill or decode alone\n"
    "  --config FILE    settings\n"
    "  --set key=value  one more; max_context, max_running, mem_fraction, chunk_tokens, "
    "pool_pages,\n"
    "                   kv_dtype and index_key_dtype weigh most\n"
    "\n"
    "--presets: what each division of eight GPUs (`tandem topology --help`) holds, cards of 96 GB\n"
    "without --memory, and predictions: requests/s of prefill and decode at 8K, 32K and 128K, "
    "what\n"
    "reductions between ranks move, and what each kv_layout costs. Assumptions:\n"
    "\n"
    "  --gpu-read N       TB/s that a GPU reads its memory with; default 1.45\n"
    "  --prefill-rate N   prompt tokens/s that a GPU computes; default 7000\n"
    "  --floor-share N    percent of what its bytes allow that decode reaches; default 60\n"
    "  --output N         tokens of an answer; default 1024\n"
    "  --link N           GB/s that a rank receives in the reductions of a chunk; default 41\n"
    "  --reduction-us N   of one reduction of a decode step; default 24\n"
    "\n"
    "Exit codes: 0 everything fits, 1 something does not (the sentence says which setting to "
    "change)\n"
    "or the run failed, 2 wrong usage.\n";

struct arguments {
    const char *model, *config;
    const char *set[MAX_SETS];
    uint32_t sets, gpus;
    double memory;
    int format; /* enum td_outline, -1: config.json's */
    bool prefill, decode, presets;
    struct td_forecast_rates rates;
};

/* Assumptions: letter, option, where it goes, unit, range. */
static const struct assumption {
    int letter;
    const char *option;
    size_t at; /* in td_forecast_rates */
    double unit, least, most;
} assumptions[] = {
    {'R', "gpu-read", offsetof(struct td_forecast_rates, gpu_bytes), 1e12, 0.01, 1000},
    {'P', "prefill-rate", offsetof(struct td_forecast_rates, prefill_tokens), 1, 1, 1e9},
    {'F', "floor-share", offsetof(struct td_forecast_rates, floor_share), 0.01, 1, 100},
    {'O', "output", offsetof(struct td_forecast_rates, output_tokens), 1, 1, 1e6},
    {'L', "link", offsetof(struct td_forecast_rates, link_bytes), 1e9, 0.01, 1e6},
    {'U', "reduction-us", offsetof(struct td_forecast_rates, reduction_s), 1e-6, 0.1, 1e6},
};
enum { N_ASSUMPTIONS = sizeof assumptions / sizeof assumptions[0] };

static const struct td_forecast_rates usual = {.gpu_bytes = 1.45e12,
                                               .prefill_tokens = 7000,
                                               .floor_share = 0.60,
                                               .output_tokens = 1024,
                                               .link_bytes = 41e9,
                                               .reduction_s = 24e-6};

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

static int assume(const struct assumption *x, struct arguments *a) {
    char text[80], *end;
    double v = strtod(optarg, &end);
    if (end != optarg && !*end && v >= x->least && v <= x->most) {
        *(double *)(void *)((char *)&a->rates + x->at) = v * x->unit;
        return TD_EXIT_OK;
    }
    snprintf(text, sizeof text, "--%s: expected %g to %g, found ", x->option, x->least, x->most);
    return usage(text, optarg);
}

static int option(int o, struct arguments *a) {
    char *end = NULL;
    for (int i = 0; i < N_ASSUMPTIONS; i++)
        if (assumptions[i].letter == o) return assume(&assumptions[i], a);
    switch (o) {
    case 'p':
        a->presets = true;
        return TD_EXIT_OK;
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
        return !*end && a->gpus >= 1 && a->gpus <= TD_MAX_RANKS && !(a->gpus & (a->gpus - 1))
                   ? TD_EXIT_OK
                   : usage("--gpus: expected 1, 2, 4 or 8, found ", optarg);
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
                                            {"presets", no_argument, NULL, 'p'},
                                            {"gpu-read", required_argument, NULL, 'R'},
                                            {"prefill-rate", required_argument, NULL, 'P'},
                                            {"floor-share", required_argument, NULL, 'F'},
                                            {"output", required_argument, NULL, 'O'},
                                            {"link", required_argument, NULL, 'L'},
                                            {"reduction-us", required_argument, NULL, 'U'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    int o;
    *a = (struct arguments){.format = -1, .prefill = true, .decode = true, .rates = usual};
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
    if (a->presets && (a->gpus || !a->prefill || !a->decode))
        return usage("--presets: --gpus and --role are the presets' own", "");
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
    char each[24] = "";
    if (p->engine.ranks > 1) snprintf(each, sizeof each, " x %u ranks", p->engine.ranks);
    for (int host = 0; host < 2; host++) {
        if (device) printf(host ? "  of the host:\n" : "  of each GPU:\n");
        for (uint32_t i = 0; td_worker_plan_row(p, i, &row); i++)
            if (row.host == host && (device || row.bytes != 0))
                printf("  %-22s %16zu bytes  %9.3f GB%s\n", row.what, row.bytes,
                       (double)row.bytes / 1e9, host || device ? "" : each);
        size_t sum = td_worker_plan_bytes(p, host);
        if (device) printf("  %-22s %16zu bytes  %9.3f GB\n", "sum", sum, (double)sum / 1e9);
    }
    size_t sum = td_worker_plan_bytes(p, false);
    if (device)
        printf("  %-22s %16zu bytes  %9.3f GB  (mem_fraction %u)\n", "left free",
               (size_t)(p->device.bytes - sum), (double)(p->device.bytes - sum) / 1e9,
               p->device.fraction);
    else
        printf("  %-22s %16zu bytes\n", "total",
               p->engine.ranks * sum + td_worker_plan_bytes(p, true));
}

static void print_table(const struct td_worker_plan *p) {
    const struct td_engine_options *o = &p->options;
    uint32_t each = td_kv_page_tokens(td_engine_split(o));
    printf("  %u pages of %u tokens, %llu tokens\n", o->pages, each,
           (unsigned long long)o->pages * each);
    printf("  %10s  %s\n", "context", "sequences at once");
    for (uint64_t n = 2048; n / 4 < o->max_context; n *= 4) {
        uint32_t tokens = n < o->max_context ? (uint32_t)n : o->max_context;
        printf("  %10u  %u\n", tokens, td_worker_plan_sequences(p, tokens));
    }
}

static td_status presets(const struct arguments *a, struct td_error *err) {
    struct td_config c;
    td_config_defaults(&c);
    if (a->config) TD_TRY(td_config_load(&c, a->config, "decode", "0", err));
    const char *dir = a->model ? a->model : c.model_dir;
    if (!dir[0]) return td_fail(err, TD_CONFIG, "model.dir is not set: give --model DIR");
    const struct td_plan_presets asked = {
        .model_dir = dir,
        .format = a->format,
        .memory = (uint64_t)((a->memory != 0 ? a->memory : 96) * 1e9),
        .set = a->set,
        .sets = a->sets,
        .rates = a->rates,
    };
    return td_plan_presets(&asked, err);
}

static td_status role(const struct arguments *a, const char *name, struct td_error *err) {
    struct td_config c;
    struct td_model_config m;
    struct td_worker_plan p;
    enum td_outline kind = TD_OUTLINE_BF16;
    TD_TRY(settings(a, name, &c, err));
    TD_TRY(td_model_config_from(&c, &m, &kind, err));
    if (a->format >= 0) kind = (enum td_outline)a->format;
    uint32_t gpus = a->gpus ? a->gpus : (uint32_t)c.tp;
    const struct td_plan_asked asked = {.config = &c,
                                        .model = &m,
                                        .format = kind,
                                        .prefill = strcmp(name, "prefill") == 0,
                                        .ranks = gpus,
                                        .memory = (uint64_t)(a->memory * 1e9)};
    TD_TRY(td_plan_worker(&asked, &p, err));
    const struct td_engine_options *o = &p.options;
    printf("%s: %s weights", name, formats[kind]);
    if (p.device.bytes) printf(", %u GPU%s of %.1f GB", gpus, gpus > 1 ? "s" : "", a->memory);
    printf("; max_context %u, max_running %u, chunk_tokens %u\n", o->max_context, o->slots,
           o->max_tokens);
    print_rows(&p);
    print_table(&p);
    return td_plan_print_layouts(&asked, p.options.max_context, err);
}

int td_cmd_plan(int argc, char **argv) {
    struct arguments a;
    struct td_error err;
    bool done = false;
    int rc = parse(argc, argv, &a, &done);
    if (rc != TD_EXIT_OK || done) return rc;
    if (a.presets) {
        if (presets(&a, &err) == TD_OK) return TD_EXIT_OK;
        fprintf(stderr, "tandem plan: %s\n", err.text);
        return TD_EXIT_FAILED;
    }
    static const char *const roles[] = {"prefill", "decode"};
    for (int i = 0; i < 2; i++) {
        if (!(i ? a.decode : a.prefill)) continue;
        if (role(&a, roles[i], &err) == TD_OK) continue;
        fprintf(stderr, "tandem plan: %s: %s\n", roles[i], err.text);
        rc = TD_EXIT_FAILED;
    }
    return rc;
}
