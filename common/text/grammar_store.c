/* The store of one engine: grammars by their bytes, so that requests with the same schema share
 * what was computed for it, and the way from a matcher to its mask. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/text/grammar_mask.h"

enum { MASK_BYTES_MIN = 1 << 20 };

struct held {
    struct td_grammar g;
    uint32_t *bytes;
    size_t n;
    uint32_t users; /* 0: kept */
    uint32_t core;  /* states that are those of `own` */
    uint64_t used;
};

struct td_grammars {
    struct td_tree tree;
    struct td_masks masks;
    struct held **held; /* [max] */
    size_t max, n;
    uint64_t clock;
    uint32_t last_id;
    struct td_bytes own; /* the core of this build, to see whether a grammar has it */
    struct td_grammar own_g;
};

td_status td_grammars_create(const struct td_grammars_params *p, struct td_grammars **ret_s,
                             struct td_error *err) {
    if (p->grammars_max == 0 || p->mask_bytes < MASK_BYTES_MIN)
        return td_fail(err, TD_INVALID, "grammar store: expected room for a grammar and %d bytes of masks",
                       MASK_BYTES_MIN);
    struct td_grammars *s = calloc(1, sizeof *s);
    struct held **held = calloc(p->grammars_max, sizeof *held);
    struct td_grammar_spec any = {.content = TD_CONTENT_OBJECT};
    td_status st = s && held ? TD_OK : td_fail(err, TD_NO_MEMORY, "no memory for a grammar store");
    if (st != TD_OK) {
        free(s);
        free(held);
        return st;
    }
    s->held = held;
    s->max = p->grammars_max;
    st = td_tree_init(&s->tree, p, err);
    if (st == TD_OK) st = td_masks_init(&s->masks, &s->tree, p->mask_bytes, err);
    if (st == TD_OK) st = td_grammar_compile(&any, &s->own, err);
    if (st == TD_OK) st = td_grammar_open(s->own.p, s->own.n, &s->own_g, err);
    if (st != TD_OK) {
        td_grammars_destroy(s);
        return st;
    }
    *ret_s = s;
    return TD_OK;
}

static void drop(struct held *h) {
    free(h->bytes);
    free(h);
}

void td_grammars_destroy(struct td_grammars *s) {
    if (!s) return;
    for (size_t i = 0; i < s->n; i++)
        drop(s->held[i]);
    free(s->held);
    td_masks_finish(&s->masks);
    td_tree_finish(&s->tree);
    td_bytes_free(&s->own);
    free(s);
}

size_t td_grammars_bytes(const struct td_grammars *s) {
    return sizeof *s + s->max * (sizeof *s->held + sizeof(struct held)) + s->tree.allocated +
           s->masks.allocated + s->own.n;
}

/* ---- grammars ---- */

/* The common states, or 0: masks of core states are shared between grammars with the same core. */
static uint32_t common_core(const struct td_grammar *a, const struct td_grammar *b) {
    uint32_t n = a->words[6];
    if (b->words[6] != n || n >= a->n_states || n >= b->n_states || a->n_rules < TD_CORE_RULES ||
        b->n_rules < TD_CORE_RULES)
        return 0;
    const uint32_t *x = td_g_state(a, n), *y = td_g_state(b, n);
    bool same = x[0] == y[0] && x[1] == y[1] &&
                memcmp(a->rules, b->rules, TD_CORE_RULES * TD_G_RULE * 4) == 0 &&
                memcmp(a->states, b->states, (size_t)n * TD_G_STATE * 4) == 0 &&
                memcmp(a->edges, b->edges, (size_t)x[0] * TD_G_EDGE * 4) == 0 &&
                memcmp(a->calls, b->calls, (size_t)x[1] * TD_G_CALL * 4) == 0;
    return same ? n : 0;
}

static td_status make(struct td_grammars *s, const void *bytes, size_t n, struct held **ret_h,
                      struct td_error *err) {
    struct held *h = calloc(1, sizeof *h);
    if (h) h->bytes = malloc(n ? n : 1);
    if (!h || !h->bytes) {
        free(h);
        return td_fail(err, TD_NO_MEMORY, "no memory for a grammar of %zu bytes", n);
    }
    memcpy(h->bytes, bytes, n);
    h->n = n;
    td_status st = td_grammar_open(h->bytes, n, &h->g, err);
    if (st != TD_OK) {
        drop(h);
        return st;
    }
    h->core = common_core(&s->own_g, &h->g);
    h->g.cache_id = ++s->last_id;
    *ret_h = h;
    return TD_OK;
}

td_status td_grammars_open(struct td_grammars *s, const void *bytes, size_t n,
                           const struct td_grammar **ret_g, struct td_error *err) {
    struct held *h = NULL, **oldest = NULL;
    if (n > TD_GRAMMAR_BYTES_MAX)
        return td_fail(err, TD_CORRUPT, "compiled grammar: %zu bytes, more than %d", n,
                       TD_GRAMMAR_BYTES_MAX);
    for (size_t i = 0; i < s->n && !h; i++) {
        struct held *k = s->held[i];
        if (k->n == n && memcmp(k->bytes, bytes, n) == 0) h = k;
        if (k->users == 0 && (!oldest || k->used < (*oldest)->used)) oldest = &s->held[i];
    }
    if (!h) {
        if (s->n == s->max && !oldest)
            return td_fail(err, TD_BUSY, "%zu grammars are in use, the most this worker holds",
                           s->max);
        TD_TRY(make(s, bytes, n, &h, err));
        if (s->n < s->max) {
            s->held[s->n++] = h;
        } else {
            drop(*oldest);
            *oldest = h;
        }
    }
    h->users++;
    h->used = ++s->clock;
    *ret_g = &h->g;
    return TD_OK;
}

void td_grammars_close(struct td_grammars *s, const struct td_grammar *g) {
    (void)s;
    struct held *h = (struct held *)((uintptr_t)g - offsetof(struct held, g));
    h->users--;
}

/* ---- tokens ---- */

static uint32_t core_of(const struct td_grammar *g) {
    return ((const struct held *)((uintptr_t)g - offsetof(struct held, g)))->core;
}

void td_grammars_mask(struct td_grammars *s, const struct td_matcher *m, uint32_t *mask) {
    memset(mask, 0, s->masks.words * sizeof *mask);
    if (m->ended) return;
    for (uint32_t i = 0; i < m->n_paths; i++)
        td_masks_path(&s->masks, m->g, core_of(m->g), &m->paths[i], mask);
    for (uint32_t i = 0; i < s->tree.n_twins; i++) {
        int32_t of = s->tree.twins[2 * i], twin = s->tree.twins[2 * i + 1];
        mask[twin / 32] |= (mask[of / 32] >> (of % 32) & 1) << (twin % 32);
    }
    if (td_matcher_may_end(m)) mask[s->tree.eos / 32] |= 1u << (s->tree.eos % 32);
}

bool td_grammars_token(const struct td_grammars *s, struct td_matcher *m, int32_t id) {
    const struct td_tree *t = &s->tree;
    if (id < 0 || id >= t->vocab || m->ended) return false;
    if (id == t->eos) {
        if (!td_matcher_may_end(m)) return false;
        m->ended = true;
        return true;
    }
    if (id == t->dsml) return td_matcher_symbol(m, TD_SYMBOL_DSML);
    if (id == t->think_end) return td_matcher_symbol(m, TD_SYMBOL_THINK_END);
    uint32_t n = t->token_at[id + 1] - t->token_at[id];
    return n > 0 && td_matcher_bytes(m, t->bytes + t->token_at[id], n);
}

bool td_grammars_warm(struct td_grammars *s, const struct td_grammar *g, uint32_t budget_us) {
    uint64_t end = td_now_ns() + (uint64_t)budget_us * 1000;
    uint32_t core = core_of(g);
    for (uint32_t k = 0; k < g->n_calls; k++) { /* strings with their numbers first: the longest */
        const uint32_t *c = g->calls + (size_t)k * TD_G_CALL;
        const uint32_t *start = td_g_state(g, td_g_start(g, c[0]));
        uint32_t in = g->edges[(size_t)start[0] * TD_G_EDGE + 1];
        if (c[0] != TD_CORE_STRING && c[0] != TD_CORE_RAW) continue;
        if (td_now_ns() >= end) return false;
        if (!td_masks_frame(&s->masks, g, core, td_frame(td_g_start(g, c[0]), c[2], c[3])) ||
            (c[0] == TD_CORE_STRING && !td_masks_frame(&s->masks, g, core, td_frame(in, c[2], c[3]))))
            return false;
    }
    for (uint32_t i = 0; i < g->n_states; i++) {
        if (td_now_ns() >= end) return false;
        if (!td_masks_frame(&s->masks, g, core, td_frame(i, 0, TD_ROOM_ANY))) return false;
    }
    return true;
}
