/* How far long work has come, as log lines: one per tenth, at most one a second, and one at the
 * end. For roles and tools. */
#ifndef TD_COMMON_BASE_PROGRESS_H
#define TD_COMMON_BASE_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct td_progress {
    const char *what; /* set by the caller, the rest zero: "checkpoint" */
    uint64_t start_ns, line_ns;
    unsigned tenths; /* said so far */
};

/* Whether `done` of `total` bytes at `now_ns` is worth a line; notes that it was said. */
bool td_progress_due(struct td_progress *p, size_t done, size_t total, uint64_t now_ns);
/* Logs the line if one is due; `progress` is a struct td_progress. Start with done = 0 where the
 * speed shall count from there. */
void td_progress_log(void *progress, size_t done, size_t total);

#endif
