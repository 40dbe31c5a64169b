/* Large reads in file order. Page faults of single weights would fetch 128 KiB at a time and wait
 * for each; here the kernel always has the next megabytes to work on. */
#include "kernels/model/load.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/model/names.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

enum { STEP = 4 << 20, AHEAD = 16 * STEP };

/* A stretch of one file without a draft tensor in it. */
struct range {
    const struct td_safetensors *file;
    size_t begin, end, asked; /* up to `asked` the kernel has been told */
};

struct reading {
    size_t page, done, total, limit;
    bool measure; /* first pass: only add up */
    const struct td_load_watch *watch;
    struct td_error *err;
};

/* Tells the kernel what comes next, each byte once. A hint: without it a step waits longer. */
static void ask_ahead(const struct reading *r, struct range *g, size_t at) {
    size_t to = g->end - at < AHEAD ? g->end : at + AHEAD;
    size_t from = (g->asked > at ? g->asked : at) & ~(r->page - 1);
    if (to <= g->asked || (to < g->end && to - from < STEP)) return;
    (void)madvise((uint8_t *)(uintptr_t)g->file->map + from, to - from, MADV_WILLNEED);
    g->asked = to;
}

static td_status fetch(const struct reading *r, struct range *g, size_t at, size_t n) {
    uint8_t *map = (uint8_t *)(uintptr_t)g->file->map;
    size_t from = at & ~(r->page - 1);
    ask_ahead(r, g, at);
    if (madvise(map + from, at + n - from, MADV_POPULATE_READ) == 0) return TD_OK;
    if (errno != EINVAL)
        return td_fail(r->err, TD_IO, "%.250s: %zu bytes at %zu cannot be read: %s", g->file->path,
                       n, at, strerror(errno));
    volatile uint8_t sink = 0;
    for (size_t i = from; i < at + n; i += r->page)
        sink ^= map[i];
    return TD_OK;
}

static td_status read_range(struct reading *r, struct range *g) {
    size_t n;
    if (r->measure) {
        r->total += g->end - g->begin;
        return TD_OK;
    }
    for (size_t at = g->begin; at < g->end && r->done < r->limit; at += n) {
        n = g->end - at < STEP ? g->end - at : STEP;
        if (n > r->limit - r->done) n = r->limit - r->done;
        TD_TRY(fetch(r, g, at, n));
        r->done += n;
        if (r->watch) r->watch->progress(r->watch->arg, r->done, r->total);
    }
    return TD_OK;
}

static td_status read_file(struct reading *r, const struct td_safetensors *f, uint32_t layers,
                           uint32_t drafts) {
    struct range g = {.file = f};
    for (size_t i = 0; i < f->count; i++) {
        const struct td_tensor *t = &f->tensors[i];
        size_t begin = (size_t)(t->data - f->map);
        if (td_name_is_draft(t->name, layers, drafts)) continue;
        if (begin > g.end + r->page) {
            TD_TRY(read_range(r, &g));
            g.begin = begin;
        } else if (g.end == 0) {
            g.begin = begin;
        }
        g.end = begin + t->bytes;
    }
    return read_range(r, &g);
}

static size_t page_size(void) {
    long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

size_t td_load_limit(void) {
    long pages = sysconf(_SC_PHYS_PAGES);
    return pages > 0 ? (size_t)pages / 4 * 3 * page_size() : SIZE_MAX;
}

td_status td_files_read_through(const struct td_model_files *f, uint32_t layers, uint32_t drafts,
                                size_t limit, const struct td_load_watch *watch,
                                struct td_error *err) {
    struct reading r = {.page = page_size(),
                        .limit = limit,
                        .watch = watch && watch->progress ? watch : NULL,
                        .err = err};
    for (int pass = 0; pass < 2; pass++) {
        r.measure = pass == 0;
        for (size_t i = 0; i < f->files; i++)
            TD_TRY(read_file(&r, &f->file[i], layers, drafts));
        if (r.total > r.limit) r.total = r.limit;
        if (r.measure && r.watch) r.watch->progress(r.watch->arg, 0, r.total);
    }
    return TD_OK;
}
