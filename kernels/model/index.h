/* model.safetensors.index.json: which file holds which tensor. Private to the loader. */
#ifndef TD_KERNELS_MODEL_INDEX_H
#define TD_KERNELS_MODEL_INDEX_H

#include "kernels/model/checkpoint.h"

struct td_index {
    void *root;          /* parsed JSON; owns all strings */
    const char **shards; /* [n] distinct file names, sorted */
    size_t n;
};

/* `text` [size] is not kept; `path` is for sentences. Every shard is a plain file name: no folder,
 * nothing hidden. */
TD_MUST_USE td_status td_index_parse(struct td_index *x, const char *path, const char *text,
                                     size_t size, struct td_error *err);
/* Fine on a zeroed one. */
void td_index_finish(struct td_index *x);

/* Index and opened shards must tell the same story, drafts included (they are not used, but a file
 * that lacks them is not the file the index was made for). Names in `f` are still as stored. */
TD_MUST_USE td_status td_index_check(const struct td_index *x, const struct td_model_files *f,
                                     const char *path, struct td_error *err);

#endif
