/* Counting blocks, and comparing what was sent with what arrived. */
#include "common/kv/manifest.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/kv/checksum.h"

/* ---- tally ---- */

td_status td_kv_tally_init(struct td_kv_tally *t, uint32_t n, struct td_error *err) {
    memset(t, 0, sizeof *t);
    if (n == 0 || n > TD_KV_MAX_TOKENS)
        return td_fail(err, TD_INVALID, "handoff: expected 1 to %d prompt tokens, found %u",
                       TD_KV_MAX_TOKENS, n);
    t->n = n;
    t->blocks = td_kv_page_blocks(n) + 1;
    return TD_OK;
}

td_status td_kv_tally_add(struct td_kv_tally *t, const struct td_kv_block_header *h,
                          struct td_error *err) {
    if (h->index >= t->blocks)
        return td_fail(err, TD_PROTOCOL, "handoff: expected block indices below %u, found %u",
                       t->blocks, h->index);
    enum td_kv_block_kind kind = h->index == t->blocks - 1 ? TD_KV_SLOT_BLOCK : TD_KV_PAGE_BLOCK;
    if (h->kind != kind)
        return td_fail(err, TD_PROTOCOL, "handoff: block %u: expected kind %d, found %u", h->index,
                       kind, h->kind);
    uint64_t bit = UINT64_C(1) << h->index % 64;
    if (t->have[h->index / 64] & bit)
        return td_fail(err, TD_PROTOCOL, "handoff: block %u: expected once, came again", h->index);
    t->have[h->index / 64] |= bit;
    t->seen++;
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        if (!td_kv_in_block(kind, f)) continue;
        t->family[f].rows += h->rows[f];
        t->family[f].bytes += h->bytes[f];
        t->family[f].checksum += td_checksum_part(h->checksum[f], h->index);
    }
    return TD_OK;
}

uint32_t td_kv_tally_missing(const struct td_kv_tally *t) {
    for (uint32_t i = 0; i < t->blocks; i++)
        if (!(t->have[i / 64] >> i % 64 & 1)) return i;
    return t->blocks;
}

static td_status require_complete(const struct td_kv_tally *t, td_status st, struct td_error *err) {
    if (td_kv_tally_complete(t)) return TD_OK;
    return td_fail(err, st, "handoff: expected %u blocks, counted %u, the first missing is %u",
                   t->blocks, t->seen, td_kv_tally_missing(t));
}

/* ---- manifest ---- */

td_status td_kv_manifest_fill(struct td_kv_manifest *m, const struct td_kv_layout *l,
                              const struct td_kv_expected *known, const struct td_kv_tally *t,
                              struct td_error *err) {
    if (t->n != known->prompt_tokens)
        return td_fail(err, TD_INVALID, "manifest: expected a tally of %u tokens, found one of %u",
                       known->prompt_tokens, t->n);
    TD_TRY(require_complete(t, TD_INVALID, err));
    *m = (struct td_kv_manifest){
        .decode_epoch = known->ticket.epoch,
        .ticket = known->ticket.ticket,
        .prefill_epoch = known->prefill_epoch,
        .fingerprint = l->fingerprint,
        .prompt_hash = known->prompt_hash,
        .prompt_tokens = known->prompt_tokens,
        .blocks = t->blocks,
        .next_position = (uint64_t)known->prompt_tokens + 1,
    };
    memcpy(m->family, t->family, sizeof m->family);
    return TD_OK;
}

static td_status same(td_status st, const char *what, uint64_t want, uint64_t have,
                      struct td_error *err) {
    if (want == have) return TD_OK;
    return td_fail(err, st, "manifest: %s: expected %" PRIu64 ", found %" PRIu64, what, want, have);
}

static td_status same_hash(td_status st, const char *what, uint64_t want, uint64_t have,
                           struct td_error *err) {
    if (want == have) return TD_OK;
    return td_fail(err, st, "manifest: %s: expected %016" PRIx64 ", found %016" PRIx64, what, want,
                   have);
}

/* What was sent and what arrived, both against what the prompt must leave. */
static td_status verify_family(const struct td_kv_manifest *m, const struct td_kv_layout *l,
                               const struct td_kv_tally *t, enum td_kv_family f,
                               struct td_error *err) {
    const struct td_kv_family_sum *sent = &m->family[f], *got = &t->family[f];
    uint64_t rows = td_kv_rows(l, f, t->n), bytes = td_kv_bytes(l, f, t->n);
    if (sent->rows != rows || got->rows != rows)
        return td_fail(err, TD_CORRUPT,
                       "manifest: %s: expected %" PRIu64 " rows, %" PRIu64 " sent, %" PRIu64
                       " arrived",
                       td_kv_family_name(f), rows, sent->rows, got->rows);
    if (sent->bytes != bytes || got->bytes != bytes)
        return td_fail(err, TD_CORRUPT,
                       "manifest: %s: expected %" PRIu64 " bytes, %" PRIu64 " sent, %" PRIu64
                       " arrived",
                       td_kv_family_name(f), bytes, sent->bytes, got->bytes);
    if (sent->checksum != got->checksum)
        return td_fail(err, TD_CORRUPT,
                       "manifest: %s: checksum sent %016" PRIx64 ", arrived %016" PRIx64,
                       td_kv_family_name(f), sent->checksum, got->checksum);
    return TD_OK;
}

static td_status verify_first_tokens(const struct td_kv_manifest *m, uint32_t n_first,
                                     struct td_error *err) {
    if (m->n_first > TD_KV_MAX_FIRST)
        return td_fail(err, TD_PROTOCOL, "manifest: expected at most %d first tokens, found %u",
                       TD_KV_MAX_FIRST, m->n_first);
    TD_TRY(same(TD_PROTOCOL, "number of first tokens", n_first, m->n_first, err));
    for (uint32_t i = 0; i < m->n_first; i++) {
        const struct td_kv_first_token *f = &m->first[i];
        if (f->token < 0)
            return td_fail(err, TD_PROTOCOL, "manifest: first token %u: expected an id, found %d",
                           i, f->token);
        if (f->n_top > TD_KV_MAX_TOP)
            return td_fail(err, TD_PROTOCOL,
                           "manifest: first token %u: expected at most %d alternatives, found %u",
                           i, TD_KV_MAX_TOP, f->n_top);
        bool numbers = !isnan(f->logprob);
        for (uint32_t k = 0; k < f->n_top; k++)
            numbers &= f->top[k].token >= 0 && !isnan(f->top[k].logprob);
        if (!numbers)
            return td_fail(err, TD_PROTOCOL,
                           "manifest: first token %u: expected ids and logprobs, found a value "
                           "that is neither",
                           i);
    }
    return TD_OK;
}

td_status td_kv_manifest_verify(const struct td_kv_manifest *m, const struct td_kv_layout *l,
                                const struct td_kv_expected *known, const struct td_kv_tally *t,
                                struct td_error *err) {
    TD_TRY(same_hash(TD_STALE, "decode epoch", known->ticket.epoch, m->decode_epoch, err));
    TD_TRY(same(TD_STALE, "ticket", known->ticket.ticket, m->ticket, err));
    TD_TRY(same_hash(TD_STALE, "prefill epoch", known->prefill_epoch, m->prefill_epoch, err));
    TD_TRY(same_hash(TD_MISMATCH, "layout fingerprint", l->fingerprint, m->fingerprint, err));
    TD_TRY(same(TD_CORRUPT, "prompt tokens", known->prompt_tokens, m->prompt_tokens, err));
    TD_TRY(same(TD_CORRUPT, "tokens of the counted blocks", known->prompt_tokens, t->n, err));
    TD_TRY(same_hash(TD_CORRUPT, "prompt hash", known->prompt_hash, m->prompt_hash, err));
    TD_TRY(same(TD_CORRUPT, "number of blocks", t->blocks, m->blocks, err));
    TD_TRY(require_complete(t, TD_CORRUPT, err));
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        TD_TRY(verify_family(m, l, t, f, err));
    TD_TRY(verify_first_tokens(m, known->n_first, err));
    TD_TRY(same(TD_PROTOCOL, "next position", (uint64_t)known->prompt_tokens + 1, m->next_position,
                err));
    if (m->matcher_len > TD_KV_MAX_MATCHER)
        return td_fail(err, TD_PROTOCOL,
                       "manifest: expected at most %d bytes of matcher state, "
                       "found %u",
                       TD_KV_MAX_MATCHER, m->matcher_len);
    if (m->matcher_len && !m->matcher)
        return td_fail(err, TD_PROTOCOL, "manifest: expected %u bytes of matcher state, found none",
                       m->matcher_len);
    return TD_OK;
}
