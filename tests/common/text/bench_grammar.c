/* Cost of structured output with a real vocabulary: compiling, the first masks of a grammar, masks
 * with a warm cache, and steps of the matcher, each as a share of its limit.
 *
 * usage: bench_grammar TOKENIZER_DIR [VOCAB]    an instance of each schema is encoded and followed */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/text/grammar.h"

enum { MASK_LIMIT_NS = 50000, COMPILE_LIMIT_NS = 50000000, PASSES = 200 };

#define STR "{\"type\":\"string\"}"
#define PERSON                                                                                     \
    "{\"type\":\"object\",\"properties\":{\"name\":" STR ",\"age\":{\"type\":\"integer\",\"minimum\":0},"   \
    "\"email\":{\"type\":\"string\",\"format\":\"email\"},\"tags\":{\"type\":\"array\",\"items\":" STR "},"  \
    "\"address\":{\"type\":\"object\",\"properties\":{\"street\":" STR ",\"city\":" STR ",\"zip\":{\"type\":"  \
    "\"string\",\"pattern\":\"^\\\\d{5}$\"}},\"required\":[\"street\",\"city\",\"zip\"],\"additionalProperties\":" \
    "false},\"note\":{\"type\":\"string\",\"maxLength\":400}},\"required\":[\"name\",\"age\",\"email\",\"tags\","    \
    "\"address\",\"note\"],\"additionalProperties\":false}"
#define WEATHER                                                                                    \
    "{\"type\":\"object\",\"properties\":{\"location\":{\"type\":\"string\",\"description\":\"City\"},\"unit\":{"  \
    "\"type\":\"string\",\"enum\":[\"celsius\",\"fahrenheit\"]},\"days\":{\"type\":\"integer\",\"minimum\":1,"      \
    "\"maximum\":14}},\"required\":[\"location\"],\"additionalProperties\":false}"

static const struct td_grammar_tool tools[] = {
    {"get_weather", 11, WEATHER, sizeof WEATHER - 1},
    {"save_person", 11, PERSON, sizeof PERSON - 1},
};
static const struct {
    const char *name, *text;
    struct td_grammar_spec spec;
} cases[] = {
    {"any object",
     "{\"title\": \"A longer piece of text, with \\\"quotes\\\" and 毕老师\", \"n\": [1, 2.5, {\"deep\": [[], {}, null]}], \"ok\": true}",
     {.content = TD_CONTENT_OBJECT}},
    {"schema",
     "{\"name\": \"Ada Lovelace\", \"age\": 36, \"email\": \"ada@example.org\", \"tags\": [\"analyst\", \"poet\"], \"address\": "
     "{\"street\": \"12 St James's Square\", \"city\": \"London\", \"zip\": \"12345\"}, \"note\": \"The engine might act upon other things "
     "besides number, were objects found whose mutual relations could be expressed.\"}",
     {.content = TD_CONTENT_SCHEMA, .text = PERSON, .n = sizeof PERSON - 1}},
    {"tool calls",
     "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"location\" string=\"true\">"
     "Tübingen, <b>near</b> Stuttgart</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">7</｜DSML｜parameter>\n"
     "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
     {.content = TD_CONTENT_NONE, .tools = tools, .n_tools = 2}},
};

static struct td_grammars *store;
static struct td_tokenizer *tok;
static int32_t vocab, eos, dsml;
static uint32_t *mask;

struct cost {
    uint64_t masks, steps, worst;
    size_t n;
};

/* One answer, mask and step for each token. */
static bool follow(const struct td_grammar *g, const struct td_ids *ids, struct cost *c) {
    struct td_matcher m;
    td_matcher_init(&m, g);
    for (size_t i = 0; i <= ids->n; i++) {
        uint64_t a = td_now_ns();
        td_grammars_mask(store, &m, mask);
        uint64_t b = td_now_ns();
        int32_t id = i < ids->n ? ids->ids[i] : eos;
        bool taken = td_grammars_token(store, &m, id);
        uint64_t e = td_now_ns();
        if (!taken || !(mask[id / 32] >> (id % 32) & 1)) {
            fprintf(stderr, "token %zu of the answer is not allowed\n", i);
            return false;
        }
        c->masks += b - a;
        c->steps += e - b;
        c->worst = b - a > c->worst ? b - a : c->worst;
        c->n++;
    }
    return true;
}

static bool run(size_t i, const struct td_grammars_params *p) {
    struct td_error err = {0};
    struct td_grammar_spec spec = cases[i].spec;
    struct td_bytes out = {0};
    struct td_ids ids = {0};
    const struct td_grammar *g;
    spec.dsml_token = dsml >= 0;
    uint64_t compile = UINT64_MAX;
    for (int k = 0; k < 20; k++) {
        out.n = 0;
        uint64_t a = td_now_ns();
        if (td_grammar_compile(&spec, &out, &err) != TD_OK) {
            fprintf(stderr, "%s\n", err.text);
            return false;
        }
        uint64_t b = td_now_ns();
        compile = b - a < compile ? b - a : compile;
    }
    td_grammars_destroy(store);
    uint64_t a = td_now_ns();
    if (td_grammars_create(p, &store, &err) != TD_OK ||
        td_grammars_open(store, out.p, out.n, &g, &err) != TD_OK ||
        td_tokenizer_encode_added(tok, cases[i].text, strlen(cases[i].text), &ids, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return false;
    }
    uint64_t created = td_now_ns() - a;
    struct cost cold = {0}, warm = {0};
    if (!follow(g, &ids, &cold)) return false;
    for (int k = 0; k < PASSES; k++)
        if (!follow(g, &ids, &warm)) return false;
    td_grammars_close(store, g);
    double mean = (double)warm.masks / (double)warm.n;
    printf("%-11s compile %6.2f ms (%.3f of limit), %zu bytes; store %.0f ms; first pass: mean mask "
           "%.0f us, worst %.1f ms; warm: mask %.2f us (%.3f of limit), step %.2f us\n",
           cases[i].name, (double)compile / 1e6, (double)compile / COMPILE_LIMIT_NS, out.n,
           (double)created / 1e6, (double)cold.masks / (double)cold.n / 1e3, (double)cold.worst / 1e6,
           mean / 1e3, mean / MASK_LIMIT_NS, (double)warm.steps / (double)warm.n / 1e3);
    td_bytes_free(&out);
    td_ids_free(&ids);
    return true;
}

int main(int argc, char **argv) {
    struct td_error err = {0};
    if (argc < 2 || td_tokenizer_load(argv[1], &tok, &err) != TD_OK) {
        fprintf(stderr, "usage: bench_grammar TOKENIZER_DIR [VOCAB] %s\n", err.text);
        return 2;
    }
    vocab = argc > 2 ? (int32_t)strtol(argv[2], NULL, 10) : td_tokenizer_size(tok);
    eos = td_tokenizer_added(tok, "<｜end▁of▁sentence｜>");
    dsml = td_tokenizer_added(tok, "｜DSML｜");
    struct td_grammars_params p = {.t = tok,
                                   .vocab = vocab,
                                   .eos = eos,
                                   .dsml = dsml,
                                   .think_end = td_tokenizer_added(tok, "</think>"),
                                   .grammars_max = 4,
                                   .mask_bytes = 64 << 20};
    mask = calloc((size_t)vocab / 32 + 1, sizeof *mask);
    bool ok = mask;
    for (size_t i = 0; ok && i < sizeof cases / sizeof *cases; i++)
        ok = run(i, &p);
    td_grammars_destroy(store);
    td_tokenizer_destroy(tok);
    free(mask);
    return ok ? 0 : 1;
}
