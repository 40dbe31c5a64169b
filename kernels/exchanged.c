/* See exchanged.h. */
#include "kernels/exchanged.h"

#include <stdlib.h>

#define X(name)                                                                                    \
    static void skip_##name(const struct td_device *d, const struct td_##name##_args *a) {         \
        (void)d;                                                                                   \
        (void)a;                                                                                   \
    }
TD_OPS_MAP(X)
#undef X

#define X(name) .name = skip_##name,
static const struct td_ops skip = {.name = "none", TD_OPS_MAP(X)};
#undef X

static void count(const struct td_device *d, uint64_t bytes) {
    uint64_t *sum = d->state;
    *sum += bytes;
}

/* Each rank sums a part and has the others' from them. */
static void count_reduce(const struct td_device *d, const struct td_all_reduce_args *a) {
    count(d, 2 * sizeof *a->x * a->n * a->dim / d->ranks * (d->ranks - 1));
}

static void count_gather(const struct td_device *d, const struct td_all_gather_args *a) {
    count(d, a->at[d->ranks] - (a->at[d->rank + 1] - a->at[d->rank]));
}

static void count_all_to_all(const struct td_device *d, const struct td_all_to_all_args *a) {
    count(d, a->bytes * (d->ranks - 1));
}

/* A planned model has no arrays of matrices; here those that the pass looks at, as they would be:
 * whether inputs are rounded decides over what ranks merge. */
static bool add_arrays(struct td_packed_model *m, struct td_matrix **ret) {
    uint32_t layers = m->model->config.layers, groups = m->share.groups;
    struct td_packed_layer *layer = calloc(layers, sizeof *layer);
    struct td_matrix *array = calloc((size_t)layers * groups, sizeof *array);
    for (uint32_t l = 0; layer && array && l < layers; l++) {
        enum td_weight_format format = m->model->layer[l].wo_b.format;
        struct td_matrix *own = array + (size_t)l * groups;
        own->fp8_input = format == TD_W_FP8_BLOCK || format == TD_W_FP4;
        layer[l] = m->layer[l];
        layer[l].wo_a = layer[l].wo_b = layer[l].w1 = layer[l].w2 = layer[l].w3 = own;
    }
    m->layer = layer;
    *ret = array;
    return layer && array;
}

td_status td_forward_exchanged(const struct td_forward *f, uint64_t *ret, struct td_error *err) {
    static const struct td_backend counting = {.name = "none",
                                               .all_reduce = count_reduce,
                                               .all_gather = count_gather,
                                               .all_to_all = count_all_to_all};
    struct td_packed_model model = *f->model;
    struct td_forward walk = *f;
    struct td_matrix *array;
    bool ok = add_arrays(&model, &array);
    *ret = 0;
    walk.model = &model;
    walk.ops = &skip;
    walk.layer_done = NULL;
    walk.device = (struct td_device){
        .backend = &counting, .state = ret, .rank = f->device.rank, .ranks = f->device.ranks};
    if (ok) td_forward_step(&walk);
    free(model.layer);
    free(array);
    return ok ? TD_OK : td_fail(err, TD_NO_MEMORY, "no memory to walk through a step");
}
