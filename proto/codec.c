/* Messages to frames and back: the two entry points, and the conversions both planes use. */
#include <stddef.h>
#include <string.h>

#include "proto/codec_parts.h"

/* The field number of a frame's body is the message type. */
#define SAME(type, body) _Static_assert((int)TD_MSG_##type == (int)TD_PB__FRAME__BODY_##body, #type)
SAME(HELLO, HELLO);
SAME(HELLO_REPLY, HELLO_REPLY);
SAME(HEARTBEAT, HEARTBEAT);
SAME(ADMIT, ADMIT);
SAME(ADMIT_REPLY, ADMIT_REPLY);
SAME(KEEP, KEEP);
SAME(PREFILL, PREFILL);
SAME(TOKENS, TOKENS);
SAME(FINISHED, FINISHED);
SAME(FAILED, FAILED);
SAME(CANCEL, CANCEL);
SAME(RELEASED, RELEASED);
SAME(LEDGER, LEDGER);
SAME(MOVED, MOVED);
SAME(PEER_HELLO, PEER_HELLO);
SAME(PEER_WELCOME, PEER_WELCOME);
SAME(PEER_BEAT, PEER_BEAT);
SAME(SLAB, SLAB);
SAME(CREDIT, CREDIT);
SAME(MANIFEST, MANIFEST);
SAME(VERDICT, VERDICT);
SAME(ABORT, ABORT);

static bool is_control(enum td_msg_type t) {
    return t < TD_MSG_PEER_HELLO;
}

static void pack(struct td_pack *p, const struct td_msg *m) {
    td_pb__frame__init(&p->frame);
    if (is_control(m->type)) {
        td_pack_control(p, m);
    } else {
        td_pack_data(p, m);
    }
}

static const uint16_t struct_size[] = {
#define SIZE(TYPE, type) [TD_MSG_##TYPE] = sizeof(struct td_msg_##type)
    SIZE(HELLO, hello),
    SIZE(HELLO_REPLY, hello_reply),
    SIZE(HEARTBEAT, heartbeat),
    SIZE(ADMIT, admit),
    SIZE(ADMIT_REPLY, admit_reply),
    SIZE(KEEP, keep),
    SIZE(PREFILL, prefill),
    SIZE(TOKENS, tokens),
    SIZE(FINISHED, finished),
    SIZE(FAILED, failed),
    SIZE(CANCEL, cancel),
    SIZE(RELEASED, released),
    SIZE(LEDGER, ledger),
    SIZE(MOVED, moved),
    SIZE(PEER_HELLO, peer_hello),
    SIZE(PEER_WELCOME, peer_welcome),
    SIZE(PEER_BEAT, peer_beat),
    SIZE(SLAB, slab),
    SIZE(CREDIT, credit),
    SIZE(MANIFEST, manifest),
    SIZE(VERDICT, verdict),
    SIZE(ABORT, abort),
#undef SIZE
};

enum { VARINT32_MAX = 5 };

static size_t sampling_bound(const struct td_sampling *s) {
    const struct td_guide *g = s->guide;
    size_t n = (size_t)s->n_said * VARINT32_MAX;
    if (!g) return n;
    return n + 3 * sizeof *g + (size_t)g->n_bias * (VARINT32_MAX + sizeof(float)) +
           (size_t)g->n_prompt_ids * VARINT32_MAX + g->grammar_n;
}

static size_t tokens_bound(const struct td_msg_tokens *m) {
    size_t n = m->n * 3 * sizeof *m->tokens; /* with all their alternatives */
    for (uint32_t i = 0; m->selections && i < m->n; i++) {
        const struct td_selection *s = &m->selections[i];
        n += 3 * sizeof *s + (2 * (size_t)s->n_layers + s->n_entries) * VARINT32_MAX;
    }
    return n;
}

/* Of what a message points to. */
static size_t outside_bound(const struct td_msg *m) {
    switch ((int)m->type) {
    case TD_MSG_HELLO:
        return m->hello.xfer_address_len + m->hello.settings_len;
    case TD_MSG_ADMIT:
        return sampling_bound(&m->admit.sampling) +
               (m->admit.ids ? m->admit.n_prompt : 0) * (size_t)VARINT32_MAX;
    case TD_MSG_PREFILL:
        return sampling_bound(&m->prefill.sampling) + m->prefill.n_prompt * (size_t)VARINT32_MAX +
               m->prefill.decode_address_len;
    case TD_MSG_TOKENS:
        return tokens_bound(&m->tokens);
    case TD_MSG_MOVED:
        return m->moved.xfer_address_len;
    case TD_MSG_PEER_HELLO:
        return m->peer_hello.xfer_address_len;
    case TD_MSG_PEER_WELCOME:
        return m->peer_welcome.rkey_len;
    default:
        return 0;
    }
}

/* A number takes at most 7 bytes for 4 in the struct, 12 for 8, 3 for a bool; a text or an array has a
 * tag and a length besides, and is no shorter than 16 bytes. */
size_t td_msg_size_bound(const struct td_msg *m) {
    return 3 * (size_t)struct_size[m->type] + outside_bound(m) + 16;
}

td_status td_msg_pack(const struct td_msg *m, uint8_t *buf, size_t cap, size_t *ret_len,
                      struct td_error *err) {
    struct td_pack p;
    pack(&p, m);
    /* Looking for the size costs as much as writing. */
    size_t len = td_msg_size_bound(m);
    if (len > cap) len = td_pb__frame__get_packed_size(&p.frame);
    if (len > cap)
        return td_fail(err, TD_TOO_LONG, "message type %d takes %zu bytes, there is room for %zu",
                       (int)m->type, len, cap);
    *ret_len = td_pb__frame__pack(&p.frame, buf);
    return TD_OK;
}

td_status td_msg_encode(const struct td_msg *m, uint8_t *buf, size_t cap, size_t *ret_len,
                        struct td_error *err) {
    TD_TRY(td_msg_check(m, err));
    return td_msg_pack(m, buf, cap, ret_len, err);
}

static void *pb_alloc(void *arena, size_t bytes) {
    return td_msg_arena_take(arena, bytes);
}

static void pb_free(void *arena, void *p) {
    (void)arena;
    (void)p; /* the reset at the next decode frees everything at once */
}

td_status td_msg_decode(const uint8_t *bytes, size_t len, struct td_msg_arena *a,
                        struct td_msg *ret, struct td_error *err) {
    if (len > TD_FRAME_BYTES_MAX)
        return td_fail(err, TD_TOO_LONG, "a frame of %zu bytes, the limit is %d", len,
                       TD_FRAME_BYTES_MAX);
    td_msg_arena_reset(a);
    ProtobufCAllocator alloc = {.alloc = pb_alloc, .free = pb_free, .allocator_data = a};
    TdPb__Frame *f = td_pb__frame__unpack(&alloc, len, bytes);
    if (!f) return td_fail(err, TD_PROTOCOL, "a frame of %zu bytes is not a message", len);
    if (f->body_case == TD_PB__FRAME__BODY__NOT_SET)
        return td_fail(err, TD_UNSUPPORTED, "a message of a type this version does not know");

    memset(ret, 0, offsetof(struct td_msg, hello) + struct_size[f->body_case]);
    ret->type = (enum td_msg_type)f->body_case;
    TD_TRY(is_control(ret->type) ? td_unpack_control(f, a, ret, err) : td_unpack_data(f, ret, err));
    return td_msg_check(ret, err);
}

/* ---- conversions ---- */

TdPb__TokenColumns *td_pack_tokens(struct td_pack *p, const struct td_token *t, uint32_t n) {
    TdPb__TokenColumns *c = &p->columns;
    td_pb__token_columns__init(c);
    size_t tops = 0;
    for (uint32_t i = 0; i < n; i++) {
        p->id[i] = (uint32_t)t[i].id;
        p->logprob[i] = t[i].logprob;
        p->n_top[i] = t[i].n_top;
        for (uint32_t k = 0; k < t[i].n_top; k++, tops++) {
            p->top_id[tops] = (uint32_t)t[i].top[k].id;
            p->top_logprob[tops] = t[i].top[k].logprob;
        }
    }
    c->n_id = c->n_logprob = n;
    c->id = p->id;
    c->logprob = p->logprob;
    c->n_n_top = tops ? n : 0; /* usually nobody asked for alternatives */
    c->n_top = p->n_top;
    c->n_top_id = c->n_top_logprob = tops;
    c->top_id = p->top_id;
    c->top_logprob = p->top_logprob;
    return c;
}

td_status td_unpack_tokens(const TdPb__TokenColumns *c, struct td_token *ret, size_t max,
                           struct td_error *err) {
    size_t n = c->n_id, tops = 0;
    if (n > max) return td_fail(err, TD_PROTOCOL, "%zu tokens in a message, at most %zu", n, max);
    if ((c->n_logprob && c->n_logprob != n) || (c->n_n_top && c->n_n_top != n) ||
        c->n_top_id != c->n_top_logprob)
        return td_fail(err, TD_PROTOCOL, "columns of %zu tokens have %zu, %zu, %zu, %zu rows", n,
                       c->n_logprob, c->n_n_top, c->n_top_id, c->n_top_logprob);
    for (size_t i = 0; i < n; i++) {
        struct td_token *t = &ret[i];
        t->id = (int32_t)c->id[i];
        t->logprob = c->n_logprob ? c->logprob[i] : 0;
        t->n_top = c->n_n_top ? c->n_top[i] : 0;
        if (t->n_top > TD_TOP_LOGPROBS_MAX || t->n_top > c->n_top_id - tops)
            return td_fail(err, TD_PROTOCOL, "token %zu has %u alternatives, at most %d, %zu left",
                           i, t->n_top, TD_TOP_LOGPROBS_MAX, c->n_top_id - tops);
        for (uint32_t k = 0; k < t->n_top; k++, tops++) {
            t->top[k].id = (int32_t)c->top_id[tops];
            t->top[k].logprob = c->top_logprob[tops];
        }
    }
    if (tops != c->n_top_id)
        return td_fail(err, TD_PROTOCOL, "%zu alternatives belong to no token", c->n_top_id - tops);
    return TD_OK;
}

td_status td_unpack_status(uint32_t wire) {
    switch (wire) {
#define X(name, value, text) case value:
        TD_STATUS_MAP(X)
#undef X
        return (td_status)wire;
    default:
        return TD_INTERNAL;
    }
}

td_status td_unpack_text(const char *from, char *to, size_t cap, const char *what,
                         struct td_error *err) {
    size_t n = strlen(from);
    if (n >= cap)
        return td_fail(err, TD_TOO_LONG, "%s of %zu bytes, the limit is %zu", what, n, cap - 1);
    memcpy(to, from, n + 1);
    return TD_OK;
}
