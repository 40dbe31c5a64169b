/* Masks computed before. Private to the store.
 *
 * What may come next depends on the top frame of a path, on the frame below only for tokens that
 * end the top one's rule and go on, and so forth. So an entry belongs to a frame and to the entry
 * of the frame above it; it holds the tokens that this frame decides and the places in the
 * vocabulary's tree where its rule ended inside a token, from which the next frame's entry goes on.
 * The mask of a path is the union of a few entries, nearly always one or two. */
#ifndef TD_COMMON_TEXT_GRAMMAR_MASK_H
#define TD_COMMON_TEXT_GRAMMAR_MASK_H

#include "common/text/grammar_impl.h"
#include "common/text/grammar_tree.h"

struct td_mask_entry;

struct td_masks {
    const struct td_tree *tree;
    uint32_t words; /* of a mask */

    struct td_mask_entry *entries; /* [cap_entries], 0 is none */
    uint32_t n_entries, cap_entries;
    uint32_t *slots; /* [slot_mask + 1] entry numbers */
    uint32_t slot_mask;
    uint32_t *data; /* [cap_data] tokens or bits, then places */
    size_t n_data, cap_data;

    uint32_t *bits;       /* [words] of the entry at hand */
    uint32_t *places;     /* [n_nodes] where its rule ended */
    uint32_t *place_seen; /* [n_nodes / 32 + 1] bits */
    uint32_t n_places;
    uint64_t computed, emptied; /* entries; how often all were dropped for room */
    size_t allocated;
};

/* TD_NO_MEMORY; after it td_masks_finish is allowed, not needed. */
TD_MUST_USE td_status td_masks_init(struct td_masks *m, const struct td_tree *tree, size_t budget,
                                    struct td_error *err);
void td_masks_finish(struct td_masks *m);

/* Adds to `mask` the tokens of one path. `core`: how many states are the store's own core's, 0 when
 * the grammar has another core. */
void td_masks_path(struct td_masks *m, const struct td_grammar *g, uint32_t core,
                   const struct td_match_path *path, uint32_t *mask);

/* Computes the entry of one frame when it is a path's last; false: it would empty the cache. */
bool td_masks_frame(struct td_masks *m, const struct td_grammar *g, uint32_t core, uint64_t frame);

#endif
