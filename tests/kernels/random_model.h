/* A checkpoint of random numbers with the model's shapes in small: every kind of layer, engines
 * over it made in milliseconds. Routed experts are NVFP4 with calibrated scales, the rest as
 * official. */
#ifndef TD_TESTS_KERNELS_RANDOM_MODEL_H
#define TD_TESTS_KERNELS_RANDOM_MODEL_H

#include "kernels/engine.h"
#include "tests/kernels/fixture.h"
#include "tests/kernels/model/maker.h"

enum {
    RANDOM_LAYERS = 3, /* SWA, CSA, HCA */
    RANDOM_EXPERTS = 2,
    RANDOM_HIDDEN = 64,
    RANDOM_INNER = 32,
    RANDOM_VOCAB = 8,
    RANDOM_CONTEXT = 4096,
};

/* Fills what maker_init made with MAKER_NVFP4; input scales go to `input_scale` too: of w1 and w3,
 * of w2. Uses the seeded generator. */
void td_test_random_fill(struct maker *m, float input_scale[RANDOM_LAYERS][RANDOM_EXPERTS][2]);
/* Writes the folder as it stands and opens it. */
struct td_model *td_test_random_open(const struct maker *m);
/* ref numerics, FP8 rows, bf16 keys, one slot, two threads; index_topk 4. */
struct td_engine_options td_test_random_options(uint32_t max_context);
int32_t *td_test_random_ids(uint32_t n);

#endif
