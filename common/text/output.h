/* Generated token ids to client text: a pure step machine, one per request.
 *
 * Bytes are held until they make whole UTF-8 code points, so every delta is valid UTF-8; bytes
 * that can never become one turn into U+FFFD, one per maximal subpart (Unicode 3.9, as browsers
 * and Python do). The token </think> ends the reasoning; the same letters in ordinary tokens are
 * text. Added tokens give no text and do not interrupt a code point, except that </think> does.
 *
 * Stop strings apply to content only and to its bytes, not to tokens: generation stops at the
 * first byte that completes any of them (of those completed there, the longest), the text before
 * that string is content, and nothing after it is. Text that could become a stop string is held
 * back. What comes out in total does not depend on how the bytes are spread over tokens. */
#ifndef TD_COMMON_TEXT_OUTPUT_H
#define TD_COMMON_TEXT_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/stops.h"
#include "common/text/tokenizer.h"

/* Borrowed for the call of td_output_init only. 1..TD_STOP_BYTES_MAX bytes of UTF-8. */
struct td_output_stop {
    const char *text;
    size_t n;
};

struct td_output_params {
    const struct td_tokenizer *t; /* borrowed, must outlive the machine */
    bool reasoning;               /* starts in reasoning: the prompt ended with <think> */
    int32_t think_end;            /* id of </think>, -1: none */
    const struct td_output_stop *stops;
    size_t n_stops; /* <= TD_STOP_MAX */
};

/* What one step gave: at most one of the two deltas is not empty, except at a </think> that
 * follows nothing. Both point into the machine and are valid until its next call. */
struct td_output_event {
    const char *reasoning;
    size_t reasoning_n;
    const char *content;
    size_t content_n;
    bool stopped; /* a stop string is complete; later pushes give nothing */
};

struct td_output_match; /* one stop string and how much of it the content ends with */

struct td_output {
    const struct td_tokenizer *t;
    struct td_output_match *stops; /* [n_stops] */
    size_t n_stops;
    char *buf; /* [cap]: held content of n bytes, then what the step adds */
    size_t n, cap;
    size_t emitted; /* bytes of buf the last step handed out */
    int32_t think_end;
    bool reasoning, stopped;
    uint8_t pending[4]; /* incomplete UTF-8 */
    uint8_t pending_n;
};

/* Takes all memory the machine will need. TD_INVALID: an empty, too long or not UTF-8 stop string,
 * or too many; TD_NO_MEMORY. After a failure td_output_finish is allowed, not needed. */
TD_MUST_USE td_status td_output_init(struct td_output *o, const struct td_output_params *p,
                                     struct td_error *err);

/* One generated id. */
void td_output_push(struct td_output *o, int32_t id, struct td_output_event *ret_ev);

/* End of the stream: gives out what is held. An incomplete code point at the end becomes U+FFFD,
 * or nothing if `cut` (the length limit ended generation in the middle of it). */
void td_output_end(struct td_output *o, bool cut, struct td_output_event *ret_ev);

void td_output_finish(struct td_output *o);

#endif
