/* See api_guide.h. */
#include "router/api_guide.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A key of logit_bias: an id in decimal. */
static bool is_id(const char *key, int32_t vocab, int32_t *ret) {
    char *end;
    errno = 0;
    long id = strtol(key, &end, 10);
    if (*key < '0' || *key > '9' || *end || errno || id >= vocab) return false;
    *ret = (int32_t)id;
    return true;
}

static td_status read_bias(const struct td_fields *f, int32_t vocab, struct td_guide *g,
                           int32_t *ids, float *bias) {
    const json_t *object = td_field(f, "logit_bias");
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)object, key, v) {
        struct td_fields b = {object, "logit_bias.", f->e};
        double value = 0;
        int32_t id;
        if (!is_id(key, vocab, &id))
            return td_api_refuse(f->e, 400, NULL, "logit_bias",
                                 "logit_bias: expected token ids from 0 to %d as keys, found "
                                 "'%.40s'",
                                 vocab - 1, key);
        for (uint32_t i = 0; i < g->n_bias; i++)
            if (ids[i] == id)
                return td_api_refuse(f->e, 400, NULL, "logit_bias",
                                     "logit_bias: id %d is there twice", id);
        if (!json_is_number(v)) return td_field_wrong(&b, key, "a number from -100 to 100");
        TD_TRY(td_field_num(&b, key, -100, 100, &value));
        ids[g->n_bias] = id;
        bias[g->n_bias++] = (float)value;
    }
    g->bias_id = ids;
    g->bias = bias;
    return TD_OK;
}

static td_status read_prompt(const struct td_ids *prompt, int32_t vocab, struct td_guide *g,
                             int32_t *ids, struct td_api_error *e) {
    uint8_t *seen = calloc((size_t)vocab, 1);
    if (!seen) return td_api_no_memory(e);
    for (size_t i = 0; i < prompt->n; i++)
        seen[prompt->ids[i]] = 1;
    for (int32_t id = 0; id < vocab; id++)
        if (seen[id]) ids[g->n_prompt_ids++] = id;
    free(seen);
    g->prompt_id = ids;
    return TD_OK;
}

td_status td_api_guide_make(const json_t *root, struct td_api_params *p,
                            const struct td_ids *prompt, int32_t vocab,
                            const struct td_bytes *grammar, struct td_api_guide *ret,
                            struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    const json_t *bias = NULL;
    float repetition = p->sampling.repetition_penalty;
    *ret = (struct td_api_guide){0};
    TD_TRY(td_field_object(&f, "logit_bias", &bias));
    size_t n = json_object_size(bias);
    if (n > TD_LOGIT_BIAS_MAX)
        return td_api_refuse(e, 400, NULL, "logit_bias",
                             "logit_bias: expected at most %d ids, found %zu", TD_LOGIT_BIAS_MAX,
                             n);
    bool counts_prompt = repetition != 0 && repetition != 1;
    size_t most = counts_prompt ? prompt->n < (size_t)vocab ? prompt->n : (size_t)vocab : 0;
    if (grammar->n) {
        ret->guide.grammar_n = (uint32_t)grammar->n;
        ret->guide.grammar = (const uint8_t *)grammar->p;
        p->sampling.guide = &ret->guide;
    }
    if (n + most == 0) return TD_OK;
    int32_t *ids = ret->memory = malloc(n * sizeof(float) + (n + most) * sizeof *ids);
    if (!ids) return td_api_no_memory(e);
    if (n) TD_TRY(read_bias(&f, vocab, &ret->guide, ids, (float *)(ids + n + most)));
    if (most) TD_TRY(read_prompt(prompt, vocab, &ret->guide, ids + n, e));
    p->sampling.guide = &ret->guide;
    return TD_OK;
}

void td_api_guide_free(struct td_api_guide *g) {
    free(g->memory);
    *g = (struct td_api_guide){0};
}
