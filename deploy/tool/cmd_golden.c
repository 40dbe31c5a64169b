/* `tandem golden`: runs a recorded file through the engine and says whether it still gives the
 * same results, to the tolerance of the file's kind and of the settings. */
#include "deploy/tool/golden.h"

#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/tool.h"
#include "kernels/device.h"
#include "kernels/model/file.h"
#include "kernels/ops.h"

enum { MAX_SETS = 64, MAX_JSON_BYTES = 1 << 30 };

static const char help[] =
    "usage: tandem golden --model DIR --golden FILE [--device cpu|cuda:N|cuda:A,B,...] [--set "
    "key=value]...\n"
    "                     [--as-served]\n"
    "\n"
    "Runs FILE through the engine and compares. Kinds of files, told apart by content:\n"
    "  logits      JSON, cases of prompt_ids, last_logits, greedy_ids\n"
    "  selections  JSON, cases of prompt_ids, selected_last4: entries the indexer chose\n"
    "  taps        safetensors, every layer's recorded input and outputs\n"
    "\n"
    "Settings are exact unless told otherwise: kv_dtype=fp32, index_key_dtype=fp32, the\n"
    "numerics (plain, ref) that the file is of, and on a GPU force_ref=all.\n"
    "  --set key=value  overrides one setting (any key of the configuration file)\n"
    "  --as-served      stores rows and keys as a served cluster does (kv_dtype=auto,\n"
    "                   index_key_dtype=bf16)\n"
    "\n"
    "Error is max |d| / max |golden| of a case. Passes when\n"
    "  logits      <= 2e-5 and greedy identical; not exact: <= 5e-3 (GPU 1e-2), greedy but for "
    "near-ties;\n"
    "              ref: median <= 5e-3 (GPU 1e-2), all <= 5e-2, greedy identical through end of "
    "text\n"
    "  taps        <= 1e-5 per layer and equal selections; not exact: <= 5e-3;\n"
    "              ref: <= 1e-5 but for counted flips of values next to a rounding boundary\n"
    "  selections  all recorded entries chosen; not exact: 98 % in every layer, pooled\n"
    "The last line is\n"
    "  golden: cases N, worst rel err E, median M, greedy mismatches N\n"
    "or, for selections, the pooled overlap per layer:\n"
    "  golden: cases N, overlap layer L P %, ...\n"
    "Exit codes: 0 passed, 1 outside the tolerance or failed, 2 wrong usage.\n";

struct arguments {
    const char *model, *golden, *device, *set[MAX_SETS];
    uint32_t sets;
    bool as_served;
};

static int usage(const char *sentence, const char *what) {
    fprintf(stderr, "tandem golden: %s%s\n`tandem golden --help` explains.\n", sentence, what);
    return TD_EXIT_USAGE;
}

/* TD_EXIT_OK to go on; otherwise the exit code, after --help with *ret_done. */
static int parse(int argc, char **argv, struct arguments *a, bool *ret_done) {
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"golden", required_argument, NULL, 'g'},
        {"device", required_argument, NULL, 'd'},
        {"set", required_argument, NULL, 's'},
        {"as-served", no_argument, NULL, 'a'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    int o;
    optind = 0;
    while ((o = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (o) {
        case 'm':
            a->model = optarg;
            break;
        case 'g':
            a->golden = optarg;
            break;
        case 'd':
            a->device = optarg;
            break;
        case 's':
            if (a->sets == MAX_SETS) return usage("--set: too many", "");
            a->set[a->sets++] = optarg;
            break;
        case 'a':
            a->as_served = true;
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
    if (!a->golden) return usage("--golden FILE is missing", "");
    return TD_EXIT_OK;
}

/* numerics: auto stands for what the golden is of. */
static td_status settings(struct td_golden *g, const struct arguments *a, struct td_error *err) {
    td_config_defaults(&g->config);
    g->config.kv_dtype = a->as_served ? TD_ROW_AUTO : TD_ROW_FP32;
    g->config.index_key_dtype = a->as_served ? TD_KEY_BF16 : TD_KEY_FP32;
    for (uint32_t i = 0; i < a->sets; i++)
        TD_TRY(td_config_set(&g->config, a->set[i], err));
    if (a->device) snprintf(g->config.device, sizeof g->config.device, "%s", a->device);
    return TD_OK;
}

/* Goldens of `ref` numerics: by what their cases hold, by their source line, or by name. */
static bool is_ref(const char *path, const json_t *root) {
    const char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    const json_t *first = json_array_get(json_object_get(root, "cases"), 0);
    const char *source = json_string_value(json_object_get(root, "source"));
    return strstr(name, "-ref.") || json_object_get(first, "ref_bf16key") ||
           json_object_get(first, "ref_fp4key") || (source && strstr(source, "ref_"));
}

/* Engine options for the golden's numerics; settings that ask for other ones are refused. */
static td_status resolve(struct td_golden *g, bool ref, struct td_error *err) {
    uint32_t *numerics = &g->config.numerics, own = ref ? TD_NUMERICS_REF : TD_NUMERICS_PLAIN;
    if (*numerics == TD_NUMERICS_AUTO) *numerics = own;
    if (*numerics != own)
        return td_fail(err, TD_INVALID,
                       "%.250s: numerics: expected %s, which the golden is of, found %s", g->path,
                       ref ? "ref" : "plain", ref ? "plain" : "ref");
    TD_TRY(td_engine_options_from(&g->config, &g->model->config, &g->options, err));
    g->ref = ref;
    g->exact = g->options.row_dtype == TD_KV_ROW_FP32 && g->options.key_dtype == TD_KV_KEY_FP32 &&
               !g->options.score_bf16;
    /* A device's fast kernels are another arithmetic; exact settings mean its plain ones. */
    if (g->exact && !g->options.backend->host)
        TD_TRY(td_ops_mask("all", &g->options.force_ref, err));
    return TD_OK;
}

static td_status run_cases(struct td_golden *g, const json_t *root, bool *ret_pass,
                           struct td_error *err) {
    const json_t *first = json_array_get(json_object_get(root, "cases"), 0);
    if (!json_is_object(first))
        return td_fail(err, TD_FORMAT, "%.250s: cases: expected an array of objects", g->path);
    TD_TRY(resolve(g, is_ref(g->path, root), err));
    if (json_object_get(first, "selected_last4"))
        return td_golden_selections(g, root, ret_pass, err);
    if (json_object_get(first, "last_logits") || json_object_get(first, "ref_bf16key"))
        return td_golden_logits(g, root, ret_pass, err);
    return td_fail(err, TD_FORMAT,
                   "%.200s: cases: expected last_logits, ref_bf16key or selected_last4 in them",
                   g->path);
}

static td_status run_json(struct td_golden *g, const char *text, size_t size, bool *ret_pass,
                          struct td_error *err) {
    json_error_t je;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return td_fail(err, TD_FORMAT,
                       "%.200s: expected JSON or safetensors, found: %.100s (line %d)", g->path,
                       je.text, je.line);
    td_status st = run_cases(g, root, ret_pass, err);
    json_decref(root);
    return st;
}

static td_status run_file(struct td_golden *g, bool *ret_pass, struct td_error *err) {
    char *text;
    size_t size;
    TD_TRY(td_file_read(g->path, MAX_JSON_BYTES, &text, &size, err));
    /* A safetensors file starts with 8 bytes of length, and then a brace. */
    bool taps = size > 8 && text[0] != '{' && text[8] == '{';
    td_status st = TD_OK;
    if (!taps) {
        st = run_json(g, text, size, ret_pass, err);
    } else {
        TD_TRY_GOTO(resolve(g, is_ref(g->path, NULL), err), free_text);
        TD_TRY_GOTO(td_golden_taps(g, ret_pass, err), free_text);
    }
free_text:
    free(text);
    return st;
}

static td_status run(struct td_golden *g, const struct arguments *a, bool *ret_pass,
                     struct td_error *err) {
    TD_TRY(td_model_open(a->model, &g->model, err));
    return run_file(g, ret_pass, err);
}

int td_cmd_golden(int argc, char **argv) {
    struct arguments a = {0};
    struct td_error err = {0};
    bool done = false, pass = false;
    int code = parse(argc, argv, &a, &done);
    if (code != TD_EXIT_OK || done) return code;
    struct td_golden g = {.path = a.golden};
    const struct td_backend *backend;
    uint32_t index[TD_MAX_RANKS];
    if (settings(&g, &a, &err) != TD_OK) return usage("--set: ", err.text);
    if (td_backend_find(g.config.device, g.config.tp, &backend, index, &err) != TD_OK)
        return usage("--", err.text); /* "device: expected ...", "tp: expected ..." */
    td_status st = run(&g, &a, &pass, &err);
    fflush(stdout);
    if (st != TD_OK) fprintf(stderr, "tandem golden: %s\n", err.text);
    td_engine_destroy(g.engine);
    td_model_close(g.model);
    free(g.pages);
    return st == TD_OK && pass ? TD_EXIT_OK : TD_EXIT_FAILED;
}
