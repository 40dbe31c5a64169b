/* The vocabulary as a tree of bytes, so that a mask is computed by one walk that leaves a branch
 * where the grammar does, and the bytes of each token. Private to the store. */
#ifndef TD_COMMON_TEXT_GRAMMAR_TREE_H
#define TD_COMMON_TEXT_GRAMMAR_TREE_H

#include "common/text/grammar.h"

enum {
    TD_TREE_TOKEN_MAX = 255,      /* longer tokens are never allowed */
    TD_TREE_NODES_MAX = 1 << 23,
};

/* In the order of a walk: a node's first child is the next node, its next sibling is at `end`. */
struct td_tree_node {
    uint32_t symbol_end; /* symbol << 23 | end */
    int32_t token;       /* -1: none ends here */
};

struct td_tree {
    struct td_tree_node *nodes; /* [n_nodes] the first one is the root */
    uint32_t n_nodes;
    uint32_t *token_at; /* [vocab + 1] bytes of a token in `bytes` */
    char *bytes;
    int32_t *twins;   /* [2 * n_twins] pairs of tokens with the same bytes, the first in the tree */
    uint32_t n_twins;
    int32_t vocab, eos, dsml, think_end;
    uint32_t longest; /* bytes of a token */
    size_t allocated; /* bytes, all together */
};

static inline uint32_t td_tree_end(const struct td_tree_node *n) {
    return n->symbol_end & (TD_TREE_NODES_MAX - 1);
}
static inline uint32_t td_tree_symbol(const struct td_tree_node *n) { return n->symbol_end >> 23; }

/* After a failure td_tree_finish is allowed, not needed. */
TD_MUST_USE td_status td_tree_init(struct td_tree *t, const struct td_grammars_params *p,
                                   struct td_error *err);
void td_tree_finish(struct td_tree *t);

#endif
