/* What a role tells its service manager: that it serves, what it is doing, and that it makes
 * progress. The protocol is systemd's: datagrams of NAME=value lines to the socket that
 * NOTIFY_SOCKET names; WATCHDOG_USEC is how long it will wait for a WATCHDOG=1. Both variables are
 * the manager's interface to a process and no settings of ours.
 *
 * Without a manager every call is a no-op. A datagram that cannot be sent is dropped: a role does
 * not stop serving because nobody listens, and a manager that misses the watchdog acts by itself.
 */
#ifndef TD_COMMON_BASE_NOTIFY_H
#define TD_COMMON_BASE_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_NOTIFY_STATUS_MAX = 256 };

/* Is it time for WATCHDOG=1, and does the process deserve it? Pure. That the question is asked
 * shows that the loop turns; while there is work, engine steps must advance as well. So the
 * longest step that is survived is a little less than the watchdog's time. */
struct td_watchdog {
    uint64_t period_ns; /* between two signs of life; 0: nobody asked for them */
    uint64_t fed_ns;    /* the last one; 0: none yet */
    uint64_t steps;     /* at the last one */
};

/* `timeout_ns` is the manager's patience; 0 turns it off. Three signs fit into it. */
void td_watchdog_init(struct td_watchdog *w, uint64_t timeout_ns);
/* True: say WATCHDOG=1 now. `busy`: there is work the engine could do; `steps` never goes down. */
bool td_watchdog_due(struct td_watchdog *w, uint64_t now_ns, bool busy, uint64_t steps);

struct td_notify {
    int fd; /* connected; -1: no manager */
    struct td_watchdog watchdog;
    char status[TD_NOTIFY_STATUS_MAX]; /* as last sent */
};

/* Reads both variables. OK without a manager; CONFIG when one of them is malformed; IO when the
 * socket cannot be reached. After a failure *n is as without a manager. */
TD_MUST_USE td_status td_notify_open(struct td_notify *n, struct td_error *err);
void td_notify_close(struct td_notify *n);

void td_notify_ready(struct td_notify *n);
void td_notify_stopping(struct td_notify *n);
/* One line for `systemctl status`; sent when it differs from the last one. */
void td_notify_status(struct td_notify *n, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Call it a few times per second, or at least every watchdog.period_ns. */
void td_notify_alive(struct td_notify *n, uint64_t now_ns, bool busy, uint64_t steps);

#endif
