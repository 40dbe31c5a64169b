/* The grammar of what begins a call, one symbol at a time. It is exact (white space apart), since
 * what follows it is no longer text: prose about the markup must not become a call. */
#include <string.h>

#include "common/text/reply_parts.h"

enum { SPACES_MAX = 16 };

enum {
    OPEN_MARK,       /* < */
    OPEN_WORD,       /* <| */
    OPEN_TOOL_CALLS, /* <|t */
    OPEN_CLOSE,      /* <|tool_calls */
    OPEN_BETWEEN,    /* <|tool_calls> */
    OPEN_MARK_2,     /* <|tool_calls> < */
    OPEN_INVOKE,     /* <| i, <|tool_calls> <| */
    OPEN_SPACE,      /* <|invoke */
    OPEN_ATTRIBUTE,  /* <|invoke and a space */
    OPEN_NAME,       /* <|invoke name=" */
    OPEN_QUOTE,      /* <|invoke name="NAME" */
};

static bool go(struct td_reply *r, uint8_t open, uint8_t at) {
    r->open = open;
    r->open_at = at;
    return true;
}

/* The next letter of a word; behind its last one comes `then`. */
static bool letter(struct td_reply *r, uint32_t sym, const char *word, uint8_t then) {
    if (sym != (unsigned char)word[r->open_at]) return false;
    r->open_at++;
    return word[r->open_at] ? true : go(r, then, 0);
}

static bool space(struct td_reply *r, uint32_t sym, uint8_t then) {
    return td_sym_is_space(sym) && r->open_at < SPACES_MAX &&
           go(r, then, (uint8_t)(r->open_at + 1));
}

static bool name(struct td_reply *r, uint32_t sym) {
    if (sym == '"') return r->open_at > 0 && go(r, OPEN_QUOTE, 0);
    bool fits = sym >= ' ' && sym != '<' && sym != '>' && sym < TD_SYM_DSML;
    return fits && r->open_at < TD_REPLY_NAME_MAX && go(r, OPEN_NAME, (uint8_t)(r->open_at + 1));
}

bool td_reply_open_takes(struct td_reply *r, uint32_t sym, bool *ret_complete) {
    *ret_complete = false;
    switch (r->n_held == 1 ? OPEN_MARK : r->open) {
    case OPEN_MARK:
        return sym == TD_SYM_DSML && go(r, OPEN_WORD, 0);
    case OPEN_WORD:
        if (sym == 'i') return !r->enforced && go(r, OPEN_INVOKE, 1);
        return sym == 't' && go(r, OPEN_TOOL_CALLS, 1);
    case OPEN_TOOL_CALLS:
        return letter(r, sym, "tool_calls", OPEN_CLOSE);
    case OPEN_CLOSE:
        return sym == '>' && go(r, OPEN_BETWEEN, 0);
    case OPEN_BETWEEN:
        return sym == '<' ? go(r, OPEN_MARK_2, 0) : space(r, sym, OPEN_BETWEEN);
    case OPEN_MARK_2:
        return sym == TD_SYM_DSML && go(r, OPEN_INVOKE, 0);
    case OPEN_INVOKE:
        return letter(r, sym, "invoke", OPEN_SPACE);
    case OPEN_SPACE:
        if (r->open_at > 0 && sym == 'n') return go(r, OPEN_ATTRIBUTE, 1);
        return space(r, sym, OPEN_SPACE);
    case OPEN_ATTRIBUTE:
        return letter(r, sym, "name=\"", OPEN_NAME);
    case OPEN_NAME:
        return name(r, sym);
    default:
        *ret_complete = sym == '>';
        return sym == '>';
    }
}
