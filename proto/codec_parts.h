/* What the codec's files share: scratch for building a protobuf frame without allocating, and the
 * small conversions both planes use. Private to proto/. */
#ifndef TD_PROTO_CODEC_PARTS_H
#define TD_PROTO_CODEC_PARTS_H

#include "proto/codec.h"
#include "proto/tandem.pb-c.h"

enum {
    TD_SETTINGS_MAX = 64 << 10, /* text of a hello's settings */
    TD_TOPS_MAX = TD_TOKENS_PER_MSG_MAX * TD_TOP_LOGPROBS_MAX,
};

/* A frame under construction; lives on the stack of one encode call and borrows from the message
 * that it was built from. */
struct td_pack {
    TdPb__Frame frame;
    union {
        TdPb__Hello hello;
        TdPb__HelloReply hello_reply;
        TdPb__Heartbeat heartbeat;
        TdPb__Admit admit;
        TdPb__AdmitReply admit_reply;
        TdPb__Keep keep;
        TdPb__Prefill prefill;
        TdPb__Tokens tokens;
        TdPb__Finished finished;
        TdPb__Failed failed;
        TdPb__Cancel cancel;
        TdPb__Released released;
        TdPb__Ledger ledger;
        TdPb__Moved moved;
        TdPb__PeerHello peer_hello;
        TdPb__PeerWelcome peer_welcome;
        TdPb__PeerBeat peer_beat;
        TdPb__Slab slab;
        TdPb__Credit credit;
        TdPb__Manifest manifest;
        TdPb__Verdict verdict;
        TdPb__Abort abort;
    } body;
    TdPb__Key key;
    TdPb__Sampling sampling;
    TdPb__TokenColumns columns;
    TdPb__Selection selection[TD_TOKENS_PER_MSG_MAX], *selections[TD_TOKENS_PER_MSG_MAX];
    uint32_t id[TD_TOKENS_PER_MSG_MAX];
    float logprob[TD_TOKENS_PER_MSG_MAX];
    uint32_t n_top[TD_TOKENS_PER_MSG_MAX];
    uint32_t top_id[TD_TOPS_MAX];
    float top_logprob[TD_TOPS_MAX];
    uint64_t family_rows[TD_KV_FAMILIES_MAX];
    uint64_t family_bytes[TD_KV_FAMILIES_MAX];
    uint64_t family_checksum[TD_KV_FAMILIES_MAX];
};

/* Fill p->frame from a message that td_msg_check accepted. */
void td_pack_control(struct td_pack *p, const struct td_msg *m);
void td_pack_data(struct td_pack *p, const struct td_msg *m);

/* Fill *m (zeroed, type set) from a frame; only what protects the writing is checked here, the
 * rest is td_msg_check's. */
TD_MUST_USE td_status td_unpack_control(const TdPb__Frame *f, struct td_msg_arena *a,
                                        struct td_msg *m, struct td_error *err);
TD_MUST_USE td_status td_unpack_data(const TdPb__Frame *f, struct td_msg *m, struct td_error *err);

/* ---- conversions ---- */

TdPb__TokenColumns *td_pack_tokens(struct td_pack *p, const struct td_token *t, uint32_t n);
/* Writes c's tokens to ret[0 .. c->n_id), of which there is room for `max`. */
TD_MUST_USE td_status td_unpack_tokens(const TdPb__TokenColumns *c, struct td_token *ret,
                                       size_t max, struct td_error *err);
/* Codes of newer versions read as TD_INTERNAL. */
td_status td_unpack_status(uint32_t wire);
/* `what` names the field in the sentence. */
TD_MUST_USE td_status td_unpack_text(const char *from, char *to, size_t cap, const char *what,
                                     struct td_error *err);

/* Memory of the message being decoded, 16-byte aligned; NULL when the arena's bound is reached. */
/* Forgets everything taken so far. */
void td_msg_arena_reset(struct td_msg_arena *a);
void *td_msg_arena_take(struct td_msg_arena *a, size_t bytes);

#endif
