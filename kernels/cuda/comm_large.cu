/* Collectives of many megabytes, a chunk's, by NCCL: it knows the ways between devices, but not our
 * order of summation. So it only carries: every rank gets its slice of the others' words, adds them
 * by the tree, and gets the sums of the others. */
#include "kernels/cuda/comm.h"

enum { THREADS = 256, MOST_BLOCKS = 1024 };

/* Words of slices; in the workspace each has a region of `most` words. */
struct slices {
    size_t first[TD_MAX_RANKS + 1], most;
};

static struct slices slices_of(size_t words, uint32_t ranks) {
    struct slices s;
    for (uint32_t q = 0; q <= ranks; q++)
        s.first[q] = words * q / ranks;
    s.most = words / ranks + 1;
    return s;
}

static __device__ uint32_t merge(uint32_t a, uint32_t b, bool bits) {
    return bits ? a | b : td_f32_bits(td_bits_f32(a) + td_bits_f32(b));
}

/* The own slice: `work` holds the others' words of it by rank; the sum goes to the own region. */
static __global__ void __launch_bounds__(THREADS)
    sum_slice(const uint32_t *x, uint32_t *work, size_t n, size_t most, uint32_t rank,
              uint32_t ranks, bool bits) {
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS) {
        uint32_t v[TD_MAX_RANKS];
#pragma unroll
        for (uint32_t q = 0; q < TD_MAX_RANKS; q++)
            if (q < ranks) v[q] = q == rank ? x[i] : work[q * most + i];
#pragma unroll
        for (uint32_t by = 1; by < TD_MAX_RANKS; by *= 2)
#pragma unroll
            for (uint32_t q = 0; q + by < TD_MAX_RANKS; q += 2 * by)
                if (q + by < ranks) v[q] = merge(v[q], v[q + by], bits);
        work[rank * most + i] = v[0];
    }
}

/* Sums, slice by slice, to where they belong. blockIdx.y: which slice. */
static __global__ void __launch_bounds__(THREADS)
    put_slices(const uint32_t *work, struct slices s, const uint32_t *add, uint32_t *y) {
    size_t first = s.first[blockIdx.y], n = s.first[blockIdx.y + 1] - first;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS) {
        uint32_t v = work[blockIdx.y * s.most + i];
        y[first + i] = add ? merge(v, add[first + i], false) : v;
    }
}

static uint32_t blocks_of(size_t words) {
    uint32_t blocks = td_ceil(words, THREADS);
    return blocks < 1 ? 1 : blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS;
}

/* ---- carrying ---- */

struct parcel {
    const void *from;
    void *to;
    size_t out, in; /* bytes, or words */
};

static void note(struct td_comm *c, int error) {
    if (error != TD_NCCL_OK && c->error == TD_NCCL_OK) c->error = error;
}

/* To every other rank and from it. */
static void exchange(const struct td_device *d, void *comm,
                     const struct parcel parcel[TD_MAX_RANKS], int type) {
    struct td_comm *c = td_comm_of(d);
    const struct td_nccl *n = c->nccl;
    cudaStream_t stream = td_cuda_of(d)->stream[TD_LANE_STEP];
    td_cuda_on(d, TD_LANE_STEP);
    note(c, n->group_start());
    for (uint32_t q = 0; q < c->ranks; q++) {
        const struct parcel *p = &parcel[q];
        if (q == d->rank) continue;
        if (p->out) note(c, n->send(p->from, p->out, type, (int)q, comm, stream));
        if (p->in) note(c, n->recv(p->to, p->in, type, (int)q, comm, stream));
    }
    note(c, n->group_end());
}

void td_cuda_reduce_large(const struct td_device *d, void *comm,
                          const struct td_all_reduce_args *a) {
    struct td_comm *c = td_comm_of(d);
    struct slices s = slices_of((size_t)a->n * a->dim, c->ranks);
    struct parcel parcel[TD_MAX_RANKS];
    uint32_t *work = (uint32_t *)c->work;
    const uint32_t *x = (const uint32_t *)(const void *)a->x + s.first[d->rank];
    const float *add = a->bits ? NULL : a->add;
    size_t n = s.first[d->rank + 1] - s.first[d->rank];
    for (uint32_t q = 0; q < c->ranks; q++)
        parcel[q] = {a->x + s.first[q], work + q * s.most, s.first[q + 1] - s.first[q], n};
    exchange(d, comm, parcel, TD_NCCL_FLOATS);
    TD_LAUNCH(d, "all_reduce", sum_slice, blocks_of(n), THREADS, 0, x, work, n, s.most, d->rank,
              c->ranks, a->bits);
    for (uint32_t q = 0; q < c->ranks; q++)
        parcel[q] = {work + d->rank * s.most, work + q * s.most, n, s.first[q + 1] - s.first[q]};
    exchange(d, comm, parcel, TD_NCCL_FLOATS);
    TD_LAUNCH(d, "all_reduce", put_slices, dim3(blocks_of(s.most), c->ranks), THREADS, 0, work, s,
              (const uint32_t *)(const void *)add, (uint32_t *)(void *)a->y);
}

void td_cuda_gather_large(const struct td_device *d, void *comm,
                          const struct td_all_gather_args *a) {
    struct parcel parcel[TD_MAX_RANKS];
    unsigned char *buffer = (unsigned char *)a->buffer;
    for (uint32_t q = 0; q < td_comm_of(d)->ranks; q++)
        parcel[q] = {buffer + a->at[d->rank], buffer + a->at[q],
                     a->at[d->rank + 1] - a->at[d->rank], a->at[q + 1] - a->at[q]};
    exchange(d, comm, parcel, TD_NCCL_BYTES);
}
