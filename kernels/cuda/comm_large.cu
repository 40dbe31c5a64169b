/* Sums of many megabytes between two ranks, a chunk's, by NCCL: two terms have one order, so its bits
 * are ours, and from some 8 MB on it is up to one and a half times as fast as mailboxes. Of more ranks
 * it adds in orders of its own; carrying words for us it was slower than mailboxes at every size
 * (tests/kernels/bench_comm; two H200, NVLink), as were gathers. */
#include "kernels/cuda/comm.h"

enum { THREADS = 256, MOST_BLOCKS = 1024 };

static __global__ void __launch_bounds__(THREADS)
    add_to(const float *add, float *y, size_t n) {
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        y[i] += add[i];
}

void td_cuda_reduce_large(const struct td_device *d, void *comm,
                          const struct td_all_reduce_args *a) {
    struct td_comm *c = td_comm_of(d);
    size_t words = (size_t)a->n * a->dim;
    uint32_t blocks = td_ceil(words, THREADS);
    td_cuda_on(d, TD_LANE_STEP);
    int e = c->nccl->all_reduce(a->x, a->y, words, TD_NCCL_FLOATS, TD_NCCL_SUM, comm,
                                td_cuda_of(d)->stream[TD_LANE_STEP]);
    if (e != TD_NCCL_OK && c->error == TD_NCCL_OK) c->error = e;
    if (a->add)
        TD_LAUNCH(d, "all_reduce", add_to, blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS, THREADS, 0,
                  a->add, a->y, words);
}
