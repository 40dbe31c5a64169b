/* See ranks_fixture.h. */
#include "tests/kernels/ranks_fixture.h"

static struct td_error err;

void td_ranks_ok(td_status st, const struct td_error *e) {
    if (st != TD_OK) fail_msg("%s", e->text);
}

struct td_model_config td_ranks_config(uint32_t lora, uint32_t experts) {
    static const enum td_layer_kind kind[] = {TD_LAYER_SWA, TD_LAYER_CSA, TD_LAYER_HCA,
                                              TD_LAYER_CSA};
    struct td_model_config c = td_test_model()->config;
    c.heads = lora == 128 ? 8 : 16;
    c.o_groups = 8;
    c.o_lora_rank = lora;
    c.experts = experts;
    c.vocab = 1003; /* no multiple of anything */
    c.layers = sizeof kind / sizeof *kind;
    memcpy(c.kind, kind, sizeof kind);
    return c;
}

struct td_engine_options td_ranks_options(const struct td_engine_options *as, uint32_t ranks,
                                          uint32_t context) {
    struct td_engine_options o = *as;
    o.index_topk = TOPK;
    o.max_context = context;
    o.slots = o.max_runs = SEQUENCES;
    o.ranks = ranks;
    o.pages = SEQUENCES * td_kv_pages(context, td_engine_split(&o));
    o.max_tokens = context > 600 ? context : 600;
    o.threads = ranks > 2 ? ranks : 2; /* one rank alone has two */
    return o;
}

struct td_engine *td_ranks_engine(const struct td_model *m, const struct td_engine_options *o) {
    struct td_engine *e;
    td_ranks_ok(td_engine_create(m, o, &e, &err), &err);
    return e;
}

struct td_record td_ranks_life(struct td_engine *e, const int32_t *ids, uint32_t tokens,
                               uint32_t chunk) {
    static uint32_t pages[SEQUENCES][MOST_PAGES];
    uint32_t layers = td_engine_layout(e)->csa_layers, vocab = e->model->config.vocab;
    uint32_t length[SEQUENCES] = {tokens, tokens / 2}, pos[SEQUENCES] = {0};
    struct td_record r = {.vocab = vocab, .chosen = layers * TOPK};
    r.logits = td_test_bytes((size_t)(DECODE + 1) * SEQUENCES * vocab * sizeof *r.logits);
    r.entries = td_test_bytes((size_t)(DECODE + 1) * SEQUENCES * r.chosen * sizeof *r.entries);
    int32_t *chosen = td_test_bytes((size_t)SEQUENCES * r.chosen * sizeof *chosen);
    struct td_capture capture = {SEQUENCES, layers, TOPK, chosen};
    uint32_t recorded[SEQUENCES] = {0};
    for (uint32_t i = 0; i < e->o.pages; i++)
        pages[i % SEQUENCES][i / SEQUENCES] = i;
    while (recorded[0] <= DECODE || recorded[1] <= DECODE) {
        struct td_run run[SEQUENCES];
        uint32_t n = 0, of[SEQUENCES], wanted = 0;
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            if (recorded[s] > DECODE) continue;
            uint32_t left = pos[s] < length[s] ? length[s] - pos[s] : 1;
            uint32_t m = left < chunk ? left : chunk;
            run[n++] = (struct td_run){.slot = s,
                                       .pos = pos[s],
                                       .n = m,
                                       .ids = ids + 7 * s + pos[s],
                                       .pages = pages[s],
                                       .want_logits = pos[s] + m >= length[s]};
            pos[s] += m;
            if (run[n - 1].want_logits) of[wanted++] = s;
        }
        const float *logits;
        td_ranks_ok(td_engine_step(e, run, n, &logits, &capture, &err), &err);
        for (uint32_t i = 0; i < wanted; i++) {
            size_t at = (size_t)of[i] * (DECODE + 1) + recorded[of[i]]++;
            memcpy(r.logits + at * vocab, logits + (size_t)i * vocab, vocab * sizeof *logits);
            memcpy(r.entries + at * r.chosen, chosen + (size_t)i * r.chosen,
                   r.chosen * sizeof *chosen);
        }
    }
    r.n = (DECODE + 1) * SEQUENCES;
    free(chosen);
    return r;
}

void td_ranks_drop(struct td_record *r) {
    free(r->logits);
    free(r->entries);
}

void td_ranks_same(const struct td_record *a, const struct td_record *b) {
    td_test_same("logits", a->logits, b->logits, (size_t)a->n * a->vocab * sizeof *a->logits);
    td_test_same("choices", a->entries, b->entries, (size_t)a->n * a->chosen * sizeof *a->entries);
}

void td_ranks_hand_over(struct td_engine *from, struct td_engine *to, uint32_t n, uint32_t spare) {
    const struct td_kv_layout *l = td_engine_layout(from);
    size_t cap = td_kv_page_block_bytes_max(l), len;
    if (cap < td_kv_slot_block_bytes_max(l)) cap = td_kv_slot_block_bytes_max(l);
    uint8_t *block = td_test_bytes(cap);
    struct td_kv_ticket ticket = {0};
    struct td_kv_block_header h;
    for (uint32_t i = 0; i < td_kv_page_blocks(n); i++) {
        uint32_t tokens = td_kv_block_tokens(n, i), at = i >> to->split;
        td_ranks_ok(td_engine_pack_page(from, i >> from->split, ticket, i, tokens, block, cap, &len,
                                        &h, &err),
                    &err);
        td_ranks_ok(td_engine_unpack_page(to, block, len, ticket, n, i, at, &h, &err), &err);
        block[len - 1] ^= 1; /* and one that was damaged on its way */
        assert_int_equal(td_engine_unpack_page(to, block, len, ticket, n, i, spare + at, &h, &err),
                         TD_CORRUPT);
    }
    td_ranks_ok(td_engine_pack_slot(from, 0, ticket, n, block, cap, &len, &h, &err), &err);
    td_ranks_ok(td_engine_unpack_slot(to, block, len, ticket, n, 0, &h, &err), &err);
    free(block);
}

void td_ranks_go_on(struct td_engine *e, const int32_t *ids, uint32_t n, float *ret) {
    uint32_t copied[MOST_PAGES], each = e->o.pages / SEQUENCES;
    for (uint32_t i = 0; i < each; i++) {
        copied[i] = each + i;
        td_ranks_ok(td_engine_copy_page(e, i, each + i, &err), &err);
    }
    td_ranks_ok(td_engine_copy_slot(e, 0, 1, &err), &err);
    const float *logits;
    struct td_run run = {
        .slot = 1, .pos = n, .n = 1, .ids = ids + n, .pages = copied, .want_logits = true};
    td_ranks_ok(td_engine_step(e, &run, 1, &logits, NULL, &err), &err);
    memcpy(ret, logits, e->model->config.vocab * sizeof *ret);
}
