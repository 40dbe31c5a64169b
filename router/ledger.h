/* Where the time of one answer went, by the router's clock: phases that follow one another from the
 * whole request to the whole answer, so that they add up. An answer carries them (`usage.tandem`,
 * the header Server-Timing) and the metrics add the same numbers. Of several choices the one that
 * ended last counts. A phase that comes again, in a second attempt, goes on where it was. */
#ifndef TD_ROUTER_LEDGER_H
#define TD_ROUTER_LEDGER_H

#include <stddef.h>
#include <stdint.h>

#include "proto/msg.h"
#include "router/json_write.h"

/* X(NAME, name, help) */
#define TD_PHASE_MAP(X)                                                                            \
    X(PREPARE, prepare, "JSON, chat encoding, tokenizer")                                          \
    X(QUEUE, queue, "waiting for a pair of workers and its admission")                             \
    X(PREFILL, prefill, "from the admission to the first token")                                   \
    X(TRANSFER, transfer, "from the first token to the decode worker's first")                     \
    X(DECODE, decode, "the rest")

enum td_phase {
#define X(NAME, name, help) TD_PHASE_##NAME,
    TD_PHASE_MAP(X)
#undef X
        TD_PHASES
};

struct td_ledger {
    uint64_t phase_ns[TD_PHASES];
    uint64_t total_ns;                              /* their sum */
    uint64_t first_ns;                              /* until the first token of any choice */
    uint32_t attempts;                              /* pairs tried */
    char prefill[TD_NAME_MAX], decode[TD_NAME_MAX]; /* workers of the last; "": none, or gone */
};

const char *td_phase_name(enum td_phase p);
/* The field "tandem" of a usage. */
void td_ledger_write(const struct td_ledger *l, struct td_json_out *w);

enum { TD_LEDGER_HEADER_MAX = 400 };
/* The value of Server-Timing (W3C), milliseconds; what has not begun is left out. */
void td_ledger_header(const struct td_ledger *l, char out[TD_LEDGER_HEADER_MAX]);

#endif
