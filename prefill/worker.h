/* The prefill worker's shell around its machine (prefill/sched.h): owns engine, send slabs, links
 * and clock, turns their callbacks into events and carries out actions. It decides nothing. */
#ifndef TD_PREFILL_WORKER_H
#define TD_PREFILL_WORKER_H

#include "common/base/role_args.h"

/* Starts, serves until SIGTERM or SIGINT, ends in order. Logs. CONFIG and the like before serving:
 * `err` says why. td_xfer_env must have been called. */
TD_MUST_USE td_status td_prefill_worker_run(const struct td_role_args *args, struct td_error *err);

#endif
