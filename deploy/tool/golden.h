/* Parts of `tandem golden`: one recorded file run through the engine under given settings. */
#ifndef TD_DEPLOY_TOOL_GOLDEN_H
#define TD_DEPLOY_TOOL_GOLDEN_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/engine.h"

/* What a file has to keep to; errors are max |d| / max |golden|. */
#define TD_GOLDEN_LOGITS_EXACT 2e-5  /* fp32 rows and keys */
#define TD_GOLDEN_LOGITS_SERVED 5e-3 /* any other storage type; taps too */
#define TD_GOLDEN_TAPS_EXACT 1e-5
#define TD_GOLDEN_LOGITS_DEVICE 1e-2 /* the same on a device, whose products take bf16 inputs */
/* Logits of ref numerics: values next to a rounding boundary fall on either side, so two right
 * programs differ. Median over all cases and parts, and worst. */
#define TD_GOLDEN_REF_MEDIAN 5e-3
#define TD_GOLDEN_REF_WORST 5e-2
#define TD_GOLDEN_OVERLAP_SERVED 0.98 /* of selected entries, pooled per layer; exact: all */

struct td_golden {
    const char *path; /* the golden file */
    struct td_config config;
    struct td_model *model;
    struct td_engine_options options;
    bool exact; /* fp32 rows, keys and scores */
    bool ref;   /* a golden of ref numerics, else of plain */
    struct td_engine *engine;
    uint32_t *pages; /* 0, 1, 2, ... */
};

/* The limit of what is not exact, logits and taps of plain numerics. */
double td_golden_served(const struct td_golden *g);

/* Creates the engine with one slot and pages for `tokens` positions, in place of an earlier one. */
TD_MUST_USE td_status td_golden_engine(struct td_golden *g, uint32_t tokens, struct td_error *err);

/* Runs ids[from..to-1] of one sequence in steps of the engine's limit. *ret_logits [vocab] of
 * position to - 1, valid until the next step; `capture` (or NULL) is of that position too. */
TD_MUST_USE td_status td_golden_run(struct td_golden *g, const int32_t *ids, uint32_t from,
                                    uint32_t to, const float **ret_logits,
                                    struct td_capture *capture, struct td_error *err);

/* max |ours - golden| / max |golden|; infinite when ours holds a NaN. `most`: max |golden| when
 * the values are part of a larger whole, else 0. */
double td_golden_error(const float *ours, const float *golden, size_t n, double most);
/* The lowest id of the largest logit: greedy's token. */
uint32_t td_golden_argmax(const float *logits, uint32_t n);
/* Of `n` values, which are sorted in place; 0 when there are none. */
double td_golden_median(double *v, uint32_t n);

/* Ops for an engine whose roundings are to meet noise, chosen anew by each td_golden_nudge. */
struct td_ops;
const struct td_ops *td_golden_nudge_ops(void);
void td_golden_nudge(uint64_t seed);

/* Entries of `golden` that `ours` holds too; both ascending, -1 = none. */
uint32_t td_golden_overlap(const int32_t *ours, uint32_t n_ours, const int32_t *golden,
                           uint32_t n_golden);
/* Entries of `s` that are not -1. */
uint32_t td_golden_count(const int32_t *s, uint32_t n);

/* The three kinds. Each prints a line per case and the last line; *ret_pass says whether the file
 * kept its tolerance. `root` is the parsed file (a json_t). */
TD_MUST_USE td_status td_golden_logits(struct td_golden *g, const void *root, bool *ret_pass,
                                       struct td_error *err);
TD_MUST_USE td_status td_golden_selections(struct td_golden *g, const void *root, bool *ret_pass,
                                           struct td_error *err);
TD_MUST_USE td_status td_golden_taps(struct td_golden *g, bool *ret_pass, struct td_error *err);

/* A JSON array of `expect` integers in lo..hi (expect 0: any number of at least one) as heap
 * memory; `what` names it in the sentence. */
TD_MUST_USE td_status td_golden_ids(const struct td_golden *g, const void *array, const char *what,
                                    uint32_t expect, int64_t lo, int64_t hi, int32_t **ret,
                                    uint32_t *ret_n, struct td_error *err);

#endif
