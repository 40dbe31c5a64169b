/* See decode_graphs.h. */
#include "kernels/decode_graphs.h"

#include <assert.h>

uint32_t td_decode_graph_next(uint32_t rows) {
    uint32_t power = TD_GRAPHS_EACH; /* the greatest power of two that is not above rows */
    if (rows < TD_GRAPHS_EACH) return rows + 1;
    while (power <= rows / 2)
        power *= 2;
    return rows + power / TD_GRAPHS_QUARTERS;
}

uint32_t td_decode_graphs_count(uint32_t most) {
    uint32_t n = 0;
    for (uint32_t rows = 0; rows < most; n++)
        rows = td_decode_graph_next(rows);
    return n;
}

static td_status record_one(struct td_decode_graphs *g, struct td_device *d, td_queue_step queue,
                            void *user, uint32_t rows, struct td_error *err) {
    struct td_decode_graph *to = &g->graph[g->n];
    uint32_t launches;
    assert(g->n < TD_GRAPHS_MAX);
    TD_TRY(d->backend->record(d, err));
    queue(user, rows, true);
    TD_TRY(d->backend->keep(d, &to->recording, &launches, err));
    to->rows = rows;
    g->n++;
    if (launches > g->launches) g->launches = launches;
    return TD_OK;
}

td_status td_decode_graphs_record(struct td_decode_graphs *g, struct td_device *d,
                                  td_queue_step queue, void *user, uint32_t most, uint32_t longest,
                                  struct td_error *err) {
    TD_TRY(d->backend->record(d, err));
    queue(user, longest, false);
    TD_TRY(d->backend->keep(d, NULL, NULL, err));
    for (uint32_t rows = 0; rows < most;) {
        rows = td_decode_graph_next(rows);
        if (rows > most) rows = most;
        TD_TRY(record_one(g, d, queue, user, rows, err));
    }
    return d->backend->wait(d, TD_LANE_STEP, err);
}

void td_decode_graphs_finish(struct td_decode_graphs *g, struct td_device *d) {
    for (uint32_t i = 0; i < g->n; i++)
        d->backend->forget(d, g->graph[i].recording);
    g->n = 0;
}

const struct td_decode_graph *td_decode_graph_for(const struct td_decode_graphs *g, uint32_t n) {
    for (uint32_t i = 0; i < g->n; i++)
        if (g->graph[i].rows >= n) return &g->graph[i];
    return NULL;
}
