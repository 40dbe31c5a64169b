/* What grammar_compare.py talks to: compiles grammars, matches documents, walks through masks.
 *
 * usage: grammar_main TOKENIZER_DIR    one request a line, fields separated by tabs, hexadecimal:
 *   compile KIND TEXT [TOOL SCHEMA]...    KIND: schema regex object calls; mark as a token
 *   match TEXT                            tokens' bytes, {D} spelled as the mark; 1 or 0
 *   walk SEED STEPS                       a random answer through masks; its text, or "-"
 * Answers: "ok", or the sentence of the failure; then what is asked. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/text/grammar.h"

enum { VOCAB_MAX = 129280, FIELDS_MAX = 64, LINE_MAX_BYTES = 1 << 20 };

static struct td_grammars *store;
static struct td_tokenizer *tok;
static const struct td_grammar *g;
static int32_t vocab, eos, dsml;

static size_t unhex(char *p) {
    size_t n = strlen(p) / 2;
    for (size_t i = 0; i < n; i++) {
        char two[3] = {p[2 * i], p[2 * i + 1], 0};
        p[i] = (char)strtol(two, NULL, 16);
    }
    p[n] = 0;
    return n;
}

static void compile(char **f, size_t n) {
    struct td_grammar_tool tools[FIELDS_MAX];
    struct td_error err = {0};
    struct td_bytes out = {0};
    struct td_grammar_spec s = {.tools = tools, .dsml_token = dsml >= 0};
    s.content = !strcmp(f[1], "schema")   ? TD_CONTENT_SCHEMA
                : !strcmp(f[1], "regex")  ? TD_CONTENT_REGEX
                : !strcmp(f[1], "object") ? TD_CONTENT_OBJECT
                                          : TD_CONTENT_NONE;
    s.n = unhex(f[2]);
    s.text = f[2];
    for (size_t i = 3; i + 1 < n; i += 2, s.n_tools++) {
        struct td_grammar_tool *t = &tools[s.n_tools];
        t->name_n = unhex(f[i]);
        t->name = f[i];
        t->schema_n = unhex(f[i + 1]);
        t->schema = f[i + 1];
    }
    uint64_t begin = td_now_ns();
    td_status st = td_grammar_compile(&s, &out, &err);
    uint64_t end = td_now_ns();
    if (g) td_grammars_close(store, g);
    g = NULL;
    if (st == TD_OK) st = td_grammars_open(store, out.p, out.n, &g, &err);
    if (st == TD_OK)
        printf("ok %zu %.3f\n", out.n, (double)(end - begin) / 1e6);
    else
        printf("%s: %s\n", td_status_name(st), err.text);
    td_bytes_free(&out);
}

static bool take_text(struct td_matcher *m, const char *p, size_t n) {
    static const char mark[] = "｜DSML｜";
    for (size_t i = 0; i < n; i++) {
        if (dsml >= 0 && n - i >= sizeof mark - 1 && memcmp(p + i, mark, sizeof mark - 1) == 0) {
            if (!td_grammars_token(store, m, dsml)) return false;
            i += sizeof mark - 2;
        } else if (!td_matcher_bytes(m, p + i, 1)) {
            return false;
        }
    }
    return td_matcher_may_end(m);
}

static uint64_t random_state;
static uint32_t random_below(uint32_t n) {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ z >> 31) >> 32) % n;
}

/* Mostly a random allowed token; when the answer grows long, one that keeps it short. */
static int32_t choose(const uint32_t *mask, bool hurry) {
    static int32_t allowed[VOCAB_MAX];
    uint32_t n = 0;
    for (int32_t id = 0; id < vocab; id++)
        if (mask[id / 32] >> (id % 32) & 1) allowed[n++] = id;
    if (n == 0) return -1;
    if (mask[eos / 32] >> (eos % 32) & 1 && (hurry || random_below(3) == 0)) return eos;
    static const char closing[] = "\"}]e,:0";
    for (size_t k = 0; hurry && closing[k]; k++)
        for (uint32_t i = 0; i < n; i++) {
            size_t len;
            const char *p = td_tokenizer_bytes(tok, allowed[i], &len);
            if (len == 1 && *p == closing[k] && random_below(4)) return allowed[i];
        }
    /* A third of the steps takes a short token, or strings would be all there is. */
    for (int k = 0; k < 40 && random_below(3); k++) {
        int32_t id = allowed[random_below(n)];
        size_t len;
        (void)td_tokenizer_bytes(tok, id, &len);
        if (len <= 2) return id;
    }
    return allowed[random_below(n)];
}

static void walk(uint64_t seed, int steps) {
    static uint32_t mask[VOCAB_MAX / 32 + 1];
    struct td_matcher m;
    struct td_bytes text = {0};
    random_state = seed;
    td_matcher_init(&m, g);
    for (int i = 0; i < steps && !m.ended; i++) {
        td_grammars_mask(store, &m, mask);
        int32_t id = choose(mask, i > 60);
        if (id < 0 || !td_grammars_token(store, &m, id)) {
            printf("stuck\n");
            td_bytes_free(&text);
            return;
        }
        size_t n;
        const char *p = td_tokenizer_bytes(tok, id, &n);
        if (id != eos) td_bytes_add(&text, p, n);
    }
    if (!m.ended) printf("-");
    for (size_t i = 0; m.ended && i < text.n; i++)
        printf("%02x", (unsigned char)text.p[i]);
    printf("\n");
    td_bytes_free(&text);
}

int main(int argc, char **argv) {
    static char line[LINE_MAX_BYTES];
    struct td_error err = {0};
    if (argc != 2 || td_tokenizer_load(argv[1], &tok, &err) != TD_OK) {
        fprintf(stderr, "usage: grammar_main TOKENIZER_DIR %s\n", err.text);
        return 2;
    }
    vocab = td_tokenizer_size(tok);
    eos = td_tokenizer_added(tok, "<｜end▁of▁sentence｜>");
    dsml = td_tokenizer_added(tok, "｜DSML｜");
    struct td_grammars_params p = {.t = tok,
                                   .vocab = vocab,
                                   .eos = eos,
                                   .dsml = dsml,
                                   .think_end = td_tokenizer_added(tok, "</think>"),
                                   .grammars_max = 4,
                                   .mask_bytes = 32 << 20};
    if (vocab > VOCAB_MAX || td_grammars_create(&p, &store, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        char *f[FIELDS_MAX] = {0}, *at = line;
        size_t n = 0;
        line[strcspn(line, "\n")] = 0;
        while (n < FIELDS_MAX && (f[n] = strsep(&at, "\t")))
            n++;
        struct td_matcher m;
        if (!strcmp(f[0], "compile") && n >= 3) {
            compile(f, n);
        } else if (!strcmp(f[0], "match") && n == 2 && g) {
            size_t k = unhex(f[1]);
            td_matcher_init(&m, g);
            printf("%d\n", take_text(&m, f[1], k));
        } else if (!strcmp(f[0], "walk") && n == 3 && g) {
            walk(strtoull(f[1], NULL, 10), (int)strtol(f[2], NULL, 10));
        } else {
            printf("unknown request\n");
        }
        fflush(stdout);
    }
    td_grammars_destroy(store);
    td_tokenizer_destroy(tok);
    return 0;
}
