/* What the files of the output machine share. Included by reply*.c alone. */
#ifndef TD_COMMON_TEXT_REPLY_PARTS_H
#define TD_COMMON_TEXT_REPLY_PARTS_H

#include "common/text/reply.h"

/* Symbols: code points, and the marks above them. */
enum { TD_SYM_DSML = 0x110000, TD_SYM_THINK_END = 0x110001 };

enum td_reply_state {
    TD_IN_TEXT,
    TD_IN_CALLS, /* between calls */
    TD_IN_ARGS,  /* in a call, between its parameters */
    TD_IN_ATTR,  /* before the quote of a name */
    TD_IN_NAME,
    TD_IN_KEY,
    TD_IN_TYPE, /* behind a key, before its value */
    TD_IN_VALUE,
    TD_IN_SKIP, /* the rest of a tag */
    TD_IN_DONE,
};

struct td_reply_record {
    enum td_reply_kind kind;
    uint32_t call;
    size_t at, n; /* in `out` */
};

static inline bool td_sym_is_space(uint32_t s) {
    return s == ' ' || s == '\n' || s == '\r' || s == '\t';
}

/* ---- reply.c ---- */

/* Opens an event, or goes on with the last one if it is of the same kind. */
void td_reply_event_open(struct td_reply *r, enum td_reply_kind kind);
/* More text of the open event. */
void td_reply_event_text(struct td_reply *r, const char *p, size_t n);
/* The UTF-8 of a symbol; a mark is written as its name. */
size_t td_reply_utf8(uint32_t sym, char out[16]);
/* Content or reasoning. */
void td_reply_put_text(struct td_reply *r, uint32_t sym);

/* ---- reply_open.c: the beginning of a call ---- */

/* Whether the held symbols and this one are the beginning of a call. */
bool td_reply_open_takes(struct td_reply *r, uint32_t sym, bool *ret_complete);

/* ---- reply_calls.c ---- */

/* The name of a call is complete: its symbols are held[from..n). */
void td_reply_call_begin(struct td_reply *r, const uint32_t *name, size_t n);
void td_reply_call_symbol(struct td_reply *r, uint32_t sym);
/* The end: gives out what is held of a value. */
void td_reply_call_end(struct td_reply *r, bool cut);

#endif
