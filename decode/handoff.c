/* Receipts of the receiving half: slabs, manifest, verdict. Peers are in handoff_peer.c. */
#include "decode/handoff.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decode/handoff_parts.h"

td_status td_receiver_create(struct td_receiver *r, const struct td_decode_options *o,
                             struct td_fifo *actions, struct td_error *err) {
    assert(o->max_peers >= 1 && o->landing_slabs >= 1 && o->landing_slabs <= TD_LANDING_SLABS_MAX);
    *r = (struct td_receiver){.o = o, .actions = actions};
    r->peer = calloc(o->max_peers, sizeof *r->peer);
    r->receipt = calloc(o->slots, sizeof *r->receipt);
    if (r->peer == NULL || r->receipt == NULL)
        return td_fail(err, TD_NO_MEMORY, "handoff tables: out of memory");
    return TD_OK;
}

void td_receiver_destroy(struct td_receiver *r) {
    free(r->peer);
    free(r->receipt);
}

/* ---- receipts ---- */

void td_receiver_open(struct td_receiver *r, uint64_t now_ns, uint32_t i,
                      const struct td_receiver_order *o) {
    struct td_receipt *t = &r->receipt[i];
    struct td_error err;
    assert(t->state == TD_RECEIPT_NONE);
    memset(t, 0, sizeof *t);
    t->state = TD_RECEIPT_OPEN;
    t->o = *o;
    t->peer = UINT32_MAX;
    td_receiver_keep(r, now_ns, i);
    if (td_kv_tally_init(&t->tally, o->n_prompt, &err) != TD_OK)
        td_receipt_over(r, i, err.status, err.text);
}

void td_receiver_keep(struct td_receiver *r, uint64_t now_ns, uint32_t i) {
    r->receipt[i].lease_ns = now_ns + r->o->lease_ns;
}

void td_receipt_over(struct td_receiver *r, uint32_t i, td_status status, const char *text) {
    struct td_receipt *t = &r->receipt[i];
    assert(t->state == TD_RECEIPT_OPEN && status != TD_OK);
    t->state = TD_RECEIPT_OVER;
    t->status = status;
    snprintf(t->text, sizeof t->text, "%s", text);
    if (status != TD_CANCELLED) r->handoffs_failed++;
}

void td_receiver_abort(struct td_receiver *r, uint32_t i, td_status status, const char *text) {
    struct td_receipt *t = &r->receipt[i];
    if (t->state != TD_RECEIPT_OPEN) return;
    td_receipt_over(r, i, status, text);
    if (t->peer != UINT32_MAX) td_source_abort(r, t->peer, t->o.ticket, status, text);
}

bool td_receiver_quiet(const struct td_receiver *r, uint32_t i) {
    return r->receipt[i].state != TD_RECEIPT_OPEN && r->receipt[i].unpacking == 0;
}

void td_receiver_forget(struct td_receiver *r, uint32_t i) {
    assert(td_receiver_quiet(r, i));
    r->receipt[i].state = TD_RECEIPT_NONE;
}

uint32_t td_receipt_find(const struct td_receiver *r, uint64_t ticket) {
    for (uint32_t i = 0; i < r->o->slots; i++)
        if (r->receipt[i].state == TD_RECEIPT_OPEN && r->receipt[i].o.ticket == ticket) return i;
    return UINT32_MAX;
}

/* ---- slabs ---- */

static void credit(struct td_receiver *r, uint32_t peer, uint32_t slab, uint64_t ticket,
                   uint32_t first_block) {
    struct td_msg_credit *m = &td_source_send(r, peer, TD_MSG_CREDIT)->credit;
    m->epoch = r->o->epoch;
    m->ticket = ticket;
    m->slab = slab;
    m->first_block = first_block;
}

static void unpack(struct td_receiver *r, uint32_t peer, uint32_t i, const struct td_msg_slab *m) {
    struct td_receipt *t = &r->receipt[i];
    struct td_receiver_peer *p = &r->peer[peer];
    uint32_t page_blocks = td_kv_page_blocks(t->o.n_prompt);
    struct td_decode_action *a = td_fifo_push(r->actions);
    a->kind = TD_DECODE_UNPACK;
    a->unpack.landing_slab = peer * r->o->landing_slabs + m->slab;
    a->unpack.bytes = m->bytes;
    a->unpack.ticket = (struct td_kv_ticket){r->o->epoch, m->ticket};
    a->unpack.n_prompt = t->o.n_prompt;
    a->unpack.first_block = m->first_block;
    a->unpack.n_blocks = m->n_blocks;
    a->unpack.pages =
        m->first_block < page_blocks ? t->o.pages + (m->first_block >> r->o->split) : NULL;
    a->unpack.slot = t->o.slot;
    p->slab[m->slab] = (struct td_receiver_slab){true, i, m->ticket, m->first_block, m->n_blocks};
    p->unpacking++;
    t->unpacking++;
    t->next_block += m->n_blocks;
    r->bytes_moved += m->bytes;
}

void td_receipt_slab(struct td_receiver *r, uint64_t now_ns, uint32_t peer,
                     const struct td_msg_slab *m) {
    if (m->slab >= r->o->landing_slabs || r->peer[peer].slab[m->slab].unpacking) return;
    uint32_t i = td_receipt_find(r, m->ticket);
    struct td_receipt *t = i != UINT32_MAX ? &r->receipt[i] : NULL;
    if (t != NULL && t->peer == UINT32_MAX) t->peer = peer;
    if (t == NULL || t->peer != peer) {
        /* Cancelled, expired or of an earlier life: the slab goes back, the sender may stop. */
        credit(r, peer, m->slab, m->ticket, m->first_block);
        td_source_abort(r, peer, m->ticket, TD_STALE, "no admission holds this ticket");
        return;
    }
    if (m->first_block < t->next_block) return; /* a double */
    uint32_t blocks = td_kv_page_blocks(t->o.n_prompt) + 1;
    if (m->first_block != t->next_block || m->n_blocks == 0 ||
        m->n_blocks > blocks - t->next_block || m->bytes > r->o->slab_bytes || t->has_manifest) {
        char text[TD_TEXT_MAX];
        snprintf(text, sizeof text,
                 "slab: expected blocks from %u to at most %u in at most %llu bytes, found %u from "
                 "%u in %llu",
                 t->next_block, blocks - 1, (unsigned long long)r->o->slab_bytes, m->n_blocks,
                 m->first_block, (unsigned long long)m->bytes);
        credit(r, peer, m->slab, m->ticket, m->first_block);
        td_receiver_abort(r, i, TD_PROTOCOL, text);
        return;
    }
    td_receiver_keep(r, now_ns, i);
    unpack(r, peer, i, m);
}

/* ---- the verdict ---- */

static td_status verify(const struct td_receiver *r, const struct td_receipt *t,
                        struct td_error *err) {
    const struct td_msg_manifest *m = &t->manifest;
    const struct td_kv_expected known = {
        .ticket = {r->o->epoch, t->o.ticket},
        .prefill_epoch = r->peer[t->peer].epoch,
        .prompt_hash = t->o.prompt_hash,
        .prompt_tokens = t->o.n_prompt,
        .n_first = t->o.n_first,
    };
    struct td_kv_manifest k = {
        .decode_epoch = m->decode_epoch,
        .ticket = m->ticket,
        .prefill_epoch = m->epoch,
        .fingerprint = m->fingerprint,
        .prompt_hash = m->prompt_hash,
        .prompt_tokens = m->n_prompt,
        .blocks = m->n_blocks,
        .n_first = m->n_first,
        .seed = m->seed,
        .next_position = m->next_position,
    };
    if (m->n_families != TD_KV_FAMILIES)
        return td_fail(err, TD_CORRUPT, "manifest: expected %d families, found %u", TD_KV_FAMILIES,
                       m->n_families);
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        k.family[f] =
            (struct td_kv_family_sum){m->family[f].rows, m->family[f].bytes, m->family[f].checksum};
    for (uint32_t i = 0; i < m->n_first && i < TD_KV_MAX_FIRST; i++)
        k.first[i] =
            (struct td_kv_first_token){.token = m->first[i].id, .logprob = m->first[i].logprob};
    return td_kv_manifest_verify(&k, r->o->layout, &known, &t->tally, err);
}

static void say_verdict(struct td_receiver *r, uint32_t peer, uint64_t ticket, td_status status,
                        const char *text) {
    struct td_msg_verdict *v = &td_source_send(r, peer, TD_MSG_VERDICT)->verdict;
    v->epoch = r->o->epoch;
    v->ticket = ticket;
    v->status = status;
    snprintf(v->text, sizeof v->text, "%s", text);
}

static void judge(struct td_receiver *r, uint32_t i) {
    struct td_receipt *t = &r->receipt[i];
    struct td_error err = {.text = ""};
    td_status st = verify(r, t, &err);
    if (st == TD_OK) {
        t->state = TD_RECEIPT_TAKEN;
        memcpy(t->first, t->manifest.first, sizeof t->first);
        r->handoffs_ok++;
    } else {
        td_receipt_over(r, i, st, err.text);
    }
    r->verdict[t->o.ticket % TD_VERDICTS_KEPT] = (struct td_receiver_verdict){t->o.ticket, st};
    say_verdict(r, t->peer, t->o.ticket, st, err.text);
}

void td_receipt_manifest(struct td_receiver *r, uint32_t peer, const struct td_msg_manifest *m) {
    uint32_t i = td_receipt_find(r, m->ticket);
    const struct td_receiver_verdict *v = &r->verdict[m->ticket % TD_VERDICTS_KEPT];
    if (i == UINT32_MAX && m->ticket != 0 && v->ticket == m->ticket) { /* it missed the verdict */
        say_verdict(r, peer, m->ticket, v->status,
                    v->status == TD_OK ? "" : "the manifest did not agree, as said before");
        return;
    }
    if (i == UINT32_MAX || r->receipt[i].peer != peer) {
        td_source_abort(r, peer, m->ticket, TD_STALE, "no admission waits for this manifest");
        return;
    }
    struct td_receipt *t = &r->receipt[i];
    if (t->has_manifest) return; /* a double */
    t->manifest = *m;
    t->has_manifest = true;
    if (t->unpacking == 0) judge(r, i);
}

static void unpacked(struct td_receiver *r, const struct td_decode_event *ev) {
    uint32_t peer = ev->unpacked.landing_slab / r->o->landing_slabs;
    uint32_t slab = ev->unpacked.landing_slab % r->o->landing_slabs;
    assert(peer < r->o->max_peers && r->peer[peer].slab[slab].unpacking);
    struct td_receiver_slab *s = &r->peer[peer].slab[slab];
    uint32_t i = s->ticket;
    struct td_receipt *t = &r->receipt[i];
    struct td_error err = {.text = ""};
    s->unpacking = false;
    t->unpacking--;
    credit(r, peer, slab, s->number, s->first_block);
    if (t->state == TD_RECEIPT_OPEN) {
        td_status st = ev->unpacked.status;
        if (st != TD_OK) snprintf(err.text, sizeof err.text, "%s", ev->unpacked.text);
        for (uint32_t k = 0; st == TD_OK && k < s->n_blocks; k++)
            st = td_kv_tally_add(&t->tally, &ev->unpacked.headers[k], &err);
        if (st != TD_OK)
            td_receiver_abort(r, i, st, err.text);
        else if (t->has_manifest && t->unpacking == 0)
            judge(r, i);
    }
    td_source_unpacked(r, peer);
}

void td_receiver_event(struct td_receiver *r, const struct td_decode_event *ev) {
    if (ev->kind == TD_DECODE_UNPACKED)
        unpacked(r, ev);
    else
        td_source_event(r, ev);
}
