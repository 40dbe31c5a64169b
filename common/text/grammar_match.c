/* Where a sequence is in its grammar: a few paths, each a bounded stack, moved symbol by symbol. */
#include <string.h>

#include "common/text/grammar_impl.h"

/* What to do with each way to take a symbol; the frames are the walker's, to be copied. */
typedef void taken(void *context, const uint64_t *frames, uint32_t n);

/* All ways to take one symbol from the stack of `n` frames, which is as before afterwards. A final
 * state returns at once, so that equal positions are equal stacks. */
static void step(const struct td_grammar *g, uint64_t *frames, uint32_t n, uint32_t symbol,
                 taken *take, void *context) {
    const uint64_t top = frames[n - 1];
    const uint32_t *s = td_g_state(g, td_frame_state(top));
    for (uint32_t k = s[0]; k < s[TD_G_STATE]; k++) {
        const uint32_t *e = g->edges + (size_t)k * TD_G_EDGE;
        if (td_edge_lo(e) > symbol) break;
        if (td_edge_hi(e) < symbol || !td_edge_take(e, top, &frames[n - 1])) continue;
        const uint32_t *to = td_g_state(g, e[1]);
        if (n + td_g_depth(to) <= TD_MATCH_DEPTH)
            take(context, frames, to[2] & TD_STATE_FINAL && n > 1 ? n - 1 : n);
    }
    for (uint32_t k = s[1]; k < s[1 + TD_G_STATE]; k++) {
        const uint32_t *c = g->calls + (size_t)k * TD_G_CALL;
        const uint32_t *behind = td_g_state(g, c[1]);
        bool final = behind[2] & TD_STATE_FINAL && n > 1;
        uint32_t m = final ? n - 1 : n, in = td_g_start(g, c[0]);
        if (m + 1 + td_g_depth(td_g_state(g, in)) > TD_MATCH_DEPTH ||
            n + td_g_depth(behind) > TD_MATCH_DEPTH)
            continue;
        if (!final) frames[n - 1] = td_frame(c[1], td_frame_need(top), td_frame_room(top));
        frames[m] = td_frame(in, c[2], c[3]);
        step(g, frames, m + 1, symbol, take, context);
    }
    frames[n - 1] = top;
    if (s[2] & TD_STATE_ACCEPT && n > 1) {
        step(g, frames, n - 1, symbol, take, context);
        frames[n - 1] = top;
    }
}

/* ---- all paths side by side ---- */

struct collect {
    struct td_matcher *to;
    bool dropped; /* there were more than fit */
};

static void collect(void *context, const uint64_t *frames, uint32_t n) {
    struct collect *c = context;
    struct td_matcher *to = c->to;
    for (uint32_t i = 0; i < to->n_paths; i++) {
        const struct td_match_path *p = &to->paths[i];
        if (p->n == n && memcmp(p->frames, frames, n * sizeof *frames) == 0) return;
    }
    if (to->n_paths == TD_MATCH_PATHS) {
        c->dropped = true;
        return;
    }
    struct td_match_path *p = &to->paths[to->n_paths++];
    p->n = n;
    memcpy(p->frames, frames, n * sizeof *frames);
}

static bool advance(struct td_matcher *m, uint32_t symbol, bool *ret_dropped) {
    struct td_matcher to;
    uint64_t frames[TD_MATCH_DEPTH + 1];
    struct collect c = {.to = &to};
    if (m->ended) return false;
    to.n_paths = 0;
    for (uint32_t i = 0; i < m->n_paths; i++) {
        memcpy(frames, m->paths[i].frames, m->paths[i].n * sizeof *frames);
        step(m->g, frames, m->paths[i].n, symbol, collect, &c);
    }
    *ret_dropped = *ret_dropped || c.dropped;
    if (to.n_paths == 0) return false;
    m->n_paths = to.n_paths;
    for (uint32_t i = 0; i < to.n_paths; i++) {
        m->paths[i].n = to.paths[i].n;
        memcpy(m->paths[i].frames, to.paths[i].frames, to.paths[i].n * sizeof *frames);
    }
    return true;
}

bool td_matcher_symbol(struct td_matcher *m, uint32_t symbol) {
    bool dropped = false;
    return advance(m, symbol, &dropped);
}

/* ---- one path alone ----
 *
 * A mask looks at every path to its end, so it allows a token whose only path was dropped halfway
 * because there were too many. Then that path is looked for and kept alone: an allowed token is
 * never refused. */

struct search {
    const struct td_grammar *g;
    const uint8_t *p;
    size_t n;
    bool found;
    struct td_match_path path;
};

static void search(void *context, const uint64_t *frames, uint32_t n) {
    struct search *s = context;
    uint64_t own[TD_MATCH_DEPTH + 1];
    if (s->found) return;
    if (s->n == 0) {
        s->found = true;
        s->path.n = n;
        memcpy(s->path.frames, frames, n * sizeof *frames);
        return;
    }
    memcpy(own, frames, n * sizeof *frames);
    s->p++, s->n--;
    step(s->g, own, n, s->p[-1], search, s);
    s->p--, s->n++;
}

static bool one_path(struct td_matcher *m, const char *p, size_t n) {
    struct search s = {.g = m->g, .p = (const uint8_t *)p, .n = n};
    for (uint32_t i = 0; i < m->n_paths && !s.found; i++)
        search(&s, m->paths[i].frames, m->paths[i].n);
    if (!s.found) return false;
    m->n_paths = 1;
    m->paths[0].n = s.path.n;
    memcpy(m->paths[0].frames, s.path.frames, s.path.n * sizeof *s.path.frames);
    return true;
}

static void copy(struct td_matcher *to, const struct td_matcher *from) {
    to->g = from->g;
    to->ended = from->ended;
    to->n_paths = from->n_paths;
    for (uint32_t i = 0; i < from->n_paths; i++) {
        to->paths[i].n = from->paths[i].n;
        memcpy(to->paths[i].frames, from->paths[i].frames,
               from->paths[i].n * sizeof *to->paths[i].frames);
    }
}

void td_matcher_init(struct td_matcher *m, const struct td_grammar *g) {
    memset(m, 0, sizeof *m);
    m->g = g;
    m->n_paths = 1;
    m->paths[0].n = 1;
    m->paths[0].frames[0] = td_frame(td_g_start(g, g->words[5]), 0, TD_ROOM_ANY);
}

bool td_matcher_bytes(struct td_matcher *m, const char *p, size_t n) {
    struct td_matcher next;
    bool dropped = false;
    if (n == 0 || m->ended) return !m->ended;
    if (n == 1) return td_matcher_symbol(m, (unsigned char)*p);
    copy(&next, m);
    for (size_t i = 0; i < n; i++)
        if (!advance(&next, (unsigned char)p[i], &dropped)) return dropped && one_path(m, p, n);
    copy(m, &next);
    return true;
}

bool td_matcher_may_end(const struct td_matcher *m) {
    for (uint32_t i = 0; i < m->n_paths && !m->ended; i++) {
        uint32_t n = m->paths[i].n;
        while (n > 0 &&
               td_g_state(m->g, td_frame_state(m->paths[i].frames[n - 1]))[2] & TD_STATE_ACCEPT)
            n--;
        if (n == 0) return true;
    }
    return false;
}

/* ---- saved: ended, paths, hash of the grammar; per path its frames ---- */

enum { SAVED_HEAD = 10 };

static void write64(uint8_t *p, uint64_t v) {
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static uint64_t read64(const uint8_t *p) {
    uint64_t v = 0;
    for (int i = 0; i < 8; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

size_t td_matcher_save(const struct td_matcher *m, uint8_t out[TD_MATCH_SAVED_MAX]) {
    size_t at = SAVED_HEAD;
    out[0] = m->ended;
    out[1] = (uint8_t)m->n_paths;
    write64(out + 2, m->g->hash);
    for (uint32_t i = 0; i < m->n_paths; i++) {
        out[at++] = (uint8_t)m->paths[i].n;
        for (uint32_t k = 0; k < m->paths[i].n; k++, at += 8)
            write64(out + at, m->paths[i].frames[k]);
    }
    return at;
}

static bool frame_fits(const struct td_grammar *g, uint64_t f, uint32_t depth) {
    return td_frame_state(f) < g->n_states && td_frame_need(f) <= td_frame_room(f) &&
           depth + td_g_depth(td_g_state(g, td_frame_state(f))) <= TD_MATCH_DEPTH;
}

td_status td_matcher_load(struct td_matcher *m, const struct td_grammar *g, const uint8_t *p,
                          size_t n, struct td_error *err) {
    struct td_matcher l;
    size_t at = SAVED_HEAD;
    if (n < SAVED_HEAD || p[0] > 1 || p[1] == 0 || p[1] > TD_MATCH_PATHS)
        return td_fail(err, TD_CORRUPT, "saved matcher: %zu bytes that are none", n);
    if (read64(p + 2) != g->hash)
        return td_fail(err, TD_CORRUPT, "saved matcher: its grammar is another one");
    l.g = g;
    l.ended = p[0];
    l.n_paths = p[1];
    for (uint32_t i = 0; i < l.n_paths; i++) {
        uint32_t frames = at < n ? p[at++] : 0;
        if (frames == 0 || frames > TD_MATCH_DEPTH || n - at < (size_t)frames * 8)
            return td_fail(err, TD_CORRUPT, "saved matcher: path %u is cut", i);
        l.paths[i].n = frames;
        for (uint32_t k = 0; k < frames; k++, at += 8) {
            l.paths[i].frames[k] = read64(p + at);
            if (!frame_fits(g, l.paths[i].frames[k], k + 1))
                return td_fail(err, TD_CORRUPT, "saved matcher: frame %u of path %u does not fit",
                               k, i);
        }
    }
    if (at != n) return td_fail(err, TD_CORRUPT, "saved matcher: %zu bytes too many", n - at);
    copy(m, &l);
    return TD_OK;
}
