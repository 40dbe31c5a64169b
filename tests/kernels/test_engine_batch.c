/* 64 sequences that join and leave at random steps, prefill and decode mixed: every logit of each
 * is bit-equal to the sequence running alone. */
#include "tests/kernels/engine_fixture.h"

enum {
    SEQS = 64,
    SLOTS = 20,
    MAX_PROMPT = 330,
    DECODE = 6,
    MAX_STEP = 256,
    PAGES = 64,
    SEQ_PAGES = 2
};

struct seq {
    uint32_t prompt, total, pos;
    int32_t *ids; /* [total] */
    uint32_t slot, pages[SEQ_PAGES];
    uint64_t want[DECODE + 1]; /* hash of the logits after the prompt and each further token */
    bool active;
};

static struct seq seqs[SEQS];

static uint64_t hash_logits(const float *logits) {
    const uint8_t *p = (const uint8_t *)logits;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < td_test_logit_bytes(); i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static void run_alone(struct td_engine *e, struct seq *s) {
    for (uint32_t i = 0; s->prompt + i <= s->total; i++)
        s->want[i] = hash_logits(i ? td_test_feed(e, s->ids, s->prompt + i - 1, 1, 1)
                                   : td_test_feed(e, s->ids, 0, s->prompt, MAX_STEP));
}

/* Free slots and pages, handed out and taken back in random order. */
static uint32_t free_slot[SLOTS], free_slots, free_page[PAGES], free_pages;

static uint32_t take_random(uint32_t *list, uint32_t *count) {
    uint32_t i = td_test_below(*count), id = list[i];
    list[i] = list[--*count];
    return id;
}

static void join(struct seq *s) {
    s->active = true;
    s->pos = 0;
    s->slot = take_random(free_slot, &free_slots);
    for (uint32_t p = 0; p < SEQ_PAGES; p++)
        s->pages[p] = take_random(free_page, &free_pages);
}

static void leave(struct seq *s) {
    s->active = false;
    free_slot[free_slots++] = s->slot;
    for (uint32_t p = 0; p < SEQ_PAGES; p++)
        free_page[free_pages++] = s->pages[p];
}

/* A random piece of the prompt, or one token. */
static uint32_t piece(const struct seq *s, uint32_t room) {
    uint32_t n = s->pos < s->prompt ? 1 + td_test_below(200) : 1;
    if (s->pos < s->prompt && n > s->prompt - s->pos) n = s->prompt - s->pos;
    return n < room ? n : room;
}

static uint32_t step(struct td_engine *e) {
    struct td_run run[SLOTS];
    struct seq *who[SLOTS];
    uint32_t n = 0, rows = 0, left = 0;
    const float *logits;
    struct td_error err = {0};
    for (uint32_t i = 0; i < SEQS; i++) {
        struct seq *s = &seqs[(i * 29 + 7) % SEQS];
        if (!s->active || rows == MAX_STEP || td_test_below(4) == 0) continue;
        uint32_t m = piece(s, MAX_STEP - rows);
        run[n] = (struct td_run){.slot = s->slot,
                                 .pos = s->pos,
                                 .n = m,
                                 .ids = s->ids + s->pos,
                                 .pages = s->pages,
                                 .want_logits = s->pos + m >= s->prompt};
        who[n++] = s;
        rows += m;
    }
    if (n == 0) return 0;
    if (td_engine_step(e, run, n, &logits, NULL, &err) != TD_OK) fail_msg("%s", err.text);
    for (uint32_t i = 0; i < n; i++) {
        struct seq *s = who[i];
        s->pos += run[i].n;
        if (!run[i].want_logits) continue;
        if (hash_logits(logits) != s->want[s->pos - s->prompt])
            fail_msg("sequence of %u tokens, position %u: differs from running alone", s->prompt,
                     s->pos);
        logits += td_test_logit_bytes() / sizeof *logits;
        if (s->pos == s->total) {
            leave(s);
            left++;
        }
    }
    return left;
}

static void each_equals_itself_alone(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    struct td_engine *alone = td_test_engine(&o);
    for (uint32_t i = 0; i < SEQS; i++) {
        struct seq *s = &seqs[i];
        s->prompt = 1 + (i % 4 ? td_test_below(70) : td_test_below(MAX_PROMPT));
        s->total = s->prompt + td_test_below(DECODE + 1);
        s->ids = td_test_ids(s->total);
        run_alone(alone, s);
    }
    td_engine_destroy(alone);
    o.slots = o.max_runs = SLOTS;
    o.pages = PAGES;
    o.max_tokens = MAX_STEP;
    struct td_engine *e = td_test_engine(&o);
    for (free_slots = 0; free_slots < SLOTS; free_slots++)
        free_slot[free_slots] = free_slots;
    for (free_pages = 0; free_pages < PAGES; free_pages++)
        free_page[free_pages] = free_pages;
    uint32_t next = 0, finished = 0, steps = 0;
    for (; finished < SEQS; steps++) {
        assert_true(steps < 20000);
        while (next < SEQS && free_slots > 0 && free_pages >= SEQ_PAGES && td_test_below(3) != 0)
            join(&seqs[next++]);
        finished += step(e);
    }
    print_message("%u sequences in %u steps\n", (uint32_t)SEQS, steps);
    td_engine_destroy(e);
    for (uint32_t i = 0; i < SEQS; i++)
        free(seqs[i].ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_equals_itself_alone)};
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
