/* Readiness: a new pair answers a real prompt, disaggregated and on decode alone, before it is
 * given requests. One probe at a time; it is a request like others, pinned to its pair. */
#include <stdio.h>
#include <string.h>

#include "common/kv/checksum.h"
#include "router/flow_parts.h"

static void report(struct td_flow *f, struct td_pair pair, td_status s, const char *text) {
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = TD_FLOW_PROBED;
    a->fail.status = s;
    a->fail.pair = pair;
    snprintf(a->fail.text, sizeof a->fail.text, "%s", text);
    *(s == TD_OK ? &f->counts.probes_passed : &f->counts.probes_failed) += 1;
}

/* A pair with little room is asked a shorter question. */
static uint32_t probe_length(const struct td_flow *f) {
    uint32_t limit = td_fleet_pair_limit(&f->fleet, f->probe.pair), n = f->o.probe_n;
    return limit > f->o.probe_new && limit - f->o.probe_new < n ? limit - f->o.probe_new : n;
}

static void submit(struct td_flow *f) {
    struct probe *p = &f->probe;
    bool alone = p->stage == 1 || p->pair.prefill == 0;
    struct td_flow_submit s = {
        .request = TD_FLOW_PROBE_BIT | f->next_probe++,
        .ids = (int32_t *)f->o.probe_ids, /* the answer is not written behind a probe's prompt */
        .n_prompt = probe_length(f),
        .max_new = f->o.probe_new,
        .sampling = {.top_p = 1},
        .colocate = alone,
    };
    p->n[p->stage] = 0;
    struct request *r = td_flow_take(f, &s);
    if (r == NULL) { /* tombstones fill the table: later */
        p->active = false;
        f->probe_ns = f->now_ns + f->fleet.o.cool_ns;
        return;
    }
    r->pinned = true;
    r->prompt_hash = td_prompt_hash(s.ids, s.n_prompt);
    td_flow_start(f, r, (struct td_pair){alone ? 0 : p->pair.prefill, p->pair.decode});
}

void td_flow_probe_pump(struct td_flow *f) {
    struct probe *p = &f->probe;
    if (p->active || f->now_ns < f->probe_ns) return;
    uint64_t when;
    while (td_fleet_probe_due(&f->fleet, f->now_ns, &p->pair, &when)) {
        if (f->o.probe_n == 0) {
            td_fleet_proven(&f->fleet, p->pair);
            f->pump_due = true;
            continue;
        }
        p->active = true;
        p->stage = 0;
        f->probe_ns = 0;
        submit(f);
        return;
    }
    f->probe_ns = when;
}

void td_flow_probe_token(struct td_flow *f, int32_t id) {
    struct probe *p = &f->probe;
    if (p->n[p->stage] < TD_FLOW_PROBE_TOKENS_MAX) p->ids[p->stage][p->n[p->stage]++] = id;
}

static bool same_ids(const struct td_flow *f, const struct probe *p) {
    if (!td_fleet_same_numerics(&f->fleet, p->pair)) return true; /* promises no equal bits */
    return p->n[0] == p->n[1] && memcmp(p->ids[0], p->ids[1], p->n[0] * sizeof p->ids[0][0]) == 0;
}

void td_flow_probe_ended(struct td_flow *f) {
    struct probe *p = &f->probe;
    if (p->stage == 0 && p->pair.prefill != 0) {
        /* The answer can be complete before token 0 and the end of its worker are known. */
        if (td_fleet_find(&f->fleet, p->pair.decode) == NULL) {
            td_flow_probe_failed(f, TD_PEER_LOST, "the decode worker was lost");
            return;
        }
        p->stage = 1;
        submit(f);
        return;
    }
    if (p->stage == 1 && !same_ids(f, p)) {
        td_flow_probe_failed(f, TD_CORRUPT,
                             "the pair's tokens differ from those of the decode worker alone");
        return;
    }
    p->active = false;
    f->probe_ns = 0;
    td_fleet_proven(&f->fleet, p->pair);
    f->pump_due = true;
    report(f, p->pair, TD_OK, "");
}

void td_flow_probe_failed(struct td_flow *f, td_status s, const char *text) {
    struct probe *p = &f->probe;
    p->active = false;
    f->probe_ns = f->now_ns + f->fleet.o.cool_ns; /* nothing else holds back one that was refused */
    if (s != TD_BUSY && s != TD_PREEMPTED) {
        f->probe_ns = 0;
        /* What a pair cannot do together says nothing about the two with others. */
        if (p->pair.prefill != 0 && (p->stage == 0 || s == TD_CORRUPT))
            td_fleet_way_failed(&f->fleet, p->pair, f->now_ns);
        else
            td_fleet_failed(&f->fleet, p->pair.decode, f->now_ns);
    }
    report(f, p->pair, s, text);
}
