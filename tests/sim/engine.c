/* The fake engine: content that can be checked instead of numbers that cannot. */
#include <string.h>

#include "tests/sim/sim.h"

uint64_t sim_hash_start(void) {
    return td_mix64(0x5117);
}

uint64_t sim_hash_id(uint64_t hash, int32_t id) {
    return td_mix64(hash ^ td_mix64((uint64_t)(uint32_t)id + 77));
}

int32_t sim_sample(uint64_t hash, uint32_t position, uint64_t seed) {
    uint64_t v = td_mix64(hash ^ td_mix64(position + 1000003ull * seed));
    return v % 41 == 0 ? SIM_EOS : (int32_t)(2 + (v >> 16) % 997);
}

uint32_t sim_split(const struct sim *s, const struct sim_worker *w) {
    return s->o.split[w->role == TD_ROLE_DECODE];
}

/* Where block i of a sequence is whose pages from block `first` on are `pages`. */
static struct sim_page *page_of(const struct sim *s, struct sim_worker *w, const uint32_t *pages,
                                uint32_t first, uint32_t i) {
    uint32_t split = sim_split(s, w), page = td_kv_page_of_block(pages, first, i, split);
    return &w->page[(page << split) + td_kv_page_rank(i, split)];
}

/* Everything before run->pos must be there, complete, and of one and the same sequence. */
static bool history_ok(const struct sim *s, struct sim_worker *w, const struct td_run *r) {
    const struct sim_slot *slot = &w->slot[r->slot];
    if (slot->n != r->pos) return false;
    uint64_t hash = sim_hash_start();
    for (uint32_t t = 0; t < r->pos; t += TD_KV_PAGE_TOKENS) {
        const struct sim_page *p = page_of(s, w, r->pages, 0, t / TD_KV_PAGE_TOKENS);
        uint32_t want = r->pos - t < TD_KV_PAGE_TOKENS ? r->pos - t : TD_KV_PAGE_TOKENS;
        if (p->start != hash || p->valid != want) return false;
        hash = p->end;
    }
    return hash == slot->hash;
}

void sim_engine(struct sim *s, struct sim_worker *w, const struct td_run *r) {
    struct sim_slot *slot = &w->slot[r->slot];
    if (r->pos == 0) *slot = (struct sim_slot){.hash = sim_hash_start()};
    if (!history_ok(s, w, r)) {
        sim_broken(s, "%s: a step at position %u of slot %u reads KV state that is not its own",
                   w->name, r->pos, r->slot);
        return;
    }
    for (uint32_t k = 0; k < r->n; k++) {
        struct sim_page *p = page_of(s, w, r->pages, 0, slot->n / TD_KV_PAGE_TOKENS);
        if (slot->n % TD_KV_PAGE_TOKENS == 0) *p = (struct sim_page){.start = slot->hash};
        slot->hash = sim_hash_id(slot->hash, r->ids[k]);
        slot->n++;
        p->end = slot->hash;
        p->valid++;
    }
}

/* ---- blocks ---- */

static uint64_t content_hash(const struct sim_block *b, int family) {
    uint64_t h = td_mix64((uint64_t)family + 1);
    if (b->h.kind == TD_KV_PAGE_BLOCK)
        h = td_mix64(td_mix64(h ^ b->page.start) ^ b->page.end) ^ b->page.valid;
    else
        h = td_mix64(h ^ b->slot.hash) ^ b->slot.n;
    return td_mix64(h);
}

static void fill_header(const struct sim *s, struct sim_block *b) {
    b->h.body_bytes = 0;
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        if (!td_kv_in_block((enum td_kv_block_kind)b->h.kind, (enum td_kv_family)f)) continue;
        b->h.rows[f] = td_kv_rows(&s->layout, (enum td_kv_family)f, b->h.tokens);
        b->h.bytes[f] = td_kv_bytes(&s->layout, (enum td_kv_family)f, b->h.tokens);
        b->h.checksum[f] = content_hash(b, f);
        b->h.body_bytes += b->h.bytes[f];
    }
}

void sim_pack(struct sim *s, struct sim_worker *w, const struct td_prefill_action *a) {
    struct sim_slab *slab = &w->slab[a->pack.send_slab];
    slab->n = a->pack.n_blocks;
    for (uint32_t k = 0; k < slab->n; k++) {
        struct sim_block *b = &slab->block[k];
        memset(b, 0, sizeof *b);
        b->h.epoch = a->pack.ticket.epoch;
        b->h.ticket = a->pack.ticket.ticket;
        b->h.index = a->pack.first_block + k;
        b->h.kind = a->pack.slot_block ? TD_KV_SLOT_BLOCK : TD_KV_PAGE_BLOCK;
        b->h.tokens = a->pack.slot_block ? a->pack.n_prompt
                                         : td_kv_block_tokens(a->pack.n_prompt, b->h.index);
        if (a->pack.slot_block)
            b->slot = w->slot[a->pack.slot];
        else
            b->page = *page_of(s, w, a->pack.pages, a->pack.first_block, b->h.index);
        if (!a->pack.slot_block && b->page.valid != b->h.tokens)
            sim_broken(s, "%s: block %u is packed with %u of %u tokens computed", w->name,
                       b->h.index, b->page.valid, b->h.tokens);
        fill_header(s, b);
    }
}

td_status sim_unpack(struct sim *s, struct sim_worker *w, const struct td_decode_action *a,
                     char *text) {
    const struct sim_slab *slab = &w->slab[a->unpack.landing_slab];
    uint32_t page_blocks = td_kv_page_blocks(a->unpack.n_prompt);
    for (uint32_t k = 0; k < a->unpack.n_blocks; k++) {
        const struct sim_block *b = &slab->block[k];
        if (slab->n != a->unpack.n_blocks || b->h.epoch != a->unpack.ticket.epoch ||
            b->h.ticket != a->unpack.ticket.ticket || b->h.index != a->unpack.first_block + k) {
            sim_broken(s, "%s: landing slab %u does not hold what SLAB announced", w->name,
                       a->unpack.landing_slab);
            return TD_STALE;
        }
        for (int f = 0; f < TD_KV_FAMILIES; f++)
            if (td_kv_in_block((enum td_kv_block_kind)b->h.kind, (enum td_kv_family)f) &&
                b->h.checksum[f] != content_hash(b, f)) {
                snprintf(text, TD_TEXT_MAX, "block %u: %s: wrong checksum", b->h.index,
                         td_kv_family_name((enum td_kv_family)f));
                return TD_CORRUPT;
            }
    }
    for (uint32_t k = 0; k < a->unpack.n_blocks; k++) {
        uint32_t index = a->unpack.first_block + k;
        if (index == page_blocks)
            w->slot[a->unpack.slot] = slab->block[k].slot;
        else
            *page_of(s, w, a->unpack.pages, a->unpack.first_block, index) = slab->block[k].page;
    }
    return TD_OK;
}

void sim_reseal(struct sim_block *b) {
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        if (td_kv_in_block((enum td_kv_block_kind)b->h.kind, (enum td_kv_family)f))
            b->h.checksum[f] = content_hash(b, f);
}
