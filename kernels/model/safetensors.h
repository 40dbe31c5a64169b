/* One mapped safetensors file: its tensors by name, every offset checked against the file.
 *
 * Layout: 8 bytes little-endian header length n, n bytes of JSON, then the data area. JSON maps a
 * name to {"dtype", "shape", "data_offsets": [begin, end]} relative to the data area; the key
 * "__metadata__" holds strings. What is refused: a header longer than the file or than 128 MiB,
 * JSON that is malformed, too deep, not UTF-8 or names a key twice, offsets outside the data
 * area, sizes that disagree with dtype and shape, tensors that overlap. */
#ifndef TD_KERNELS_MODEL_SAFETENSORS_H
#define TD_KERNELS_MODEL_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_TENSOR_MAX_RANK = 8 };

enum td_dtype {
    TD_DTYPE_OTHER, /* known by its text only */
    TD_DTYPE_F32,
    TD_DTYPE_BF16,
    TD_DTYPE_I64,
    TD_DTYPE_I32,
    TD_DTYPE_F8_E4M3,
    TD_DTYPE_F8_E8M0,
    TD_DTYPE_I8,
    TD_DTYPE_U8,
};

struct td_tensor {
    const char *name;   /* the official one once the checkpoint is open (names.h) */
    const char *stored; /* as in the file; owned by its header */
    const char *dtype_name;
    enum td_dtype dtype;
    uint32_t rank;
    uint64_t shape[TD_TENSOR_MAX_RANK]; /* outermost first */
    const uint8_t *data;                /* in the mapping; any alignment */
    size_t bytes;
    const struct td_safetensors *file;
    bool used; /* for the loader's "nothing is left over" check */
};

struct td_safetensors {
    char *path;
    const uint8_t *map;
    size_t size;
    bool borrowed;             /* `map` is the caller's */
    void *header;              /* parsed JSON; NULL after td_safetensors_drop_header */
    struct td_tensor *tensors; /* [count], by offset */
    size_t count;
};

TD_MUST_USE td_status td_safetensors_open(struct td_safetensors *f, const char *path,
                                          struct td_error *err);
/* The same from `size` bytes in memory, which must outlive *f; `path` is for sentences. */
TD_MUST_USE td_status td_safetensors_parse(struct td_safetensors *f, const char *path,
                                           const uint8_t *data, size_t size, struct td_error *err);
/* Frees names and tensor list; the mapping, and so every data pointer, stays. */
void td_safetensors_drop_header(struct td_safetensors *f);
/* Fine on a zeroed or half-opened file. */
void td_safetensors_finish(struct td_safetensors *f);

/* NULL when there is none. Linear search: for files with few tensors. */
const struct td_tensor *td_safetensors_find(const struct td_safetensors *f, const char *name);
/* A string of "__metadata__", or NULL. */
const char *td_safetensors_meta(const struct td_safetensors *f, const char *key);

/* Bytes per element; 0 for TD_DTYPE_OTHER. */
size_t td_dtype_size(enum td_dtype t);

/* "[64, 256]" into `buf`; returns buf. */
const char *td_shape_text(const uint64_t *shape, uint32_t rank, char buf[128]);
/* A name from a file, fit for one line of an error: at most 100 printable bytes. */
const char *td_name_text(const char *name, char buf[104]);

#endif
