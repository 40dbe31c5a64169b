/* What a loaded tokenizer holds; shared by the loader (tokenizer_load.c) and the encoder
 * (tokenizer.c), private to them. */
#ifndef TD_COMMON_TEXT_TOKENIZER_IMPL_H
#define TD_COMMON_TEXT_TOKENIZER_IMPL_H

#include "common/text/bpe.h"
#include "common/text/tokenizer.h"

/* Ids above this are a malformed file, not a vocabulary. */
#define TD_TOKEN_ID_MAX ((int32_t)(1 << 22))

enum td_token_kind { TD_TOKEN_NONE, TD_TOKEN_BASE, TD_TOKEN_ADDED };

struct td_token {
    uint32_t at, n; /* bytes in td_tokenizer.blob */
    uint8_t kind;   /* enum td_token_kind */
    bool whole;     /* base: a piece of exactly these bytes merges into this token */
};

/* Hash table from bytes to id, open addressing, at most half full. */
struct td_vocab_slot {
    uint32_t hash;
    int32_t id; /* -1: free */
};

struct td_vocab {
    struct td_vocab_slot *slots; /* [mask + 1] */
    uint32_t mask;
};

/* Added tokens of one pass. Hugging Face cuts at the tokens that are not "normalized" first and at
 * the others inside what is left, so there are two. */
struct td_added_pass {
    struct td_vocab names;
    uint32_t count;
    size_t max_bytes;
    bool first[256];   /* bytes a name can begin with */
    uint64_t *lengths; /* [max_bytes / 64 + 1] bit k: some name has k bytes */
};

struct td_tokenizer {
    char *blob; /* [blob_n] bytes of all tokens */
    size_t blob_n, blob_cap;
    struct td_token *tokens; /* [size] by id */
    int32_t size;
    size_t max_bytes; /* of a base token */
    struct td_vocab base;
    struct td_added_pass pass[2];
    struct td_bpe bpe;
};

TD_MUST_USE td_status td_vocab_init(struct td_vocab *v, size_t count);
void td_vocab_finish(struct td_vocab *v);
/* The bytes must be those of tokens[id] and not be present yet. */
void td_vocab_add(struct td_vocab *v, const struct td_tokenizer *t, int32_t id);
/* -1 if not present. */
int32_t td_vocab_find(const struct td_vocab *v, const struct td_tokenizer *t, const char *p,
                      size_t n);

#endif
