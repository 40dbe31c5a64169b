/* Makes small checkpoints in a temporary folder, and broken ones: a list of tensors as the format
 * describes them, changed by a test before it is written. */
#ifndef TD_TESTS_KERNELS_MODEL_MAKER_H
#define TD_TESTS_KERNELS_MODEL_MAKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How linears are stored; routed experts are FP4 or NVFP4 in the two quantised kinds. */
enum maker_kind { MAKER_BF16, MAKER_FP8FP4, MAKER_NVFP4 };

struct maker_tensor {
    char name[96];
    const char *dtype;
    uint32_t rank;
    uint64_t shape[3];
    size_t begin, end; /* in the data area */
};

struct maker {
    struct maker_tensor t[512];
    size_t n;
    uint8_t *data;
    size_t bytes;
    char dir[64]; /* temporary folder, made by maker_init */
};

/* Three layers (ratios 0, 4, 128), the first hash-routed; hidden 64, 2 experts, vocabulary 8. */
void maker_init(struct maker *m, enum maker_kind kind);
/* Removes the folder and what was written. */
void maker_finish(struct maker *m);

struct maker_tensor *maker_find(struct maker *m, const char *name);
void maker_remove(struct maker *m, const char *name);
/* Appends a tensor of `bytes` zero bytes at the end of the data area. */
struct maker_tensor *maker_add(struct maker *m, const char *name, const char *dtype, uint32_t rank,
                               const uint64_t *shape, size_t bytes);

/* The JSON header of tensors first..first+n-1 (heap), offsets relative to the first's. */
char *maker_header(const struct maker *m, size_t first, size_t n);
/* File `name` in the folder: length, header text, data. `length` < 0: the true one. */
void maker_write_file(const struct maker *m, const char *name, const char *header, size_t header_n,
                      int64_t length, const void *data, size_t bytes);
void maker_write_text(const struct maker *m, const char *name, const char *text);
/* config.json, with `from` replaced by `to` when given. */
void maker_write_config(const struct maker *m, const char *from, const char *to);
/* config.json and model.safetensors as they stand. */
void maker_write(const struct maker *m);
/* config.json, two shards a.safetensors and b.safetensors, and the index with `from` replaced. */
void maker_write_shards(const struct maker *m, const char *from, const char *to);

#endif
