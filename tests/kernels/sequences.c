/* See sequences.h. */
#include "tests/kernels/sequences.h"

void td_sequences_init(struct td_sequences *s, uint32_t count, enum td_kv_row_dtype row,
                       enum td_kv_key_dtype key) {
    static const uint8_t ratio[] = {0, TD_CSA_RATIO, TD_HCA_RATIO};
    struct td_error err;
    uint32_t ids[TD_SEQ_MAX * TD_SEQ_PAGES], n = count * TD_SEQ_PAGES;
    memset(s, 0, sizeof *s);
    s->count = count;
    assert_int_equal(td_kv_layout_init(&s->kv, 3, ratio, row, key, n, 1, &err), TD_OK);
    s->pool = td_test_bytes(s->kv.pool_bytes);
    s->slots = td_test_bytes(s->kv.slot_bytes * count);
    memset(s->pool, 0xff, s->kv.pool_bytes); /* what earlier users left must never matter */
    memset(s->slots, 0xff, s->kv.slot_bytes * count);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = td_test_below(i + 1);
        ids[i] = ids[j];
        ids[j] = i;
    }
    for (uint32_t i = 0; i < n; i++)
        s->pages[i / TD_SEQ_PAGES][i % TD_SEQ_PAGES] = ids[i];
    s->row = malloc((size_t)n * TD_KV_PAGE_TOKENS * sizeof *s->row);
    assert_non_null(s->row);
}

void td_sequences_finish(struct td_sequences *s) {
    free(s->pool);
    free(s->slots);
    free(s->row);
}

void td_sequences_step(struct td_sequences *s, const uint32_t *n) {
    uint32_t rows = 0, runs = 0, max_pos = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        if (n[i] == 0) continue;
        assert_true(s->pos[i] + n[i] <= TD_SEQ_PAGES * TD_KV_PAGE_TOKENS);
        s->run[runs] = (struct td_op_run){.first = rows,
                                          .n = n[i],
                                          .pos = s->pos[i],
                                          .pages = s->pages[i],
                                          .slot = (uint8_t *)s->slots + s->kv.slot_bytes * i};
        for (uint32_t t = 0; t < n[i]; t++)
            s->row[rows++] = (struct td_op_row){runs, s->pos[i] + t};
        if (s->pos[i] + n[i] - 1 > max_pos) max_pos = s->pos[i] + n[i] - 1;
        runs++;
    }
    s->batch = (struct td_op_batch){.kv = &s->kv,
                                    .pool = s->pool,
                                    .row = s->row,
                                    .run = s->run,
                                    .n = rows,
                                    .runs = runs,
                                    .max_pos = max_pos};
}

void td_sequences_advance(struct td_sequences *s, const uint32_t *n) {
    for (uint32_t i = 0; i < s->count; i++)
        s->pos[i] += n[i];
}
