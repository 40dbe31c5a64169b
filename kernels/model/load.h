/* Reading the tensors of an opened checkpoint through once, in the order of the disk, so that
 * everything after it works from memory. Private to the loader. */
#ifndef TD_KERNELS_MODEL_LOAD_H
#define TD_KERNELS_MODEL_LOAD_H

#include "kernels/model/checkpoint.h"
#include "kernels/model/model.h"

/* Three quarters of this machine's memory: what is read beyond would push out what was read
 * before. */
size_t td_load_limit(void);

/* Drafts are left out, and so is what comes after `limit` bytes: that is read when it is touched.
 * `watch` may be NULL. TD_IO when the disk fails, which later would be a SIGBUS. */
TD_MUST_USE td_status td_files_read_through(const struct td_model_files *f, uint32_t layers,
                                            uint32_t drafts, size_t limit,
                                            const struct td_load_watch *watch,
                                            struct td_error *err);

#endif
