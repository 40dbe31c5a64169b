/* Reading the tensors of an opened checkpoint through once, in the order of the disk, so that
 * everything after it works from memory. Private to the loader. */
#ifndef TD_KERNELS_MODEL_LOAD_H
#define TD_KERNELS_MODEL_LOAD_H

#include "kernels/model/checkpoint.h"
#include "kernels/model/model.h"

/* Drafts are left out. More bytes than three quarters of this machine's memory are not read: the
 * rest comes when it is touched. `watch` may be NULL. TD_IO when the disk fails, which later
 * would be a SIGBUS. */
TD_MUST_USE td_status td_files_read_through(const struct td_model_files *f, uint32_t layers,
                                            uint32_t drafts, const struct td_load_watch *watch,
                                            struct td_error *err);

#endif
