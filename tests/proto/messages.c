/* The table of all message fields, and what can be done with it. */
#include "tests/proto/messages.h"

#include <stdio.h>
#include <string.h>

enum kind {
    U32,
    U64,
    BOOL,
    TEXT,
    NAME,
    STATUS,
    ROLE,
    FINISH,
    KEY,
    SAMPLING,
    ADDRESS,
    RKEY,
    SETTINGS,
    IDS,
    SHAPE, /* what else is in a sampling, its guide included */
    TOKENS,
    SELECTIONS,
    SLABS,
    FAMILIES,
    FIRST,
    CHOICES, /* 1..TD_CHOICES_MAX: how many, or which one alone */
    CHOICE   /* 1..TD_CHOICES_MAX - 1: what is 0 would not be seen missing */
};

struct field {
    enum td_msg_type type;
    const char *name;
    enum kind kind;
    size_t at;
    bool recorded; /* false for fields added after the frames were recorded */
};

#define F(TYPE, member, field, kind)                                                               \
    { TD_MSG_##TYPE, #member "." #field, kind, offsetof(struct td_msg, member.field), true }

#define NEW(TYPE, member, field, kind)                                                             \
    { TD_MSG_##TYPE, #member "." #field, kind, offsetof(struct td_msg, member.field), false }

static const struct field fields[] = {
    F(HELLO, hello, version, U32),
    F(HELLO, hello, role, ROLE),
    F(HELLO, hello, name, NAME),
    F(HELLO, hello, epoch, U64),
    F(HELLO, hello, pid, U64),
    F(HELLO, hello, fingerprint, U64),
    F(HELLO, hello, numerics_id, U64),
    F(HELLO, hello, numerics, TEXT),
    F(HELLO, hello, model, NAME),
    F(HELLO, hello, max_context, U32),
    F(HELLO, hello, max_running, U32),
    F(HELLO, hello, pages, U32),
    F(HELLO, hello, slots, U32),
    NEW(HELLO, hello, selection_max, U32),
    F(HELLO, hello, xfer_address, ADDRESS),
    NEW(HELLO, hello, xfer_number, U32),
    NEW(HELLO, hello, page_tokens, U32),
    F(HELLO, hello, settings, SETTINGS),
    F(HELLO_REPLY, hello_reply, version, U32),
    F(HELLO_REPLY, hello_reply, epoch, U64),
    F(HELLO_REPLY, hello_reply, status, STATUS),
    F(HELLO_REPLY, hello_reply, text, TEXT),
    F(HEARTBEAT, heartbeat, epoch, U64),
    F(HEARTBEAT, heartbeat, seq, U64),
    F(HEARTBEAT, heartbeat, running, U32),
    F(HEARTBEAT, heartbeat, waiting, U32),
    F(HEARTBEAT, heartbeat, queued_tokens, U64),
    F(HEARTBEAT, heartbeat, free_pages, U32),
    F(HEARTBEAT, heartbeat, free_slots, U32),
    F(HEARTBEAT, heartbeat, steps, U64),
    NEW(HEARTBEAT, heartbeat, busy, BOOL),
    F(ADMIT, admit, key, KEY),
    F(ADMIT, admit, max_new, U32),
    F(ADMIT, admit, sampling, SAMPLING),
    NEW(ADMIT, admit, sampling.selections, BOOL),
    NEW(ADMIT, admit, sampling.guide, SHAPE),
    F(ADMIT, admit, ids, IDS),
    F(ADMIT, admit, prompt_hash, U64),
    NEW(ADMIT, admit, n, CHOICES),
    F(ADMIT_REPLY, admit_reply, key, KEY),
    F(ADMIT_REPLY, admit_reply, status, STATUS),
    F(ADMIT_REPLY, admit_reply, text, TEXT),
    F(ADMIT_REPLY, admit_reply, ticket, U64),
    F(ADMIT_REPLY, admit_reply, lease_ms, U32),
    F(ADMIT_REPLY, admit_reply, retry_ms, U32),
    F(KEEP, keep, key, KEY),
    F(PREFILL, prefill, key, KEY),
    F(PREFILL, prefill, max_new, U32),
    F(PREFILL, prefill, sampling, SAMPLING),
    NEW(PREFILL, prefill, sampling.selections, BOOL),
    NEW(PREFILL, prefill, sampling.guide, SHAPE),
    F(PREFILL, prefill, ids, IDS),
    F(PREFILL, prefill, ticket, U64),
    F(PREFILL, prefill, decode_epoch, U64),
    F(PREFILL, prefill, decode_name, NAME),
    F(PREFILL, prefill, decode_address, ADDRESS),
    NEW(PREFILL, prefill, decode_number, U32),
    NEW(PREFILL, prefill, n, CHOICES),
    F(TOKENS, tokens, key, KEY),
    F(TOKENS, tokens, index, U32),
    F(TOKENS, tokens, tokens, TOKENS),
    NEW(TOKENS, tokens, choice, CHOICE),
    NEW(TOKENS, tokens, selections, SELECTIONS), /* after the tokens: one for each */
    F(FINISHED, finished, key, KEY),
    F(FINISHED, finished, reason, FINISH),
    F(FINISHED, finished, n_tokens, U32),
    NEW(FINISHED, finished, choice, CHOICE),
    F(FAILED, failed, key, KEY),
    F(FAILED, failed, status, STATUS),
    F(FAILED, failed, text, TEXT),
    NEW(FAILED, failed, only, CHOICES),
    F(CANCEL, cancel, key, KEY),
    NEW(CANCEL, cancel, only, CHOICES),
    F(RELEASED, released, key, KEY),
    F(RELEASED, released, queue_ns, U64),
    F(RELEASED, released, compute_ns, U64),
    F(RELEASED, released, transfer_ns, U64),
    F(LEDGER, ledger, pages_free, U32),
    F(LEDGER, ledger, pages_owned, U32),
    F(LEDGER, ledger, slots_free, U32),
    F(LEDGER, ledger, slots_owned, U32),
    F(LEDGER, ledger, landing_free, U32),
    F(LEDGER, ledger, landing_granted, U32),
    F(LEDGER, ledger, landing_quarantined, U32),
    F(LEDGER, ledger, send_free, U32),
    F(LEDGER, ledger, send_busy, U32),
    F(LEDGER, ledger, handoffs_ok, U64),
    F(LEDGER, ledger, handoffs_failed, U64),
    F(LEDGER, ledger, bytes_moved, U64),
    F(LEDGER, ledger, cancels, U64),
    F(LEDGER, ledger, bytes_before_last_chunk, U64),
    NEW(LEDGER, ledger, pages_shared, U32),
    F(MOVED, moved, epoch, U64),
    F(MOVED, moved, xfer_address, ADDRESS),
    F(MOVED, moved, xfer_number, U32),
    F(PEER_HELLO, peer_hello, version, U32),
    F(PEER_HELLO, peer_hello, name, NAME),
    F(PEER_HELLO, peer_hello, epoch, U64),
    F(PEER_HELLO, peer_hello, pid, U64),
    F(PEER_HELLO, peer_hello, decode_epoch, U64),
    F(PEER_HELLO, peer_hello, fingerprint, U64),
    F(PEER_HELLO, peer_hello, numerics_id, U64),
    F(PEER_HELLO, peer_hello, xfer_address, ADDRESS),
    F(PEER_WELCOME, peer_welcome, epoch, U64),
    F(PEER_WELCOME, peer_welcome, prefill_epoch, U64),
    F(PEER_WELCOME, peer_welcome, status, STATUS),
    F(PEER_WELCOME, peer_welcome, text, TEXT),
    F(PEER_WELCOME, peer_welcome, slab_bytes, U64),
    F(PEER_WELCOME, peer_welcome, slab_address, SLABS),
    F(PEER_WELCOME, peer_welcome, rkey, RKEY),
    F(PEER_BEAT, peer_beat, epoch, U64),
    F(PEER_BEAT, peer_beat, seq, U64),
    F(SLAB, slab, epoch, U64),
    F(SLAB, slab, ticket, U64),
    F(SLAB, slab, slab, U32),
    F(SLAB, slab, first_block, U32),
    F(SLAB, slab, n_blocks, U32),
    F(SLAB, slab, bytes, U64),
    F(CREDIT, credit, epoch, U64),
    F(CREDIT, credit, ticket, U64),
    F(CREDIT, credit, slab, U32),
    F(CREDIT, credit, first_block, U32),
    F(MANIFEST, manifest, epoch, U64),
    F(MANIFEST, manifest, decode_epoch, U64),
    F(MANIFEST, manifest, ticket, U64),
    F(MANIFEST, manifest, n_prompt, U32),
    F(MANIFEST, manifest, n_blocks, U32),
    F(MANIFEST, manifest, prompt_hash, U64),
    F(MANIFEST, manifest, fingerprint, U64),
    F(MANIFEST, manifest, family, FAMILIES),
    F(MANIFEST, manifest, first, FIRST),
    F(MANIFEST, manifest, seed, U64),
    F(MANIFEST, manifest, next_position, U32),
    F(VERDICT, verdict, epoch, U64),
    F(VERDICT, verdict, ticket, U64),
    F(VERDICT, verdict, status, STATUS),
    F(VERDICT, verdict, text, TEXT),
    F(ABORT, abort, epoch, U64),
    F(ABORT, abort, ticket, U64),
    F(ABORT, abort, status, STATUS),
    F(ABORT, abort, text, TEXT),
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

const enum td_msg_type test_types[TEST_TYPES] = {
    TD_MSG_HELLO,     TD_MSG_HELLO_REPLY, TD_MSG_HEARTBEAT, TD_MSG_ADMIT,      TD_MSG_ADMIT_REPLY,
    TD_MSG_KEEP,      TD_MSG_PREFILL,     TD_MSG_TOKENS,    TD_MSG_FINISHED,   TD_MSG_FAILED,
    TD_MSG_CANCEL,    TD_MSG_RELEASED,    TD_MSG_LEDGER,    TD_MSG_PEER_HELLO, TD_MSG_PEER_WELCOME,
    TD_MSG_PEER_BEAT, TD_MSG_SLAB,        TD_MSG_CREDIT,    TD_MSG_MANIFEST,   TD_MSG_VERDICT,
    TD_MSG_ABORT,     TD_MSG_MOVED};

const char *test_type_name(enum td_msg_type t) {
    static char name[64];
    for (int i = 0; i < N_FIELDS; i++) {
        if (fields[i].type != t) continue;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(fields[i].name, "."), fields[i].name);
        return name;
    }
    return "?";
}

uint64_t test_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- filling ---- */

static void fill_text(char *to, size_t len, uint64_t *r) {
    for (size_t i = 0; i < len; i++)
        to[i] = (char)(' ' + test_random(r) % 95);
    to[len] = 0;
}

static void fill_token(struct td_token *t, uint64_t *r, bool tops) {
    memset(t, 0, sizeof *t);
    t->id = (int32_t)(test_random(r) % 129280);
    t->logprob = -(float)(test_random(r) % 1000) / 64;
    t->n_top = tops ? (uint32_t)(test_random(r) % (TD_TOP_LOGPROBS_MAX + 1)) : 0;
    for (uint32_t k = 0; k < t->n_top; k++) {
        t->top[k].id = (int32_t)(test_random(r) % 129280);
        t->top[k].logprob = -(float)(test_random(r) % 1000) / 64;
    }
}

/* Any width, so that short and long varints occur. */
static uint64_t some_number(uint64_t *r) {
    uint64_t shift = test_random(r) % 60; /* one call per statement: their order is the value */
    return test_random(r) >> shift | 1;
}

static struct td_sampling *sampling_of(struct td_msg *m) {
    return m->type == TD_MSG_ADMIT ? &m->admit.sampling : &m->prefill.sampling;
}

static void fill_sampling(struct td_sampling *s, uint64_t *r) {
    s->temperature = (float)(test_random(r) % 200) / 100;
    s->top_p = (float)(1 + test_random(r) % 100) / 100;
    s->min_p = (float)(test_random(r) % 100) / 100;
    s->top_k = (uint32_t)test_random(r);
    s->seed = test_random(r);
    s->top_logprobs = (uint32_t)(test_random(r) % (TD_TOP_LOGPROBS_MAX + 1));
    s->logprobs = test_random(r) & 1;
    s->ignore_eos = test_random(r) & 1;
}

/* Each array is there or not on its own. */
static void fill_shape(struct td_sampling *s, uint64_t *r, struct test_room *room) {
    struct td_guide *g = &room->guide;
    s->frequency_penalty = (float)(test_random(r) % 400) / 100 - 2;
    s->presence_penalty = (float)(test_random(r) % 400) / 100 - 2;
    s->repetition_penalty = (float)(1 + test_random(r) % 200) / 100;
    s->end_from = (uint32_t)some_number(r);
    for (uint32_t i = 0; i < TEST_GUIDE_MAX; i++) {
        room->guide_id[0][i] = (int32_t)(test_random(r) % 129280);
        room->guide_id[1][i] = (int32_t)(test_random(r) % 129280);
        room->guide_id[2][i] = (int32_t)(test_random(r) % 129280);
        room->bias[i] = (float)(test_random(r) % 20000) / 100 - 100;
        room->grammar[i] = (uint8_t)test_random(r);
    }
    uint32_t n = (uint32_t)(test_random(r) % (TEST_GUIDE_MAX + 1));
    *g = (struct td_guide){.bias_id = room->guide_id[0], .bias = room->bias};
    g->prompt_id = room->guide_id[1];
    g->n_bias = n % 3 ? n : 0;
    g->n_prompt_ids = n % 4 ? TEST_GUIDE_MAX - n : 0;
    g->grammar_n = n % 7 ? n : 0;
    g->grammar = room->grammar;
    s->guide = g->n_bias + g->n_prompt_ids + g->grammar_n ? g : NULL;
    s->n_said = n % 5 ? n : 0;
    s->said = s->n_said ? room->guide_id[2] : NULL;
}

static void fill_selection(struct td_selection *s, uint64_t *r, struct test_room *room,
                           uint32_t token) {
    uint32_t *layer = room->layer[token], *count = room->count[token], *entry = room->entry[token];
    s->n_layers = (uint32_t)(test_random(r) % (TEST_LAYERS_MAX + 1));
    s->n_entries = 0;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        layer[l] = 3 * l + (uint32_t)(test_random(r) % 3);
        count[l] = (uint32_t)(test_random(r) % (TEST_ENTRIES_MAX + 1));
        for (uint32_t i = 0, at = 0; i < count[l]; i++)
            entry[s->n_entries++] = at += 1 + (uint32_t)(test_random(r) % 5000);
    }
    s->layer = layer;
    s->count = count;
    s->entry = entry;
}

static const uint8_t *fill_blob(uint8_t *to, size_t n, uint64_t *r) {
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)test_random(r);
    return to;
}

static void fill_pointers(const struct field *f, struct td_msg *m, uint64_t *r,
                          struct test_room *room) {
    uint32_t n = (uint32_t)(1 + test_random(r) % (f->kind == IDS ? TEST_IDS_MAX : 200));
    switch (f->kind) {
    case ADDRESS:
        n = (uint32_t)(test_random(r) % TD_MSG_ADDRESS_MAX);
        fill_blob(room->blob, n, r);
        if (f->type == TD_MSG_HELLO)
            m->hello.xfer_address = room->blob, m->hello.xfer_address_len = n;
        if (f->type == TD_MSG_PREFILL)
            m->prefill.decode_address = room->blob, m->prefill.decode_address_len = n;
        if (f->type == TD_MSG_MOVED)
            m->moved.xfer_address = room->blob, m->moved.xfer_address_len = n;
        if (f->type == TD_MSG_PEER_HELLO)
            m->peer_hello.xfer_address = room->blob, m->peer_hello.xfer_address_len = n;
        return;
    case RKEY:
        m->peer_welcome.rkey = fill_blob(room->blob, n, r);
        m->peer_welcome.rkey_len = n;
        return;
    case SETTINGS:
        fill_text(room->settings, n, r);
        m->hello.settings = room->settings;
        m->hello.settings_len = n;
        return;
    case IDS:
        for (uint32_t i = 0; i < n; i++) {
            uint64_t shift = test_random(r) % 31;
            room->ids[i] = (int32_t)((test_random(r) & INT32_MAX) >> shift);
        }
        if (f->type == TD_MSG_ADMIT) {
            m->admit.n_prompt = n;
            m->admit.ids = test_random(r) % 4 ? room->ids : NULL;
        } else {
            m->prefill.n_prompt = n;
            m->prefill.ids = room->ids;
        }
        return;
    case TOKENS:
        m->tokens.n = 1 + n % TD_TOKENS_PER_MSG_MAX;
        for (uint32_t i = 0; i < m->tokens.n; i++)
            fill_token(&room->tokens[i], r, n & 1);
        m->tokens.tokens = room->tokens;
        return;
    case SELECTIONS:
        m->tokens.selections = n % 3 ? room->selections : NULL;
        for (uint32_t i = 0; i < m->tokens.n; i++)
            fill_selection(&room->selections[i], r, room, i);
        return;
    case SLABS:
        m->peer_welcome.n_slabs = 1 + n % TD_LANDING_SLABS_MAX;
        for (uint32_t i = 0; i < m->peer_welcome.n_slabs; i++)
            m->peer_welcome.slab_address[i] = test_random(r);
        return;
    case FAMILIES:
        m->manifest.n_families = n % (TD_KV_FAMILIES_MAX + 1);
        for (uint32_t i = 0; i < m->manifest.n_families; i++) {
            m->manifest.family[i].rows = some_number(r);
            m->manifest.family[i].bytes = some_number(r);
            m->manifest.family[i].checksum = test_random(r);
        }
        return;
    default:
        m->manifest.n_first = n % (TD_FIRST_TOKENS_MAX + 1);
        for (uint32_t i = 0; i < m->manifest.n_first; i++)
            fill_token(&m->manifest.first[i], r, n & 1);
        return;
    }
}

static void fill_field(const struct field *f, struct td_msg *m, uint64_t *r,
                       struct test_room *room) {
    static const td_status statuses[] = {TD_OK,        TD_INVALID, TD_BUSY,    TD_STALE,
                                         TD_PEER_LOST, TD_CORRUPT, TD_INTERNAL};
    void *p = (char *)m + f->at;
    switch (f->kind) {
    case U32:
        *(uint32_t *)p = (uint32_t)some_number(r);
        return;
    case U64:
        *(uint64_t *)p = some_number(r);
        return;
    case CHOICES:
        *(uint32_t *)p = (uint32_t)(1 + test_random(r) % TD_CHOICES_MAX);
        return;
    case CHOICE:
        *(uint32_t *)p = (uint32_t)(1 + test_random(r) % (TD_CHOICES_MAX - 1));
        return;
    case BOOL:
        *(bool *)p = true;
        return;
    case TEXT:
        fill_text(p, test_random(r) % TD_TEXT_MAX, r);
        return;
    case NAME:
        fill_text(p, 1 + test_random(r) % (TD_NAME_MAX - 1), r);
        return;
    case STATUS:
        *(td_status *)p = statuses[test_random(r) % 7];
        return;
    case ROLE:
        *(enum td_role *)p = (enum td_role)(1 + test_random(r) % 3);
        return;
    case FINISH:
        *(enum td_finish *)p = (enum td_finish)(1 + test_random(r) % 2);
        return;
    case KEY:
        ((struct td_key *)p)->request = some_number(r);
        ((struct td_key *)p)->attempt = (uint32_t)test_random(r);
        return;
    case SAMPLING:
        fill_sampling(p, r);
        return;
    case SHAPE:
        fill_shape(sampling_of(m), r, room);
        return;
    default:
        fill_pointers(f, m, r, room);
        return;
    }
}

void test_message_fill(struct td_msg *m, enum td_msg_type type, uint64_t seed,
                       struct test_room *room) {
    memset(m, 0, sizeof *m);
    m->type = type;
    for (int i = 0; i < N_FIELDS; i++) {
        if (fields[i].type != type) continue;
        uint64_t r = seed * 1000003u + (uint64_t)type;
        for (const char *c = fields[i].name; *c; c++)
            r = r * 31 + (uint64_t)*c;
        fill_field(&fields[i], m, &r, room);
    }
}

/* ---- comparing ---- */

static bool same_tokens(const struct td_token *a, const struct td_token *b, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (a[i].id != b[i].id || a[i].logprob != b[i].logprob || a[i].n_top != b[i].n_top)
            return false;
        for (uint32_t k = 0; k < a[i].n_top; k++)
            if (a[i].top[k].id != b[i].top[k].id || a[i].top[k].logprob != b[i].top[k].logprob)
                return false;
    }
    return true;
}

static bool same_numbers(const uint32_t *a, const uint32_t *b, uint32_t n) {
    return n == 0 || memcmp(a, b, n * sizeof *a) == 0;
}

static bool same_selections(const struct td_selection *a, const struct td_selection *b,
                            uint32_t n) {
    if (!a || !b) return a == b;
    for (uint32_t i = 0; i < n; i++)
        if (a[i].n_layers != b[i].n_layers || a[i].n_entries != b[i].n_entries ||
            !same_numbers(a[i].layer, b[i].layer, a[i].n_layers) ||
            !same_numbers(a[i].count, b[i].count, a[i].n_layers) ||
            !same_numbers(a[i].entry, b[i].entry, a[i].n_entries))
            return false;
    return true;
}

static bool same_sampling(const struct td_sampling *a, const struct td_sampling *b) {
    return a->temperature == b->temperature && a->top_p == b->top_p && a->min_p == b->min_p &&
           a->top_k == b->top_k && a->seed == b->seed && a->top_logprobs == b->top_logprobs &&
           a->logprobs == b->logprobs && a->ignore_eos == b->ignore_eos;
}

static bool same_shape(const struct td_sampling *a, const struct td_sampling *b) {
    const struct td_guide *g = a->guide, *h = b->guide;
    if (a->frequency_penalty != b->frequency_penalty ||
        a->presence_penalty != b->presence_penalty ||
        a->repetition_penalty != b->repetition_penalty || a->end_from != b->end_from ||
        a->n_said != b->n_said ||
        !same_numbers((const void *)a->said, (const void *)b->said, a->n_said))
        return false;
    if (!g || !h) return g == h;
    return g->n_bias == h->n_bias && g->n_prompt_ids == h->n_prompt_ids &&
           same_numbers((const void *)g->bias_id, (const void *)h->bias_id, g->n_bias) &&
           same_numbers((const void *)g->bias, (const void *)h->bias, g->n_bias) &&
           same_numbers((const void *)g->prompt_id, (const void *)h->prompt_id, g->n_prompt_ids) &&
           g->grammar_n == h->grammar_n &&
           (g->grammar_n == 0 || memcmp(g->grammar, h->grammar, g->grammar_n) == 0);
}

static bool same_blob(const void *a, size_t an, const void *b, size_t bn) {
    return an == bn && (an == 0 || memcmp(a, b, an) == 0);
}

static bool same_pointers(const struct field *f, const struct td_msg *a, const struct td_msg *b) {
    switch (f->kind) {
    case ADDRESS:
        if (f->type == TD_MSG_HELLO)
            return same_blob(a->hello.xfer_address, a->hello.xfer_address_len,
                             b->hello.xfer_address, b->hello.xfer_address_len);
        if (f->type == TD_MSG_PREFILL)
            return same_blob(a->prefill.decode_address, a->prefill.decode_address_len,
                             b->prefill.decode_address, b->prefill.decode_address_len);
        if (f->type == TD_MSG_MOVED)
            return same_blob(a->moved.xfer_address, a->moved.xfer_address_len,
                             b->moved.xfer_address, b->moved.xfer_address_len);
        return same_blob(a->peer_hello.xfer_address, a->peer_hello.xfer_address_len,
                         b->peer_hello.xfer_address, b->peer_hello.xfer_address_len);
    case RKEY:
        return same_blob(a->peer_welcome.rkey, a->peer_welcome.rkey_len, b->peer_welcome.rkey,
                         b->peer_welcome.rkey_len);
    case SETTINGS:
        return same_blob(a->hello.settings, a->hello.settings_len, b->hello.settings,
                         b->hello.settings_len);
    case IDS:
        if (f->type == TD_MSG_ADMIT)
            return a->admit.n_prompt == b->admit.n_prompt && !a->admit.ids == !b->admit.ids &&
                   (!a->admit.ids || memcmp(a->admit.ids, b->admit.ids,
                                            a->admit.n_prompt * sizeof a->admit.ids[0]) == 0);
        return same_blob(a->prefill.ids, a->prefill.n_prompt * sizeof(int32_t), b->prefill.ids,
                         b->prefill.n_prompt * sizeof(int32_t));
    case TOKENS:
        return a->tokens.n == b->tokens.n &&
               same_tokens(a->tokens.tokens, b->tokens.tokens, a->tokens.n);
    case SELECTIONS:
        return same_selections(a->tokens.selections, b->tokens.selections, a->tokens.n);
    case SLABS:
        return same_blob(a->peer_welcome.slab_address, a->peer_welcome.n_slabs * sizeof(uint64_t),
                         b->peer_welcome.slab_address, b->peer_welcome.n_slabs * sizeof(uint64_t));
    case FAMILIES:
        return same_blob(a->manifest.family, a->manifest.n_families * sizeof a->manifest.family[0],
                         b->manifest.family, b->manifest.n_families * sizeof a->manifest.family[0]);
    default:
        return a->manifest.n_first == b->manifest.n_first &&
               same_tokens(a->manifest.first, b->manifest.first, a->manifest.n_first);
    }
}

static bool same_field(const struct field *f, const struct td_msg *a, const struct td_msg *b) {
    const void *x = (const char *)a + f->at, *y = (const char *)b + f->at;
    switch (f->kind) {
    case U32:
    case STATUS:
    case ROLE:
    case FINISH:
    case CHOICES:
    case CHOICE:
        return memcmp(x, y, sizeof(uint32_t)) == 0;
    case U64:
        return memcmp(x, y, sizeof(uint64_t)) == 0;
    case BOOL:
        return memcmp(x, y, sizeof(bool)) == 0;
    case TEXT:
    case NAME:
        return strcmp(x, y) == 0;
    case KEY:
        return ((const struct td_key *)x)->request == ((const struct td_key *)y)->request &&
               ((const struct td_key *)x)->attempt == ((const struct td_key *)y)->attempt;
    case SAMPLING:
        return same_sampling(x, y);
    case SHAPE:
        return same_shape(sampling_of((struct td_msg *)(uintptr_t)a),
                          sampling_of((struct td_msg *)(uintptr_t)b));
    default:
        return same_pointers(f, a, b);
    }
}

const char *test_message_differs(const struct td_msg *a, const struct td_msg *b,
                                 bool recorded_only) {
    if (a->type != b->type) return "type";
    for (int i = 0; i < N_FIELDS; i++) {
        if (fields[i].type != a->type || (recorded_only && !fields[i].recorded)) continue;
        if (!same_field(&fields[i], a, b)) return fields[i].name;
    }
    return NULL;
}
