/* Drives the decode machine by hand: events as short calls, actions as lines of text. */
#ifndef TD_TESTS_DECODE_HARNESS_H
#define TD_TESTS_DECODE_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/kv/manifest.h"
#include "decode/sched.h"

#define MS 1000000ull
enum {
    ME = 60,
    PREFILL = 50,
    PREFILL2 = 51,
    EOS = 1,
    PAGES = 12,
    MAX_CONTEXT = 2048,
    BUDGET = 300
};

static struct td_decode *machine;
static struct td_kv_layout layout;
static uint64_t now;
static char said[8192];
static char failed_text[TD_TEXT_MAX]; /* of the last FAILED */
static int32_t ids[4096];
static uint32_t ids_back;    /* FREE_IDS so far */
static uint32_t guides_back; /* FREE_GUIDE so far */
static const struct td_guide *last_guide_back;
static uint64_t ticket;       /* of the last admission */
static uint32_t step_samples; /* of the last STEP */
static uint64_t step_seeds[8], step_owners[8];
static uint32_t step_slots[8];
static int32_t step_fed[8];

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...) {
    size_t n = strlen(said);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(said + n, sizeof said - n, fmt, ap);
    va_end(ap);
}

static const char *only(uint32_t choice) {
    static char text[16];
    snprintf(text, sizeof text, "/%u", choice);
    return text;
}
static const char *which(uint32_t choice) { /* choice 0 is what there always is */
    return choice == 0 ? "" : only(choice);
}

static void say_message(const struct td_msg *m) {
    unsigned r = (unsigned)m->cancel.key.request;
    switch (m->type) {
    case TD_MSG_ADMIT_REPLY:
        say("ADMITTED %u %s%s\n", r, td_status_name(m->admit_reply.status),
            m->admit_reply.retry_ms != 0 ? " retry" : "");
        if (m->admit_reply.status == TD_OK) ticket = m->admit_reply.ticket;
        return;
    case TD_MSG_TOKENS:
        say("TOKENS %u%s #%u", r, which(m->tokens.choice), m->tokens.index);
        if (m->tokens.selections != NULL) say(" selection %u", m->tokens.selections->n_entries);
        say("\n");
        return;
    case TD_MSG_FINISHED:
        say("FINISHED %u%s %s %u\n", r, which(m->finished.choice),
            m->finished.reason == TD_FINISH_STOP ? "stop" : "length", m->finished.n_tokens);
        return;
    case TD_MSG_FAILED:
        say("FAILED %u%s %s\n", r, m->failed.only != 0 ? only(m->failed.only - 1) : "",
            td_status_name(m->failed.status));
        memcpy(failed_text, m->failed.text, sizeof failed_text);
        return;
    case TD_MSG_RELEASED:
        say("RELEASED %u\n", r);
        return;
    case TD_MSG_PEER_WELCOME:
        say("peer WELCOME %s\n", td_status_name(m->peer_welcome.status));
        return;
    case TD_MSG_CREDIT:
        say("peer CREDIT %u\n", m->credit.slab);
        return;
    case TD_MSG_VERDICT:
        say("peer VERDICT %s\n", td_status_name(m->verdict.status));
        assert_int_equal(m->verdict.text[0] == 0, m->verdict.status == TD_OK);
        return;
    case TD_MSG_ABORT:
        say("peer ABORT %s\n", td_status_name(m->abort.status));
        return;
    case TD_MSG_PEER_BEAT:
        say("peer BEAT\n");
        return;
    default:
        say("?\n");
    }
}

static void say_step(const struct td_decode_action *a) {
    uint32_t sample = 0, row = 0;
    say("STEP");
    for (uint32_t k = 0; k < a->step.n_runs; k++) {
        const struct td_run *r = &a->step.runs[k];
        say(" %u+%u", r->pos, r->n);
        if (!r->want_logits) continue;
        /* The sampled token stands right behind the run's last one. */
        uint32_t before = sample;
        while (sample < a->step.n_samples && a->step.samples[sample].row == row)
            assert_int_equal(a->step.samples[sample++].position, r->pos + r->n);
        if (sample - before != 1) say("x%u", sample - before);
        row++;
    }
    say("\n");
    step_samples = a->step.n_samples;
    for (uint32_t k = 0; k < step_samples; k++) {
        step_seeds[k] = a->step.samples[k].sampling->seed;
        step_owners[k] = a->step.samples[k].owner;
        step_slots[k] = a->step.samples[k].slot;
        step_fed[k] = a->step.samples[k].fed;
    }
    assert_int_equal(sample, step_samples);
}

static void say_action(const struct td_decode_action *a) {
    switch (a->kind) {
    case TD_DECODE_SEND:
        say_message(&a->msg);
        return;
    case TD_DECODE_STEP:
        say_step(a);
        return;
    case TD_DECODE_SEND_PEER:
        say_message(&a->peer.msg);
        return;
    case TD_DECODE_CLOSE:
        say("CLOSE %u\n", (unsigned)a->peer.link);
        return;
    case TD_DECODE_UNPACK:
        say("UNPACK %u+%u from %u\n", a->unpack.first_block, a->unpack.n_blocks,
            a->unpack.landing_slab);
        return;
    case TD_DECODE_COPY:
        say("COPY slot %u to %u", a->copy.from_slot, a->copy.to_slot);
        if (a->copy.page) say(", page %u to %u", a->copy.from_page, a->copy.to_page);
        say("\n");
        return;
    case TD_DECODE_FREE_IDS:
        ids_back++;
        return;
    case TD_DECODE_FREE_GUIDE:
        guides_back++;
        last_guide_back = a->guide;
        return;
    }
}

static const char *step(struct td_decode_event ev) {
    struct td_decode_action a;
    struct td_error err = {.text = ""};
    said[0] = 0;
    ev.now_ns = now;
    td_decode_step(machine, &ev);
    while (td_decode_next(machine, &a))
        say_action(&a);
    (void)!td_decode_check(machine, &err);
    assert_string_equal(err.text, "");
    return said;
}

static const char *from_router(struct td_msg m) {
    return step((struct td_decode_event){.kind = TD_DECODE_MESSAGE, .msg = &m});
}
static const char *admit_n(uint64_t request, uint32_t n_prompt, uint32_t max_new, uint32_t n,
                           const int32_t *prompt) {
    return from_router((struct td_msg){.type = TD_MSG_ADMIT,
                                       .admit = {.key = {request, 1},
                                                 .n_prompt = n_prompt,
                                                 .max_new = max_new,
                                                 .n = n,
                                                 .ids = prompt,
                                                 .prompt_hash = 5}});
}
static const char *admit(uint64_t request, uint32_t n_prompt, uint32_t max_new) {
    return admit_n(request, n_prompt, max_new, 0, NULL);
}
static const char *admit_ids(uint64_t request, uint32_t n_prompt, uint32_t max_new) {
    return admit_n(request, n_prompt, max_new, 0, ids);
}
static const char *cancel(uint64_t request) {
    return from_router((struct td_msg){.type = TD_MSG_CANCEL, .cancel = {.key = {request, 1}}});
}
static const char *keep(uint64_t request) {
    return from_router((struct td_msg){.type = TD_MSG_KEEP, .keep = {.key = {request, 1}}});
}
/* Sample k of the step gives list[k]. */
static const char *computed_each(const int32_t *list) {
    struct td_token t[8];
    memset(t, 0, sizeof t);
    for (uint32_t k = 0; k < step_samples; k++)
        t[k].id = list[k];
    return step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE, .step = {.tokens = t}});
}
/* Every sample of the step gives `id`. */
static const char *computed(int32_t id) {
    const int32_t list[8] = {id, id, id, id, id, id, id, id};
    return computed_each(list);
}
static const char *from_peer(td_link_id link, struct td_msg m) {
    return step((struct td_decode_event){.kind = TD_DECODE_PEER_MESSAGE,
                                         .peer = {.link = link, .msg = &m}});
}
static struct td_msg hello(uint64_t epoch) {
    return (struct td_msg){.type = TD_MSG_PEER_HELLO,
                           .peer_hello = {.version = TD_PROTO_VERSION,
                                          .epoch = epoch,
                                          .decode_epoch = ME,
                                          .fingerprint = layout.fingerprint}};
}
static const char *slab(td_link_id link, uint64_t t, uint32_t index, uint32_t first, uint32_t n) {
    return from_peer(
        link, (struct td_msg){.type = TD_MSG_SLAB, .slab = {PREFILL, t, index, first, n, 100}});
}

/* Headers as packing would make them; checksums stand for content. */
static void headers(struct td_kv_block_header *h, uint32_t n_prompt, uint32_t first, uint32_t n) {
    memset(h, 0, n * sizeof *h);
    for (uint32_t k = 0; k < n; k++) {
        h[k].index = first + k;
        bool page = h[k].index < td_kv_page_blocks(n_prompt);
        h[k].kind = page ? TD_KV_PAGE_BLOCK : TD_KV_SLOT_BLOCK;
        uint32_t tokens = page ? td_kv_block_tokens(n_prompt, h[k].index) : n_prompt;
        for (int f = 0; f < TD_KV_FAMILIES; f++) {
            if (!td_kv_in_block((enum td_kv_block_kind)h[k].kind, (enum td_kv_family)f)) continue;
            h[k].rows[f] = td_kv_rows(&layout, (enum td_kv_family)f, tokens);
            h[k].bytes[f] = td_kv_bytes(&layout, (enum td_kv_family)f, tokens);
            h[k].checksum[f] = 1000 * h[k].index + (uint64_t)f;
        }
    }
}
static const char *unpacked(uint32_t landing, uint32_t n_prompt, uint32_t first, uint32_t n) {
    struct td_kv_block_header h[8];
    headers(h, n_prompt, first, n);
    return step((struct td_decode_event){.kind = TD_DECODE_UNPACKED,
                                         .unpacked = {.landing_slab = landing, .headers = h}});
}
static const char *manifest_n(td_link_id link, uint64_t t, uint32_t n_prompt, uint64_t prompt_hash,
                              const int32_t *first, uint32_t n) {
    struct td_kv_block_header h[16];
    struct td_kv_tally tally;
    struct td_kv_manifest k;
    uint32_t blocks = td_kv_page_blocks(n_prompt) + 1;
    const struct td_kv_expected known = {{ME, t}, PREFILL, prompt_hash, n_prompt, n};
    headers(h, n_prompt, 0, blocks);
    assert_int_equal(td_kv_tally_init(&tally, n_prompt, NULL), TD_OK);
    for (uint32_t b = 0; b < blocks; b++)
        assert_int_equal(td_kv_tally_add(&tally, &h[b], NULL), TD_OK);
    assert_int_equal(td_kv_manifest_fill(&k, &layout, &known, &tally, NULL), TD_OK);
    struct td_msg m = {.type = TD_MSG_MANIFEST,
                       .manifest = {.epoch = PREFILL,
                                    .decode_epoch = ME,
                                    .ticket = t,
                                    .n_prompt = n_prompt,
                                    .n_blocks = blocks,
                                    .prompt_hash = prompt_hash,
                                    .fingerprint = layout.fingerprint,
                                    .n_families = TD_KV_FAMILIES,
                                    .n_first = n,
                                    .next_position = n_prompt + 1}};
    for (uint32_t c = 0; c < n; c++)
        m.manifest.first[c].id = first[c];
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        m.manifest.family[f] =
            (struct td_msg_family){k.family[f].rows, k.family[f].bytes, k.family[f].checksum};
    return from_peer(link, m);
}
static const char *manifest(td_link_id link, uint64_t t, uint32_t n_prompt, uint64_t prompt_hash,
                            int32_t first) {
    return manifest_n(link, t, n_prompt, prompt_hash, &first, 1);
}
static const char *peer(enum td_decode_event_kind kind, td_link_id link) {
    return step((struct td_decode_event){.kind = kind, .peer = {.link = link}});
}
static const char *after(uint64_t ms) {
    now += ms * MS;
    return step((struct td_decode_event){.kind = TD_DECODE_TIMER});
}
static struct td_msg_ledger ledger(void) {
    struct td_msg_ledger l;
    td_decode_ledger(machine, &l);
    return l;
}

static int begin_with(uint32_t pages, uint32_t split) {
    static const uint8_t ratio[2] = {4, 128};
    if (td_kv_layout_init(&layout, 2, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, pages, 1, NULL) != 0)
        return -1;
    const struct td_decode_options o = {
        .epoch = ME,
        .layout = &layout,
        .split = split,
        .pages = pages,
        .slots = 4,
        .max_context = MAX_CONTEXT,
        .reserve_new = 100,
        .max_tokens = BUDGET,
        .eos = EOS,
        .max_peers = 2,
        .landing_slabs = 2,
        .slab_bytes = 1 << 20,
        .lease_ns = 100 * MS,
        .beat_ns = 1000 * MS,
        .peer_timeout_ns = 2000 * MS,
    };
    now = 1;
    ids_back = guides_back = 0;
    return td_decode_create(&o, &machine, NULL) == TD_OK ? 0 : -1;
}
static int begin(void **state) {
    (void)state;
    return begin_with(PAGES, 0);
}
static int end(void **state) {
    (void)state;
    td_decode_destroy(machine);
    return 0;
}

#define T(f) cmocka_unit_test_setup_teardown(f, begin, end)

#endif
