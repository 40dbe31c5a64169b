/* `tandem index-diff`: what storing indexer keys in fewer bits does to the entries chosen. Every
 * CSA layer runs the same prompt once per key type; where more entries are visible than are taken,
 * the choice is compared with that of fp32 keys. */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/config.h"
#include "common/text/chat.h"
#include "common/text/tokenizer.h"
#include "deploy/tool/needle_text.h"
#include "deploy/tool/tool.h"
#include "kernels/engine.h"

/* Below this share of equal entries facts get lost. */
static const double least_share = 0.98;

enum { MAX_SETS = 64, TYPES = 3 };

static const struct {
    const char *name;
    uint32_t setting;
} types[TYPES] = {{"bf16", TD_KEY_BF16}, {"fp8", TD_KEY_FP8}, {"fp4", TD_KEY_FP4}};

static const char help[] =
    "usage: tandem index-diff --model DIR --length N [--seed N] [--set key=value]...\n"
    "\n"
    "Runs one prompt of about N tokens (filler and facts of the bundled model's kind) with\n"
    "indexer keys stored as fp32, bf16, fp8 and fp4, each layer from the same input. Prints per\n"
    "CSA layer which share of the chosen entries equals the choice of fp32 keys, over all\n"
    "positions with more than index_topk visible entries.\n"
    "\n"
    "  --model DIR      checkpoint folder with tokenizer.json\n"
    "  --length N       tokens\n"
    "  --seed N         another prompt (default 1)\n"
    "  --set key=value  any key of the configuration file; index_key_dtype is the served type\n"
    "\n"
    "Exit codes: 0 the served type keeps 98.0 % in every layer, 1 it does not or the run failed,\n"
    "2 wrong usage.\n";

struct arguments {
    const char *model, *set[MAX_SETS];
    uint32_t sets, length;
    uint64_t seed;
};

struct run {
    struct td_config config;
    struct td_model *model;
    struct td_engine_options options;
    struct td_ids ids;
    uint32_t topk, first;    /* the first position that has more entries visible than it takes */
    float *x, *x_out;        /* [tokens][4][hidden] residual streams before and after a layer */
    int32_t *fp32, *other;   /* [tokens][topk] */
    uint64_t *common[TYPES]; /* [CSA layers] equal entries */
};

static int usage(const char *sentence, const char *what) {
    fprintf(stderr, "tandem index-diff: %s%s\n`tandem index-diff --help` explains.\n", sentence,
            what);
    return TD_EXIT_USAGE;
}

static bool number(const char *s, uint64_t lo, uint64_t hi, uint64_t *ret) {
    char *end;
    if (*s < '0' || *s > '9') return false;
    *ret = strtoull(s, &end, 10);
    return !*end && *ret >= lo && *ret <= hi;
}

/* TD_EXIT_OK to go on; otherwise the exit code, after --help with *ret_done. */
static int parse(int argc, char **argv, struct arguments *a, bool *ret_done) {
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'}, {"length", required_argument, NULL, 'l'},
        {"seed", required_argument, NULL, 'r'},  {"set", required_argument, NULL, 's'},
        {"help", no_argument, NULL, 'h'},        {0}};
    uint64_t v;
    int o;
    optind = 0;
    while ((o = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (o) {
        case 'm':
            a->model = optarg;
            break;
        case 'l':
            if (!number(optarg, 1, 1u << 20, &v))
                return usage("--length: expected 1 to 1048576, found ", optarg);
            a->length = (uint32_t)v;
            break;
        case 'r':
            if (!number(optarg, 0, UINT32_MAX, &a->seed))
                return usage("--seed: expected a number, found ", optarg);
            break;
        case 's':
            if (a->sets == MAX_SETS) return usage("--set: too many", "");
            a->set[a->sets++] = optarg;
            break;
        case 'h':
            fputs(help, stdout);
            *ret_done = true;
            return TD_EXIT_OK;
        default:
            return usage("unknown option or missing value", "");
        }
    }
    if (optind < argc) return usage("unexpected argument ", argv[optind]);
    if (!a->model) return usage("--model DIR is missing", "");
    if (!a->length) return usage("--length N is missing", "");
    return TD_EXIT_OK;
}

static uint32_t count_tokens(void *user, const char *text, size_t len) {
    struct td_ids ids = {0};
    td_status st = td_tokenizer_encode(user, text, len, &ids, NULL);
    uint32_t n = st == TD_OK ? (uint32_t)ids.n : 0;
    td_ids_free(&ids);
    return n;
}

/* The prompt as a user's message in chat mode. */
static td_status build_prompt(const struct arguments *a, struct td_ids *ret, struct td_error *err) {
    struct td_needle_spec spec = {.seed = a->seed,
                                  .tokens = a->length,
                                  .depth = 50,
                                  .look_alikes = a->length / 100,
                                  .repeats = 1};
    struct td_needle_prompt p = {0};
    struct td_tokenizer *t;
    TD_TRY(td_tokenizer_load(a->model, &t, err));
    td_status st = td_needle_build(&spec, count_tokens, t, &p, err);
    if (st == TD_OK) {
        struct td_chat chat;
        struct td_chat_params params = {.thinking = false};
        struct td_chat_message m = {.role = TD_CHAT_USER, .content = p.text, .content_n = p.len};
        td_chat_init(&chat, t);
        st = td_chat_encode(&chat, &params, &m, 1, ret, err);
    }
    free(p.text);
    td_tokenizer_destroy(t);
    return st;
}

static td_status take(struct run *r, struct td_error *err) {
    const struct td_model_config *c = &r->model->config;
    uint32_t n = (uint32_t)r->ids.n, layers = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        layers += c->kind[l] == TD_LAYER_CSA;
    if (layers == 0) return td_fail(err, TD_UNSUPPORTED, "the model has no layer with an indexer");
    TD_TRY(td_engine_options_from(&r->config, c, &r->options, err));
    r->topk = r->options.index_topk;
    if (n / TD_CSA_RATIO <= r->topk)
        return td_fail(err, TD_INVALID,
                       "--length: expected more than %u tokens, so that not all entries are taken, "
                       "found %u",
                       TD_CSA_RATIO * r->topk, n);
    r->options.max_context = n;
    r->options.pages = td_kv_pages(n, td_engine_split(&r->options));
    r->options.slots = r->options.max_runs = 1;
    r->first = TD_CSA_RATIO * (r->topk + 1) - 1;
    size_t values = (size_t)n * r->topk, streams = (size_t)n * TD_HC_STREAMS * c->hidden;
    r->x = calloc(streams, sizeof *r->x);
    r->x_out = calloc(streams, sizeof *r->x_out);
    r->fp32 = calloc(values, sizeof *r->fp32);
    r->other = calloc(values, sizeof *r->other);
    for (int i = 0; i < TYPES; i++)
        r->common[i] = calloc(layers, sizeof *r->common[i]);
    if (!r->x || !r->x_out || !r->fp32 || !r->other || !r->common[0] || !r->common[1] ||
        !r->common[2])
        return td_fail(err, TD_NO_MEMORY, "no memory for the choices at %u positions", n);
    return TD_OK;
}

/* Layer `l` over the whole prompt with keys of one type: what every position chose. */
static td_status choices(struct run *r, uint32_t l, uint32_t setting, int32_t *ret,
                         struct td_error *err) {
    struct td_config config = r->config;
    struct td_engine_options o;
    struct td_engine *e;
    config.index_key_dtype = setting;
    TD_TRY(td_engine_options_from(&config, &r->model->config, &o, err));
    r->options.key_dtype = o.key_dtype;
    TD_TRY(td_engine_create(r->model, &r->options, &e, err));
    struct td_layer_tap tap = {.layer = l,
                               .n = (uint32_t)r->ids.n,
                               .ids = r->ids.ids,
                               .x_in = r->x,
                               .selected = ret,
                               .x_out = setting == TD_KEY_FP32 ? r->x_out : NULL};
    td_status st = td_engine_layer(e, &tap, err);
    td_engine_destroy(e);
    return st;
}

/* Equal entries of two full, ascending choices. */
static uint32_t equal_entries(const int32_t *a, const int32_t *b, uint32_t n) {
    uint32_t common = 0;
    for (uint32_t i = 0, k = 0; i < n && k < n;) {
        common += a[i] == b[k];
        int32_t x = a[i], y = b[k];
        i += x <= y;
        k += y <= x;
    }
    return common;
}

/* Over the positions where not all visible entries are taken. */
static uint64_t compare(const struct run *r) {
    uint64_t common = 0;
    for (uint32_t p = r->first; p < r->ids.n; p++)
        common +=
            equal_entries(r->fp32 + (size_t)p * r->topk, r->other + (size_t)p * r->topk, r->topk);
    return common;
}

static void embed(struct run *r) {
    size_t hidden = r->model->config.hidden;
    for (size_t i = 0; i < r->ids.n; i++) {
        float *x = r->x + i * TD_HC_STREAMS * hidden;
        td_weight_row(&r->model->embed, (uint32_t)r->ids.ids[i], x);
        for (size_t s = 1; s < TD_HC_STREAMS; s++)
            memcpy(x + s * hidden, x, hidden * sizeof *x);
    }
}

/* Every layer takes what fp32 keys made of the layers before it, so that its row shows its own
 * keys alone. */
static td_status run_all(const struct arguments *a, struct run *r, struct td_error *err) {
    TD_TRY(td_model_open_from(&r->config, NULL, &r->model, err));
    TD_TRY(build_prompt(a, &r->ids, err));
    TD_TRY(take(r, err));
    embed(r);
    for (uint32_t l = 0, csa = 0; l < r->model->config.layers; l++) {
        TD_TRY(choices(r, l, TD_KEY_FP32, r->fp32, err));
        for (int i = 0; i < TYPES && r->model->config.kind[l] == TD_LAYER_CSA; i++) {
            TD_TRY(choices(r, l, types[i].setting, r->other, err));
            r->common[i][csa] = compare(r);
        }
        csa += r->model->config.kind[l] == TD_LAYER_CSA;
        float *x = r->x;
        r->x = r->x_out;
        r->x_out = x;
    }
    return TD_OK;
}

/* A row per CSA layer; true when the served type is good enough in all of them. */
static bool report(const struct run *r) {
    const struct td_model_config *c = &r->model->config;
    double least = 1.0, entries = (double)(r->ids.n - r->first) * r->topk;
    const char *served = "fp32";
    printf("%zu tokens, index_topk %u, %zu positions with more entries visible\n%8s", r->ids.n,
           r->topk, r->ids.n - r->first, "layer");
    for (int i = 0; i < TYPES; i++)
        printf(" %8s", types[i].name);
    for (uint32_t l = 0, csa = 0; l < c->layers; l++) {
        if (c->kind[l] != TD_LAYER_CSA) continue;
        printf("\n%8u", l);
        for (int i = 0; i < TYPES; i++) {
            double share = (double)r->common[i][csa] / entries;
            printf(" %6.2f %%", 100 * share);
            if (types[i].setting != r->config.index_key_dtype) continue;
            served = types[i].name;
            least = share < least ? share : least;
        }
        csa++;
    }
    bool pass = least >= least_share;
    printf("\nindex-diff: served %s, least %.2f %%, expected %.1f %%: %s\n", served, 100 * least,
           100 * least_share, pass ? "ok" : "FAILED");
    return pass;
}

int td_cmd_index_diff(int argc, char **argv) {
    struct arguments a = {.seed = 1};
    struct run r = {0};
    struct td_error err = {.text = ""};
    bool done = false, pass = false;
    int code = parse(argc, argv, &a, &done);
    if (code != TD_EXIT_OK || done) return code;
    td_config_defaults(&r.config);
    snprintf(r.config.model_dir, sizeof r.config.model_dir, "%s", a.model);
    for (uint32_t i = 0; i < a.sets; i++)
        if (td_config_set(&r.config, a.set[i], &err) != TD_OK) return usage("--set: ", err.text);
    td_status st = run_all(&a, &r, &err);
    if (st == TD_OK)
        pass = report(&r);
    else
        fprintf(stderr, "tandem index-diff: %s\n", err.text);
    for (int i = 0; i < TYPES; i++)
        free(r.common[i]);
    free(r.other);
    free(r.fp32);
    free(r.x);
    free(r.x_out);
    td_ids_free(&r.ids);
    td_model_close(r.model);
    return st == TD_OK && pass ? TD_EXIT_OK : TD_EXIT_FAILED;
}
