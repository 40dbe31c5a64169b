/* Sequences for tests of the KV ops: a pool with shuffled pages, slots, and steps that advance
 * every sequence by its own number of tokens. Layers: 0 SWA, 1 CSA, 2 HCA. */
#ifndef TD_TESTS_KERNELS_SEQUENCES_H
#define TD_TESTS_KERNELS_SEQUENCES_H

#include "tests/kernels/fixture.h"

enum { TD_SEQ_MAX = 4, TD_SEQ_PAGES = 24 };

struct td_sequences {
    struct td_kv_layout kv;
    void *pool, *slots;
    uint32_t count;
    uint32_t pos[TD_SEQ_MAX]; /* tokens so far */
    uint32_t pages[TD_SEQ_MAX][TD_SEQ_PAGES];
    struct td_op_run run[TD_SEQ_MAX];
    struct td_op_row *row;
    struct td_op_batch batch;
};

void td_sequences_init(struct td_sequences *s, uint32_t count, enum td_kv_row_dtype row,
                       enum td_kv_key_dtype key);
void td_sequences_finish(struct td_sequences *s);
/* The next step: n[i] tokens of sequence i (0: it does not take part). Fills s->batch. */
void td_sequences_step(struct td_sequences *s, const uint32_t *n);
/* The step was done. */
void td_sequences_advance(struct td_sequences *s, const uint32_t *n);

#endif
