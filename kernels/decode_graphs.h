/* Decode steps of a device recorded once, at start: one recording for each number of rows, or for
 * the next greater number that has one.
 *
 * A step of some thousand small kernels costs more to launch than to run. What changes from step to
 * step (ids, positions, page tables, slots) is in device memory that the kernels read; the number
 * of rows is what is recorded, so a step with fewer sequences has idle rows. */
#ifndef TD_KERNELS_DECODE_GRAPHS_H
#define TD_KERNELS_DECODE_GRAPHS_H

#include "kernels/device.h"

enum {
    TD_GRAPHS_EACH = 8,     /* up to so many rows every number has its own, */
    TD_GRAPHS_QUARTERS = 4, /* then so many in each doubling: at most a fifth of the rows idle */
    TD_GRAPHS_MAX = 64,     /* enough for 2^16 rows */
};

struct td_decode_graph {
    uint32_t rows;
    struct td_recording *recording;
};

struct td_decode_graphs {
    struct td_decode_graph graph[TD_GRAPHS_MAX]; /* rows ascending */
    uint32_t n;
    uint32_t launches; /* kernels of the one that has most */
};

/* Queues a step of n rows on the device: with their logits (a decode step), or without. */
typedef void (*td_queue_step)(void *user, uint32_t n, bool wanted);

/* Records decode steps of up to `most` rows (0: none). First a step of `longest` rows is walked
 * through and forgotten, so that whatever a launch asks the driver for is asked for now. */
TD_MUST_USE td_status td_decode_graphs_record(struct td_decode_graphs *g, struct td_device *d,
                                              td_queue_step queue, void *user, uint32_t most,
                                              uint32_t longest, struct td_error *err);
void td_decode_graphs_finish(struct td_decode_graphs *g, struct td_device *d);

/* The one with the fewest rows that holds n; NULL: none does. */
const struct td_decode_graph *td_decode_graph_for(const struct td_decode_graphs *g, uint32_t n);
/* Rows of the recording after one of `rows`; recordings for steps of up to `most`. */
uint32_t td_decode_graph_next(uint32_t rows);
uint32_t td_decode_graphs_count(uint32_t most);

#endif
