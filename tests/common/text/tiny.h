/* Small tokenizers for tests, made in memory: all 256 bytes, a few merges, a few added tokens. */
#ifndef TD_TESTS_COMMON_TEXT_TINY_H
#define TD_TESTS_COMMON_TEXT_TINY_H

#include <jansson.h>

#include "common/text/tokenizer.h"

/* Ids: byte b is b; merge i gives 256 + i; added tokens come after the last merge. */
enum { TINY_MERGES = 14 };
enum {
    TINY_BOS = 256 + TINY_MERGES,
    TINY_EOS,
    TINY_USER,
    TINY_ASSISTANT,
    TINY_THINK,
    TINY_THINK_END,
    TINY_SIZE
};
extern const char *const tiny_added[TINY_SIZE - TINY_BOS];

/* The tokenizer.json of such a tokenizer, to be edited and given to tiny_load. */
json_t *tiny_json(void);

/* Adds an added token to a tokenizer.json. */
void tiny_add(json_t *root, int id, const char *name, bool normalized);

/* Adds a base token of those bytes (no NUL), which encoding never yields. */
void tiny_add_base(json_t *root, int id, const char *bytes);

/* Writes `root` (taken over) to a folder of its own, loads it, removes the folder. */
td_status tiny_load(json_t *root, struct td_tokenizer **ret_t, struct td_error *err);

/* tiny_json, loaded; asserts that it works. */
struct td_tokenizer *tiny_tokenizer(void);

/* Text of ids, names of added tokens included; NUL-terminated, the caller frees. */
char *tiny_text(const struct td_tokenizer *t, const int32_t *ids, size_t n);

/* Printed once per test program; from TANDEM_TEST_SEED or the clock. */
uint64_t tiny_seed(void);
uint32_t tiny_random(uint64_t *state, uint32_t below);

#endif
