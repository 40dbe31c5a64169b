/* How a request wants tokens chosen, and one chosen token: the words that router, wire, handoff
 * and sampler share. */
#ifndef TD_COMMON_BASE_SAMPLING_H
#define TD_COMMON_BASE_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

enum {
    TD_TOP_LOGPROBS_MAX = 20,
    TD_CHOICES_MAX = 8,      /* sequences of one request (`n`) */
    TD_LOGIT_BIAS_MAX = 300, /* ids of one request */
    TD_GUIDE_GRAMMAR_MAX = 1 << 20,
};

/* The part of a request's wishes that has a size of its own; everything is borrowed. All of it is
 * the same for every attempt and every choice. */
struct td_guide {
    uint32_t n_bias;
    const int32_t *bias_id;   /* [n_bias] */
    const float *bias;        /* [n_bias] finite */
    uint32_t n_prompt_ids;    /* for the repetition penalty, else 0: */
    const int32_t *prompt_id; /* [n_prompt_ids] every id of the prompt once */
    uint32_t grammar_n;       /* bytes, at most TD_GUIDE_GRAMMAR_MAX; 0: none */
    const uint8_t *grammar;   /* compiled: common/text/grammar.h */
};

struct td_sampling {
    float temperature; /* 0: greedy, ties to the lowest id */
    float top_p;       /* (0, 1]; 1: off */
    float min_p;       /* [0, 1); 0: off */
    uint32_t top_k;    /* 0: off */
    /* Of ids by their number of occurrences in the answer: see kernels/shape.h. */
    float frequency_penalty, presence_penalty; /* [-2, 2]; 0: off */
    float repetition_penalty;                  /* > 0; counts the prompt too; 0 and 1: off */
    uint32_t end_from;            /* absolute position before which end-of-text is not chosen */
    const struct td_guide *guide; /* NULL: none */
    /* The prompt's end when an attempt goes on where an earlier one ended: what of the answer is
     * there. NULL when nothing depends on it. */
    uint32_t n_said;
    const int32_t *said;   /* [n_said] */
    uint64_t seed;         /* with the absolute position it keys the counter-based generator */
    uint32_t top_logprobs; /* 0..20 alternatives wanted per token */
    bool logprobs;         /* the chosen token's logprob wanted */
    bool ignore_eos;       /* end-of-text does not end the sequence */
    bool selections;       /* what the indexer selected for each token is wanted with it */
};

/* The seed of choice c of a request: choice 0 is what the request alone would be, and choice c is
 * what a request with this seed alone would be. The step is odd, so choices never share a seed, and
 * large, so neighbouring seeds of a client do not meet each other's choices. */
static inline uint64_t td_choice_seed(uint64_t seed, uint32_t choice) {
    return seed + choice * 0x9E3779B97F4A7C15ull;
}

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

enum { TD_SELECTION_LAYERS_MAX = 128, TD_SELECTION_ENTRIES_MAX = 2048 /* of a layer */ };

/* What the indexer selected when one token was computed: per CSA layer the compressed entries that
 * the token before it, whose logits it was sampled from, attended. */
struct td_selection {
    uint32_t n_layers, n_entries; /* layers; entries of all layers together */
    const uint32_t *layer;        /* [n_layers] numbers in the model, ascending */
    const uint32_t *count;        /* [n_layers] entries */
    const uint32_t *entry;        /* [n_entries] layer after layer, ascending in each */
};

#endif
