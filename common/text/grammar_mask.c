/* Walks of a grammar over the vocabulary's tree, and the cache of what they found. */
#include "common/text/grammar_mask.h"

#include <stdlib.h>
#include <string.h>

/* A walk visits a node once per path that leads there. Ordinary grammars have one or two; the limit
 * is for those made to have many, whose masks then lack tokens. */
enum { AS_BITS = UINT32_MAX, ENTRY_SHARE = 512, VISITS_MAX = 20 << 20 };

struct td_mask_entry {
    uint64_t frame;
    uint32_t parent, grammar;
    uint32_t tokens_at, n_tokens; /* AS_BITS: a whole mask */
    uint32_t places_at, n_places;
    uint32_t reach; /* most frames, from this one on, that any token needs */
};

/* ---- walks ---- */

struct walk {
    struct td_masks *m;
    const struct td_grammar *g;
    uint32_t *bits;
    bool whole; /* the stack's lowest frame is the path's: nothing below decides anything */
    uint32_t reach, visits;
    uint64_t frames[TD_MATCH_DEPTH + 1];
};

static void place(struct walk *w, uint32_t node) {
    struct td_masks *m = w->m;
    uint32_t *word = &m->place_seen[node / 32], bit = 1u << (node % 32);
    if (w->whole || *word & bit || td_tree_end(&m->tree->nodes[node]) == node + 1) return;
    *word |= bit;
    m->places[m->n_places++] = node;
}

static bool fits(struct walk *w, uint32_t depth) {
    if (depth > TD_MATCH_DEPTH) return false;
    w->reach = depth > w->reach ? depth : w->reach;
    return true;
}

static void visit(struct walk *w, uint32_t n, uint32_t node);

/* The top frame has just taken the symbol of `node`. */
static void enter(struct walk *w, uint32_t n, uint32_t node) {
    const struct td_tree_node *x = &w->m->tree->nodes[node];
    const uint32_t *s = td_g_state(w->g, td_frame_state(w->frames[n - 1]));
    if (!fits(w, n + td_g_depth(s))) return;
    if (x->token >= 0) w->bits[x->token / 32] |= 1u << (x->token % 32);
    if (td_tree_end(x) == node + 1) return;
    if (!(s[2] & TD_STATE_FINAL))
        visit(w, n, node);
    else if (n > 1)
        visit(w, n - 1, node);
    else
        place(w, node);
}

static void visit_edges(struct walk *w, uint32_t n, uint32_t node, const uint32_t *s) {
    const struct td_tree_node *nodes = w->m->tree->nodes;
    const uint32_t *e = w->g->edges + (size_t)s[0] * TD_G_EDGE;
    const uint32_t *end = w->g->edges + (size_t)s[TD_G_STATE] * TD_G_EDGE;
    const uint64_t top = w->frames[n - 1];
    const uint32_t last = td_tree_end(&nodes[node]);
    for (uint32_t c = node + 1; c < last; c = td_tree_end(&nodes[c])) {
        uint32_t symbol = td_tree_symbol(&nodes[c]);
        while (e < end && td_edge_hi(e) < symbol)
            e += TD_G_EDGE;
        if (e == end) break;
        for (const uint32_t *k = e; k < end && td_edge_lo(k) <= symbol; k += TD_G_EDGE)
            if (td_edge_hi(k) >= symbol && td_edge_take(k, top, &w->frames[n - 1])) enter(w, n, c);
    }
    w->frames[n - 1] = top;
}

static void visit_calls(struct walk *w, uint32_t n, uint32_t node, const uint32_t *s) {
    const uint64_t top = w->frames[n - 1];
    for (uint32_t k = s[1]; k < s[1 + TD_G_STATE]; k++) {
        const uint32_t *c = w->g->calls + (size_t)k * TD_G_CALL;
        const uint32_t *behind = td_g_state(w->g, c[1]);
        uint32_t in = td_g_start(w->g, c[0]);
        /* A final target leaves no frame; below this walk's lowest frame that cannot be done, but
         * there a return through it is the same. */
        bool final = behind[2] & TD_STATE_FINAL && n > 1;
        uint32_t m = final ? n - 1 : n;
        if (!fits(w, m + 1 + td_g_depth(td_g_state(w->g, in))) || !fits(w, n + td_g_depth(behind)))
            continue;
        if (!final) w->frames[n - 1] = td_frame(c[1], td_frame_need(top), td_frame_room(top));
        w->frames[m] = td_frame(in, c[2], c[3]);
        visit(w, m + 1, node);
    }
    w->frames[n - 1] = top;
}

/* All that the stack of `n` frames takes from `node` on; the frames are as before afterwards. */
static void visit(struct walk *w, uint32_t n, uint32_t node) {
    const uint64_t top = w->frames[n - 1];
    const uint32_t *s = td_g_state(w->g, td_frame_state(top));
    if (w->visits++ > VISITS_MAX) return;
    if (s[0] < s[TD_G_STATE]) visit_edges(w, n, node, s);
    if (s[1] < s[1 + TD_G_STATE]) visit_calls(w, n, node, s);
    if (!(s[2] & TD_STATE_ACCEPT)) return;
    if (n > 1) {
        visit(w, n - 1, node);
        w->frames[n - 1] = top;
    } else {
        place(w, node);
    }
}

/* ---- entries ---- */

static uint32_t hash(uint32_t parent, uint32_t grammar, uint64_t frame) {
    uint64_t h = (frame ^ (uint64_t)parent << 32 ^ grammar) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9ull;
    return (uint32_t)(h >> 32);
}

static uint32_t find(const struct td_masks *m, uint32_t parent, uint32_t grammar, uint64_t frame,
                     uint32_t *ret_slot) {
    uint32_t i = hash(parent, grammar, frame) & m->slot_mask;
    for (; m->slots[i]; i = (i + 1) & m->slot_mask) {
        const struct td_mask_entry *e = &m->entries[m->slots[i]];
        if (e->frame == frame && e->parent == parent && e->grammar == grammar) break;
    }
    *ret_slot = i;
    return m->slots[i];
}

static void empty(struct td_masks *m) {
    memset(m->slots, 0, ((size_t)m->slot_mask + 1) * sizeof *m->slots);
    m->n_entries = 1;
    m->n_data = 0;
    m->emptied++;
}

/* A room for characters that no token can fill is any room, and so is a need. */
static uint64_t normal(const struct td_masks *m, uint64_t f) {
    uint32_t need = td_frame_need(f), room = td_frame_room(f), most = m->tree->longest + 1;
    if (need > most) need = most;
    if (room >= most) room = TD_ROOM_ANY;
    return td_frame(td_frame_state(f), need, room);
}

static void scratch_begin(struct td_masks *m) {
    memset(m->bits, 0, m->words * sizeof *m->bits);
    for (uint32_t i = 0; i < m->n_places; i++)
        m->place_seen[m->places[i] / 32] = 0;
    m->n_places = 0;
}

static uint32_t count_bits(const uint32_t *bits, uint32_t words) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < words; i++)
        n += (uint32_t)__builtin_popcount(bits[i]);
    return n;
}

static void keep_tokens(struct td_masks *m, struct td_mask_entry *e, uint32_t n) {
    uint32_t *out = m->data + m->n_data;
    e->tokens_at = (uint32_t)m->n_data;
    e->n_tokens = n < m->words ? n : AS_BITS;
    if (e->n_tokens == AS_BITS) {
        memcpy(out, m->bits, m->words * sizeof *out);
        m->n_data += m->words;
        return;
    }
    m->n_data += n;
    for (uint32_t i = 0; i < m->words; i++)
        for (uint32_t b = m->bits[i]; b; b &= b - 1)
            *out++ = i * 32 + (uint32_t)__builtin_ctz(b);
}

/* Number of the new entry, 0: there is no room. */
static uint32_t compute(struct td_masks *m, const struct td_grammar *g, uint32_t parent,
                        uint32_t grammar, uint64_t frame, uint32_t slot) {
    struct walk w = {.m = m, .g = g, .bits = m->bits};
    w.frames[0] = frame;
    scratch_begin(m);
    if (parent) {
        const struct td_mask_entry *above = &m->entries[parent];
        for (uint32_t i = 0; i < above->n_places; i++)
            visit(&w, 1, m->data[above->places_at + i]);
    } else {
        visit(&w, 1, 0);
    }
    m->computed++;
    uint32_t n = count_bits(m->bits, m->words), stored = n < m->words ? n : m->words;
    if (m->n_entries == m->cap_entries || m->n_data + stored + m->n_places > m->cap_data) return 0;
    struct td_mask_entry *e = &m->entries[m->n_entries];
    *e = (struct td_mask_entry){
        .frame = frame, .parent = parent, .grammar = grammar, .reach = w.reach};
    keep_tokens(m, e, n);
    e->places_at = (uint32_t)m->n_data;
    e->n_places = m->n_places;
    memcpy(m->data + m->n_data, m->places, m->n_places * sizeof *m->places);
    m->n_data += m->n_places;
    m->slots[slot] = m->n_entries;
    return m->n_entries++;
}

static void add_tokens(const struct td_masks *m, const struct td_mask_entry *e, uint32_t *mask) {
    const uint32_t *data = m->data + e->tokens_at;
    if (e->n_tokens == AS_BITS) {
        for (uint32_t i = 0; i < m->words; i++)
            mask[i] |= data[i];
    } else {
        for (uint32_t i = 0; i < e->n_tokens; i++)
            mask[data[i] / 32] |= 1u << (data[i] % 32);
    }
}

enum result { DONE, NO_ROOM, TOO_DEEP };

static enum result from_cache(struct td_masks *m, const struct td_grammar *g, uint32_t core,
                              const struct td_match_path *path, uint32_t *mask) {
    uint32_t entry = 0, slot;
    for (uint32_t i = path->n; i-- > 0;) {
        uint64_t frame = normal(m, path->frames[i]);
        uint32_t grammar = td_frame_state(frame) < core ? 0 : g->cache_id, parent = entry;
        entry = find(m, parent, grammar, frame, &slot);
        if (!entry) entry = compute(m, g, parent, grammar, frame, slot);
        if (!entry) return NO_ROOM;
        const struct td_mask_entry *e = &m->entries[entry];
        if (e->reach + i > TD_MATCH_DEPTH) return TOO_DEEP;
        add_tokens(m, e, mask);
        if (e->n_places == 0) break;
    }
    return DONE;
}

void td_masks_path(struct td_masks *m, const struct td_grammar *g, uint32_t core,
                   const struct td_match_path *path, uint32_t *mask) {
    enum result r = from_cache(m, g, core, path, mask);
    if (r == NO_ROOM) {
        empty(m);
        r = from_cache(m, g, core, path, mask);
    }
    if (r == DONE) return;
    struct walk w = {.m = m, .g = g, .bits = mask, .whole = true};
    memcpy(w.frames, path->frames, path->n * sizeof *w.frames);
    visit(&w, path->n, 0);
}

bool td_masks_frame(struct td_masks *m, const struct td_grammar *g, uint32_t core, uint64_t frame) {
    uint32_t slot, f_core = td_frame_state(frame) < core ? 0 : g->cache_id;
    frame = normal(m, frame);
    return find(m, 0, f_core, frame, &slot) || compute(m, g, 0, f_core, frame, slot);
}

/* ---- memory ---- */

td_status td_masks_init(struct td_masks *m, const struct td_tree *tree, size_t budget,
                        struct td_error *err) {
    uint32_t nodes = tree->n_nodes;
    *m = (struct td_masks){.tree = tree, .words = ((uint32_t)tree->vocab + 31) / 32};
    m->cap_entries = (uint32_t)(budget / ENTRY_SHARE);
    m->slot_mask = 1;
    while (m->slot_mask < m->cap_entries * 2)
        m->slot_mask *= 2;
    size_t slots = m->slot_mask--;
    size_t fixed = m->cap_entries * sizeof *m->entries + slots * sizeof *m->slots;
    m->cap_data = (budget - fixed) / sizeof *m->data;
    size_t scratch = m->words + nodes + nodes / 32 + 1;
    m->allocated = fixed + (m->cap_data + scratch) * 4;
    m->entries = malloc(m->cap_entries * sizeof *m->entries);
    m->slots = calloc(slots, sizeof *m->slots);
    m->data = malloc(m->cap_data * sizeof *m->data);
    m->bits = calloc(scratch, sizeof *m->bits);
    if (!m->entries || !m->slots || !m->data || !m->bits) {
        td_masks_finish(m);
        return td_fail(err, TD_NO_MEMORY, "no memory for %zu bytes of masks", budget);
    }
    m->places = m->bits + m->words;
    m->place_seen = m->places + nodes;
    m->n_entries = 1;
    return TD_OK;
}

void td_masks_finish(struct td_masks *m) {
    free(m->entries);
    free(m->slots);
    free(m->data);
    free(m->bits);
    *m = (struct td_masks){0};
}
