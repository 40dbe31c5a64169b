/* See collectives.h. Two meetings each: before anything is read, and before what was read changes.
 */
#include "kernels/collectives.h"

#include <assert.h>
#include <string.h>

#include "kernels/team.h"

enum { PIECE = 256 }; /* values added together: a rank's share of the cache's first level */

struct reduction {
    const struct td_all_reduce_args *own;
    const struct td_all_reduce_args *of[TD_MAX_RANKS];
    uint32_t ranks;
    size_t values;
};

/* Neighbours, then neighbours of those: for 2, 4 and 8 the tree that halves from the top. */
static void add_ranks(float (*part)[PIECE], uint32_t ranks, uint32_t n) {
    for (uint32_t step = 1; step < ranks; step *= 2)
        for (uint32_t r = 0; r < ranks; r += 2 * step)
            for (uint32_t i = 0; i < n; i++)
                part[r][i] += part[r + step][i];
}

static void or_ranks(const struct reduction *c, size_t at, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t word = 0, of;
        for (uint32_t r = 0; r < c->ranks; r++) {
            memcpy(&of, c->of[r]->x + at + i, sizeof of);
            word |= of;
        }
        memcpy(y + i, &word, sizeof word);
    }
}

static void reduce_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct reduction *c = arg;
    const struct td_all_reduce_args *a = c->own;
    float part[TD_MAX_RANKS][PIECE];
    (void)thread;
    for (uint32_t p = begin; p < end; p++) {
        size_t at = (size_t)p * PIECE;
        uint32_t n = c->values - at < PIECE ? (uint32_t)(c->values - at) : PIECE;
        if (a->bits) {
            or_ranks(c, at, n, a->y + at);
            continue;
        }
        for (uint32_t r = 0; r < c->ranks; r++)
            memcpy(part[r], c->of[r]->x + at, n * sizeof part[r][0]);
        add_ranks(part, c->ranks, n);
        for (uint32_t i = 0; i < n; i++)
            a->y[at + i] = a->add ? part[0][i] + a->add[at + i] : part[0][i];
    }
}

void td_host_all_reduce(const struct td_device *d, const struct td_all_reduce_args *a) {
    struct reduction c = {.own = a, .ranks = d->ranks, .values = (size_t)a->n * a->dim};
    const void *const *brought = td_team_meet(d->team, d->rank, a);
    for (uint32_t r = 0; brought && r < d->ranks; r++) {
        c.of[r] = brought[r];
        assert(c.of[r]->n == a->n && c.of[r]->dim == a->dim && c.of[r]->bits == a->bits);
    }
    if (!brought) return;
    td_threads_run(d->threads, reduce_pieces, &c, (uint32_t)((c.values + PIECE - 1) / PIECE));
    (void)td_team_meet(d->team, d->rank, NULL);
}

void td_host_all_gather(const struct td_device *d, const struct td_all_gather_args *a) {
    const void *const *brought = td_team_meet(d->team, d->rank, a);
    for (uint32_t r = 0; brought && r < d->ranks; r++) {
        const struct td_all_gather_args *of = brought[r];
        assert(of->at[r] == a->at[r] && of->at[r + 1] == a->at[r + 1]);
        if (r != d->rank || a->own)
            memcpy((uint8_t *)a->buffer + a->at[r],
                   of->own ? of->own : (const uint8_t *)of->buffer + a->at[r],
                   a->at[r + 1] - a->at[r]);
    }
    if (brought) (void)td_team_meet(d->team, d->rank, NULL);
}

void td_host_all_to_all(const struct td_device *d, const struct td_all_to_all_args *a) {
    const void *const *brought = td_team_meet(d->team, d->rank, a);
    for (uint32_t r = 0; brought && r < d->ranks; r++) {
        const struct td_all_to_all_args *of = brought[r];
        assert(of->bytes == a->bytes);
        memcpy((uint8_t *)a->y + r * a->bytes, (const uint8_t *)of->x + d->rank * a->bytes,
               a->bytes);
    }
    if (brought) (void)td_team_meet(d->team, d->rank, NULL);
}
