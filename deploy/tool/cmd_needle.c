/* `tandem needle`: recall over a running cluster, in the bundled model's format. A prompt with a
 * fact hidden at a known place goes in as a user would send it; the answer must be that fact. */
#include <curl/curl.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer.h"
#include "deploy/tool/client.h"
#include "deploy/tool/needle_text.h"
#include "deploy/tool/tool.h"

enum { LIST_MAX = 64 };

static const char help[] =
    "usage: tandem needle --url URL [--lengths N,...] [--depths P,...] [--look-alikes N]\n"
    "       tandem needle --url URL --window\n"
    "\n"
    "Sends prompts of the given lengths (tokens) with a fact at the given depths (percent of the\n"
    "text before it) and compares the answers. Prints a table; exit code 1 if one is lost.\n"
    "\n"
    "  --url URL        the router, e.g. http://127.0.0.1:8000\n"
    "  --lengths N,...  default 338,943,1850,4509,10498,22016\n"
    "  --depths P,...   default 0,25,50,75,100\n"
    "  --look-alikes N  further facts of all four kinds about other names (default 0)\n"
    "  --window         instead: needle at the start, in the last 30 tokens, repeated 8 times,\n"
    "                   short prompt\n"
    "  --seed N         other facts and filler (default 1)\n"
    "  --show           print question and answer of each prompt\n"
    "  --tokenizer DIR  folder of tokenizer.json; default: model.dir of the running cluster\n";

struct options {
    const char *url, *tokenizer;
    uint32_t lengths[LIST_MAX], depths[LIST_MAX];
    int n_lengths, n_depths;
    uint32_t look_alikes;
    uint64_t seed;
    bool window, show;
    char model[TD_CLIENT_MODEL_MAX]; /* asked of the endpoint */
};

/* "1,20,300" into list; false when it is not that. */
static bool parse_list(const char *s, uint32_t max, uint32_t *list, int *ret_n) {
    int n = 0;
    for (;;) {
        char *end;
        unsigned long v = strtoul(s, &end, 10);
        if (end == s || v > max || n == LIST_MAX) return false;
        list[n++] = (uint32_t)v;
        if (*end == '\0') break;
        if (*end != ',') return false;
        s = end + 1;
    }
    *ret_n = n;
    return true;
}

static int parse(int argc, char **argv, struct options *o) {
    static const struct option longs[] = {
        {"url", required_argument, NULL, 'u'},    {"lengths", required_argument, NULL, 'l'},
        {"depths", required_argument, NULL, 'd'}, {"look-alikes", required_argument, NULL, 'a'},
        {"window", no_argument, NULL, 'w'},       {"seed", required_argument, NULL, 's'},
        {"show", no_argument, NULL, 'S'},         {"tokenizer", required_argument, NULL, 't'},
        {"help", no_argument, NULL, 'h'},         {0}};
    uint32_t one[LIST_MAX];
    int n, c;
    optind = 1;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        bool ok = true;
        switch (c) {
        case 'u':
            o->url = optarg;
            break;
        case 't':
            o->tokenizer = optarg;
            break;
        case 'l':
            ok = parse_list(optarg, 1048576, o->lengths, &o->n_lengths);
            break;
        case 'd':
            ok = parse_list(optarg, 100, o->depths, &o->n_depths);
            break;
        case 'a':
            ok = parse_list(optarg, 100000, one, &n) && n == 1;
            if (ok) o->look_alikes = one[0];
            break;
        case 's':
            ok = parse_list(optarg, UINT32_MAX, one, &n) && n == 1;
            if (ok) o->seed = one[0];
            break;
        case 'w':
            o->window = true;
            break;
        case 'S':
            o->show = true;
            break;
        case 'h':
            fputs(help, stdout);
            return TD_EXIT_OK;
        default:
            return TD_EXIT_USAGE;
        }
        if (!ok) {
            fprintf(stderr, "tandem needle: expected numbers separated by commas, found '%s'\n",
                    optarg);
            return TD_EXIT_USAGE;
        }
    }
    if (!o->url || optind != argc) {
        fprintf(stderr, "tandem needle: %s%s\n",
                o->url ? "unexpected argument " : "--url is missing", o->url ? argv[optind] : "");
        return TD_EXIT_USAGE;
    }
    return -1;
}

static uint32_t count_tokens(void *user, const char *text, size_t len) {
    struct td_ids ids = {0};
    td_status st = td_tokenizer_encode(user, text, len, &ids, NULL);
    uint32_t n = st == TD_OK ? (uint32_t)ids.n : 0;
    td_ids_free(&ids);
    return n;
}

/* The folder named on the command line, else the one the cluster says it serves. */
static td_status open_tokenizer(const struct options *o, struct td_tokenizer **ret,
                                struct td_error *err) {
    if (o->tokenizer) return td_tokenizer_load(o->tokenizer, ret, err);
    json_t *j = NULL;
    long http = 0;
    TD_TRY(td_client_get(o->url, "/v1/cluster", 5000, &j, &http, err));
    const json_t *settings = json_object_get(json_object_get(j, "router"), "settings");
    const char *dir = json_string_value(json_object_get(settings, "model.dir"));
    td_status st = dir ? td_tokenizer_load(dir, ret, err)
                       : td_fail(err, TD_NOT_FOUND,
                                 "%s/v1/cluster names no model.dir; give --tokenizer DIR", o->url);
    json_decref(j);
    return st;
}

struct tally {
    int asked, found;
};

/* One prompt, one row of the table. A transport error ends the sweep; a wrong answer does not. */
static td_status ask(const struct options *o, struct td_tokenizer *t, const char *label,
                     const struct td_needle_spec *spec, struct tally *tally, struct td_error *err) {
    struct td_needle_prompt p;
    struct td_client_answer a;
    TD_TRY(td_needle_build(spec, count_tokens, t, &p, err));
    td_status st = td_client_chat(o->url, o->model, p.text, 32, &a, err);
    free(p.text);
    if (st != TD_OK) return st;
    bool ok = strcmp(a.text, p.answer) == 0 && strcmp(a.finish, "stop") == 0;
    double decode_s = a.total_s - a.first_s;
    tally->asked++;
    tally->found += ok;
    printf("%8u %-10s %s  %8.0f ms %8.0f tok/s %8.0f tok/s\n", a.prompt_tokens, label,
           ok ? "found" : "LOST ", a.first_s * 1e3,
           a.first_s > 0 ? a.prompt_tokens / a.first_s : 0.0,
           decode_s > 0 && a.completion_tokens > 1 ? (a.completion_tokens - 1) / decode_s : 0.0);
    if (o->show || !ok) {
        printf("           question: %s\n           answer:   %s\n", p.question, a.text);
        if (!ok) printf("           expected: %s (finish stop), finish %s\n", p.answer, a.finish);
    }
    fflush(stdout);
    return TD_OK;
}

static td_status sweep(const struct options *o, struct td_tokenizer *t, struct tally *tally,
                       struct td_error *err) {
    for (int i = 0; i < o->n_lengths; i++)
        for (int j = 0; j < o->n_depths; j++) {
            char label[16];
            snprintf(label, sizeof label, "%u %%", o->depths[j]);
            struct td_needle_spec spec = {.seed = o->seed + (uint64_t)(i * LIST_MAX + j) * 7919,
                                          .tokens = o->lengths[i],
                                          .depth = o->depths[j],
                                          .look_alikes = o->look_alikes,
                                          .repeats = 1};
            TD_TRY(ask(o, t, label, &spec, tally, err));
        }
    return TD_OK;
}

static td_status window(const struct options *o, struct td_tokenizer *t, struct tally *tally,
                        struct td_error *err) {
    /* 40 tokens are about the shortest prompt that holds fact and question */
    const struct {
        const char *label;
        struct td_needle_spec spec;
    } cases[] = {
        {"start", {.tokens = 2000, .depth = 0, .repeats = 1}},
        {"last 30", {.tokens = 2000, .repeats = 1, .tail_tokens = 30}},
        {"8 times", {.tokens = 2000, .repeats = 8}},
        {"short", {.tokens = 60, .depth = 50, .repeats = 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_needle_spec spec = cases[i].spec;
        spec.seed = o->seed + i * 104729;
        TD_TRY(ask(o, t, cases[i].label, &spec, tally, err));
    }
    return TD_OK;
}

int td_cmd_needle(int argc, char **argv) {
    struct options o = {.lengths = {338, 943, 1850, 4509, 10498, 22016},
                        .n_lengths = 6,
                        .depths = {0, 25, 50, 75, 100},
                        .n_depths = 5,
                        .seed = 1};
    int code = parse(argc, argv, &o);
    if (code >= 0) return code;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    struct td_error err = {.text = ""};
    struct td_tokenizer *t = NULL;
    struct tally tally = {0};
    td_status st = td_client_model(o.url, o.model, &err);
    if (st == TD_OK) st = open_tokenizer(&o, &t, &err);
    if (st == TD_OK) {
        printf("%8s %-10s %s  %11s %14s %14s\n", "tokens", "needle", "     ", "first token",
               "prefill", "decode");
        st = o.window ? window(&o, t, &tally, &err) : sweep(&o, t, &tally, &err);
    }
    if (st == TD_OK)
        printf("needle: %d of %d found\n", tally.found, tally.asked);
    else
        fprintf(stderr, "tandem needle: %s\n", err.text);
    td_tokenizer_destroy(t);
    curl_global_cleanup();
    return st == TD_OK && tally.found == tally.asked ? TD_EXIT_OK : TD_EXIT_FAILED;
}
