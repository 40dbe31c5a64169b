/* Files of a checkpoint as bytes: read whole (small JSON) or mapped (tensors). Private to the
 * loader and the tools. */
#ifndef TD_KERNELS_MODEL_FILE_H
#define TD_KERNELS_MODEL_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* Reads `path` (a regular file of at most `max` bytes) into heap memory the caller frees; one NUL
 * follows the last byte. */
TD_MUST_USE td_status td_file_read(const char *path, size_t max, char **ret, size_t *ret_size,
                                   struct td_error *err);

/* Maps `path` read-only. An empty file is TD_FORMAT. A file cut short while it is mapped kills
 * the process on the next touch (SIGBUS): checkpoints must not be rewritten in place. */
TD_MUST_USE td_status td_file_map(const char *path, const uint8_t **ret, size_t *ret_size,
                                  struct td_error *err);
/* NULL is fine. */
void td_file_unmap(const uint8_t *map, size_t size);

/* FNV-1a over `n` bytes, continuing from `h` (TD_HASH_START at the beginning): names and samples
 * of a checkpoint, no protection against intent. */
#define TD_HASH_START 0xcbf29ce484222325u
static inline uint64_t td_hash_more(uint64_t h, const void *data, size_t n) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

#endif
