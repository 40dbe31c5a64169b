/* Doing what may hang or crash in a process of its own, with a time limit: a driver that never
 * comes back becomes a value here, not a hung doctor. */
#ifndef TD_DEPLOY_TOOL_DOCTOR_APART_H
#define TD_DEPLOY_TOOL_DOCTOR_APART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum td_apart_how {
    TD_APART_NEVER, /* not begun */
    TD_APART_DONE,
    TD_APART_LATE, /* its time was up; the process was killed */
    TD_APART_DIED, /* the process ended by itself: `code` is its signal, or minus its exit code */
};
struct td_apart_end {
    enum td_apart_how how;
    int code;
    bool stuck; /* not even SIGKILL ended it within some seconds: it hangs in the kernel */
};

/* Memory that children write and we read; zeroed. NULL: there is none. */
void *td_apart_memory(size_t bytes);
void td_apart_memory_free(void *memory, size_t bytes);

/* fn(arg, i) for i in 0..n-1, one after the other, in one process as long as all goes well; an item
 * that takes longer than limit_ms or ends the process is given up, and the next begin in a new one.
 * fn returns false when its process is of no further use (a GPU's fault stays). What it finds it
 * writes to memory of td_apart_memory; its standard output and error lead nowhere. ends [n]. */
typedef bool td_apart_fn(void *arg, uint32_t i);
void td_apart(td_apart_fn *fn, void *arg, uint32_t n, uint32_t limit_ms, struct td_apart_end *ends);

/* Runs a program; what it writes to standard output and error, together, is in `out` [cap], cut
 * when longer. DONE: exit code 0. Its environment is ours. */
struct td_apart_end td_apart_program(const char *const argv[], uint32_t limit_ms, char *out,
                                     size_t cap);

#endif
