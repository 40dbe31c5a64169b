/* How fast slabs go to another process, beside what the machine and UCX alone can do, in one run:
 *   memcpy      private to private memory
 *   map         memcpy straight into the receiver's mapped region, no library in between (shm)
 *   ucp put     bare ucp_put_nbx of a slab and a flush (shm)
 *   td_xfer     put + flush, callbacks and all
 *   slab cycle  put + flush + message, and the receiver's answer before the next slab
 *   2 in flight the same with the answer to slab n awaited after slab n+1 was put, as the workers
 * do Sources and targets alternate between two slabs, as the send and landing slabs do. All take
 * turns in blocks of a few slabs, and medians of the blocks are told, so that what else the machine
 * does hits all of them. On the tcp lane the peer to compare with is ucx_perftest: bench_tcp.py.
 * Usage: bench_xfer [shm|tcp] [slab MiB] [blocks] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"
#include "tests/common/xfer/ends.h"

#define NEED(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: " #cond "\n", __FILE__, __LINE__);                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static struct end a;
static struct end *ends[] = {&a};
static struct receiver r;
static struct td_xfer_remote *remote;
static size_t slab;
static char *source, *target;

enum { ROUNDS = 6, BLOCKS_MAX = 200 }; /* slabs of a block */
static unsigned rounds = ROUNDS, blocks;

static bool answered(void *user) {
    return a.messages >= *(unsigned *)user;
}

static void order(uint64_t op) {
    struct order o = {.op = op};
    NEED(td_xfer_send(a.peer, &o, sizeof o, UINT64_MAX) == TD_OK);
}

static uint64_t bench_copy(char *to) {
    uint64_t t = td_now_ns();
    for (unsigned i = 0; i < rounds; i++) {
        memcpy(to + (i & 1) * slab, source + (i & 1) * slab, slab);
        __asm__ volatile("" ::: "memory");
    }
    return td_now_ns() - t;
}

static uint64_t bench_ucp(void) {
    static const ucp_request_param_t none;
    uint64_t t = td_now_ns();
    for (unsigned i = 0; i < rounds; i++) {
        void *put = ucp_put_nbx(a.peer->ep, source + (i & 1) * slab, slab,
                                remote->base + (i & 1) * slab, remote->rkey, &none);
        void *flush = ucp_ep_flush_nbx(a.peer->ep, &none);
        NEED(!UCS_PTR_IS_ERR(put) && !UCS_PTR_IS_ERR(flush));
        while (UCS_PTR_IS_PTR(flush) && ucp_request_check_status(flush) == UCS_INPROGRESS)
            ucp_worker_progress(a.x->queue.worker);
        if (UCS_PTR_IS_PTR(flush)) ucp_request_free(flush);
        if (UCS_PTR_IS_PTR(put)) ucp_request_free(put);
    }
    return td_now_ns() - t;
}

static void put_and_flush(unsigned i) {
    static struct want put, flush;
    want_init(&put, UINT64_MAX);
    want_init(&flush, UINT64_MAX);
    NEED(td_xfer_put(a.peer, remote, (i & 1) * slab, source + (i & 1) * slab, slab, &put.req) ==
         TD_OK);
    NEED(td_xfer_flush(a.peer, &flush.req) == TD_OK);
    NEED(ends_run(ends, 1, want_is_quiet, &flush, 10000));
    NEED(put.status == TD_OK && flush.status == TD_OK);
}

static uint64_t bench_put(void) {
    uint64_t t = td_now_ns();
    for (unsigned i = 0; i < rounds; i++)
        put_and_flush(i);
    return td_now_ns() - t;
}

static uint64_t bench_cycle(unsigned ahead) {
    uint64_t t = td_now_ns();
    unsigned first = a.messages;
    for (unsigned i = 0; i < rounds; i++) {
        unsigned want = first + (i < ahead ? 0 : i - ahead);
        NEED(ends_run(ends, 1, answered, &want, 10000));
        put_and_flush(i);
        order(OP_HELLO);
    }
    unsigned want = first + rounds;
    NEED(ends_run(ends, 1, answered, &want, 10000));
    return td_now_ns() - t;
}

static void bench_round_trip(void) {
    enum { TRIPS = 2000 };
    uint64_t t = td_now_ns();
    for (unsigned i = 0; i < TRIPS; i++) {
        unsigned want = a.messages + 1;
        order(OP_HELLO);
        NEED(ends_run(ends, 1, answered, &want, 10000));
    }
    printf("%-12s %8.1f us (40-byte message and answer, both sides sleeping in poll)\n",
           "round trip", (double)(td_now_ns() - t) / 1e3 / TRIPS);
}

/* ---- taking turns ---- */

static void *mapped;

static uint64_t run_memcpy(void) {
    return bench_copy(target);
}
static uint64_t run_map(void) {
    return bench_copy(mapped);
}
static uint64_t run_cycle(void) {
    return bench_cycle(0);
}
static uint64_t run_two(void) {
    return bench_cycle(1);
}

static struct mode {
    const char *name;
    uint64_t (*run)(void);
    bool shm_only;
    uint64_t ns[BLOCKS_MAX];
} modes[] = {
    {"memcpy", run_memcpy, false, {0}},    {"map", run_map, true, {0}},
    {"ucp put", bench_ucp, true, {0}},     {"td_xfer", bench_put, false, {0}},
    {"slab cycle", run_cycle, false, {0}}, {"2 in flight", run_two, false, {0}},
};
enum { MODES = sizeof modes / sizeof modes[0], UCP_PUT = 2 };

static int by_size(const void *x, const void *y) {
    uint64_t p = *(const uint64_t *)x, q = *(const uint64_t *)y;
    return p < q ? -1 : p > q;
}

static void take_turns(void) {
    for (unsigned i = 0; i < blocks; i++)
        for (int m = 0; m < MODES; m++)
            if (!modes[m].shm_only || !ends_tcp()) modes[m].ns[i] = modes[m].run();
    for (int m = 0; m < MODES; m++)
        qsort(modes[m].ns, blocks, sizeof modes[m].ns[0], by_size);
    double put = (double)modes[UCP_PUT].ns[blocks / 2];
    for (int m = 0; m < MODES; m++) {
        double ns = (double)modes[m].ns[blocks / 2];
        if (modes[m].shm_only && ends_tcp()) continue;
        printf("%-12s %8.2f GB/s  %8.1f us a slab", modes[m].name, (double)slab * ROUNDS / ns,
               ns / 1e3 / ROUNDS);
        if (!ends_tcp()) printf("  %5.1f %% of ucp put", 100 * put / ns);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    struct td_error err;
    int used = ends_lane(argc, argv);
    argc -= used;
    argv += used;
    if (argc > 1 && strcmp(argv[1], "receiver") == 0) return receiver_main();
    slab = (size_t)(argc > 1 ? strtoul(argv[1], NULL, 10) : 8) << 20;
    blocks = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 25;
    NEED(slab > 0 && 2 * slab <= RECEIVER_REGION && blocks > 0 && blocks <= BLOCKS_MAX);
    end_open(&a, 0, 0);
    receiver_start(&r);
    end_connect(&a, r.address, r.address_len);
    NEED(td_xfer_remote_open(a.peer, r.key, r.key_len, &remote, &err) == TD_OK);
    source = malloc(2 * slab);
    target = malloc(2 * slab);
    NEED(source && target);
    pattern_fill(source, 2 * slab, 1);
    memset(target, 1, 2 * slab);
    unsigned first = 1;
    order(OP_HELLO);
    NEED(ends_run(ends, 1, answered, &first, 10000));
    char lanes[TD_XFER_LANES_MAX];
    td_xfer_lanes(a.peer, lanes);
    printf("slab %zu MiB, medians of %u blocks of %d slabs, lanes %s\n", slab >> 20, blocks, ROUNDS,
           lanes);
    if (!ends_tcp()) NEED(ucp_rkey_ptr(remote->rkey, remote->base, &mapped) == UCS_OK);
    /* Touch both slabs once, so that page faults are nobody's. */
    put_and_flush(0);
    put_and_flush(1);
    take_turns();
    bench_round_trip();
    end_close(&a);
    receiver_stop(&r);
    free(source);
    free(target);
    return 0;
}
