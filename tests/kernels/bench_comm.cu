/* What ranks tell each other, in microseconds: sums, gathers and exchanges (all to all) of a step's
 * sizes by mailboxes, queued one by one and sums replayed; and NCCL's own all-reduce in the same
 * threads on the same streams (of more than two ranks in an order of its own, so its bits are not
 * ours: a yardstick). Where the columns cross is where kernels/cuda/comm_join.cu has its threshold.
 *
 * usage: bench_comm [DEVICES [ROUNDS]]     (0,1 and 9), a device per rank: 2, 4 or 8 of them
 * Medians over rounds; GB/s are bytes of the message by time; exit code 77 where there are fewer
 * GPUs. The same device may stand there twice: then NCCL does not take part. */
#include "kernels/cuda/comm.h"

#include <algorithm>
#include <stdlib.h>

#define _Static_assert static_assert /* C's word in C's headers */
extern "C" {
#include "common/base/clock.h"
#include "kernels/device.h"
#include "kernels/team.h"
}

enum { MOST_ROUNDS = 101, SMALLEST = 16 << 10, LARGEST = 64 << 20, SILENCE = 60000 };
enum what { MAIL, MAIL_REPLAYED, GATHER, EXCHANGE, NCCL, NCCL_REPLAYED, WHATS };
static const char *const name[WHATS] = {"sum",      "replayed",   "gather",
                                        "exchange", "NCCL's sum", "replayed"};

static struct td_error err;

static void die(const char *what) {
    fprintf(stderr, "bench_comm: %s\n", what);
    exit(1);
}

static void ok(td_status st) {
    if (st != TD_OK) die(err.text);
}

/* ---- ranks ---- */

struct bench {
    uint32_t ranks;
    int device[TD_MAX_RANKS];
    struct td_team *team;
    struct td_device d[TD_MAX_RANKS];
    float *x[TD_MAX_RANKS], *y[TD_MAX_RANKS];
    const struct td_nccl *nccl; /* NULL: none, or ranks that share a device */
    enum what what;
    size_t bytes;
    uint32_t calls;
    int rounds;
    double us; /* of a call, by rank 0 */
};

static void break_off(void *user) {
    struct bench *b = (struct bench *)user;
    for (uint32_t q = 0; q < b->ranks; q++)
        b->d[q].backend->break_off(&b->d[q]);
}

static td_status start_rank(void *arg, uint32_t rank, struct td_error *e) {
    struct bench *b = (struct bench *)arg;
    struct td_device *d = &b->d[rank];
    void *p[2];
    TD_TRY(d->backend->join(d, LARGEST / 4, e));
    for (int i = 0; i < 2; i++)
        TD_TRY(d->backend->take(d, LARGEST, "words", &p[i], e));
    b->x[rank] = (float *)p[0];
    b->y[rank] = (float *)p[1];
    return d->backend->wait(d, TD_LANE_STEP, e);
}

static void queue(const struct bench *b, uint32_t rank) {
    const struct td_device *d = &b->d[rank];
    const uint32_t row = 4096;
    struct td_all_reduce_args sum = {b->x[rank], NULL, b->y[rank], (uint32_t)(b->bytes / 4 / row),
                                     row,        false};
    struct td_all_gather_args parts = {b->y[rank], {0}};
    for (uint32_t q = 0; q <= b->ranks; q++)
        parts.at[q] = b->bytes / b->ranks * q;
    struct td_all_to_all_args each = {b->x[rank], b->y[rank], b->bytes / b->ranks};
    td_comm_of(d)->large = SIZE_MAX;
    for (uint32_t i = 0; i < b->calls; i++)
        if (b->what == GATHER)
            d->backend->all_gather(d, &parts);
        else if (b->what == EXCHANGE)
            d->backend->all_to_all(d, &each);
        else if (b->what < NCCL)
            d->backend->all_reduce(d, &sum);
        else if (b->nccl->all_reduce(b->x[rank], b->y[rank], b->bytes / 4, TD_NCCL_FLOATS, 0,
                                     td_comm_of(d)->carrier,
                                     td_cuda_of(d)->stream[TD_LANE_STEP]) != TD_NCCL_OK)
            die("NCCL refuses a call");
}

static bool replayed(enum what w) {
    return w == MAIL_REPLAYED || w == NCCL_REPLAYED;
}

static td_status time_rank(void *arg, uint32_t rank, struct td_error *e) {
    struct bench *b = (struct bench *)arg;
    struct td_device *d = &b->d[rank];
    struct td_recording *r = NULL;
    double us[MOST_ROUNDS];
    cudaSetDevice(b->device[rank]);
    if (replayed(b->what)) {
        TD_TRY(d->backend->record(d, e));
        queue(b, rank);
        TD_TRY(d->backend->keep(d, &r, NULL, e));
    }
    for (int i = -2; i < b->rounds; i++) {
        TD_TRY(d->backend->wait(d, TD_LANE_STEP, e));
        if (!td_team_meet(b->team, rank, NULL)) break;
        uint64_t from = td_now_ns();
        if (r)
            d->backend->replay(d, r);
        else
            queue(b, rank);
        TD_TRY(d->backend->wait(d, TD_LANE_STEP, e));
        if (i >= 0) us[i] = (double)(td_now_ns() - from) / 1e3 / b->calls;
    }
    d->backend->forget(d, r);
    if (!td_team_meet(b->team, rank, NULL)) return TD_OK;
    std::sort(us, us + b->rounds);
    if (rank == 0) b->us = us[b->rounds / 2];
    return TD_OK;
}

static double time_of(struct bench *b, enum what what, size_t bytes) {
    b->what = what;
    b->bytes = bytes;
    b->calls = bytes <= 1 << 20 ? 100 : bytes <= 8 << 20 ? 20 : 5;
    ok(td_team_run(b->team, time_rank, b, &err));
    return b->us;
}

int main(int argc, char **argv) {
    static struct bench b;
    const char *at = argc > 1 ? argv[1] : "0,1";
    struct td_team_options o = {};
    b.rounds = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 9;
    for (char *end; b.ranks < TD_MAX_RANKS; at = end + 1) {
        b.device[b.ranks++] = (int)strtol(at, &end, 10);
        if (*end != ',') break;
    }
    if ((b.ranks != 2 && b.ranks != 4 && b.ranks != 8) || b.rounds < 1 || b.rounds > MOST_ROUNDS)
        return 2;
    o.ranks = b.ranks;
    o.silence_ms = SILENCE;
    o.break_off = break_off;
    o.user = &b;
    for (uint32_t q = 0; q < b.ranks; q++) {
        snprintf(o.place[q], sizeof o.place[q], "cuda:%d", b.device[q]);
        if (td_backend_cuda.open(&b.d[q], (uint32_t)b.device[q], &err) != TD_OK) {
            printf("skipped: %s\n", err.text);
            return 77;
        }
        b.d[q].rank = q;
        b.d[q].ranks = b.ranks;
    }
    ok(td_team_create(&o, &b.team, &err));
    for (uint32_t q = 0; q < b.ranks; q++)
        b.d[q].team = b.team;
    ok(td_team_run(b.team, start_rank, &b, &err));
    b.nccl = td_comm_of(&b.d[0])->nccl;
    int version = 0;
    if (b.nccl) b.nccl->get_version(&version);
    printf(b.nccl ? "NCCL %d, " : "without NCCL, ", version);
    printf("%u ranks; us a call, GB/s of the message\n%10s", b.ranks, "KB");
    for (int w = 0; w < WHATS; w++)
        printf("%19s", name[w]);
    for (size_t bytes = SMALLEST; bytes <= LARGEST; bytes *= 2) {
        printf("\n%10zu", bytes >> 10);
        for (int w = 0; w < WHATS; w++) {
            if (w >= NCCL && !b.nccl) continue;
            double us = time_of(&b, (enum what)w, bytes);
            printf("%11.1f %7.1f", us, (double)bytes / us / 1e3);
        }
        fflush(stdout);
    }
    printf("\n");
    td_team_destroy(b.team);
    for (uint32_t q = 0; q < b.ranks; q++) {
        b.d[q].backend->give(&b.d[q], b.x[q], LARGEST);
        b.d[q].backend->give(&b.d[q], b.y[q], LARGEST);
        b.d[q].backend->leave(&b.d[q]);
        b.d[q].backend->close(&b.d[q]);
    }
    return 0;
}
