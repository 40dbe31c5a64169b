/* See guide.h. */
#include "kernels/guide.h"

#include <stdlib.h>
#include <string.h>

/* The guide, and behind it what it points to. */
struct block {
    struct td_guide guide;
    uint32_t words[];
};

static const void *add(uint32_t **at, const void *from, uint32_t n) {
    void *to = *at;
    if (n == 0) return NULL;
    memcpy(to, from, n * sizeof(uint32_t));
    *at += n;
    return to;
}

td_status td_guide_take(struct td_sampling *s, struct td_error *err) {
    static const struct td_guide none;
    const struct td_guide *g = s->guide ? s->guide : &none;
    size_t grammar = ((size_t)g->grammar_n + 3) / 4;
    size_t words = 2 * (size_t)g->n_bias + g->n_prompt_ids + s->n_said + grammar;
    if (words == 0) {
        s->guide = NULL;
        return TD_OK;
    }
    struct block *b = malloc(sizeof *b + words * sizeof *b->words);
    if (!b) return td_fail(err, TD_NO_MEMORY, "no memory for %zu ids and biases", words);
    uint32_t *at = b->words;
    b->guide = *g;
    b->guide.bias_id = add(&at, g->bias_id, g->n_bias);
    b->guide.bias = add(&at, g->bias, g->n_bias);
    b->guide.prompt_id = add(&at, g->prompt_id, g->n_prompt_ids);
    s->said = add(&at, s->said, s->n_said);
    b->guide.grammar = g->grammar_n ? (const uint8_t *)at : NULL; /* read as words */
    if (g->grammar_n) memcpy(at, g->grammar, g->grammar_n);
    s->guide = &b->guide;
    return TD_OK;
}

td_status td_guide_take_prompt(struct td_sampling *s, const int32_t **ids, uint32_t n,
                               struct td_error *err) {
    TD_TRY(td_guide_take(s, err));
    if (!*ids) return TD_OK;
    int32_t *copy = malloc(n * sizeof *copy);
    if (!copy) {
        td_guide_give(s->guide);
        return td_fail(err, TD_NO_MEMORY, "no memory for %u ids", n);
    }
    memcpy(copy, *ids, n * sizeof *copy);
    *ids = copy;
    return TD_OK;
}

void td_guide_give(const struct td_guide *g) {
    free((struct td_guide *)(uintptr_t)g);
}
