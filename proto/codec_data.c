/* The data plane's messages (prefill <-> decode) to protobuf structs and back. */
#include <string.h>

#include "proto/codec_parts.h"

#define BODY(kind, KIND)                                                                           \
    TdPb__##KIND *b = &p->body.kind;                                                               \
    td_pb__##kind##__init(b);                                                                      \
    p->frame.kind = b

static void pack_peer_hello(struct td_pack *p, const struct td_msg_peer_hello *m) {
    BODY(peer_hello, PeerHello);
    b->version = m->version;
    b->name = (char *)m->name;
    b->epoch = m->epoch;
    b->pid = m->pid;
    b->decode_epoch = m->decode_epoch;
    b->fingerprint = m->fingerprint;
    b->numerics_id = m->numerics_id;
    b->xfer_address.data = (uint8_t *)m->xfer_address;
    b->xfer_address.len = m->xfer_address_len;
}

static void pack_peer_welcome(struct td_pack *p, const struct td_msg_peer_welcome *m) {
    BODY(peer_welcome, PeerWelcome);
    b->epoch = m->epoch;
    b->prefill_epoch = m->prefill_epoch;
    b->status = m->status;
    b->text = (char *)m->text;
    b->slab_bytes = m->slab_bytes;
    b->n_slab_address = m->n_slabs;
    b->slab_address = (uint64_t *)m->slab_address;
    b->rkey.data = (uint8_t *)m->rkey;
    b->rkey.len = m->rkey_len;
}

static void pack_manifest(struct td_pack *p, const struct td_msg_manifest *m) {
    BODY(manifest, Manifest);
    b->epoch = m->epoch;
    b->decode_epoch = m->decode_epoch;
    b->ticket = m->ticket;
    b->n_prompt = m->n_prompt;
    b->n_blocks = m->n_blocks;
    b->prompt_hash = m->prompt_hash;
    b->fingerprint = m->fingerprint;
    for (uint32_t i = 0; i < m->n_families; i++) {
        p->family_rows[i] = m->family[i].rows;
        p->family_bytes[i] = m->family[i].bytes;
        p->family_checksum[i] = m->family[i].checksum;
    }
    b->n_family_rows = b->n_family_bytes = b->n_family_checksum = m->n_families;
    b->family_rows = p->family_rows;
    b->family_bytes = p->family_bytes;
    b->family_checksum = p->family_checksum;
    b->first = td_pack_tokens(p, m->first, m->n_first);
    b->seed = m->seed;
    b->next_position = m->next_position;
}

static void pack_slab(struct td_pack *p, const struct td_msg_slab *m) {
    BODY(slab, Slab);
    b->epoch = m->epoch;
    b->ticket = m->ticket;
    b->slab = m->slab;
    b->first_block = m->first_block;
    b->n_blocks = m->n_blocks;
    b->bytes = m->bytes;
}

static void pack_small(struct td_pack *p, const struct td_msg *m) {
    if (m->type == TD_MSG_PEER_BEAT) {
        BODY(peer_beat, PeerBeat);
        b->epoch = m->peer_beat.epoch;
        b->seq = m->peer_beat.seq;
    } else if (m->type == TD_MSG_CREDIT) {
        BODY(credit, Credit);
        b->epoch = m->credit.epoch;
        b->ticket = m->credit.ticket;
        b->slab = m->credit.slab;
        b->first_block = m->credit.first_block;
    } else if (m->type == TD_MSG_VERDICT) {
        BODY(verdict, Verdict);
        b->epoch = m->verdict.epoch;
        b->ticket = m->verdict.ticket;
        b->status = m->verdict.status;
        b->text = (char *)m->verdict.text;
    } else {
        BODY(abort, Abort);
        b->epoch = m->abort.epoch;
        b->ticket = m->abort.ticket;
        b->status = m->abort.status;
        b->text = (char *)m->abort.text;
    }
}

void td_pack_data(struct td_pack *p, const struct td_msg *m) {
    p->frame.body_case = (TdPb__Frame__BodyCase)m->type;
    switch ((int)m->type) {
    case TD_MSG_PEER_HELLO:
        pack_peer_hello(p, &m->peer_hello);
        return;
    case TD_MSG_PEER_WELCOME:
        pack_peer_welcome(p, &m->peer_welcome);
        return;
    case TD_MSG_SLAB:
        pack_slab(p, &m->slab);
        return;
    case TD_MSG_MANIFEST:
        pack_manifest(p, &m->manifest);
        return;
    default:
        pack_small(p, m);
        return;
    }
}

/* ---- the way back ---- */

static td_status unpack_peer_hello(const TdPb__PeerHello *b, struct td_msg_peer_hello *m,
                                   struct td_error *err) {
    m->version = b->version;
    m->epoch = b->epoch;
    m->pid = b->pid;
    m->decode_epoch = b->decode_epoch;
    m->fingerprint = b->fingerprint;
    m->numerics_id = b->numerics_id;
    m->xfer_address = b->xfer_address.data;
    m->xfer_address_len = b->xfer_address.len;
    return td_unpack_text(b->name, m->name, sizeof m->name, "name", err);
}

static td_status unpack_peer_welcome(const TdPb__PeerWelcome *b, struct td_msg_peer_welcome *m,
                                     struct td_error *err) {
    if (b->n_slab_address > TD_LANDING_SLABS_MAX)
        return td_fail(err, TD_PROTOCOL, "%zu landing slabs, at most %d", b->n_slab_address,
                       TD_LANDING_SLABS_MAX);
    m->epoch = b->epoch;
    m->prefill_epoch = b->prefill_epoch;
    m->status = td_unpack_status(b->status);
    m->slab_bytes = b->slab_bytes;
    m->n_slabs = (uint32_t)b->n_slab_address;
    if (m->n_slabs)
        memcpy(m->slab_address, b->slab_address, m->n_slabs * sizeof m->slab_address[0]);
    m->rkey = b->rkey.data;
    m->rkey_len = b->rkey.len;
    return td_unpack_text(b->text, m->text, sizeof m->text, "text", err);
}

static td_status unpack_manifest(const TdPb__Manifest *b, struct td_msg_manifest *m,
                                 struct td_error *err) {
    size_t n = b->n_family_rows;
    if (n > TD_KV_FAMILIES_MAX || n != b->n_family_bytes || n != b->n_family_checksum)
        return td_fail(err, TD_PROTOCOL, "%zu families with %zu sizes, %zu checksums, at most %d",
                       n, b->n_family_bytes, b->n_family_checksum, TD_KV_FAMILIES_MAX);
    m->epoch = b->epoch;
    m->decode_epoch = b->decode_epoch;
    m->ticket = b->ticket;
    m->n_prompt = b->n_prompt;
    m->n_blocks = b->n_blocks;
    m->prompt_hash = b->prompt_hash;
    m->fingerprint = b->fingerprint;
    m->n_families = (uint32_t)n;
    for (uint32_t i = 0; i < m->n_families; i++)
        m->family[i] = (struct td_msg_family){.rows = b->family_rows[i],
                                              .bytes = b->family_bytes[i],
                                              .checksum = b->family_checksum[i]};
    if (b->first) {
        TD_TRY(td_unpack_tokens(b->first, m->first, TD_FIRST_TOKENS_MAX, err));
        m->n_first = (uint32_t)b->first->n_id;
    }
    m->seed = b->seed;
    m->next_position = b->next_position;
    return TD_OK;
}

static void unpack_slab(const TdPb__Slab *b, struct td_msg_slab *m) {
    m->epoch = b->epoch;
    m->ticket = b->ticket;
    m->slab = b->slab;
    m->n_blocks = b->n_blocks;
    m->bytes = b->bytes;
    m->first_block = b->first_block;
}

td_status td_unpack_data(const TdPb__Frame *f, struct td_msg *m, struct td_error *err) {
    switch ((int)m->type) {
    case TD_MSG_PEER_HELLO:
        return unpack_peer_hello(f->peer_hello, &m->peer_hello, err);
    case TD_MSG_PEER_WELCOME:
        return unpack_peer_welcome(f->peer_welcome, &m->peer_welcome, err);
    case TD_MSG_SLAB:
        unpack_slab(f->slab, &m->slab);
        return TD_OK;
    case TD_MSG_MANIFEST:
        return unpack_manifest(f->manifest, &m->manifest, err);
    case TD_MSG_PEER_BEAT:
        m->peer_beat.epoch = f->peer_beat->epoch;
        m->peer_beat.seq = f->peer_beat->seq;
        return TD_OK;
    case TD_MSG_CREDIT:
        m->credit.epoch = f->credit->epoch;
        m->credit.ticket = f->credit->ticket;
        m->credit.slab = f->credit->slab;
        m->credit.first_block = f->credit->first_block;
        return TD_OK;
    case TD_MSG_VERDICT:
        m->verdict.epoch = f->verdict->epoch;
        m->verdict.ticket = f->verdict->ticket;
        m->verdict.status = td_unpack_status(f->verdict->status);
        return td_unpack_text(f->verdict->text, m->verdict.text, sizeof m->verdict.text, "text",
                              err);
    default:
        m->abort.epoch = f->abort->epoch;
        m->abort.ticket = f->abort->ticket;
        m->abort.status = td_unpack_status(f->abort->status);
        return td_unpack_text(f->abort->text, m->abort.text, sizeof m->abort.text, "text", err);
    }
}
