/* The one list of errors, and the sentence that goes with one.
 *
 * A function that can fail returns td_status; where the user will want to know more than the
 * code says, it also takes a `struct td_error *` and puts one sentence there: the thing, what was
 * expected, what was found. Outputs named ret_x are written on success only. Libraries return
 * errors and never log them; roles log, once. */
#ifndef TD_COMMON_BASE_STATUS_H
#define TD_COMMON_BASE_STATUS_H

#include <stdarg.h>

/* Grouped by what the error destroys: the request, the peer, the process. Numbers travel on the
 * wire (proto/): append, never renumber. */
#define TD_STATUS_MAP(X)                                                                           \
    /* nothing is wrong */                                                                         \
    X(OK, 0, "ok")                                                                                 \
    /* one request */                                                                              \
    X(INVALID, 1, "invalid argument")                                                              \
    X(TOO_LONG, 2, "longer than a limit")                                                          \
    X(BUSY, 3, "no capacity now")                                                                  \
    X(CANCELLED, 4, "cancelled")                                                                   \
    X(TIMEOUT, 5, "a deadline passed")                                                             \
    X(NOT_FOUND, 6, "not found")                                                                   \
    X(CORRUPT, 7, "checksum or content does not match")                                            \
    X(STALE, 8, "belongs to an earlier epoch or attempt")                                          \
    X(UNSUPPORTED, 9, "not supported")                                                             \
    X(PREEMPTED, 10, "preempted")                                                                  \
    /* one peer */                                                                                 \
    X(PEER_LOST, 20, "the peer is gone")                                                           \
    X(PROTOCOL, 21, "the peer broke the protocol")                                                 \
    X(MISMATCH, 22, "the peer's configuration does not match")                                     \
    X(UNREACHABLE, 23, "the peer cannot be reached")                                               \
    /* the process, or its start */                                                                \
    X(FORMAT, 40, "malformed file")                                                                \
    X(IO, 41, "input or output failed")                                                            \
    X(NO_MEMORY, 42, "out of memory")                                                              \
    X(CONFIG, 43, "bad configuration")                                                             \
    X(NO_KERNEL, 44, "no kernel for this device")                                                  \
    X(INTERNAL, 45, "internal error")

typedef enum td_status {
#define X(name, value, text) TD_##name = (value),
    TD_STATUS_MAP(X)
#undef X
} td_status;

#define TD_MUST_USE __attribute__((warn_unused_result))

/* Caller-owned; `text` is always terminated. Contents are meaningful after a failure only. */
struct td_error {
    td_status status;
    char text[400];
};

/* "INVALID", "BUSY", ...; never NULL. */
const char *td_status_name(td_status s);
/* The few words beside the code in the list above; never NULL. */
const char *td_status_text(td_status s);

/* Fills *err (may be NULL) with `s` and the formatted sentence; returns s, so that failing is one
 * line: return td_fail(err, TD_FORMAT, "%s: expected ..., found ...", ...). */
td_status td_fail(struct td_error *err, td_status s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns the status of `expr` from the enclosing function unless it is TD_OK. */
#define TD_TRY(expr)                                                                               \
    do {                                                                                           \
        td_status td_try_ = (expr);                                                                \
        if (td_try_ != TD_OK) return td_try_;                                                      \
    } while (0)

/* Same, but jumps to a clean-up label named for what it undoes; needs a local `td_status st`. */
#define TD_TRY_GOTO(expr, label)                                                                   \
    do {                                                                                           \
        st = (expr);                                                                               \
        if (st != TD_OK) goto label;                                                               \
    } while (0)

#endif
