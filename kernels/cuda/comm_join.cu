/* How ranks come together and part: who can reach whose memory, mailboxes that all know of, a first
 * exchange that is compared with what must come, and what is said when somebody does not come. */
#include "kernels/cuda/comm.h"

#include <stdlib.h>
#include <time.h>

extern "C" {
#include "kernels/team.h"
}

#define MS 1000000ull /* ns */
/* Ranks do the same work, so that one waits for another as long as they differ, or as a host thread
 * is late. A team's limit names what the missing rank does and may be shorter or longer; this one
 * ends the wait of a kernel. */
#define LIMIT (30000 * MS)
#define CHECK_LIMIT (5000 * MS) /* of the first exchange, to which all come from a meeting */

/* Where epochs begin: their wrap comes soon, so that it is met in every test. */
#define FIRST_EPOCH 0xffffffe0u

/* From here on NCCL adds what two ranks have: on two H200 (BENCHMARKS.md) 8 MB take 46 us by it and 49
 * by mailboxes, 1 MB 13 and 10. */
#ifdef TD_CUDA_EMULATED
#define LARGE ((size_t)512 << 10)
#else
#define LARGE ((size_t)8 << 20)
#endif

enum { STUCK_S = 2, CHECK_WORDS = TD_MAIL_CHECK / 4, FLAGS = TD_MAIL_BLOCKS * TD_MAX_RANKS };

static td_status fail(struct td_error *err, const char *what, cudaError_t e) {
    return td_fail(err, TD_IO, "%s: CUDA: %s", what, cudaGetErrorString(e));
}

/* ---- who is there ---- */

/* What every rank has in *c, which stays until it leaves. */
static td_status meet(struct td_device *d, const struct td_comm *ret[TD_MAX_RANKS],
                      struct td_error *err) {
    const void *const *all = td_team_meet(d->team, d->rank, d->comm);
    if (!all) return td_fail(err, TD_IO, "ranks: one of them could not join");
    for (uint32_t q = 0; q < d->ranks; q++)
        ret[q] = (const struct td_comm *)all[q];
    return TD_OK;
}

/* Blocks of all ranks on a device run at once when there is a processor for each. The fewest that
 * any rank may have are what all have. */
static void share_processors(struct td_comm *c, const struct td_comm *const all[TD_MAX_RANKS]) {
    c->blocks = TD_MAIL_BLOCKS;
    for (uint32_t q = 0; q < c->ranks; q++) {
        uint32_t here = 0;
        for (uint32_t p = 0; p < c->ranks; p++)
            here += all[p]->device[p] == all[q]->device[q];
        uint32_t most = (uint32_t)all[q]->processors / here;
        if (most < c->blocks) c->blocks = most ? most : 1;
        c->device[q] = all[q]->device[q];
    }
}

/* Does every rank reach every other rank's memory? All get the same answer. */
static td_status find_ways(struct td_comm *c, bool *ret, struct td_error *err) {
    *ret = true;
    for (uint32_t p = 0; p < c->ranks; p++)
        for (uint32_t q = 0; q < c->ranks; q++) {
            int can = 1;
            cudaError_t e = cudaSuccess;
            if (c->device[p] != c->device[q])
                e = cudaDeviceCanAccessPeer(&can, c->device[p], c->device[q]);
            if (e != cudaSuccess) return fail(err, "ranks", e);
            if (!can) *ret = false;
        }
    return TD_OK;
}

static td_status open_ways(struct td_device *d, struct td_comm *c, struct td_error *err) {
    for (uint32_t q = 0; q < c->ranks; q++) {
        if (c->device[q] == c->device[d->rank]) continue;
        cudaError_t e = cudaDeviceEnablePeerAccess(c->device[q], 0);
        if (e == cudaErrorPeerAccessAlreadyEnabled)
            cudaGetLastError();
        else if (e != cudaSuccess)
            return td_fail(err, TD_IO, "ranks: cuda:%d cannot reach cuda:%d: CUDA: %s",
                           c->device[d->rank], c->device[q], cudaGetErrorString(e));
    }
    return TD_OK;
}

/* ---- mailboxes ---- */

static td_status take_box(struct td_device *d, struct td_comm *c, struct td_error *err) {
    size_t bytes = td_mailbox_bytes(c->ranks);
    uint32_t epoch[FLAGS];
    void *box;
    if (!c->box_on_host) {
        TD_TRY(d->backend->take(d, bytes, "mailbox", &box, err));
    } else {
        cudaError_t e = cudaHostAlloc(&box, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
        if (e != cudaSuccess) return fail(err, "mailbox", e);
        memset(box, 0, bytes);
    }
    c->box = (unsigned char *)box;
    for (int i = 0; i < FLAGS; i++)
        epoch[i] = FIRST_EPOCH;
    if (c->box_on_host)
        memcpy(box, epoch, sizeof epoch);
    else
        td_upload(d, box, epoch, sizeof epoch);
    td_upload(d, c->mail.count, epoch, TD_MAIL_BLOCKS * sizeof *epoch);
    /* Peers will write there. */
    return d->backend->wait(d, TD_LANE_STEP, err);
}

static td_status take_own(struct td_device *d, struct td_comm *c, struct td_error *err) {
    void *own, *host;
    TD_TRY(d->backend->take(d, TD_MAIL_OWN, "mailbox", &own, err));
    c->own = (unsigned char *)own;
    c->mail.count = (uint32_t *)own;
    cudaError_t e =
        cudaHostAlloc(&host, sizeof *c->mail.host, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e != cudaSuccess) return fail(err, "mailbox", e);
    memset(host, 0, sizeof *c->mail.host);
    c->mail.host = (struct td_mail_host *)host;
    return TD_OK;
}

/* ---- the first exchange ---- */

static uint32_t check_word(uint32_t rank, uint32_t i) {
    return i << TD_MAX_RANKS | 1u << rank;
}

static td_status check_found(const struct td_device *d, const struct td_comm *c,
                             const uint32_t *word, const char *why, struct td_error *err) {
    for (uint32_t i = 0; i < CHECK_WORDS; i++)
        for (uint32_t q = 0; q < c->ranks; q++)
            if ((check_word(q, i) & ~word[i]) != 0)
                return td_fail(err, TD_IO,
                               "ranks: cuda:%d found something else than cuda:%d wrote%s",
                               c->device[d->rank], c->device[q], why);
    return TD_OK;
}

/* Memory that a driver says can be reached and that cannot (an IOMMU between the devices) shows
 * here, not in the first answer. */
static td_status check(struct td_device *d, struct td_comm *c, struct td_error *err) {
    static const char broken[] = ": memory of other GPUs cannot be written to here (is there an "
                                 "IOMMU or ACS between them?)";
    uint32_t word[CHECK_WORDS];
    float term[CHECK_WORDS];
    float *x = (float *)(void *)(c->own + TD_MAIL_OWN - 2 * TD_MAIL_CHECK), *y = x + CHECK_WORDS;
    struct td_all_reduce_args a = {x, NULL, y, 1, CHECK_WORDS, true};
    struct td_error why;
    for (uint32_t i = 0; i < CHECK_WORDS; i++)
        word[i] = check_word(d->rank, i);
    td_upload(d, x, word, sizeof word);
    c->mail.limit = CHECK_LIMIT;
    TD_FAST(all_reduce)(d, &a);
    c->mail.limit = LIMIT;
    td_download(d, word, y, sizeof word);
    if (d->backend->wait(d, TD_LANE_STEP, &why) != TD_OK)
        return td_fail(err, why.status, "ranks: the first exchange: %.200s%s", why.text, broken);
    TD_TRY(check_found(d, c, word, broken, err));
    if (!c->carrier) return TD_OK;
    for (uint32_t i = 0; i < CHECK_WORDS; i++)
        term[i] = (float)(2 * i + d->rank);
    td_upload(d, x, term, sizeof term);
    td_cuda_reduce_large(d, c->carrier, &a); /* and its connections are made now */
    td_download(d, term, y, sizeof term);
    TD_TRY(d->backend->wait(d, TD_LANE_STEP, err));
    for (uint32_t i = 0; i < CHECK_WORDS; i++)
        if (term[i] != (float)(4 * i + 1))
            return td_fail(err, TD_IO, "ranks: NCCL's sum over cuda:%d and cuda:%d is wrong",
                           c->device[0], c->device[1]);
    return TD_OK;
}

/* ---- NCCL ---- */

static bool alone_on_devices(const struct td_comm *c) {
    for (uint32_t q = 0; q < c->ranks; q++)
        for (uint32_t p = 0; p < q; p++)
            if (c->device[p] == c->device[q]) return false;
    return true;
}

static td_status nccl_failed(struct td_error *err, const struct td_comm *c, int e) {
    return td_fail(err, TD_IO, "ranks: NCCL: %s", c->nccl->error_text(e));
}

static td_status take_carrier(struct td_device *d, struct td_comm *c, struct td_nccl_id id,
                              struct td_error *err) {
    void *carrier;
    td_cuda_on(d, TD_LANE_STEP);
    int e = c->nccl->init_rank(&carrier, (int)c->ranks, id, (int)d->rank);
    if (e != TD_NCCL_OK) return nccl_failed(err, c, e);
    c->carrier = carrier;
    return TD_OK;
}

/* ---- joining, leaving ---- */

extern "C" td_status TD_FAST(join)(struct td_device *d, size_t words, struct td_error *err) {
    const struct td_comm *all[TD_MAX_RANKS];
    struct td_comm *c = (struct td_comm *)calloc(1, sizeof *c);
    bool peers;
    if (!c) return td_fail(err, TD_NO_MEMORY, "no memory for a rank");
    pthread_mutex_init(&c->queueing, NULL);
    d->comm = c;
    c->ranks = d->ranks;
    c->device[d->rank] = td_cuda_of(d)->index;
    c->processors = td_cuda_of(d)->processors;
    TD_TRY(take_own(d, c, err));
    TD_TRY(meet(d, all, err));
    share_processors(c, all);
    TD_TRY(find_ways(c, &peers, err));
    c->box_on_host = !peers;
    if (peers) TD_TRY(open_ways(d, c, err));
    TD_TRY(take_box(d, c, err));
    c->large = LARGE;
    if (c->ranks == 2 && alone_on_devices(c) && words * 4 >= LARGE) c->nccl = td_nccl_find();
    if (c->nccl && d->rank == 0) {
        int e = c->nccl->get_id(&c->id);
        if (e != TD_NCCL_OK) return nccl_failed(err, c, e);
    }
    TD_TRY(meet(d, all, err));
    c->mail.rank = d->rank;
    for (uint32_t q = 0; q < c->ranks; q++)
        c->mail.box[q] = all[q]->box;
    if (c->nccl) TD_TRY(take_carrier(d, c, all[0]->id, err));
    return check(d, c, err);
}

extern "C" void TD_FAST(leave)(struct td_device *d) {
    struct td_comm *c = td_comm_of(d);
    if (!c) return;
    cudaSetDevice(td_cuda_of(d)->index);
    if (c->carrier) (void)c->nccl->destroy(c->carrier);
    if (c->box_on_host)
        cudaFreeHost(c->box);
    else
        d->backend->give(d, c->box, td_mailbox_bytes(c->ranks));
    d->backend->give(d, c->own, TD_MAIL_OWN);
    if (c->mail.host) cudaFreeHost(c->mail.host);
    pthread_mutex_destroy(&c->queueing);
    free(c);
    d->comm = NULL;
}

/* ---- faults ---- */

extern "C" void TD_FAST(break_off)(struct td_device *d) {
    struct td_comm *c = td_comm_of(d);
    if (!c || !c->mail.host) return;
    __atomic_store_n(&c->mail.host->broken, 1, __ATOMIC_RELAXED);
    if (!c->nccl) return;
    /* NCCL's kernels look at no flag of ours. Where the rank's thread is stuck inside a call,
     * because the queue of its device is full, NCCL goes down under it: the worker ends anyhow. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += STUCK_S;
    bool locked = pthread_mutex_timedlock(&c->queueing, &until) == 0;
    void *carrier = __atomic_exchange_n(&c->carrier, NULL, __ATOMIC_ACQ_REL);
    if (locked) pthread_mutex_unlock(&c->queueing);
    if (carrier) (void)c->nccl->abort(carrier);
}

static td_status carrier_failed(const struct td_comm *c, struct td_error *err) {
    void *carrier = __atomic_load_n(&c->carrier, __ATOMIC_ACQUIRE);
    int e = c->error;
    if (e == TD_NCCL_OK && carrier && c->nccl->async_error(carrier, &e) == TD_NCCL_OK &&
        e == TD_NCCL_IN_PROGRESS)
        e = TD_NCCL_OK;
    if (e != TD_NCCL_OK) return td_fail(err, TD_IO, "NCCL: %s", c->nccl->error_text(e));
    if (c->nccl && !carrier && c->mail.host->broken) return td_fail(err, TD_IO, "NCCL: given up");
    return TD_OK;
}

td_status td_cuda_missing(const struct td_device *d, struct td_error *err) {
    const struct td_comm *c = td_comm_of(d);
    if (!c || !c->mail.host) return TD_OK;
    const volatile struct td_mail_host *h = c->mail.host;
    if (h->missing == 0) return carrier_failed(c, err);
    uint32_t q = h->missing - 1;
    return td_fail(err, TD_IO,
                   h->left ? "given up while waiting for rank %u (cuda:%d)"
                           : "rank %u (cuda:%d) did not come",
                   q, c->device[q]);
}
