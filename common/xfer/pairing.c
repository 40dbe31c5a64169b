/* Keeps both sides' endpoints in pairs. UCX numbers the endpoints a worker makes towards another
 * one and joins number k of one side with number k of the other. A side that never saw a greeting
 * (it was stopped while a link came and went, or its house was full) is one number behind: from
 * then on every endpoint it makes is joined with one that the other side has closed, and UCX ends
 * it within seconds, link after link, until one of the processes restarts.
 *
 * So each side counts what it made towards each address, HELLO says the greeter's count, and who is
 * behind makes up for it with endpoints that it closes at once. */
#include <string.h>

#include "common/xfer/internal.h"

/* Unknown addresses take the place of the one that was used least lately: its count begins again,
 * which costs no more than not counting. */
static struct td_xfer_made *made_towards(struct td_xfer *x, const void *address) {
    struct td_xfer_envelope e;
    memcpy(&e, address, sizeof e);
    struct td_xfer_made *oldest = &x->made[0];
    for (int i = 0; i < TD_XFER_MADE_MAX; i++) {
        struct td_xfer_made *m = &x->made[i];
        if (m->used != 0 && m->address_sum == e.sum) {
            oldest = m;
            break;
        }
        if (m->used < oldest->used) oldest = m;
    }
    if (oldest->used == 0 || oldest->address_sum != e.sum)
        *oldest = (struct td_xfer_made){.address_sum = e.sum};
    oldest->used = ++x->made_clock;
    return oldest;
}

uint32_t td_xfer_made_next(struct td_xfer *x, const void *address) {
    return made_towards(x, address)->count++;
}

uint32_t td_xfer_made_behind(struct td_xfer *x, const void *address, uint32_t theirs) {
    uint32_t ours = made_towards(x, address)->count;
    if (theirs <= ours) return 0;
    uint32_t behind = theirs - ours;
    return behind < TD_XFER_CATCH_UP_MAX ? behind : TD_XFER_CATCH_UP_MAX;
}
