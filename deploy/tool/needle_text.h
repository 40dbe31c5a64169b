/* Prompts in the bundled model's format: facts hidden in filler, and the question for one of them.
 *
 * The model was trained on exactly these sentences; the word lists are its training vocabulary
 * (deploy/models/needle/README.md). Everything follows from the seed. */
#ifndef TD_DEPLOY_TOOL_NEEDLE_TEXT_H
#define TD_DEPLOY_TOOL_NEEDLE_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum td_needle_kind {
    TD_NEEDLE_CODE,
    TD_NEEDLE_NUMBER,
    TD_NEEDLE_CITY,
    TD_NEEDLE_COLOR,
    TD_NEEDLE_KINDS
};

struct td_needle_spec {
    uint64_t seed;
    uint32_t tokens;      /* target length of the whole encoded prompt */
    uint32_t depth;       /* percent of the text before the needle: 0 = first sentence */
    uint32_t look_alikes; /* facts about other names; the four kinds in turn */
    uint32_t repeats;     /* times the needle is stated, >= 1, spread evenly when more than one */
    uint32_t
        tail_tokens; /* not 0: the needle stands in the last so many tokens; depth is ignored */
};

struct td_needle_prompt {
    char *text; /* the user message; free() */
    size_t len;
    char question[96];
    char answer[64];
    uint32_t tokens; /* of the encoded prompt, by `count` */
};

/* Tokens of `len` bytes of ordinary text; `user` is passed through. */
typedef uint32_t td_needle_count_fn(void *user, const char *text, size_t len);

/* Builds one prompt. Filler is added while the count stays within spec->tokens, so the result is
 * at most one sentence short. TD_INVALID when needle and question alone are longer. */
TD_MUST_USE td_status td_needle_build(const struct td_needle_spec *spec, td_needle_count_fn *count,
                                      void *user, struct td_needle_prompt *ret,
                                      struct td_error *err);

#endif
