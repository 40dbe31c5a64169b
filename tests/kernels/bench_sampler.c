/* What shaping the choice of a token costs beside choosing it: bias, penalties, a grammar's mask,
 * in microseconds a token and as a share of plain sampling in the same run. The mask is computed
 * beside the step (td_samplers_follow); what is left of it there is the last column's business.
 *
 * usage: bench_sampler TOKENIZER_DIR [VOCAB [TOKENS]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/text/chat.h"
#include "common/text/grammar.h"
#include "kernels/sampler.h"

static const char schema[] =
    "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"name\",\"age\",\"items\"],"
    "\"properties\":{\"name\":{\"type\":\"string\"},\"age\":{\"type\":\"integer\"},\"items\":{"
    "\"type\":"
    "\"array\",\"items\":{\"type\":\"object\",\"required\":[\"id\",\"kind\"],\"properties\":{"
    "\"id\":{"
    "\"type\":\"string\",\"maxLength\":20},\"kind\":{\"enum\":[\"red\",\"green\",\"blue\"]}}}}}}";

static struct td_samplers samplers;
static struct td_chat chat;
static uint32_t vocab = 129280, tokens = 400;
static float *rows[8]; /* random logits, one after the other */

struct cost {
    double follow, draw, worst; /* us: of follow and draw a token, of the slowest follow */
    uint32_t n;
};

static void need(td_status st, const struct td_error *err) {
    if (st == TD_OK) return;
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

/* One answer after the other until enough tokens are drawn. */
static struct cost measure(const struct td_sampling *s, uint64_t *owner) {
    struct cost c = {0};
    int32_t fed = -1;
    for (uint32_t at = 0; c.n < tokens; c.n++, at++) {
        struct td_worker_sample p = {s, at, 0, 0, *owner, fed};
        struct td_token t;
        struct td_error err;
        uint64_t a = td_now_ns();
        td_samplers_follow(&samplers, &p, 1);
        td_samplers_wait(&samplers);
        uint64_t b = td_now_ns();
        need(td_samplers_draw(&samplers, rows[c.n % 8], &p, &t, &err), &err);
        uint64_t e = td_now_ns();
        c.follow += (double)(b - a) * 1e-3;
        c.draw += (double)(e - b) * 1e-3;
        if ((double)(b - a) * 1e-3 > c.worst) c.worst = (double)(b - a) * 1e-3;
        fed = t.id;
        if (fed != chat.eos && at < 300) continue;
        fed = -1;
        at = UINT32_MAX;
        ++*owner;
    }
    ++*owner;
    return c;
}

static struct td_guide compiled(enum td_grammar_content content, struct td_bytes *bytes) {
    const struct td_grammar_spec spec = {
        .content = content, .text = schema, .n = sizeof schema - 1, .dsml_token = chat.dsml >= 0};
    struct td_error err;
    uint64_t a = td_now_ns();
    need(td_grammar_compile(&spec, bytes, &err), &err);
    printf("compiling: %.0f us, %zu bytes\n", (double)(td_now_ns() - a) * 1e-3, bytes->n);
    return (struct td_guide){.grammar_n = (uint32_t)bytes->n, .grammar = (const uint8_t *)bytes->p};
}

static void load(const char *dir) {
    struct td_tokenizer *t;
    struct td_error err;
    need(td_tokenizer_load(dir, &t, &err), &err);
    td_chat_init(&chat, t);
    const struct td_samplers_params p = {
        .slots = 1, .vocab = vocab, .eos = chat.eos, .tokenizer = t, .mask_bytes = 64u << 20};
    uint64_t a = td_now_ns();
    need(td_samplers_init(&samplers, &p, &err), &err);
    printf("start: %.0f ms, %.1f MB at most for grammars of one slot\n",
           (double)(td_now_ns() - a) * 1e-6,
           (double)td_samplers_grammar_bytes(1, vocab, p.mask_bytes) * 1e-6);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_sampler TOKENIZER_DIR [VOCAB [TOKENS]]\n");
        return 2;
    }
    if (argc > 2) vocab = (uint32_t)strtoul(argv[2], NULL, 10);
    if (argc > 3) tokens = (uint32_t)strtoul(argv[3], NULL, 10);
    load(argv[1]);
    uint64_t x = 1, owner = 1;
    for (uint32_t r = 0; r < 8; r++) {
        rows[r] = malloc(vocab * sizeof *rows[r]);
        for (uint32_t i = 0; i < vocab; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            rows[r][i] = (float)((int32_t)(x >> 40 & 2047) - 1024) / 128;
        }
    }
    struct td_bytes object = {0}, form = {0};
    const int32_t id[1] = {7};
    const float bias[1] = {1};
    const struct td_guide biased = {.n_bias = 1, .bias_id = id, .bias = bias};
    const struct td_guide any = compiled(TD_CONTENT_OBJECT, &object);
    const struct td_guide person = compiled(TD_CONTENT_SCHEMA, &form);
    const struct td_sampling base = {.top_p = 1, .temperature = 1, .seed = 3};
    const struct {
        const char *name;
        const struct td_guide *guide;
        float frequency;
    } ways[] = {{"plain", NULL, 0},
                {"logit_bias", &biased, 0},
                {"frequency_penalty", NULL, 0.5f},
                {"any object, cold", &any, 0},
                {"any object, known", &any, 0},
                {"a schema, cold", &person, 0},
                {"a schema, known", &person, 0}};
    double plain = 0;
    printf("%-20s %10s %10s %10s %10s\n", "", "follow us", "slowest", "draw us", "of plain");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        struct td_sampling s = base;
        s.guide = ways[i].guide;
        s.frequency_penalty = ways[i].frequency;
        struct cost c = measure(&s, &owner);
        if (i == 0) plain = c.draw / c.n;
        printf("%-20s %10.1f %10.1f %10.1f %10.2f\n", ways[i].name, c.follow / c.n, c.worst,
               c.draw / c.n, c.draw / c.n / plain);
    }
    for (uint32_t r = 0; r < 8; r++)
        free(rows[r]);
    td_bytes_free(&object);
    td_bytes_free(&form);
    td_samplers_finish(&samplers);
    return 0;
}
