/* Stop strings over a growing text: one Knuth-Morris-Pratt automaton each, so that a byte costs the
 * same whatever came before. An automaton's state is how many bytes at the end of the text could
 * still become its string; the greatest state is what must be held back. */
#ifndef TD_COMMON_TEXT_STOPS_H
#define TD_COMMON_TEXT_STOPS_H

#include <stddef.h>

#include "common/base/status.h"

enum { TD_STOP_MAX = 16, TD_STOP_BYTES_MAX = 256 };

/* Borrowed. 1..TD_STOP_BYTES_MAX bytes of UTF-8. */
struct td_stop {
    const char *text;
    size_t n;
};

struct td_stop_match; /* one string and how much of it the text ends with */

struct td_stops {
    struct td_stop_match *match; /* [n] */
    size_t n;
    size_t held;    /* bytes at the end of the text that could become a string */
    size_t matched; /* 1 + number of the string completed last; 0: none was */
};

/* TD_INVALID: an empty, too long or not UTF-8 string, or too many; TD_NO_MEMORY. Copies. */
TD_MUST_USE td_status td_stops_init(struct td_stops *s, const struct td_stop *list, size_t n,
                                    struct td_error *err);
void td_stops_finish(struct td_stops *s);

/* The text grew by one byte. Returns the length of the longest string that it completes, or 0. */
size_t td_stops_byte(struct td_stops *s, char byte);

/* The string completed last; NULL: none was. */
const char *td_stops_matched(const struct td_stops *s, size_t *ret_n);

#endif
