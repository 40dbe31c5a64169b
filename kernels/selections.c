/* See selections.h. */
#include "kernels/selections.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/bump.h"

static void plan(struct td_selections *s, struct td_bump *b) {
    size_t rows = (size_t)s->capture.runs * s->capture.csa_layers;
    for (int i = 0; i < 2; i++) {
        s->sets[i].entry = td_bump_take(b, rows * s->capture.topk * sizeof *s->sets[i].entry);
        s->sets[i].count = td_bump_take(b, rows * sizeof *s->sets[i].count);
        s->sets[i].of = td_bump_take(b, s->samples * sizeof *s->sets[i].of);
    }
}

size_t td_selections_bytes(const struct td_kv_layout *l, uint32_t topk, uint32_t runs,
                           uint32_t samples) {
    struct td_selections s = {.capture = {.runs = runs, .csa_layers = l->csa_layers, .topk = topk},
                              .samples = samples};
    struct td_bump bump = {0};
    plan(&s, &bump);
    return bump.used;
}

td_status td_selections_init(struct td_selections *s, const struct td_kv_layout *l, uint32_t topk,
                             uint32_t runs, uint32_t samples, struct td_error *err) {
    struct td_bump bump = {0};
    *s = (struct td_selections){
        .capture = {.runs = runs, .csa_layers = l->csa_layers, .topk = topk}, .samples = samples};
    for (uint32_t i = 0, n = 0; i < l->layers; i++)
        if (l->ratio[i] == TD_CSA_RATIO) s->layer[n++] = i;
    plan(s, &bump);
    s->bytes = bump.used;
    s->memory = aligned_alloc(64, s->bytes);
    if (!s->memory)
        return td_fail(err, TD_NO_MEMORY, "selections of %u runs: no memory for %zu bytes", runs,
                       s->bytes);
    memset(s->memory, 0, s->bytes);
    bump = (struct td_bump){s->memory, 0};
    plan(s, &bump);
    return TD_OK;
}

void td_selections_finish(struct td_selections *s) {
    free(s->memory);
    *s = (struct td_selections){0};
}

struct td_capture *td_selections_begin(struct td_selections *s) {
    s->set ^= 1;
    s->row = UINT32_MAX;
    s->capture.entries = s->sets[s->set].entry;
    return &s->capture;
}

/* Moves a row's entries together; where one layer holds topk of them, the next begins there. */
static struct td_selection dense(struct td_selections *s, uint32_t row) {
    uint32_t layers = s->capture.csa_layers, topk = s->capture.topk;
    int32_t *base = s->sets[s->set].entry + (size_t)row * layers * topk, *to = base;
    uint32_t *count = s->sets[s->set].count + (size_t)row * layers;
    for (uint32_t l = 0; l < layers; l++) {
        const int32_t *from = base + (size_t)l * topk;
        uint32_t n = 0;
        while (n < topk && from[n] >= 0)
            n++;
        memmove(to, from, n * sizeof *to);
        to += n;
        count[l] = n;
    }
    return (struct td_selection){layers, (uint32_t)(to - base), s->layer, count,
                                 (const uint32_t *)base};
}

void td_selections_add(struct td_selections *s, uint32_t i, uint32_t row) {
    struct td_selection *of = s->sets[s->set].of;
    of[i] = row == s->row ? of[i - 1] : dense(s, row);
    s->row = row;
}

const struct td_selection *td_selections_of(const struct td_selections *s) {
    return s->sets[s->set].of;
}
