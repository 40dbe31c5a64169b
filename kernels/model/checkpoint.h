/* All tensors of a checkpoint folder by name, over one file or many shards. Private to the
 * loader: model.c takes tensors out and asks at the end what was left over. */
#ifndef TD_KERNELS_MODEL_CHECKPOINT_H
#define TD_KERNELS_MODEL_CHECKPOINT_H

#include "kernels/model/safetensors.h"

/* Lives as long as the td_model: the mappings, and aligned copies of tensors whose file offset
 * is not a multiple of their element size. */
struct td_model_files {
    char *source; /* path of model.safetensors or of the index, for sentences */
    struct td_safetensors *file;
    size_t files;
    void **copy;
    size_t copies, copies_cap;
    struct td_tensor **by_name; /* [tensors], sorted; while loading only */
    size_t tensors;
    bool renamed; /* some tensor's stored name is not the official one */
};

/* Opens DIR/model.safetensors, or, without it, DIR/model0-mp1.safetensors or the shards that
 * DIR/model.safetensors.index.json names. With an index, file and index must agree on every
 * tensor's place. Tensors have official names afterwards; a mixture of layouts is refused. */
TD_MUST_USE td_status td_files_open(struct td_model_files *f, const char *dir,
                                    struct td_error *err);
/* The same from one safetensors file of `size` bytes in memory, which must outlive *f. */
TD_MUST_USE td_status td_files_parse(struct td_model_files *f, const char *source,
                                     const uint8_t *data, size_t size, struct td_error *err);
/* Called by both of the above: from names as stored to official ones. */
TD_MUST_USE td_status td_files_use_official_names(struct td_model_files *f, struct td_error *err);
/* NULL when there is none. */
struct td_tensor *td_files_find(const struct td_model_files *f, const char *name);
/* The tensor's bytes, at an address its element type may be read from. */
TD_MUST_USE td_status td_files_aligned(struct td_model_files *f, const struct td_tensor *t,
                                       const void **ret, struct td_error *err);
/* The first tensor (by name) nobody used, drafts aside; NULL when all were. */
const struct td_tensor *td_files_unused(const struct td_model_files *f, uint32_t layers,
                                        uint32_t drafts);
/* Names are no longer needed: frees everything but mappings and copies. */
void td_files_drop_names(struct td_model_files *f);
/* Fine on zeroed or half-opened. */
void td_files_finish(struct td_model_files *f);

#endif
