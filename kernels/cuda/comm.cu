/* What ranks tell each other inside a step, without the host: every rank writes its part into the
 * other ranks' mailboxes, raises a flag there, waits for the flags in its own and reads its own
 * memory. One kernel, no library, nothing that depends on when a step was queued: so it may be
 * recorded.
 *
 * Block b of a rank talks to blocks b of the others alone, and counts its exchanges (epochs) in
 * device memory. A room per sender is there twice, for even and odd epochs, which is enough:
 * a block writes into a peer's room in epoch e after it has seen the peer's flag of e - 1, which
 * the peer raised after all its threads had read what lay there since e - 2 (the barrier in front
 * of the flag, or the end of the kernel before). It may run ahead by one epoch, not by two, since
 * for e + 1 it needs the peer's flag of e; so a flag is e or e + 1 when it is looked at, and
 * comparing differences carries over the end of 32 bits.
 *
 * All ranks' blocks must run at once. A device of its own always has room for 32; ranks that share
 * one share its processors (join). */
#include "kernels/cuda/comm.h"

enum {
    THREADS = 512,
    PATIENCE = 256, /* looks at a flag between looks at the clock and the host */
    /* Two exchanges of parts instead of one of everything: what is saved takes a PCIe 5 link longer
     * than a second exchange, about 3 us. */
    WORTH_TWO = 128 << 10,
};
static_assert(TD_MAIL_BLOCKS * TD_MAX_RANKS * 4 <= TD_MAIL_FLAGS, "a word per flag");
static_assert((TD_MAIL_BLOCKS + 1) * 4 <= TD_MAIL_OWN - 2 * TD_MAIL_CHECK, "a word per count");

/* ---- memory that others write, and time ---- */

#ifdef TD_CUDA_EMULATED
static inline uint32_t load_flag(const uint32_t *p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static inline void store_flag(uint32_t *p, uint32_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
template <class T> static inline T load(const T *p) {
    return *p;
}
static inline uint64_t nanoseconds(void) {
    return td_emulate_ns();
}
static inline void turn_away(void) {
    td_emulate_yield();
}
#else
static __device__ uint32_t load_flag(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ void store_flag(uint32_t *p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
/* Past the first cache, which knows nothing of peers. */
static __device__ uint32_t load(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ uint4 load(const uint4 *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
static __device__ uint64_t nanoseconds(void) {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}
static __device__ void turn_away(void) {
}
#endif

/* ---- an exchange ---- */

/* Of block blockIdx.x. */
static __device__ uint32_t *flag_of(const struct td_mail *m, uint32_t at, uint32_t from) {
    return (uint32_t *)(void *)m->box[at] + blockIdx.x * TD_MAX_RANKS + from;
}

template <class T, int R>
static __device__ T *room_of(const struct td_mail *m, uint32_t at, uint32_t from, uint32_t epoch) {
    size_t i = ((size_t)blockIdx.x * 2 + epoch % 2) * R + from;
    return (T *)(void *)(m->box[at] + TD_MAIL_FLAGS + i * TD_MAIL_ROOM);
}

/* False: somebody did not come, now or earlier. */
static __device__ bool await(const struct td_mail *m, uint32_t from, uint32_t epoch) {
    const uint32_t *flag = flag_of(m, m->rank, from);
    uint64_t begun = 0;
    for (uint32_t looks = 1; (int32_t)(load_flag(flag) - epoch) < 0; looks++) {
        turn_away();
        if (looks % PATIENCE) continue;
        uint64_t now = nanoseconds();
        if (!begun) begun = now;
        uint32_t broken = load(&m->host->broken);
        if (!broken && now - begun < m->limit) continue;
        if (!load(&m->count[TD_MAIL_BLOCKS])) {
            m->host->left = broken;
            m->host->missing = from + 1;
            store_flag(&m->count[TD_MAIL_BLOCKS], 1);
        }
        return false;
    }
    return true;
}

/* Where a block is; false: there is nothing to be done any more. A rank that somebody did not come
 * to says nothing more: it could run into rooms that are being read. */
static __device__ bool begin(const struct td_mail *m, uint32_t *ret_epoch) {
    __shared__ uint32_t start[2];
    if (threadIdx.x == 0) {
        start[0] = m->count[blockIdx.x];
        start[1] = load(&m->count[TD_MAIL_BLOCKS]);
    }
    __syncthreads();
    *ret_epoch = start[0];
    return start[1] == 0;
}

/* What the block has written to the others is theirs, and what they have written is here. */
template <int R> static __device__ bool meet(const struct td_mail *m, uint32_t epoch) {
    __shared__ uint32_t lost;
    uint32_t q = threadIdx.x;
    if (q == R) lost = 0;
    __syncthreads();
    if (q < R && q != m->rank) {
        __threadfence_system();
        store_flag(flag_of(m, q, m->rank), epoch);
        if (!await(m, q, epoch)) lost = 1;
    }
    __syncthreads();
    return lost == 0;
}

static __device__ void end(const struct td_mail *m, uint32_t epoch) {
    if (threadIdx.x == 0) m->count[blockIdx.x] = epoch;
}

/* ---- arithmetic ---- */

static __device__ uint32_t merge(uint32_t a, uint32_t b, bool bits) {
    return bits ? a | b : td_f32_bits(td_bits_f32(a) + td_bits_f32(b));
}

static __device__ uint4 merge(uint4 a, uint4 b, bool bits) {
    uint4 v = {merge(a.x, b.x, bits), merge(a.y, b.y, bits), merge(a.z, b.z, bits),
               merge(a.w, b.w, bits)};
    return v;
}

/* The binary tree: of 2, 4 and 8 the lower half and the upper half, all the way down. */
template <class T, int R> static __device__ T merge_all(T v[R], bool bits) {
#pragma unroll
    for (int by = 1; by < R; by *= 2)
#pragma unroll
        for (int i = 0; i < R; i += 2 * by)
            v[i] = merge(v[i], v[i + by], bits);
    return v[0];
}

/* ---- sums ---- */

template <class T> struct reduction {
    const T *x, *add;
    T *y;
    size_t n;
    bool bits;
};

template <class T> static __device__ void put_sum(const struct reduction<T> *a, size_t i, T sum) {
    a->y[i] = a->add ? merge(sum, a->add[i], false) : sum;
}

/* Everything to everyone. */
template <class T, int R>
static __global__ void __launch_bounds__(THREADS)
    reduce_at_once(const __grid_constant__ struct td_mail m,
                   const __grid_constant__ struct reduction<T> a) {
    const size_t most = TD_MAIL_ROOM / sizeof(T), stop = a.n * (blockIdx.x + 1) / gridDim.x;
    uint32_t epoch;
    if (!begin(&m, &epoch)) return;
    for (size_t at = a.n * blockIdx.x / gridDim.x; at < stop; at += most) {
        size_t n = stop - at < most ? stop - at : most;
        epoch++;
        for (size_t i = threadIdx.x; i < n; i += THREADS) {
            T v = a.x[at + i];
#pragma unroll
            for (uint32_t q = 0; q < R; q++)
                if (q != m.rank) room_of<T, R>(&m, q, m.rank, epoch)[i] = v;
        }
        if (!meet<R>(&m, epoch)) return;
        for (size_t i = threadIdx.x; i < n; i += THREADS) {
            T v[R];
#pragma unroll
            for (uint32_t q = 0; q < R; q++)
                v[q] = q == m.rank ? a.x[at + i] : load(room_of<T, R>(&m, m.rank, q, epoch) + i);
            put_sum(&a, at + i, merge_all<T, R>(v, a.bits));
        }
    }
    end(&m, epoch);
}

/* To each the part that it sums, then the sums to everyone. */
template <class T, int R>
static __global__ void __launch_bounds__(THREADS)
    reduce_in_parts(const __grid_constant__ struct td_mail m,
                    const __grid_constant__ struct reduction<T> a) {
    const size_t most = TD_MAIL_ROOM / sizeof(T) * R;
    const size_t stop = a.n * (blockIdx.x + 1) / gridDim.x;
    uint32_t epoch;
    if (!begin(&m, &epoch)) return;
    for (size_t at = a.n * blockIdx.x / gridDim.x; at < stop; at += most) {
        size_t n = stop - at < most ? stop - at : most;
        size_t first = at + n * m.rank / R, count = at + n * (m.rank + 1) / R - first;
        epoch++;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            const T *x = a.x + at + n * q / R;
            T *room = room_of<T, R>(&m, q, m.rank, epoch);
            for (size_t i = threadIdx.x; q != m.rank && i < n * (q + 1) / R - n * q / R;
                 i += THREADS)
                room[i] = x[i];
        }
        if (!meet<R>(&m, epoch)) return;
        for (size_t i = threadIdx.x; i < count; i += THREADS) {
            T v[R], sum;
#pragma unroll
            for (uint32_t q = 0; q < R; q++)
                v[q] = q == m.rank ? a.x[first + i] : load(room_of<T, R>(&m, m.rank, q, epoch) + i);
            sum = merge_all<T, R>(v, a.bits);
#pragma unroll
            for (uint32_t q = 0; q < R; q++)
                if (q != m.rank) room_of<T, R>(&m, q, m.rank, epoch + 1)[i] = sum;
            put_sum(&a, first + i, sum);
        }
        epoch++;
        if (!meet<R>(&m, epoch)) return;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            size_t from = at + n * q / R;
            const T *room = room_of<T, R>(&m, m.rank, q, epoch);
            for (size_t i = threadIdx.x; q != m.rank && i < at + n * (q + 1) / R - from;
                 i += THREADS)
                put_sum(&a, from + i, load(room + i));
        }
    }
    end(&m, epoch);
}

template <class T, int R>
static void reduce(const struct td_device *d, const struct td_all_reduce_args *a) {
    const struct td_comm *c = td_comm_of(d);
    const float *add = a->bits ? NULL : a->add;
    struct reduction<T> r = {
        (const T *)(const void *)a->x, (const T *)(const void *)add, (T *)(void *)a->y,
            (size_t)a->n * a->dim * 4 / sizeof(T), a->bits
    };
    uint32_t blocks = td_ceil(r.n, THREADS);
    if (r.n == 0) return;
    if (blocks > c->blocks) blocks = c->blocks;
    if (r.n * sizeof(T) / R * (R - 1) * (R - 2) <= WORTH_TWO)
        TD_LAUNCH(d, "all_reduce", (reduce_at_once<T, R>), blocks, THREADS, 0, c->mail, r);
    else if constexpr (R > 2)
        TD_LAUNCH(d, "all_reduce", (reduce_in_parts<T, R>), blocks, THREADS, 0, c->mail, r);
}

/* ---- gathering ---- */

template <class T> struct gathering {
    T *buffer;
    const T *own; /* the rank's part */
    size_t at[TD_MAX_RANKS + 1];
};

/* This block's share of what rank q has. */
template <class T>
static __device__ size_t share_of(const struct gathering<T> *a, uint32_t q, size_t *ret_first) {
    size_t n = a->at[q + 1] - a->at[q];
    *ret_first = a->at[q] + n * blockIdx.x / gridDim.x;
    return a->at[q] + n * (blockIdx.x + 1) / gridDim.x - *ret_first;
}

template <class T, int R>
static __global__ void __launch_bounds__(THREADS)
    gather_parts(const __grid_constant__ struct td_mail m,
                 const __grid_constant__ struct gathering<T> a) {
    const size_t most = TD_MAIL_ROOM / sizeof(T);
    size_t first[R], n[R], longest = 0;
    uint32_t epoch;
    if (!begin(&m, &epoch)) return;
#pragma unroll
    for (uint32_t q = 0; q < R; q++) {
        n[q] = share_of(&a, q, &first[q]);
        longest = n[q] > longest ? n[q] : longest;
    }
    for (size_t at = 0; at < longest; at += most) {
        epoch++;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            if (q != m.rank) continue;
            for (size_t i = at + threadIdx.x; i < n[q] && i < at + most; i += THREADS) {
                T v = a.own[first[q] - a.at[q] + i];
#pragma unroll
                for (uint32_t to = 0; to < R; to++)
                    if (to != q) room_of<T, R>(&m, to, q, epoch)[i - at] = v;
                if (a.own != a.buffer + a.at[q]) a.buffer[first[q] + i] = v;
            }
        }
        if (!meet<R>(&m, epoch)) return;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            const T *room = room_of<T, R>(&m, m.rank, q, epoch);
            for (size_t i = at + threadIdx.x; q != m.rank && i < n[q] && i < at + most;
                 i += THREADS)
                a.buffer[first[q] + i] = load(room + i - at);
        }
    }
    end(&m, epoch);
}

template <class T, int R>
static void gather(const struct td_device *d, const struct td_all_gather_args *a) {
    const struct td_comm *c = td_comm_of(d);
    const unsigned char *own = (const unsigned char *)a->own;
    if (!own) own = (const unsigned char *)a->buffer + a->at[d->rank];
    struct gathering<T> g = {
        (T *)a->buffer, (const T *)(const void *)own, {
            0
        }
    };
    size_t longest = 0;
    for (int q = 0; q <= R; q++)
        g.at[q] = a->at[q] / sizeof(T);
    for (int q = 0; q < R; q++)
        longest = g.at[q + 1] - g.at[q] > longest ? g.at[q + 1] - g.at[q] : longest;
    uint32_t blocks = td_ceil(longest, THREADS);
    if (longest == 0) return;
    if (blocks > c->blocks) blocks = c->blocks;
    TD_LAUNCH(d, "all_gather", (gather_parts<T, R>), blocks, THREADS, 0, c->mail, g);
}

/* ---- to each its own ---- */

struct parts {
    const uint4 *x;
    uint4 *y;
    size_t n; /* of a part */
};

template <int R>
static __global__ void __launch_bounds__(THREADS)
    exchange_parts(const __grid_constant__ struct td_mail m,
                   const __grid_constant__ struct parts a) {
    const size_t most = TD_MAIL_ROOM / sizeof(uint4), stop = a.n * (blockIdx.x + 1) / gridDim.x;
    uint32_t epoch;
    if (!begin(&m, &epoch)) return;
    for (size_t at = a.n * blockIdx.x / gridDim.x; at < stop; at += most) {
        size_t n = stop - at < most ? stop - at : most;
        epoch++;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            const uint4 *x = a.x + a.n * q + at;
            uint4 *to = q == m.rank ? a.y + a.n * q + at : room_of<uint4, R>(&m, q, m.rank, epoch);
            for (size_t i = threadIdx.x; i < n; i += THREADS)
                to[i] = x[i];
        }
        if (!meet<R>(&m, epoch)) return;
#pragma unroll
        for (uint32_t q = 0; q < R; q++) {
            const uint4 *room = room_of<uint4, R>(&m, m.rank, q, epoch);
            for (size_t i = threadIdx.x; q != m.rank && i < n; i += THREADS)
                a.y[a.n * q + at + i] = load(room + i);
        }
    }
    end(&m, epoch);
}

template <int R>
static void exchange(const struct td_device *d, const struct td_all_to_all_args *a) {
    const struct td_comm *c = td_comm_of(d);
    struct parts p = {(const uint4 *)a->x, (uint4 *)a->y, a->bytes / sizeof(uint4)};
    uint32_t blocks = td_ceil(p.n, THREADS);
    if (p.n == 0) return;
    if (blocks > c->blocks) blocks = c->blocks;
    TD_LAUNCH(d, "all_to_all", exchange_parts<R>, blocks, THREADS, 0, c->mail, p);
}

/* ---- entries ---- */

/* Is it NCCL's, and was it given to it? All ranks say the same until one breaks off. */
static bool carried(const struct td_device *d, const struct td_all_reduce_args *a) {
    struct td_comm *c = td_comm_of(d);
    if (!c->nccl || a->bits || a->y == a->add || (size_t)a->n * a->dim * 4 < c->large) return false;
    pthread_mutex_lock(&c->queueing);
    void *carrier = c->carrier;
    if (carrier) td_cuda_reduce_large(d, carrier, a);
    pthread_mutex_unlock(&c->queueing);
    return carrier != NULL;
}

/* Vectors or words: by the sizes alone, on which all ranks agree. */
#define OF_RANKS(ranks, whole, what, d, a)                                                         \
    switch (ranks) {                                                                               \
    case 2:                                                                                        \
        whole ? what<uint4, 2>(d, a) : what<uint32_t, 2>(d, a);                                    \
        break;                                                                                     \
    case 4:                                                                                        \
        whole ? what<uint4, 4>(d, a) : what<uint32_t, 4>(d, a);                                    \
        break;                                                                                     \
    case 8:                                                                                        \
        whole ? what<uint4, 8>(d, a) : what<uint32_t, 8>(d, a);                                    \
        break;                                                                                     \
    }

extern "C" void TD_FAST(all_reduce)(const struct td_device *d, const struct td_all_reduce_args *a) {
    size_t words = (size_t)a->n * a->dim;
    bool whole = words % 4 == 0;
    if (carried(d, a)) return;
    OF_RANKS(td_comm_of(d)->ranks, whole, reduce, d, a)
}

extern "C" void TD_FAST(all_gather)(const struct td_device *d, const struct td_all_gather_args *a) {
    uint32_t ranks = td_comm_of(d)->ranks;
    size_t odd = 0;
    for (uint32_t q = 0; q <= ranks; q++)
        odd |= a->at[q] % 16;
    OF_RANKS(ranks, odd == 0, gather, d, a)
}

extern "C" void TD_FAST(all_to_all)(const struct td_device *d, const struct td_all_to_all_args *a) {
    switch (td_comm_of(d)->ranks) {
    case 2:
        exchange<2>(d, a);
        break;
    case 4:
        exchange<4>(d, a);
        break;
    case 8:
        exchange<8>(d, a);
        break;
    }
}
