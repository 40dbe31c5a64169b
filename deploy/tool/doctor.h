/* `tandem doctor`: what is wrong with this machine for this configuration, before weights load.
 *
 * Three layers, so that every rule can be tested with invented facts:
 *   facts     plain structs, filled by probes: thin input and output, no judgement
 *   rules     pure functions from facts to findings
 *   findings  a verdict, a sentence and its cure, collected in a report
 * What may hang or crash (a driver, a copy between two GPUs, UCX) runs in a process of its own with
 * a time limit (doctor_apart.h) and becomes a finding as well. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_H
#define TD_DEPLOY_TOOL_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

/* ---- findings ---- */

/* TD_SKIPPED: could not be looked at here, the sentence says why. */
enum td_verdict { TD_FINE, TD_SKIPPED, TD_WARNING, TD_ERROR, TD_VERDICTS };

struct td_diagnosis {
    enum td_verdict verdict;
    const char *area; /* static: "config", "model", "gpu", ... */
    char text[480];
    char cure[480]; /* "" where nothing is to be done */
};

enum { TD_FINDINGS_MAX = 1024 }; /* 16 GPUs have 120 pairs */

struct td_report {
    struct td_diagnosis finding[TD_FINDINGS_MAX];
    uint32_t n, lost; /* lost: beyond the room above; an error of its own when printed */
    uint32_t count[TD_VERDICTS];
};

/* Adds one; the cure is that of the last one added. */
void td_find(struct td_report *r, enum td_verdict v, const char *area, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void td_cure(struct td_report *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* One line each, then one with the counts. `quiet`: without what is fine. */
void td_report_text(const struct td_report *r, bool quiet, FILE *out);
/* An object: "findings" (verdict, area, text, cure) and the counts. False: no memory. */
bool td_report_json(const struct td_report *r, FILE *out);

/* ---- the examination ---- */

struct td_gpu_probe;

struct td_doctor_options {
    const char *config;      /* file; NULL: the installed one */
    const char *const *sets; /* [n_sets] key=value */
    uint32_t n_sets;
    uint32_t limit_s; /* of each thing that may hang */
    bool all_gpus;    /* also those no worker is configured for */
    bool still;       /* nothing is copied to or between GPUs */
    size_t bytes;     /* of a copy that is compared and timed */
    uint32_t times;
    const struct td_gpu_probe *gpus; /* NULL: a build without CUDA */
};

/* Looks at everything; `r` is large: not on the stack. */
void td_doctor(const struct td_doctor_options *o, struct td_report *r);

/* The command over another kind of GPU than this build's: `base` has gpus, bytes and times. */
int td_cmd_doctor_with(int argc, char **argv, const struct td_doctor_options *base);

#endif
