/* The fleet: a table of at most 64 workers; every question is one walk over it. */
#include "router/fleet.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/kv/layout.h"

#define SECOND_NS 1000000000ull
enum { COOL_MAX_S = 30 };

void td_fleet_init(struct td_fleet *f, const struct td_fleet_options *o) {
    assert(o->max_workers >= 1 && o->max_workers <= TD_FLEET_WORKERS_MAX);
    memset(f, 0, sizeof *f);
    f->o = *o;
    f->stall_at_ns = UINT64_MAX;
    if (f->o.cool_ns == 0) f->o.cool_ns = SECOND_NS;
    if (f->o.cool_max_ns == 0) f->o.cool_max_ns = COOL_MAX_S * SECOND_NS;
}

static uint32_t find(const struct td_fleet *f, uint64_t epoch) {
    for (uint32_t i = 0; epoch != 0 && i < f->o.max_workers; i++)
        if (f->epoch[i] == epoch) return i;
    return UINT32_MAX;
}

static struct td_fleet_worker *at(struct td_fleet *f, uint64_t epoch) {
    uint32_t i = find(f, epoch);
    return i == UINT32_MAX ? NULL : &f->worker[i];
}

const struct td_fleet_worker *td_fleet_find(const struct td_fleet *f, uint64_t epoch) {
    uint32_t i = find(f, epoch);
    return i == UINT32_MAX ? NULL : &f->worker[i];
}

/* ---- engines that do not advance ---- */

static uint64_t stalls_at(const struct td_fleet *f, const struct td_fleet_worker *w) {
    bool may = w->epoch != 0 && f->o.stall_ns != 0 && !w->stalled && w->beat.busy;
    return may ? w->moved_ns + f->o.stall_ns : UINT64_MAX;
}

/* After every change of what stalls_at() looks at. */
static void find_next_stall(struct td_fleet *f) {
    f->stall_at_ns = UINT64_MAX;
    for (uint32_t i = 0; i < f->o.max_workers; i++) {
        uint64_t at_ns = stalls_at(f, &f->worker[i]);
        if (at_ns < f->stall_at_ns) f->stall_at_ns = at_ns;
    }
}

uint64_t td_fleet_stall(struct td_fleet *f, uint64_t now_ns) {
    if (f->stall_at_ns > now_ns) return 0;
    for (uint32_t i = 0; i < f->o.max_workers; i++) {
        if (stalls_at(f, &f->worker[i]) > now_ns) continue;
        f->worker[i].stalled = true;
        find_next_stall(f);
        return f->worker[i].epoch;
    }
    return 0;
}

uint64_t td_fleet_stall_at(const struct td_fleet *f) {
    return f->stall_at_ns;
}

/* ---- joining and leaving ---- */

static uint64_t *set_of(struct td_fleet *f, enum td_role role) {
    return role == TD_ROLE_DECODE ? &f->decodes : &f->prefills;
}

static td_status refuse(char text[TD_TEXT_MAX], td_status s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static td_status refuse(char text[TD_TEXT_MAX], td_status s, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, TD_TEXT_MAX, fmt, ap);
    va_end(ap);
    return s;
}

static td_status check_model(const struct td_fleet *f, const struct td_msg_hello *h,
                             char text[TD_TEXT_MAX]) {
    if (f->o.model != NULL && f->o.model[0] != 0 && strcmp(f->o.model, h->model) != 0)
        return refuse(text, TD_MISMATCH, "%s: model: expected %s, found %s", h->name, f->o.model,
                      h->model);
    for (uint32_t i = 0; i < f->o.max_workers; i++) {
        const struct td_fleet_worker *w = &f->worker[i];
        if (w->epoch == 0) continue;
        if (strcmp(w->model, h->model) != 0)
            return refuse(text, TD_MISMATCH, "%s: model: expected %s as on %s, found %s", h->name,
                          w->model, w->name, h->model);
        if (w->fingerprint != h->fingerprint)
            return refuse(text, TD_MISMATCH,
                          "%s: KV layout fingerprint: expected %016llx as on %s, found %016llx",
                          h->name, (unsigned long long)w->fingerprint, w->name,
                          (unsigned long long)h->fingerprint);
        if (w->numerics_id != h->numerics_id && !f->o.mixed_numerics)
            return refuse(text, TD_MISMATCH,
                          "%s: numerics: expected '%.120s' as on %s, found '%.120s'", h->name,
                          w->numerics, w->name, h->numerics);
    }
    return TD_OK;
}

td_status td_fleet_check(const struct td_fleet *f, const struct td_msg_hello *h,
                         char text[TD_TEXT_MAX]) {
    text[0] = 0;
    if (h->version != TD_PROTO_VERSION)
        return refuse(text, TD_PROTOCOL, "protocol version: expected %d, found %u",
                      TD_PROTO_VERSION, h->version);
    if (h->epoch == 0 || h->name[0] == 0)
        return refuse(text, TD_PROTOCOL, "a worker needs a name and an epoch other than 0");
    if (h->role != TD_ROLE_PREFILL && h->role != TD_ROLE_DECODE)
        return refuse(text, TD_PROTOCOL, "%s: role: expected prefill or decode, found %d", h->name,
                      (int)h->role);
    if (h->xfer_address_len > TD_MSG_ADDRESS_MAX)
        return refuse(text, TD_TOO_LONG, "%s: transfer address: at most %d bytes, found %zu",
                      h->name, TD_MSG_ADDRESS_MAX, h->xfer_address_len);
    if (h->max_context == 0 || h->max_running == 0)
        return refuse(text, TD_PROTOCOL, "%s: limits of 0 tokens or 0 sequences", h->name);
    if (find(f, h->epoch) != UINT32_MAX)
        return refuse(text, TD_BUSY, "%s: epoch %016llx is still connected", h->name,
                      (unsigned long long)h->epoch);
    /* Not taken over: two processes of one name would throw each other out for ever. One that hangs
     * is lost by its silence, and whoever was refused dials again. */
    for (uint32_t i = 0; i < f->o.max_workers; i++)
        if (f->worker[i].epoch != 0 && strcmp(f->worker[i].name, h->name) == 0)
            return refuse(text, TD_BUSY, "%s: process %llu has this name and is connected", h->name,
                          (unsigned long long)f->worker[i].pid);
    TD_TRY(check_model(f, h, text));
    for (uint32_t i = 0; i < f->o.max_workers; i++)
        if (f->worker[i].epoch == 0) return TD_OK;
    return refuse(text, TD_BUSY, "%s: the fleet is full with %u workers", h->name,
                  f->o.max_workers);
}

void td_fleet_join(struct td_fleet *f, uint64_t now_ns, const struct td_msg_hello *h,
                   uint64_t *ret_replaced) {
    *ret_replaced = 0;
    struct td_fleet_worker *w = NULL;
    for (uint32_t i = 0; i < f->o.max_workers; i++)
        if (f->worker[i].epoch != 0 && strcmp(f->worker[i].name, h->name) == 0)
            *ret_replaced = f->worker[i].epoch;
    td_fleet_leave(f, *ret_replaced);
    for (uint32_t i = 0; w == NULL && i < f->o.max_workers; i++)
        if (f->worker[i].epoch == 0) w = &f->worker[i];
    assert(w != NULL && find(f, h->epoch) == UINT32_MAX);
    *w = (struct td_fleet_worker){
        .epoch = h->epoch,
        .role = h->role,
        .pid = h->pid,
        .fingerprint = h->fingerprint,
        .numerics_id = h->numerics_id,
        .max_context = h->max_context,
        .max_running = h->max_running,
        .pages = h->pages,
        .page_tokens = h->page_tokens ? h->page_tokens : TD_KV_PAGE_TOKENS,
        .slots = h->slots,
        .selection_max = h->selection_max,
        .xfer_address_len = h->xfer_address_len,
        .xfer_number = h->xfer_number,
        .joined_ns = now_ns,
        .beat_ns = now_ns,
        .moved_ns = now_ns,
    };
    memcpy(w->name, h->name, sizeof w->name);
    memcpy(w->model, h->model, sizeof w->model);
    memcpy(w->numerics, h->numerics, sizeof w->numerics);
    if (h->xfer_address_len != 0) memcpy(w->xfer_address, h->xfer_address, h->xfer_address_len);
    f->epoch[w - f->worker] = h->epoch;
    *set_of(f, h->role) |= 1ull << (w - f->worker);
}

void td_fleet_leave(struct td_fleet *f, uint64_t epoch) {
    uint32_t i = find(f, epoch);
    if (i == UINT32_MAX) return;
    /* The next worker in this entry has proven nothing yet. */
    for (uint32_t k = 0; k < f->o.max_workers; k++) {
        f->worker[k].proven &= ~(1ull << i);
        f->way[i][k] = f->way[k][i] = (struct td_fleet_cool){0};
    }
    *set_of(f, f->worker[i].role) &= ~(1ull << i);
    memset(&f->worker[i], 0, sizeof f->worker[i]);
    f->epoch[i] = 0;
    find_next_stall(f);
}

bool td_fleet_moved(struct td_fleet *f, const struct td_msg_moved *m) {
    uint32_t i = find(f, m->epoch);
    if (i == UINT32_MAX || m->xfer_address_len == 0 || m->xfer_address_len > TD_MSG_ADDRESS_MAX)
        return false;
    struct td_fleet_worker *w = &f->worker[i];
    if (w->role != TD_ROLE_DECODE || m->xfer_number <= w->xfer_number) return false;
    memcpy(w->xfer_address, m->xfer_address, m->xfer_address_len);
    w->xfer_address_len = m->xfer_address_len;
    w->xfer_number = m->xfer_number;
    for (uint32_t k = 0; k < f->o.max_workers; k++)
        f->way[k][i] = (struct td_fleet_cool){0};
    return true;
}

bool td_fleet_beat(struct td_fleet *f, uint64_t now_ns, const struct td_msg_heartbeat *b) {
    struct td_fleet_worker *w = at(f, b->epoch);
    if (w == NULL) return false;
    /* From the beat that first shows work: what came before was no waiting. */
    bool moved = !w->beat.busy || b->steps != w->beat.steps;
    w->beat = *b;
    w->beat_ns = now_ns;
    moved = moved || !b->busy;
    if (moved) w->moved_ns = now_ns;
    bool again = w->stalled && moved;
    if (again) w->stalled = false;
    find_next_stall(f);
    return again;
}

void td_fleet_ledger(struct td_fleet *f, uint64_t epoch, const struct td_msg_ledger *l) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w != NULL) w->ledger = *l;
}

bool td_fleet_drain(struct td_fleet *f, const char *name, bool draining) {
    for (uint32_t i = 0; i < f->o.max_workers; i++) {
        if (f->worker[i].epoch == 0 || strcmp(f->worker[i].name, name) != 0) continue;
        f->worker[i].draining = draining;
        return true;
    }
    return false;
}

uint32_t td_fleet_selection_max(const struct td_fleet *f) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < f->o.max_workers; i++)
        if (f->worker[i].epoch != 0 && f->worker[i].selection_max > most)
            most = f->worker[i].selection_max;
    return most;
}

/* ---- choosing ---- */

static bool compatible(const struct td_fleet *f, const struct td_fleet_worker *p,
                       const struct td_fleet_worker *d) {
    return p->fingerprint == d->fingerprint &&
           (p->numerics_id == d->numerics_id || f->o.mixed_numerics);
}

/* A walk over all compatible pairs: the decode entries to come, and of the first of them the
 * prefill entries to come. Asked several times a request, so it visits no free entry. */
struct pairs {
    uint64_t decodes, prefills;
};

static struct pairs all_pairs(const struct td_fleet *f) {
    return (struct pairs){f->decodes, f->prefills};
}

/* *p NULL for decode alone. */
static bool next_pair(const struct td_fleet *f, bool colocate, struct pairs *c,
                      const struct td_fleet_worker **p, const struct td_fleet_worker **d) {
    for (; c->decodes != 0; c->decodes &= c->decodes - 1, c->prefills = f->prefills) {
        *d = &f->worker[__builtin_ctzll(c->decodes)];
        if (colocate) {
            *p = NULL;
            c->decodes &= c->decodes - 1;
            return true;
        }
        while (c->prefills != 0) {
            *p = &f->worker[__builtin_ctzll(c->prefills)];
            c->prefills &= c->prefills - 1;
            if (compatible(f, *p, *d)) return true;
        }
    }
    return false;
}

static bool pair_proven(const struct td_fleet *f, const struct td_fleet_worker *p,
                        const struct td_fleet_worker *d) {
    return p == NULL ? d->proven_alone : (d->proven >> (p - f->worker) & 1) != 0;
}

static bool pair_stalled(const struct td_fleet_worker *p, const struct td_fleet_worker *d) {
    return d->stalled || (p != NULL && p->stalled);
}

static uint32_t pair_limit(const struct td_fleet_worker *p, const struct td_fleet_worker *d) {
    return p != NULL && p->max_context < d->max_context ? p->max_context : d->max_context;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t cools_until(const struct td_fleet *f, const struct td_fleet_worker *p,
                            const struct td_fleet_worker *d) {
    if (p == NULL) return d->cool.until_ns;
    return later(later(p->cool.until_ns, d->cool.until_ns),
                 f->way[p - f->worker][d - f->worker].until_ns);
}

/* Our own count is exact; the worker's may include what a former router left behind. */
static uint64_t work(const struct td_fleet_worker *w) {
    return w == NULL ? 0 : later(w->work_tokens, w->beat.queued_tokens);
}

uint32_t td_fleet_limit(const struct td_fleet *f, bool colocate) {
    const struct td_fleet_worker *p, *d;
    uint32_t limit = 0;
    for (struct pairs c = all_pairs(f); next_pair(f, colocate, &c, &p, &d);)
        if (pair_limit(p, d) > limit) limit = pair_limit(p, d);
    return limit;
}

uint32_t td_fleet_pair_limit(const struct td_fleet *f, struct td_pair pair) {
    const struct td_fleet_worker *d = td_fleet_find(f, pair.decode);
    return d != NULL ? pair_limit(td_fleet_find(f, pair.prefill), d) : 0;
}

/* Choices a pair can hold, up to `most`. As decode admits them (decode/sched.h). */
static uint32_t held(const struct td_fleet_worker *p, const struct td_fleet_worker *d,
                     struct td_fleet_need need, uint32_t most) {
    uint32_t n = most, shared = need.n_prompt / d->page_tokens;
    if (pair_limit(p, d) < (uint64_t)need.n_prompt + need.max_new) return 0;
    if (n > d->slots) n = d->slots;
    if (n > 1 && shared + n > d->pages) n = d->pages > shared ? d->pages - shared : 1;
    return n > 0 ? n : 1;
}

uint32_t td_fleet_choices(const struct td_fleet *f, struct td_fleet_need need, bool colocate) {
    const struct td_fleet_worker *p, *d;
    uint32_t most = 0;
    for (struct pairs c = all_pairs(f); next_pair(f, colocate, &c, &p, &d);) {
        uint32_t n = held(p, d, need, TD_CHOICES_MAX);
        if (n > most) most = n;
    }
    return most;
}

td_status td_fleet_choose(const struct td_fleet *f, uint64_t now_ns, struct td_fleet_need need,
                          bool colocate, bool patient, struct td_pair *ret_pair,
                          uint64_t *ret_when_ns) {
    const struct td_fleet_worker *p, *d;
    uint64_t best = UINT64_MAX, when = UINT64_MAX, coolest = UINT64_MAX;
    bool any = false, sound = false;
    struct td_pair cooling = {0};
    for (struct pairs c = all_pairs(f); next_pair(f, colocate, &c, &p, &d);) {
        uint32_t n = need.choices > 1 ? need.choices : 1;
        if (!pair_proven(f, p, d) || held(p, d, need, n) < n || pair_stalled(p, d)) continue;
        any = true;
        if (d->draining || (p != NULL && p->draining) || d->asked) continue;
        struct td_pair pair = {p != NULL ? p->epoch : 0, d->epoch};
        uint64_t cool_at = cools_until(f, p, d), free_at = later(cool_at, d->busy_until_ns);
        if (cool_at <= now_ns) sound = true;
        if (free_at > now_ns) {
            if (free_at < when) when = free_at;
            if (d->busy_until_ns <= now_ns && cool_at < coolest) coolest = cool_at, cooling = pair;
        } else if (work(p) + work(d) < best) {
            best = work(p) + work(d);
            *ret_pair = pair;
        }
    }
    *ret_when_ns = when;
    if (!patient && !sound && coolest != UINT64_MAX) {
        *ret_pair = cooling;
        return TD_OK;
    }
    return best != UINT64_MAX ? TD_OK : any ? TD_BUSY : TD_UNREACHABLE;
}

bool td_fleet_probe_due(const struct td_fleet *f, uint64_t now_ns, struct td_pair *ret_pair,
                        uint64_t *ret_when_ns) {
    const struct td_fleet_worker *p, *d;
    *ret_when_ns = UINT64_MAX;
    for (struct pairs c = all_pairs(f); next_pair(f, f->o.colocate, &c, &p, &d);) {
        if (pair_proven(f, p, d) || d->draining || (p != NULL && p->draining)) continue;
        if (pair_stalled(p, d)) continue;
        uint64_t free_at = later(cools_until(f, p, d), d->busy_until_ns);
        if (free_at <= now_ns) {
            *ret_pair = (struct td_pair){p != NULL ? p->epoch : 0, d->epoch};
            return true;
        }
        if (free_at < *ret_when_ns) *ret_when_ns = free_at;
    }
    return false;
}

void td_fleet_proven(struct td_fleet *f, struct td_pair pair) {
    struct td_fleet_worker *d = at(f, pair.decode);
    uint32_t p = find(f, pair.prefill);
    if (d == NULL) return;
    d->proven_alone = true; /* a probe of a pair also runs on decode alone */
    if (p != UINT32_MAX) d->proven |= 1ull << p;
}

bool td_fleet_ready(const struct td_fleet *f) {
    const struct td_fleet_worker *p, *d;
    for (struct pairs c = all_pairs(f); next_pair(f, f->o.colocate, &c, &p, &d);)
        if (pair_proven(f, p, d) && !pair_stalled(p, d)) return true;
    return false;
}

bool td_fleet_same_numerics(const struct td_fleet *f, struct td_pair pair) {
    const struct td_fleet_worker *p = td_fleet_find(f, pair.prefill);
    const struct td_fleet_worker *d = td_fleet_find(f, pair.decode);
    return p == NULL || d == NULL || p->numerics_id == d->numerics_id;
}

/* ---- accounting ---- */

void td_fleet_began(struct td_fleet *f, uint64_t epoch, uint64_t tokens) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w == NULL) return;
    w->legs++;
    w->work_tokens += tokens;
}

void td_fleet_did(struct td_fleet *f, uint64_t epoch, uint64_t tokens) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w == NULL) return;
    assert(w->work_tokens >= tokens);
    w->work_tokens -= tokens;
}

void td_fleet_ended(struct td_fleet *f, uint64_t epoch, uint64_t tokens_left) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w == NULL) return;
    assert(w->legs > 0);
    w->legs--;
    td_fleet_did(f, epoch, tokens_left);
}

void td_fleet_busy(struct td_fleet *f, uint64_t epoch, uint64_t until_ns) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w != NULL) w->busy_until_ns = until_ns;
}

void td_fleet_asked(struct td_fleet *f, uint64_t epoch, bool asked) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w != NULL) w->asked = asked;
}

void td_fleet_roomy(struct td_fleet *f, uint64_t epoch) {
    td_fleet_busy(f, epoch, 0);
}

static void cool_down(const struct td_fleet *f, struct td_fleet_cool *c, uint64_t now_ns) {
    if (c->until_ns > now_ns) return; /* the same trouble */
    uint64_t cool = f->o.cool_ns;
    for (uint32_t i = 0; i < c->failures && cool < f->o.cool_max_ns; i++)
        cool *= 2;
    c->failures++;
    c->until_ns = now_ns + (cool < f->o.cool_max_ns ? cool : f->o.cool_max_ns);
}

void td_fleet_failed(struct td_fleet *f, uint64_t epoch, uint64_t now_ns) {
    struct td_fleet_worker *w = at(f, epoch);
    if (w != NULL) cool_down(f, &w->cool, now_ns);
}

void td_fleet_way_failed(struct td_fleet *f, struct td_pair pair, uint64_t now_ns) {
    uint32_t p = find(f, pair.prefill), d = find(f, pair.decode);
    if (p != UINT32_MAX && d != UINT32_MAX) cool_down(f, &f->way[p][d], now_ns);
}

void td_fleet_worked(struct td_fleet *f, struct td_pair pair) {
    uint32_t p = find(f, pair.prefill), d = find(f, pair.decode);
    if (p != UINT32_MAX) f->worker[p].cool.failures = 0;
    if (d != UINT32_MAX) f->worker[d].cool.failures = 0;
    if (p != UINT32_MAX && d != UINT32_MAX) f->way[p][d].failures = 0;
}

uint64_t td_fleet_cool_until(const struct td_fleet *f, struct td_pair pair) {
    const struct td_fleet_worker *d = td_fleet_find(f, pair.decode);
    return d != NULL ? cools_until(f, td_fleet_find(f, pair.prefill), d) : 0;
}
