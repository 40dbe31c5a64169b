/* Engines over the bundled model, and one sequence's life in them. */
#ifndef TD_TESTS_KERNELS_ENGINE_FIXTURE_H
#define TD_TESTS_KERNELS_ENGINE_FIXTURE_H

#include "kernels/engine.h"
#include "tests/kernels/fixture.h"

enum { TD_TEST_CONTEXT = 2048, TD_TEST_PAGES = TD_TEST_CONTEXT / TD_KV_PAGE_TOKENS };

/* The bundled checkpoint, opened once per program. */
const struct td_model *td_test_model(void);
/* bf16 rows and keys, one slot, steps of up to 1,024 tokens, two threads. */
struct td_engine_options td_test_options(void);
struct td_engine *td_test_engine(const struct td_engine_options *o);

/* Random ids of the model's vocabulary; freed by the caller. */
int32_t *td_test_ids(uint32_t n);
/* Positions pos..pos+n-1 of slot 0 on pages 0.. in steps of `chunk`; logits of the last one. */
const float *td_test_feed(struct td_engine *e, const int32_t *ids, uint32_t pos, uint32_t n,
                          uint32_t chunk);
size_t td_test_logit_bytes(void);
/* A copy of logits to keep past the next step. */
float *td_test_keep(const float *logits);
/* Pool and slot 0 of two engines of one layout hold the same bytes. */
void td_test_same_state(struct td_engine *a, struct td_engine *b);

#endif
