/* Workers of several ranks: engines, two sequences' lives in them, and handoffs between them. */
#ifndef TD_TESTS_KERNELS_RANKS_FIXTURE_H
#define TD_TESTS_KERNELS_RANKS_FIXTURE_H

#include "kernels/engine_parts.h"
#include "tests/kernels/engine_fixture.h"

enum { SEQUENCES = 2, DECODE = 4, TOPK = 12, MOST_PAGES = 16 };

/* Shapes that 8 ranks can share. */
struct td_model_config td_ranks_config(uint32_t lora, uint32_t experts);
/* Of a worker of `ranks` ranks with sequences of up to `context` tokens. */
struct td_engine_options td_ranks_options(const struct td_engine_options *as, uint32_t ranks,
                                          uint32_t context);
struct td_engine *td_ranks_engine(const struct td_model *m, const struct td_engine_options *o);
void td_ranks_ok(td_status st, const struct td_error *err);

/* What a worker gave: logits and choices of every step that wanted them, by sequence. */
struct td_record {
    uint32_t n, vocab, chosen;
    float *logits;
    int32_t *entries;
};

/* Prompts of `tokens` and of half as many side by side in steps of `chunk` rows of each, then
 * decode together; the last step of each prompt and every decode step are recorded. */
struct td_record td_ranks_life(struct td_engine *e, const int32_t *ids, uint32_t tokens,
                               uint32_t chunk);
void td_ranks_drop(struct td_record *r);
void td_ranks_same(const struct td_record *a, const struct td_record *b);

/* A prompt of n tokens from slot 0 and pages 0.. of `from` to those of `to`, block by block; pages
 * from `spare` on get a damaged one, which is refused. */
void td_ranks_hand_over(struct td_engine *from, struct td_engine *to, uint32_t n, uint32_t spare);

/* Decodes ids[n] behind the n tokens of slot 0, with its slot and its pages (half of all) copied to
 * others first as for a second choice; ret [vocab] logits. */
void td_ranks_go_on(struct td_engine *e, const int32_t *ids, uint32_t n, float *ret);

#endif
