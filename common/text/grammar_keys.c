/* Keys of objects: the names that schemas give, in order, and every key that is none of them. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"
#include "common/text/unicode.h"

static bool named(const struct td_gs_names *m, const char *name) {
    for (size_t i = 0; i < m->n; i++)
        if (strcmp(m->p[i], name) == 0) return true;
    return false;
}

/* All names in the order in which the schemas have them; required ones without a schema last. */
void td_gs_names_of(struct td_gs *s, const struct td_gs_node *n, struct td_gs_names *m) {
    size_t most = n->required.n;
    const char *key;
    json_t *v;
    for (size_t i = 0; i < n->objects.n; i++)
        most += json_object_size(json_object_get(n->objects.p[i], "properties"));
    m->p = calloc(most + 1, sizeof *m->p);
    m->required = calloc(most + 1, sizeof *m->required);
    if (!m->p || !m->required) {
        td_gb_fail(s->b, TD_NO_MEMORY, "no memory for a grammar");
        return;
    }
    for (size_t i = 0; i < n->objects.n; i++) {
        json_object_foreach(json_object_get(n->objects.p[i], "properties"), key, v) {
            s->b->work += i ? m->n : 1;
            if (i == 0 || !named(m, key)) m->p[m->n++] = key;
        }
    }
    for (size_t i = 0; i < n->required.n; i++) {
        const char *name = json_string_value(n->required.p[i]);
        size_t k = 0;
        while (k < m->n && strcmp(m->p[k], name) != 0)
            k++;
        s->b->work += k;
        if (k == m->n) m->p[m->n++] = name;
        m->required[k] = true;
        m->n_required++;
    }
}

/* Code points lo..hi that a key can hold: a JSON string's, or those of an attribute in a tag. */
static void points(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi, bool json) {
    static const struct {
        uint32_t lo, hi;
    } plain[] = {{' ', '!'}, {'#', ';'}, {'=', '='}, {'?', 0xD7FF}, {0xE000, 0x10FFFF}},
      any[] = {{0, 0xD7FF}, {0xE000, 0x10FFFF}};
    for (size_t i = 0; i < (json ? 2 : 5); i++) {
        uint32_t first = json ? any[i].lo : plain[i].lo, last = json ? any[i].hi : plain[i].hi;
        if (first < lo) first = lo;
        if (last > hi) last = hi;
        if (first > last) continue;
        if (json)
            td_gb_json_points(b, from, to, first, last);
        else
            td_gb_code_points(b, from, to, first, last);
    }
}

static uint32_t code_point(const char *p, size_t *ret_n) {
    uint32_t cp = 0;
    int n = td_utf8_decode((const uint8_t *)p, strlen(p), &cp);
    *ret_n = n > 0 ? (size_t)n : 1;
    return cp;
}

static int by_number(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

struct others {
    struct td_gb *b;
    const struct td_gs_names *m;
    uint32_t *next; /* [n] what follows a beginning in the names */
    uint32_t rest, close;
    bool json;
};

/* At the state of one beginning of names: what follows it in none of them is any other key, and
 * unless it is a name itself it is one too. `k` bytes of name i, which has it first. */
static void leave_names(struct others *o, uint32_t at, size_t i, size_t k) {
    const struct td_gs_names *m = o->m;
    size_t n = 0, len;
    bool name = false;
    for (size_t j = i; j < m->n; j++) {
        if (strncmp(m->p[j], m->p[i], k) != 0) continue;
        if (m->p[j][k])
            o->next[n++] = code_point(m->p[j] + k, &len);
        else
            name = true;
    }
    if (!name) td_gb_empty(o->b, at, o->close);
    if (n) qsort(o->next, n, sizeof *o->next, by_number);
    uint32_t lo = 0;
    for (size_t q = 0; q < n; q++) {
        if (o->next[q] > lo) points(o->b, at, o->rest, lo, o->next[q] - 1, o->json);
        lo = o->next[q] + 1;
    }
    points(o->b, at, o->rest, lo, 0x10FFFF, o->json);
}

/* The tree of the names: each beginning is a state, made by the first name that has it. */
static void leave_each(struct others *o, uint32_t root, uint32_t **state) {
    const struct td_gs_names *m = o->m;
    for (size_t i = 0; i < m->n && o->b->st == TD_OK; i++) {
        for (size_t k = 0, step = 1, before = 0; o->b->st == TD_OK; before = k, k += step) {
            size_t first = 0;
            while (strncmp(m->p[first], m->p[i], k) != 0)
                first++;
            o->b->work += m->n * (2 + k / 16) + strlen(m->p[i]) / 16; /* as long as names agree */
            if (o->b->work > TD_GB_WORK_MAX)
                td_gb_fail(o->b, TD_TOO_LONG, "the schema is too complex");
            if (first < i) {
                state[i][k] = state[first][k];
            } else {
                state[i][k] = k ? td_gb_new(o->b) : root;
                leave_names(o, state[i][k], i, k);
                if (k) {
                    uint32_t cp = code_point(m->p[i] + before, &step);
                    points(o->b, state[i][before], state[i][k], cp, cp, o->json);
                }
            }
            if (!m->p[i][k]) break;
            (void)code_point(m->p[i] + k, &step);
        }
    }
}

void td_gs_other_key(struct td_gb *b, uint32_t from, uint32_t to, const struct td_gs_names *m,
                     bool json) {
    struct others o = {.b = b, .m = m, .json = json};
    size_t total = 1;
    for (size_t i = 0; i < m->n; i++)
        total += strlen(m->p[i]) + 1;
    uint32_t **state = calloc(m->n + 1, sizeof *state), *pool = calloc(total, sizeof *pool);
    o.next = calloc(m->n + 1, sizeof *o.next);
    if (!state || !pool || !o.next) td_gb_fail(b, TD_NO_MEMORY, "no memory for a grammar");
    o.rest = td_gb_new(b);
    o.close = td_gb_new(b);
    points(b, o.rest, o.rest, 0, 0x10FFFF, json);
    td_gb_empty(b, o.rest, o.close);
    td_gb_empty(b, td_gb_text(b, o.close, "\""), to);
    uint32_t root = json ? td_gb_text(b, from, "\"") : from;
    if (m->n == 0) td_gb_empty(b, root, o.rest);
    for (size_t i = 0, at = 0; b->st == TD_OK && i < m->n; at += strlen(m->p[i++]) + 1)
        state[i] = pool + at;
    if (b->st == TD_OK) leave_each(&o, root, state);
    free(o.next);
    free(state);
    free(pool);
}
