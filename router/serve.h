/* The router as a whole: the shell that turns HTTP requests, worker messages, clocks and jobs into
 * events of the flow machine and carries out its actions. Decisions are in flow.h and fleet.h. */
#ifndef TD_ROUTER_SERVE_H
#define TD_ROUTER_SERVE_H

#include <uv.h>

#include "common/base/config.h"

struct td_serve;

/* Listens for clients at router.listen, at once, and loads the tokenizer in the thread pool; then
 * listens for workers at run_dir/router.sock. `config` must outlive it. */
TD_MUST_USE td_status td_serve_create(uv_loop_t *loop, const struct td_config *config,
                                      struct td_serve **ret, struct td_error *err);
/* Ends everything: requests are cancelled with their workers, connections closed. The loop then
 * runs out by itself. May be called more than once. */
void td_serve_stop(struct td_serve *s);
/* Reads router.api_keys_file again; what cannot be read changes nothing and is logged. */
void td_serve_reload(struct td_serve *s);
/* TD_OK, or what ended the service (tokenizer unreadable, control socket taken). */
td_status td_serve_result(const struct td_serve *s, struct td_error *err);
/* After the loop has run out. NULL is fine. */
void td_serve_destroy(struct td_serve *s);

#endif
