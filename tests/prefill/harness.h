/* Drives the prefill machine by hand: events as short calls, actions as lines of text. */
#ifndef TD_TESTS_PREFILL_HARNESS_H
#define TD_TESTS_PREFILL_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "prefill/sched.h"

#define MS 1000000ull
enum { ME = 50, DECODE = 60, EOS = 1, PAGES = 16 };

static struct td_prefill *machine;
static struct td_kv_layout layout;
static uint64_t now;
static char said[8192];
static int32_t ids[4096];
static uint32_t ids_back; /* FREE_IDS so far */
static const struct td_guide *last_guide_back;
static uint64_t step_owner;
static uint8_t dial; /* the address in PREFILLs is this byte, and it has this number; 0: none */

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...) {
    size_t n = strlen(said);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(said + n, sizeof said - n, fmt, ap);
    va_end(ap);
}

static uint64_t step_seeds[TD_CHOICES_MAX]; /* of the last STEP that samples */

static const char *which(uint32_t choice) { /* choice 0 is what there always is */
    static char text[16];
    snprintf(text, sizeof text, "/%u", choice);
    return choice == 0 ? "" : text;
}

static void say_message(const char *to, const struct td_msg *m) {
    unsigned r = (unsigned)m->cancel.key.request;
    switch (m->type) {
    case TD_MSG_TOKENS:
        say("%sTOKENS %u%s #%u", to, r, which(m->tokens.choice), m->tokens.index);
        if (m->tokens.selections != NULL) say(" selection %u", m->tokens.selections->n_entries);
        say("\n");
        return;
    case TD_MSG_FINISHED:
        say("%sFINISHED %u%s %u\n", to, r, which(m->finished.choice), m->finished.n_tokens);
        return;
    case TD_MSG_FAILED:
        say("%sFAILED %u %s\n", to, r, td_status_name(m->failed.status));
        return;
    case TD_MSG_RELEASED:
        say("%sRELEASED %u\n", to, r);
        return;
    case TD_MSG_PEER_HELLO:
        say("%sHELLO\n", to);
        return;
    case TD_MSG_SLAB:
        say("%sSLAB %u+%u in %u\n", to, m->slab.first_block, m->slab.n_blocks, m->slab.slab);
        return;
    case TD_MSG_MANIFEST:
        say("%sMANIFEST %u", to, m->manifest.n_blocks);
        for (uint32_t c = 0; m->manifest.n_first > 1 && c < m->manifest.n_first; c++)
            say(" %d", m->manifest.first[c].id);
        say("\n");
        return;
    case TD_MSG_ABORT:
        say("%sABORT %s\n", to, td_status_name(m->abort.status));
        return;
    case TD_MSG_PEER_BEAT:
        say("%sBEAT\n", to);
        return;
    default:
        say("%s?\n", to);
    }
}

static void say_action(const struct td_prefill_action *a) {
    switch (a->kind) {
    case TD_PREFILL_SEND:
        say_message("", &a->msg);
        return;
    case TD_PREFILL_STEP:
        say("STEP %u+%u%s", a->step.run.pos, a->step.run.n,
            a->step.run.want_logits ? " sample" : "");
        if (a->step.n_samples > 1) say(" %u", a->step.n_samples);
        say("\n");
        assert_true(a->step.run.want_logits == (a->step.n_samples > 0));
        step_owner = a->step.owner;
        for (uint32_t c = 0; c < a->step.n_samples; c++)
            step_seeds[c] = a->step.sampling[c].seed;
        return;
    case TD_PREFILL_CONNECT:
        if (a->peer.address_len != 0)
            say("CONNECT %u\n", a->peer.address[0]);
        else
            say("CONNECT\n");
        return;
    case TD_PREFILL_SEND_PEER:
        say_message("peer ", &a->peer.msg);
        return;
    case TD_PREFILL_CLOSE:
        say("CLOSE\n");
        return;
    case TD_PREFILL_PACK:
        say("PACK %u+%u in %u%s\n", a->pack.first_block, a->pack.n_blocks, a->pack.send_slab,
            a->pack.slot_block ? " slot" : "");
        return;
    case TD_PREFILL_PUT:
        say("PUT %u to %u\n", a->put.send_slab, a->put.landing_slab);
        return;
    case TD_PREFILL_FREE_IDS:
        ids_back++;
        last_guide_back = a->lent.guide;
        return;
    }
}

static const char *step(struct td_prefill_event ev) {
    struct td_prefill_action a;
    struct td_error err = {.text = ""};
    said[0] = 0;
    ev.now_ns = now;
    td_prefill_step(machine, &ev);
    while (td_prefill_next(machine, &a))
        say_action(&a);
    (void)!td_prefill_check(machine, &err);
    assert_string_equal(err.text, "");
    return said;
}

static const char *prefill_n(uint64_t request, uint32_t n_prompt, uint32_t max_new, uint32_t n) {
    struct td_msg m = {.type = TD_MSG_PREFILL,
                       .prefill = {.key = {request, 1},
                                   .n_prompt = n_prompt,
                                   .max_new = max_new,
                                   .n = n,
                                   .ids = ids,
                                   .ticket = 100 + request,
                                   .decode_epoch = DECODE,
                                   .decode_address = &dial,
                                   .decode_address_len = dial != 0,
                                   .decode_number = dial}};
    return step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
}
static const char *prefill_max(uint64_t request, uint32_t n_prompt, uint32_t max_new) {
    return prefill_n(request, n_prompt, max_new, 0);
}
static const char *prefill(uint64_t request, uint32_t n_prompt) {
    return prefill_max(request, n_prompt, 10);
}
static const char *cancel(uint64_t request) {
    struct td_msg m = {.type = TD_MSG_CANCEL, .cancel = {.key = {request, 1}}};
    return step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
}
/* Choice c's token 0 is ids[c]. */
static const char *computed_each(const int32_t *tokens, uint32_t n) {
    struct td_token t[TD_CHOICES_MAX];
    memset(t, 0, sizeof t);
    for (uint32_t c = 0; c < n; c++)
        t[c].id = tokens[c];
    return step((struct td_prefill_event){.kind = TD_PREFILL_STEP_DONE, .step = {.tokens = t}});
}
static const char *computed(int32_t token) {
    return computed_each(&token, 1);
}
static const char *from_peer(struct td_msg m) {
    return step((struct td_prefill_event){.kind = TD_PREFILL_PEER_MESSAGE,
                                          .peer = {.epoch = DECODE, .msg = &m}});
}
static const char *welcome(uint32_t slabs) {
    return from_peer((struct td_msg){
        .type = TD_MSG_PEER_WELCOME,
        .peer_welcome = {
            .epoch = DECODE, .prefill_epoch = ME, .slab_bytes = 1 << 30, .n_slabs = slabs}});
}
/* The headers real packing would give. */
static const char *packed(uint32_t slab, uint32_t n_prompt, uint32_t first, uint32_t n) {
    struct td_kv_block_header h[8];
    memset(h, 0, sizeof h);
    for (uint32_t k = 0; k < n; k++) {
        h[k].index = first + k;
        h[k].kind = h[k].index == td_kv_page_blocks(n_prompt) ? TD_KV_SLOT_BLOCK : TD_KV_PAGE_BLOCK;
    }
    return step((struct td_prefill_event){
        .kind = TD_PREFILL_PACKED, .packed = {.send_slab = slab, .bytes = 100, .headers = h}});
}
static const char *put_done(uint32_t slab, td_status status, bool quiet) {
    return step(
        (struct td_prefill_event){.kind = TD_PREFILL_PUT_DONE, .put = {slab, status, quiet}});
}
static const char *put_quiet(uint32_t slab) {
    return step(
        (struct td_prefill_event){.kind = TD_PREFILL_PUT_QUIET, .put = {.send_slab = slab}});
}
static const char *credit(uint64_t request, uint32_t landing, uint32_t first_block) {
    return from_peer((struct td_msg){.type = TD_MSG_CREDIT,
                                     .credit = {DECODE, 100 + request, landing, first_block}});
}
static const char *verdict(uint64_t request, td_status status) {
    return from_peer((struct td_msg){.type = TD_MSG_VERDICT,
                                     .verdict = {DECODE, 100 + request, status, "because"}});
}
static const char *peer(enum td_prefill_event_kind kind) {
    return step((struct td_prefill_event){.kind = kind, .peer = {.epoch = DECODE}});
}
static const char *after(uint64_t ms) {
    now += ms * MS;
    return step((struct td_prefill_event){.kind = TD_PREFILL_TIMER});
}
static struct td_msg_ledger ledger(void) {
    struct td_msg_ledger l;
    td_prefill_ledger(machine, &l);
    return l;
}

static int begin(void **state) {
    (void)state;
    static const uint8_t ratio[2] = {4, 128};
    if (td_kv_layout_init(&layout, 2, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, PAGES, 1, NULL) != 0)
        return -1;
    const struct td_prefill_options o = {
        .epoch = ME,
        .layout = &layout,
        .pages = PAGES,
        .slots = 3,
        .max_context = 4096,
        .max_requests = 4,
        .chunk_tokens = 600,
        .eos = EOS,
        .send_slabs = 2,
        .slab_bytes = td_kv_slot_block_bytes_max(&layout) + td_kv_page_block_bytes_max(&layout),
        .max_peers = 2,
        .transfer_ns = 100 * MS,
        .beat_ns = 40 * MS,
        .peer_timeout_ns = 200 * MS,
    };
    now = 1;
    ids_back = 0;
    dial = 0;
    return td_prefill_create(&o, &machine, NULL) == TD_OK ? 0 : -1;
}
static int end(void **state) {
    (void)state;
    td_prefill_destroy(machine);
    return 0;
}
/* The beat to a peer that has just become open says nothing here. */
static void settle(void) {
    step((struct td_prefill_event){.kind = TD_PREFILL_TIMER});
}

#define T(f) cmocka_unit_test_setup_teardown(f, begin, end)

#endif
