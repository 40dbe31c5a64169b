/* The forging prefill worker. */
#include "tests/workers/forger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/io/loop.h"
#include "common/kv/checksum.h"

enum { BEAT_MS = 200, WAIT_MS = 10000, NS_PER_MS = 1000000 };

static void need(td_status st, const struct td_error *err) {
    if (st == TD_OK) return;
    fprintf(stderr, "forger: %s\n", err->text);
    abort();
}

static uint64_t soon(void) {
    return td_now_ns() + (uint64_t)WAIT_MS * CLUSTER_SLOW * NS_PER_MS;
}

/* ---- the link ---- */

static void end(struct forger *f, uint64_t ticket, td_status status, const char *text) {
    if (ticket != f->ticket || f->over) return;
    f->over = true;
    f->status = status;
    snprintf(f->text, sizeof f->text, "%s", text);
}

static void on_message(void *user, struct td_xfer_peer *peer, const struct td_msg *m) {
    struct forger *f = user;
    struct td_error err;
    switch (m->type) {
    case TD_MSG_PEER_WELCOME:
        f->welcome = m->peer_welcome;
        f->welcomed = true;
        if (m->peer_welcome.status == TD_OK)
            need(td_xfer_remote_open(peer, m->peer_welcome.rkey, m->peer_welcome.rkey_len,
                                     &f->remote, &err),
                 &err);
        return;
    case TD_MSG_CREDIT:
        f->in_use &= ~(1ull << m->credit.slab);
        return;
    case TD_MSG_VERDICT:
        end(f, m->verdict.ticket, m->verdict.status, m->verdict.text);
        return;
    case TD_MSG_ABORT:
        end(f, m->abort.ticket, m->abort.status, m->abort.text);
        return;
    default:
        return;
    }
}

static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *text) {
    struct forger *f = user;
    (void)peer, (void)why;
    fprintf(stderr, "forger's link: %s\n", text);
    f->lost = true;
}

static void on_closed(void *user, struct td_xfer_peer *peer) {
    struct forger *f = user;
    (void)peer;
    f->peer = NULL;
    f->remote = NULL;
    f->closed = true;
}

static const struct td_plane_events events = {NULL, on_message, on_lost, on_closed};

static void on_beat(uv_timer_t *t) {
    struct forger *f = t->data;
    struct td_msg m = {.type = TD_MSG_PEER_BEAT, .peer_beat = {f->epoch, ++f->beats}};
    if (f->peer && !f->lost) (void)!td_plane_send(f->plane, f->peer, &m, soon(), NULL);
}

static void say(struct forger *f, const struct td_msg *m) {
    struct td_error err;
    need(td_plane_send(f->plane, f->peer, m, soon(), &err), &err);
}

static bool is_welcomed(void *arg) {
    const struct forger *f = arg;
    return f->welcomed || f->lost;
}
static bool is_closed(void *arg) {
    return ((struct forger *)arg)->closed;
}

bool forger_greet(struct forger *f, uint64_t decode_epoch) {
    struct td_error err;
    struct td_msg m = {.type = TD_MSG_PEER_HELLO};
    f->welcomed = f->lost = f->closed = false;
    f->in_use = 0;
    need(td_xfer_connect(td_plane_xfer(f->plane), f->c->decode.address, f->c->decode.address_len,
                         &f->peer, &err),
         &err);
    m.peer_hello = (struct td_msg_peer_hello){.version = TD_PROTO_VERSION,
                                              .name = "prefill@9",
                                              .epoch = f->epoch,
                                              .pid = (uint64_t)getpid(),
                                              .decode_epoch = decode_epoch,
                                              .fingerprint = f->engine.layout->fingerprint,
                                              .numerics_id = f->engine.numerics_id};
    m.peer_hello.xfer_address =
        td_xfer_address(td_plane_xfer(f->plane), &m.peer_hello.xfer_address_len);
    say(f, &m);
    if (!cluster_until(f->c, is_welcomed, f)) return false;
    return f->welcomed && f->welcome.status == TD_OK;
}

void forger_hang_up(struct forger *f) {
    if (!f->peer) return;
    td_xfer_peer_close(f->peer);
    if (!cluster_until(f->c, is_closed, f)) abort();
}

/* ---- the prompt ---- */

static void compute(struct forger *f) {
    struct td_error err, unsampled = {.status = TD_OK};
    struct td_sampling greedy = {.top_p = 1, .logprobs = true};
    struct td_worker_sample sample = {.sampling = &greedy, .position = f->n_prompt};
    uint32_t pages[FORGER_BLOCKS];
    for (uint32_t i = 0; i < FORGER_BLOCKS; i++)
        pages[i] = i;
    for (uint32_t pos = 0; pos < f->n_prompt;) {
        uint32_t n = f->n_prompt - pos < TD_KV_PAGE_TOKENS ? f->n_prompt - pos : TD_KV_PAGE_TOKENS;
        struct td_run run = {.slot = 0, .pos = pos, .n = n, .ids = f->ids + pos, .pages = pages};
        run.want_logits = pos + n == f->n_prompt;
        need(td_worker_engine_step(&f->engine, &run, 1, &sample, run.want_logits, &f->first, NULL,
                                   &unsampled, &err),
             &err);
        if (unsampled.status != TD_OK) need(unsampled.status, &unsampled);
        pos += n;
    }
}

void forger_compute(struct forger *f, const char *model, const char *const *settings,
                    const int32_t *ids, uint32_t n, uint64_t seed) {
    struct td_error err;
    memset(f, 0, sizeof *f);
    f->ids = ids;
    f->n_prompt = n;
    f->epoch = seed | 1;
    td_config_defaults(&f->config);
    snprintf(f->config.model_dir, sizeof f->config.model_dir, "%s", model);
    f->config.numerics = TD_NUMERICS_PLAIN;
    for (; *settings; settings++)
        if (strncmp(*settings, "kv_layout=", 10) == 0)
            need(td_config_set(&f->config, *settings, &err), &err);
    f->config.max_context = 4096;
    f->config.pool_pages = FORGER_BLOCKS;
    f->config.max_running = 1;
    f->config.chunk_tokens = TD_KV_PAGE_TOKENS;
    if (td_kv_page_blocks(n) >= FORGER_BLOCKS) abort();
    need(td_worker_engine_open(&f->engine, &f->config, NULL, &err), &err);
    compute(f);
    size_t cap = td_kv_page_block_bytes_max(f->engine.layout);
    if (cap < td_kv_slot_block_bytes_max(f->engine.layout))
        cap = td_kv_slot_block_bytes_max(f->engine.layout);
    for (int i = 0; i < FORGER_BLOCKS; i++) {
        f->good.block[i].cap = cap;
        if (!(f->good.block[i].bytes = malloc(cap))) abort();
    }
}

void forger_open(struct forger *f, struct cluster *c) {
    struct td_error err;
    f->c = c;
    struct td_plane_options o = cluster_plane(c, 4, 64);
    need(td_plane_create(&c->loop, &events, f, &o, &f->plane, &err), &err);
    uv_timer_init(&c->loop, &f->beat);
    f->beat.data = f;
    uv_timer_start(&f->beat, on_beat, BEAT_MS, BEAT_MS);
}

void forger_close(struct forger *f) {
    forger_hang_up(f);
    uv_close((uv_handle_t *)&f->beat, NULL);
    td_plane_destroy(f->plane);
    td_worker_engine_close(&f->engine);
    for (int i = 0; i < FORGER_BLOCKS; i++)
        free(f->good.block[i].bytes);
}

/* ---- an honest handoff ---- */

static void make_manifest(struct forger *f, struct forged *h, const struct td_kv_tally *tally) {
    const struct td_kv_expected known = {.ticket = {f->c->decode.epoch, f->ticket},
                                         .prefill_epoch = f->epoch,
                                         .prompt_hash = td_prompt_hash(f->ids, f->n_prompt),
                                         .prompt_tokens = f->n_prompt,
                                         .n_first = 1};
    struct td_kv_manifest k;
    struct td_error err;
    need(td_kv_manifest_fill(&k, f->engine.layout, &known, tally, &err), &err);
    h->manifest = (struct td_msg){.type = TD_MSG_MANIFEST};
    struct td_msg_manifest *m = &h->manifest.manifest;
    m->epoch = f->epoch;
    m->decode_epoch = k.decode_epoch;
    m->ticket = k.ticket;
    m->n_prompt = k.prompt_tokens;
    m->n_blocks = k.blocks;
    m->prompt_hash = k.prompt_hash;
    m->fingerprint = k.fingerprint;
    m->n_families = TD_KV_FAMILIES;
    for (int i = 0; i < TD_KV_FAMILIES; i++)
        m->family[i] =
            (struct td_msg_family){k.family[i].rows, k.family[i].bytes, k.family[i].checksum};
    m->n_first = 1;
    m->first[0] = f->first;
    m->next_position = f->n_prompt + 1;
}

struct forged *forger_make(struct forger *f, uint64_t ticket) {
    struct forged *h = &f->good;
    const struct td_kv_layout *l = f->engine.layout;
    const struct td_kv_ticket t = {f->c->decode.epoch, ticket};
    uint32_t pages = td_kv_page_blocks(f->n_prompt);
    struct td_kv_tally tally;
    struct td_error err;
    f->ticket = ticket;
    f->over = false;
    f->status = TD_OK;
    h->n_blocks = pages + 1;
    need(td_kv_tally_init(&tally, f->n_prompt, &err), &err);
    for (uint32_t i = 0; i < h->n_blocks; i++) {
        struct forged_block *b = &h->block[i];
        if (i < pages)
            need(td_kv_pack_page(l, td_engine_pool(f->engine.engine), i, t, i,
                                 td_kv_block_tokens(f->n_prompt, i), b->bytes, b->cap, &b->len,
                                 &b->header, &err),
                 &err);
        else
            need(td_kv_pack_slot(l, td_engine_slot(f->engine.engine, 0), t, f->n_prompt, b->bytes,
                                 b->cap, &b->len, &b->header, &err),
                 &err);
        need(td_kv_tally_add(&tally, &b->header, &err), &err);
        h->step[i] = (struct forged_step){.block = i, .say = true};
        h->step[i].slab = (struct td_msg_slab){
            .epoch = f->epoch, .ticket = ticket, .first_block = i, .n_blocks = 1};
    }
    h->step[h->n_blocks] = (struct forged_step){.block = UINT32_MAX, .manifest = true};
    h->n_steps = h->n_blocks + 1;
    make_manifest(f, h, &tally);
    forged_measure(h);
    return h;
}

/* ---- sending ---- */

static void on_flushed(struct td_xfer_req *r, td_status st) {
    struct forger *f = r->user;
    if (st != TD_OK) abort();
    f->flushed = true;
}
static bool is_flushed(void *arg) {
    return ((struct forger *)arg)->flushed;
}
static void on_put(struct td_xfer_req *r, td_status st) {
    (void)r;
    if (st != TD_OK) abort();
}

static void put(struct forger *f, uint32_t slab, const struct forged_block *b) {
    struct td_xfer_req p = {.deadline_ns = soon(), .on_done = on_put, .user = f}, q = p;
    q.on_done = on_flushed;
    f->flushed = false;
    if (td_xfer_put(f->peer, f->remote, f->welcome.slab_address[slab], b->bytes, b->len, &p) !=
            TD_OK ||
        td_xfer_flush(f->peer, &q) != TD_OK)
        abort();
    while (!cluster_until(f->c, is_flushed, f) || !p.quiet || !q.quiet) {
    }
}

static bool has_room(void *arg) {
    const struct forger *f = arg;
    return f->over || f->in_use != (1ull << f->welcome.n_slabs) - 1;
}

bool forger_send(struct forger *f, struct forged *h) {
    uint32_t slab = 0;
    for (uint32_t k = 0; k < h->n_steps && !f->over; k++) {
        struct forged_step *s = &h->step[k];
        if (s->block != UINT32_MAX) {
            if (!cluster_until(f->c, has_room, f)) return false;
            if (f->over) break;
            for (slab = 0; f->in_use >> slab & 1;)
                slab++;
            put(f, slab, &h->block[s->block]);
        }
        struct td_msg m = {.type = TD_MSG_SLAB, .slab = s->slab};
        m.slab.slab += slab;
        if (s->say) {
            if (s->block != UINT32_MAX) f->in_use |= 1ull << slab;
            say(f, &m);
        }
        if (s->manifest) say(f, &h->manifest);
    }
    return true;
}

/* ---- for making faults ---- */

uint8_t *forged_family(struct forged_block *b, int family) {
    uint8_t *at = b->bytes + b->header.header_bytes;
    for (int f = 0; f < family; f++)
        at += b->header.bytes[f];
    return at;
}

void forged_cut(struct forged_block *b, uint8_t *at, size_t n) {
    size_t behind = (size_t)(b->bytes + b->len - at) - n;
    memmove(at, at + n, behind);
    b->len -= n;
}

void forged_seal(struct forged_block *b) {
    b->header.header_checksum = 0;
    b->header.header_checksum = td_checksum(&b->header, sizeof b->header);
    memcpy(b->bytes, &b->header, sizeof b->header);
}

void forged_measure(struct forged *h) {
    for (uint32_t k = 0; k < h->n_steps; k++)
        if (h->step[k].block != UINT32_MAX) h->step[k].slab.bytes = h->block[h->step[k].block].len;
}

void forged_no_step(struct forged *h, uint32_t step) {
    memmove(&h->step[step], &h->step[step + 1], (h->n_steps - step - 1) * sizeof h->step[0]);
    h->n_steps--;
}
