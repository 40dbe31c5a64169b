/* See worker_plan.h. */
#include "kernels/worker_plan.h"

#include <stdio.h>

#include "kernels/decode_graphs.h"
#include "kernels/device.h"
#include "kernels/sampler.h"
#include "kernels/scratch.h"
#include "kernels/selections.h"

enum { MEMORY_PAGE = 4096, MB = 1 << 20 };

/* What a CUDA process holds beside what we take. Measured with CUDA 13.0 on an H200
 * (tests/kernels/bench_slice): 531 MiB for context and kernels, 65 for the sparse core's workspace
 * (kernels/cuda/groups.cu), and up to 3 more because memory comes in pieces of 2 MiB; 1.7 KB of a
 * graph per kernel, of which a layer has 51 to 62. What NCCL takes itself is assumed. */
enum {
    CONTEXT_MB = 650,     /* context, loaded kernels, workspace */
    GRAPH_KERNEL = 2048,  /* bytes of a kernel in a graph */
    LAYER_KERNELS = 64,   /* of a layer, in a decode step */
    COLLECTIVES_MB = 512, /* NCCL's channels, where two ranks share the weights */
};

#ifdef TD_HAVE_CUDA
const struct td_backend *td_worker_plan_cuda(void) {
    return &td_backend_cuda;
}
#else
static size_t index_workspace(uint32_t heads, uint32_t topk, uint32_t rows) {
    (void)heads;
    (void)topk;
    (void)rows;
    return td_index_workspace_cuda();
}

const struct td_backend *td_worker_plan_cuda(void) {
    static const struct td_backend sizes = {.name = "cuda", .index_workspace = index_workspace};
    return &sizes;
}
#endif

uint64_t td_worker_slab_bytes(const struct td_kv_layout *l, uint64_t wanted) {
    uint64_t need = wanted, page = td_kv_page_block_bytes_max(l),
             slot = td_kv_slot_block_bytes_max(l);
    if (need < page) need = page;
    if (need < slot) need = slot;
    return (need + MEMORY_PAGE - 1) & ~(uint64_t)(MEMORY_PAGE - 1);
}

/* ---- lines ---- */

bool td_worker_plan_row(const struct td_worker_plan *p, uint32_t i, struct td_plan_row *ret) {
    const struct td_kv_layout *l = &p->layout;
    size_t n = p->options.slots;
    const struct td_plan_row row[] = {
        {"weights", p->engine.weights, false},
        {"pool: CSA entries", l->index_offset - l->csa_offset, false},
        {"pool: indexer keys", l->hca_offset - l->index_offset, false},
        {"pool: HCA entries", l->pool_bytes - l->hca_offset, false},
        {"slots: windows", (l->slot_csa - l->slot_window) * n, false},
        {"slots: CSA state", (l->slot_index - l->slot_csa) * n, false},
        {"slots: indexer state", (l->slot_hca - l->slot_index) * n, false},
        {"slots: HCA state", (l->slot_bytes - l->slot_hca) * n, false},
        {"index workspace", p->engine.index_workspace, false},
        {"scratch", p->engine.scratch, false},
        {"collectives", p->engine.collectives, false},
        {"graphs", p->graphs, false},
        {"libraries (assumed)", p->libraries, false},
        {"context", p->context, false},
        {"step arrays", p->engine.host, true},
        {"sampling", p->sampling, true},
        {"grammars (at most)", p->grammars, true},
        {"selections", p->selections, true},
        {p->engine.pinned ? "slabs, pinned" : "slabs", p->slabs, true},
    };
    if (i >= sizeof row / sizeof row[0]) return false;
    *ret = row[i];
    return true;
}

size_t td_worker_plan_bytes(const struct td_worker_plan *p, bool host) {
    struct td_plan_row row;
    size_t sum = 0;
    for (uint32_t i = 0; td_worker_plan_row(p, i, &row); i++)
        if (row.host == host) sum += row.bytes;
    return sum;
}

void td_worker_plan_text(const struct td_worker_plan *p, char *buf, size_t cap) {
    struct td_plan_row row;
    uint32_t ranks = p->engine.ranks;
    size_t used = 0;
    char each[24] = "";
    if (ranks > 1) snprintf(each, sizeof each, " x %u ranks", ranks);
    buf[0] = 0;
    for (uint32_t i = 0; used < cap && td_worker_plan_row(p, i, &row); i++) {
        if (row.bytes == 0) continue;
        int n = snprintf(buf + used, cap - used, "%-20s %14zu bytes%s\n", row.what, row.bytes,
                         row.host ? "" : each);
        used += n > 0 ? (size_t)n : 0;
    }
    if (used < cap)
        snprintf(buf + used, cap - used, "%-20s %14zu bytes\n", "total",
                 ranks * td_worker_plan_bytes(p, false) + td_worker_plan_bytes(p, true));
}

uint32_t td_worker_plan_sequences(const struct td_worker_plan *p, uint32_t tokens) {
    uint32_t fit = p->options.pages / td_kv_pages(tokens, td_engine_split(&p->options));
    return fit < p->options.slots ? fit : p->options.slots;
}

/* ---- planning ---- */

uint32_t td_worker_sample_threads(const struct td_engine_options *o) {
    if (!o->backend || o->backend->host) return 1;
    return o->threads < o->slots ? o->threads : o->slots;
}

/* What does not change while numbers are tried. */
struct asked {
    const struct td_model *model;
    const struct td_engine_options *options;
};

void td_worker_plan_beside(struct td_worker_plan *p, uint32_t layers) {
    const struct td_engine_options *o = &p->options;
    p->context = (size_t)CONTEXT_MB * MB;
    p->graphs = o->eager ? 0
                         : (size_t)td_decode_graphs_count(o->max_runs) * layers * LAYER_KERNELS *
                               GRAPH_KERNEL;
}

static td_status plan_with(const struct asked *a, uint32_t pages, uint32_t slots,
                           struct td_worker_plan *p, struct td_error *err) {
    struct td_engine_options *o = &p->options;
    *o = *a->options;
    o->pages = pages;
    o->slots = o->max_runs = slots;
    if (o->max_tokens < slots) o->max_tokens = slots;
    if (p->device.bytes) td_worker_plan_beside(p, a->model->config.layers);
    TD_TRY(td_engine_plan(a->model, o, &p->layout, &p->engine, err));
    uint32_t samples = slots > TD_CHOICES_MAX ? slots : TD_CHOICES_MAX;
    p->sampling = td_samplers_bytes(slots, a->model->config.vocab, td_worker_sample_threads(o));
    p->selections = td_selections_bytes(&p->layout, o->index_topk, o->max_runs, samples);
    return TD_OK;
}

static uint64_t budget(const struct td_worker_plan *p) {
    return p->device.bytes / 100 * p->device.fraction;
}

static uint32_t context_pages(const struct td_worker_plan *p) {
    return td_kv_pages(p->options.max_context, td_engine_split(&p->options));
}

/* As many pages as fit beside `slots` slots; 0 when not even one does. *p is planned with them. */
static td_status fill_pool(const struct asked *a, uint32_t slots, struct td_worker_plan *p,
                           uint32_t *ret_pages, struct td_error *err) {
    TD_TRY(plan_with(a, 1, slots, p, err));
    uint64_t one = p->layout.pool_bytes, fixed = td_worker_plan_bytes(p, false) - one;
    *ret_pages = 0;
    if (fixed + one > budget(p)) return TD_OK;
    uint64_t pages = (budget(p) - fixed) / one;
    /* `one` counts the padding of each family's start: a few more may fit, and then too many. */
    pages += pages * 192 / one + 1;
    if (pages > TD_KV_MAX_PAGES) pages = TD_KV_MAX_PAGES;
    do
        TD_TRY(plan_with(a, (uint32_t)pages, slots, p, err));
    while (td_worker_plan_bytes(p, false) > budget(p) && --pages > 0);
    *ret_pages = (uint32_t)pages;
    return TD_OK;
}

static double gb(uint64_t bytes) {
    return (double)bytes / 1e9;
}

/* The most slots below those planned that leave room for `pages`; 0: none do. */
static td_status most_slots(const struct asked *a, const struct td_worker_plan *p, uint32_t pages,
                            uint32_t *ret, struct td_error *err) {
    uint32_t low = 0, high = p->options.slots; /* `low` fits, `high` does not */
    while (high - low > 1) {
        struct td_worker_plan try = *p;
        uint32_t mid = low + (high - low) / 2;
        TD_TRY(plan_with(a, pages, mid, &try, err));
        *(td_worker_plan_bytes(&try, false) <= budget(p) ? &low : &high) = mid;
    }
    *ret = low;
    return TD_OK;
}

/* The most tokens a context may have where `pages` fit beside tables for the one asked for: tables
 * of a shorter one leave room for more, until nothing changes. */
static td_status longest_context(const struct asked *a, const struct td_worker_plan *p,
                                 uint32_t pages, uint32_t *ret, struct td_error *err) {
    struct td_engine_options o = *a->options;
    const struct asked shorter = {a->model, &o};
    uint32_t before, each = td_kv_page_tokens(td_engine_split(&o));
    do {
        struct td_worker_plan try = *p;
        before = pages;
        o.max_context = pages * each;
        TD_TRY(fill_pool(&shorter, p->options.slots, &try, &pages, err));
    } while (pages > before);
    *ret = pages * each;
    return TD_OK;
}

/* Which number to change. `pages` fit, fewer than one context needs. */
static td_status refuse(const struct asked *a, const struct td_worker_plan *p, uint32_t pages,
                        struct td_error *err) {
    uint32_t slots, need = context_pages(p);
    TD_TRY(most_slots(a, p, need, &slots, err));
    char or [80] = "";
    if (pages > 0) {
        uint32_t longest;
        TD_TRY(longest_context(a, p, pages, &longest, err));
        if (slots > 0) snprintf(or, sizeof or, ", or max_running to at most %u", slots);
        return td_fail(
            err, TD_NO_MEMORY,
            "max_context: %u tokens need %u pages, %.2f GB of %.2f GB leave room for %u: "
            "set max_context to at most %u%s",
            p->options.max_context, need, gb(budget(p)), gb(p->device.bytes), pages, longest, or);
    }
    if (slots > 0)
        return td_fail(err, TD_NO_MEMORY,
                       "max_running: %u slots and one context of %u tokens do not fit %.2f GB of "
                       "%.2f GB: set max_running to at most %u",
                       p->options.slots, p->options.max_context, gb(budget(p)), gb(p->device.bytes),
                       slots);
    uint64_t rest = td_worker_plan_bytes(p, false) - p->engine.weights;
    return td_fail(
        err, TD_NO_MEMORY,
        "weights: %.2f GB on each of %u GPU(s) and %.2f GB beside them do not fit %.2f GB "
        "(mem_fraction %u of %.2f GB): share the weights among more GPUs (tp)%s",
        gb(p->engine.weights), p->engine.ranks, gb(rest), gb(budget(p)), p->device.fraction,
        gb(p->device.bytes),
        p->engine.weights < budget(p) ? ", or lower chunk_tokens or max_context" : "");
}

td_status td_worker_plan(const struct td_model *model, const struct td_engine_options *o,
                         const struct td_plan_device *device, uint64_t slab_bytes, uint32_t slabs,
                         uint64_t mask_bytes, struct td_worker_plan *ret, struct td_error *err) {
    struct td_worker_plan p = {.options = *o, .device = *device};
    const struct asked a = {model, o};
    uint32_t pages = o->pages;
    if (device->bytes == 0) {
        TD_TRY(plan_with(&a, pages, o->slots, &p, err));
    } else {
        p.libraries = o->ranks == 2 ? (size_t)COLLECTIVES_MB * MB : 0;
        TD_TRY(fill_pool(&a, o->slots, &p, &pages, err));
        if (pages < context_pages(&p)) return refuse(&a, &p, pages, err);
        if (o->pages > pages)
            return td_fail(err, TD_NO_MEMORY,
                           "pool_pages: %u pages do not fit %.2f GB of %.2f GB: set pool_pages to "
                           "at most %u",
                           o->pages, gb(budget(&p)), gb(device->bytes), pages);
        if (o->pages) TD_TRY(plan_with(&a, o->pages, o->slots, &p, err));
    }
    p.slab_bytes = td_worker_slab_bytes(&p.layout, slab_bytes);
    p.slabs = p.slab_bytes * slabs;
    p.engine.pinned = device->bytes ? p.slabs : 0;
    p.grammars =
        td_samplers_grammar_bytes(p.options.slots, model->config.vocab, (size_t)mask_bytes);
    *ret = p;
    return TD_OK;
}

/* What a worker's cards have for a rank: least of all, so that every rank has the same pool. */
struct room {
    uint64_t bytes, left;
    uint32_t index; /* the card with least left */
};

/* Ranks that share a card share it evenly. */
static td_status find_room(const struct td_engine_options *o, struct room *ret,
                           struct td_error *err) {
    uint32_t ranks = o->ranks ? o->ranks : 1;
    struct room least = {UINT64_MAX, UINT64_MAX, 0};
    for (uint32_t r = 0; r < ranks; r++) {
        uint64_t bytes, left, sharing = 0;
        TD_TRY(o->backend->memory(o->device[r], &bytes, &left, err));
        for (uint32_t i = 0; i < ranks; i++)
            sharing += o->device[i] == o->device[r];
        if (bytes / sharing < least.bytes) least.bytes = bytes / sharing;
        if (left / sharing >= least.left) continue;
        least.left = left / sharing;
        least.index = o->device[r];
    }
    *ret = least;
    return TD_OK;
}

/* What is planned and what is free. */
static td_status fits_beside_others(const struct td_worker_plan *p, const struct td_config *c,
                                    const struct room *room, struct td_error *err) {
    uint64_t need = td_worker_plan_bytes(p, false) - p->context; /* it is there by now */
    if (need <= room->left) return TD_OK;
    const char *what = c->pool_pages ? "lower pool_pages, or " : "";
    return td_fail(err, TD_NO_MEMORY,
                   "%s:%u: the plan takes %.2f GB, but %.2f GB of %.2f GB are free beside other "
                   "processes: %sset mem_fraction to at most %llu, or end them",
                   p->options.backend->name, room->index, gb(need), gb(room->left),
                   gb(p->device.bytes), what,
                   (unsigned long long)((room->left + p->context) * 100 / p->device.bytes));
}

td_status td_worker_plan_card(const struct td_model *model, const struct td_config *c,
                              struct td_engine_options *o, struct td_error *err) {
    struct td_worker_plan p;
    struct room room;
    if (!o->backend->memory) return TD_OK;
    TD_TRY(find_room(o, &room, err));
    struct td_plan_device device = {.bytes = room.bytes, .fraction = (uint32_t)c->mem_fraction};
    struct td_engine_options asked = *o;
    asked.pages = (uint32_t)c->pool_pages;
    TD_TRY(
        td_worker_plan(model, &asked, &device, c->slab_bytes, 0, c->grammar_mask_bytes, &p, err));
    TD_TRY(fits_beside_others(&p, c, &room, err));
    *o = p.options;
    return TD_OK;
}
