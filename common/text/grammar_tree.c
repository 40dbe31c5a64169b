/* Builds the tree from the sorted tokens: each shares with its predecessor the path of their common
 * beginning. */
#include "common/text/grammar_tree.h"

#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_impl.h"

struct entry {
    const char *p;
    uint32_t n;
    int32_t id;
};

static int by_bytes(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    int c = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    if (c != 0) return c;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static uint32_t common(const struct entry *a, const struct entry *b) {
    uint32_t n = a->n < b->n ? a->n : b->n, i = 0;
    while (i < n && a->p[i] == b->p[i])
        i++;
    return i;
}

static void set_end(struct td_tree *t, uint32_t node, uint32_t end) {
    struct td_tree_node *x = &t->nodes[node];
    x->symbol_end = td_tree_symbol(x) << 23 | end;
}

static uint32_t add(struct td_tree *t, uint32_t symbol, int32_t token) {
    t->nodes[t->n_nodes] = (struct td_tree_node){.symbol_end = symbol << 23, .token = token};
    return t->n_nodes++;
}

static void build(struct td_tree *t, const struct entry *e, size_t n) {
    uint32_t path[TD_TREE_TOKEN_MAX + 1], depth = 0;
    path[0] = add(t, 0, -1);
    for (size_t i = 0; i < n; i++) {
        uint32_t keep = i ? common(&e[i - 1], &e[i]) : 0;
        if (i && keep == e[i].n) { /* sorted: the same bytes again */
            t->twins[2 * t->n_twins] = t->nodes[path[depth]].token;
            t->twins[2 * t->n_twins++ + 1] = e[i].id;
            continue;
        }
        for (; depth > keep; depth--)
            set_end(t, path[depth], t->n_nodes);
        for (; depth < e[i].n; depth++)
            path[depth + 1] = add(t, (unsigned char)e[i].p[depth], -1);
        t->nodes[path[depth]].token = e[i].id;
    }
    for (; depth > 0; depth--)
        set_end(t, path[depth], t->n_nodes);
    const int32_t marks[] = {t->dsml, t->think_end};
    for (uint32_t k = 0; k < 2; k++) {
        if (marks[k] >= 0) {
            uint32_t node = add(t, TD_SYMBOL_DSML + k, marks[k]);
            set_end(t, node, t->n_nodes);
        }
    }
    set_end(t, 0, t->n_nodes);
}

static size_t count_nodes(const struct entry *e, size_t n) {
    size_t nodes = 1 + 2;
    for (size_t i = 0; i < n; i++)
        nodes += e[i].n - (i ? common(&e[i - 1], &e[i]) : 0);
    return nodes;
}

static td_status fill(struct td_tree *t, const struct td_grammars_params *p, struct entry *e,
                      struct td_error *err) {
    size_t n = 0, bytes = 0;
    for (int32_t id = 0; id < p->vocab; id++) {
        size_t k = 0;
        const char *b = td_tokenizer_is_special(p->t, id) ? NULL : td_tokenizer_bytes(p->t, id, &k);
        t->token_at[id] = (uint32_t)bytes;
        if (k == 0 || k > TD_TREE_TOKEN_MAX || id == p->eos || id == p->dsml || id == p->think_end)
            continue;
        e[n++] = (struct entry){.p = b, .n = (uint32_t)k, .id = id};
        bytes += k;
        t->longest = k > t->longest ? (uint32_t)k : t->longest;
    }
    t->token_at[p->vocab] = (uint32_t)bytes;
    t->bytes = malloc(bytes + 1);
    if (!t->bytes) return td_fail(err, TD_NO_MEMORY, "no memory for a vocabulary's tree");
    for (size_t i = 0; i < n; i++)
        memcpy(t->bytes + t->token_at[e[i].id], e[i].p, e[i].n);
    qsort(e, n, sizeof *e, by_bytes);
    size_t nodes = count_nodes(e, n);
    if (nodes >= TD_TREE_NODES_MAX)
        return td_fail(err, TD_INVALID, "vocabulary: its tree has %zu nodes, more than %d", nodes,
                       TD_TREE_NODES_MAX);
    t->nodes = malloc(nodes * sizeof *t->nodes);
    t->twins = malloc((n + 1) * 2 * sizeof *t->twins);
    if (!t->nodes || !t->twins)
        return td_fail(err, TD_NO_MEMORY, "no memory for a vocabulary's tree");
    build(t, e, n);
    t->allocated = bytes + 1 + nodes * sizeof *t->nodes + (n + 1) * 2 * sizeof *t->twins +
                   ((size_t)p->vocab + 1) * sizeof *t->token_at;
    return TD_OK;
}

td_status td_tree_init(struct td_tree *t, const struct td_grammars_params *p,
                       struct td_error *err) {
    *t = (struct td_tree){
        .vocab = p->vocab, .eos = p->eos, .dsml = p->dsml, .think_end = p->think_end};
    if (p->vocab <= 0 || p->eos < 0 || p->eos >= p->vocab || p->dsml >= p->vocab ||
        p->think_end >= p->vocab)
        return td_fail(err, TD_INVALID, "vocabulary of %d: expected its end of text (%d) and marks inside",
                       p->vocab, p->eos);
    struct entry *e = calloc((size_t)p->vocab, sizeof *e);
    t->token_at = calloc((size_t)p->vocab + 1, sizeof *t->token_at);
    td_status st = e && t->token_at
                       ? fill(t, p, e, err)
                       : td_fail(err, TD_NO_MEMORY, "no memory for a vocabulary's tree");
    free(e);
    if (st != TD_OK) td_tree_finish(t);
    return st;
}

void td_tree_finish(struct td_tree *t) {
    free(t->nodes);
    free(t->token_at);
    free(t->bytes);
    free(t->twins);
    *t = (struct td_tree){0};
}
