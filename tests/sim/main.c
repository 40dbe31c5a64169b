/* Random stories of the cluster: `sim [--seeds N] [--from SEED] [--seed SEED] [--trace]`. A failing
 * seed is printed with what broke; `--seed` replays it exactly. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/sim/sim.h"

static void choose(struct sim_options *o, uint64_t seed) {
    sim_defaults(o, seed);
    struct sim chance = {.rng = td_mix64(seed ^ 0xC0FFEE)};
    o->prefills = 1 + (uint32_t)sim_below(&chance, 3);
    o->decodes = 1 + (uint32_t)sim_below(&chance, 3);
    if (seed % 3 != 0) o->prefills = o->decodes = 2;
    o->pages = sim_chance(&chance, 300) ? 20 : 64;
    o->slots = sim_chance(&chance, 300) ? 3 : 8;
    o->colocate_some = sim_chance(&chance, 500);
    if (sim_chance(&chance, 600)) o->choices = SIM_CHOICES;
    o->cancels = sim_chance(&chance, 500) ? 200 : 0;
    o->stops = sim_chance(&chance, 500) ? 200 : 0;
    o->doubled = sim_chance(&chance, 500) ? 50 : 0;
    if (sim_chance(&chance, 400)) { /* pools that fill up while sequences run */
        o->reserve_new = 16;
        o->pages = 16 + (uint32_t)sim_below(&chance, 8);
    }
    for (int role = 0; role < 2; role++)
        if (sim_chance(&chance, 300))
            o->split[role] = 1 + (uint32_t)sim_below(&chance, SIM_SPLIT_MAX);
    if (seed % 5 == 0) return; /* only cancels, stops and doubles: every other request must end */
    uint32_t *const each[] = {&o->kills, &o->freezes, &o->hangs, &o->breaks, &o->router_restarts,
                              &o->deafs};
    const uint32_t most[] = {5, 5, 3, 4, 2, 4};
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++)
        if (sim_chance(&chance, 500)) *each[i] = 1 + (uint32_t)sim_below(&chance, most[i]);
    uint32_t *const rates[] = {&o->data_lost, &o->put_fails, &o->corrupt, &o->forged};
    for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++)
        if (sim_chance(&chance, 300)) *rates[i] = 1 + (uint32_t)sim_below(&chance, 15);
}

struct totals {
    uint64_t steps, ended, failed, gone, tokens, preempted;
};

static bool one(uint64_t seed, bool trace, struct totals *t) {
    static struct sim s;
    struct sim_options o;
    choose(&o, seed);
    o.trace = trace;
    sim_init(&s, &o);
    bool ok = sim_story(&s);
    if (!ok) printf("seed %llu: %s\n", (unsigned long long)seed, s.failure);
    t->steps += s.steps;
    for (uint32_t i = 0; i < SIM_CLIENTS_MAX; i++) {
        t->ended += s.client[i].state == SIM_ENDED;
        t->failed += s.client[i].state == SIM_FAILED;
        t->gone += s.client[i].state == SIM_GONE;
        t->tokens += s.client[i].delivered;
    }
    sim_finish(&s);
    t->preempted += s.preempted;
    return ok;
}

int main(int argc, char **argv) {
    uint64_t n = 500, from = 1;
    bool trace = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--seeds") == 0)
            n = strtoull(value, NULL, 10), i++;
        else if (strcmp(argv[i], "--from") == 0)
            from = strtoull(value, NULL, 10), i++;
        else if (strcmp(argv[i], "--seed") == 0)
            from = strtoull(value, NULL, 10), n = 1, i++;
        else if (strcmp(argv[i], "--trace") == 0)
            trace = true;
        else
            return fprintf(stderr,
                           "usage: sim [--seeds N] [--from SEED] [--seed SEED] [--trace]\n"),
                   2;
    }
    struct totals t = {0};
    uint64_t bad = 0;
    printf("seeds %llu to %llu\n", (unsigned long long)from, (unsigned long long)(from + n - 1));
    for (uint64_t seed = from; seed < from + n && bad < 10; seed++)
        bad += !one(seed, trace, &t);
    printf("sim: %llu broken; %llu events, requests: %llu ended, %llu failed, %llu left; %llu "
           "tokens; %llu preempted\n",
           (unsigned long long)bad, (unsigned long long)t.steps, (unsigned long long)t.ended,
           (unsigned long long)t.failed, (unsigned long long)t.gone, (unsigned long long)t.tokens,
           (unsigned long long)t.preempted);
    return bad == 0 ? 0 : 1;
}
