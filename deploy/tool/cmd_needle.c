/* `tandem needle`: recall over a running cluster, in the bundled model's format. A prompt with a
 * fact hidden at a known place goes in as a user would send it; the answer must be that fact. */
#include <curl/curl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/needle_ab.h"
#include "deploy/tool/needle_ask.h"
#include "deploy/tool/needle_svg.h"
#include "deploy/tool/tool.h"

enum { LIST_MAX = 64 };

static const char help[] =
    "usage: tandem needle --url URL [--lengths N,...] [--depths P,...] [--look-alikes N]\n"
    "       tandem needle --url URL --window\n"
    "       tandem needle --ab KEY=VALUE,... [--lengths N,...] [--look-alikes N] [--trials N]\n"
    "                     [--set KEY=VALUE]... [--model DIR]\n"
    "\n"
    "Sends prompts of the given lengths (tokens) with a fact at the given depths (percent of the\n"
    "text before it) and compares the answers. Prints a table; exit code 1 if one is lost.\n"
    "\n"
    "  --url URL        the router, e.g. http://127.0.0.1:8000\n"
    "  --key-file FILE  an API key of the router, when it wants one\n"
    "  --lengths N,...  default 338,943,1850,4509,10498,22016\n"
    "  --depths P,...   default 0,25,50,75,100\n"
    "  --look-alikes N  further facts of all four kinds about other names (default 0)\n"
    "  --trials N       prompts per cell of the table (default 1), per length with --ab\n"
    "  --svg FILE       also draw the table as a heat map, length by depth\n"
    "  --window         instead: needle at the start, in the last 30 tokens, repeated 8 times,\n"
    "                   short prompt\n"
    "  --ab KEY=A,B,..  instead: start one local cluster per value of the setting and print "
    "recall\n"
    "                   of each over the same prompts with a 95 % interval; exit code 0 whatever\n"
    "                   it is\n"
    "  --set KEY=VALUE  a further setting of the clusters that --ab starts\n"
    "  --model DIR      their checkpoint (default deploy/models/needle)\n"
    "  --seed N         other facts and filler (default 1)\n"
    "  --show           print question and answer of each prompt\n"
    "  --tokenizer DIR  folder of tokenizer.json; default: model.dir of the running cluster\n";

struct options {
    const char *url, *key_file, *tokenizer, *svg;
    uint32_t lengths[LIST_MAX], depths[LIST_MAX];
    int n_lengths, n_depths;
    uint32_t look_alikes, trials, seed;
    bool window, show;
    struct td_needle_ab ab;
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

static bool parse_one(const char *s, uint32_t max, uint32_t *ret) {
    uint32_t list[LIST_MAX];
    int n;
    if (!parse_list(s, max, list, &n) || n != 1) return false;
    *ret = list[0];
    return true;
}

/* False when the value of option `c` is not what it must be. */
static bool take_option(struct options *o, int c, const char *value) {
    switch (c) {
    case 'u':
        o->url = value;
        return true;
    case 'k':
        o->key_file = value;
        return true;
    case 't':
        o->tokenizer = value;
        return true;
    case 'v':
        o->svg = value;
        return true;
    case 'm':
        o->ab.model_dir = value;
        return true;
    case 'b':
        o->ab.setting = value;
        return true;
    case 'e':
        if (!strchr(value, '=') || o->ab.n_sets == TD_NEEDLE_AB_SETS_MAX) return false;
        o->ab.set[o->ab.n_sets++] = value;
        return true;
    case 'l':
        return parse_list(value, 1048576, o->lengths, &o->n_lengths);
    case 'd':
        return parse_list(value, 100, o->depths, &o->n_depths);
    case 'a':
        return parse_one(value, 100000, &o->look_alikes);
    case 'r':
        return parse_one(value, 1000000, &o->trials) && o->trials > 0;
    case 's':
        return parse_one(value, UINT32_MAX, &o->seed);
    case 'w':
        return o->window = true;
    default:
        return o->show = true;
    }
}

static int parse(int argc, char **argv, struct options *o) {
    static const struct option longs[] = {{"url", required_argument, NULL, 'u'},
                                          {"key-file", required_argument, NULL, 'k'},
                                          {"lengths", required_argument, NULL, 'l'},
                                          {"depths", required_argument, NULL, 'd'},
                                          {"look-alikes", required_argument, NULL, 'a'},
                                          {"window", no_argument, NULL, 'w'},
                                          {"seed", required_argument, NULL, 's'},
                                          {"show", no_argument, NULL, 'S'},
                                          {"tokenizer", required_argument, NULL, 't'},
                                          {"trials", required_argument, NULL, 'r'},
                                          {"svg", required_argument, NULL, 'v'},
                                          {"ab", required_argument, NULL, 'b'},
                                          {"set", required_argument, NULL, 'e'},
                                          {"model", required_argument, NULL, 'm'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    int c;
    optind = 1;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 'h') {
            fputs(help, stdout);
            return TD_EXIT_OK;
        }
        if (c == '?') return TD_EXIT_USAGE;
        if (!take_option(o, c, optarg)) {
            fprintf(stderr, "tandem needle: '%s' is not a value this option takes; see --help\n",
                    optarg);
            return TD_EXIT_USAGE;
        }
    }
    if (optind != argc) {
        fprintf(stderr, "tandem needle: unexpected argument '%s'\n", argv[optind]);
        return TD_EXIT_USAGE;
    }
    if (!o->url == !o->ab.setting) {
        fprintf(stderr, "tandem needle: expected either --url or --ab\n");
        return TD_EXIT_USAGE;
    }
    return -1;
}

struct tally {
    uint32_t asked, found;
};

/* One prompt, one row of the table. An error ends the sweep; a wrong answer does not. */
static td_status ask(const struct options *o, const struct td_needle_target *t, const char *label,
                     const struct td_needle_spec *spec, struct tally *tally, struct td_error *err) {
    struct td_needle_result r;
    TD_TRY(td_needle_ask(t, spec, &r, err));
    const struct td_client_answer *a = &r.answer;
    double decode_s = a->total_s - a->first_s;
    tally->asked++;
    tally->found += r.found;
    printf("%8u %-10s %s  %8.0f ms %8.0f tok/s %8.0f tok/s\n", a->prompt_tokens, label,
           r.found ? "found" : "LOST ", a->first_s * 1e3,
           a->first_s > 0 ? a->prompt_tokens / a->first_s : 0.0,
           decode_s > 0 && a->completion_tokens > 1 ? (a->completion_tokens - 1) / decode_s : 0.0);
    if (o->show || !r.found) {
        printf("           question: %s\n           answer:   %s\n", r.question, a->text);
        if (!r.found)
            printf("           expected: %s (finish stop), finish %s\n", r.expected, a->finish);
    }
    fflush(stdout);
    return TD_OK;
}

static td_status sweep(const struct options *o, const struct td_needle_target *t,
                       struct tally *total, struct td_error *err) {
    static uint32_t found[LIST_MAX * LIST_MAX], asked[LIST_MAX * LIST_MAX];
    for (int i = 0; i < o->n_lengths; i++)
        for (int j = 0; j < o->n_depths; j++) {
            struct tally cell = {0};
            char label[16];
            snprintf(label, sizeof label, "%u %%", o->depths[j]);
            for (uint32_t k = 0; k < o->trials; k++) {
                uint64_t nth = ((uint64_t)i * LIST_MAX + (uint64_t)j) * 1000003 + k;
                struct td_needle_spec spec = {.seed = o->seed + nth * 7919,
                                              .tokens = o->lengths[i],
                                              .depth = o->depths[j],
                                              .look_alikes = o->look_alikes,
                                              .repeats = 1};
                TD_TRY(ask(o, t, label, &spec, &cell, err));
            }
            found[i * o->n_depths + j] = cell.found;
            asked[i * o->n_depths + j] = cell.asked;
            total->found += cell.found;
            total->asked += cell.asked;
        }
    if (!o->svg) return TD_OK;
    struct td_needle_grid grid = {o->lengths, o->depths, o->n_lengths, o->n_depths, found, asked};
    return td_needle_svg(&grid, "Needles found, by prompt length and depth", o->svg, err);
}

static td_status window(const struct options *o, const struct td_needle_target *t,
                        struct tally *tally, struct td_error *err) {
    /* 60 tokens are about the shortest prompt that holds fact, question and some filler */
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

static td_status run(struct options *o, struct tally *tally, struct td_error *err) {
    if (o->ab.setting) {
        o->ab.lengths = o->lengths;
        o->ab.n_lengths = o->n_lengths;
        o->ab.look_alikes = o->look_alikes;
        o->ab.trials = o->trials;
        o->ab.seed = o->seed;
        return td_needle_ab(&o->ab, err);
    }
    struct td_needle_target t;
    td_status st = td_needle_target_init(&t, o->url, o->tokenizer, err);
    if (st == TD_OK) {
        printf("%8s %-10s %s  %11s %14s %14s\n", "tokens", "needle", "     ", "first token",
               "prefill", "decode");
        st = o->window ? window(o, &t, tally, err) : sweep(o, &t, tally, err);
    }
    if (st == TD_OK) printf("needle: %u of %u found\n", tally->found, tally->asked);
    td_needle_target_finish(&t);
    return st;
}

int td_cmd_needle(int argc, char **argv) {
    struct options o = {.lengths = {338, 943, 1850, 4509, 10498, 22016},
                        .n_lengths = 6,
                        .depths = {0, 25, 50, 75, 100},
                        .n_depths = 5,
                        .trials = 1,
                        .seed = 1,
                        .ab.model_dir = "deploy/models/needle"};
    int code = parse(argc, argv, &o);
    if (code >= 0) return code;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    struct td_error err = {.text = ""};
    struct tally tally = {0};
    td_status st = o.key_file ? td_client_use_key(o.key_file, &err) : TD_OK;
    if (st == TD_OK) st = run(&o, &tally, &err);
    if (st != TD_OK) fprintf(stderr, "tandem needle: %s\n", err.text);
    curl_global_cleanup();
    return st == TD_OK && tally.found == tally.asked ? TD_EXIT_OK : TD_EXIT_FAILED;
}
