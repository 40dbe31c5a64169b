/* How a request wants tokens chosen, and one chosen token: the words that router, wire, handoff
 * and sampler share. */
#ifndef TD_COMMON_BASE_SAMPLING_H
#define TD_COMMON_BASE_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

enum { TD_TOP_LOGPROBS_MAX = 20 };

struct td_sampling {
    float temperature;     /* 0: greedy, ties to the lowest id */
    float top_p;           /* (0, 1]; 1: off */
    float min_p;           /* [0, 1); 0: off */
    uint32_t top_k;        /* 0: off */
    uint64_t seed;         /* with the absolute position it keys the counter-based generator */
    uint32_t top_logprobs; /* 0..20 alternatives wanted per token */
    bool logprobs;         /* the chosen token's logprob wanted */
    bool ignore_eos;       /* end-of-text does not end the sequence */
};

struct td_token_alt {
    int32_t id;
    float logprob;
};

struct td_token {
    int32_t id;
    float logprob; /* of the unmodified distribution (temperature 1) */
    uint32_t n_top;
    struct td_token_alt top[TD_TOP_LOGPROBS_MAX]; /* most likely first */
};

#endif
