/* The ranks of a worker: one thread each, which do the same things in the same order side by side.
 *
 * A worker of one rank has no team and no thread more: every call takes NULL for that. What a rank
 * does is told as it goes, so that when one fails or stays away the sentence can say where. A team
 * that has lost a rank is broken for good: nothing that the others hold is whole any more. */
#ifndef TD_KERNELS_TEAM_H
#define TD_KERNELS_TEAM_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"

enum { TD_TEAM_NO_LAYER = UINT32_MAX };

struct td_team_options {
    uint32_t ranks;               /* 2 to TD_MAX_RANKS */
    uint32_t silence_ms;          /* of all ranks together, after which a run has failed; not 0 */
    char place[TD_MAX_RANKS][16]; /* "cuda:2": for sentences */
    char pci[TD_MAX_RANKS][16];   /* a rank's thread stays on the cores beside that device of sysfs;
                                     ""   or unknown: anywhere */
    /* Once, when the team breaks: whoever waits in a device's collective gives up. From the thread
     * that calls td_team_run. */
    void (*break_off)(void *user);
    void *user;
};

TD_MUST_USE td_status td_team_create(const struct td_team_options *o, struct td_team **ret,
                                     struct td_error *err);
/* Joins the threads. One that hangs cannot be joined: then nothing is freed. NULL is fine. */
void td_team_destroy(struct td_team *t);
/* A rank has not come back from a run that was given up: what it uses must stay as it is. */
bool td_team_lost(const struct td_team *t);

/* Another limit to silence, between runs. */
void td_team_silence(struct td_team *t, uint32_t ms);

/* What rank `rank` does of a run, in its thread. */
typedef td_status td_team_fn(void *arg, uint32_t rank, struct td_error *err);

/* Runs fn for every rank and returns when all are done; with t NULL fn(arg, 0, err). One caller at
 * a time. The first rank that fails breaks the team, and its sentence is returned, with the rank in
 * front. So does silence: when no rank has told anything for silence_ms, those that the others wait
 * for are named with what they did last (IO). A broken team runs nothing: it says again why. `arg`
 * must outlive a rank that is lost. */
TD_MUST_USE td_status td_team_run(struct td_team *t, td_team_fn *fn, void *arg,
                                  struct td_error *err);

/* ---- from a rank's thread, inside a run ---- */

/* The rank begins `what` (a literal) of `layer` (or TD_TEAM_NO_LAYER). False: the team is broken,
 * so it had better not. */
bool td_team_at(struct td_team *t, uint32_t rank, const char *what, uint32_t layer);
/* Waits until all ranks are here. Returns what they brought, [ranks], valid until the rank's next
 * meeting; NULL: the team is broken. */
const void *const *td_team_meet(struct td_team *t, uint32_t rank, const void *mine);
bool td_team_broken(const struct td_team *t);

#endif
