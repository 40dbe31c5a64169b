/* Generated token ids to what a client is told: a pure step machine, one per answer, for reasoning,
 * content and tool calls. An id goes in, events come out. What comes out in total does not depend
 * on how the text is spread over tokens, and the events of a stream, put together, are the answer
 * that is not streamed.
 *
 * Text. Bytes are held until they make whole code points, so every piece is valid UTF-8; bytes that
 * can never become one turn into U+FFFD, one per maximal subpart (Unicode 3.9, as browsers and
 * Python do). Added tokens give no text and do not interrupt a code point, except the marks below.
 *
 * Marks. </think> and the DSML mark are tokens; the same letters spelled in ordinary tokens are
 * text. Only where a vocabulary has no DSML token is the mark what it looks like.
 *
 * Reasoning ends at </think>. Line ends at the beginning of reasoning and content are dropped, and
 * those (up to 64) before </think> and before calls. A stray </think> in the content is dropped.
 *
 * Calls are looked for when tools were declared and only then; without, the DSML mark is shown as
 * what it is. They begin where one of these is complete, and nothing less is taken for a call:
 *     <|DSML|tool_calls> white space <|DSML|invoke name="NAME">       <|DSML|invoke name="NAME">
 * What turns out otherwise is text. From there on the markup is read with tolerance: a value ends
 * at </|DSML|parameter and nowhere else, so it may hold any text; names of added tokens in it are
 * text too. Arguments are the text of a JSON object: string values are encoded, others are copied
 * as they stand. Behind the calls nothing more is said: text there stops the answer.
 *
 * Stop strings apply to content only and to its bytes, not to tokens: generation stops at the
 * first byte that completes any of them (of those completed there, the longest), the text before
 * that string is content, and nothing after it is. Text that could become a stop string, or the
 * beginning of a call, is held back; nothing held back is lost at the end. */
#ifndef TD_COMMON_TEXT_REPLY_H
#define TD_COMMON_TEXT_REPLY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/bytes.h"
#include "common/text/chat.h"
#include "common/text/stops.h"

struct td_reply_params {
    const struct td_chat *chat;  /* marks and tokenizer; borrowed, must outlive the machine */
    bool plain;                  /* no conversation: all is content, nothing is dropped */
    bool reasoning;              /* starts in reasoning: the prompt ended with <think> */
    bool calls;                  /* tools were declared */
    bool one_call;               /* the answer stops behind its first call */
    const struct td_stop *stops; /* [n_stops] for the call of td_reply_init only */
    size_t n_stops;              /* <= TD_STOP_MAX */
    bool enforced;               /* by a grammar: reasoning ends at </think> alone, and calls begin
                                  * with tool_calls */
    uint32_t min_ids;            /* stop strings are looked for behind the text of so many ids */
};

enum td_reply_kind {
    TD_REPLY_REASONING, /* more of the reasoning */
    TD_REPLY_CONTENT,   /* more of the content */
    TD_REPLY_CALL,      /* a call begins; the text is its name */
    TD_REPLY_ARGUMENTS, /* more of its arguments */
    TD_REPLY_CALL_END,  /* it is complete; no text */
};

struct td_reply_event {
    enum td_reply_kind kind;
    uint32_t call; /* number of the call, from 0 */
    const char *text;
    size_t n;
};

enum td_reply_finish { TD_REPLY_STOP, TD_REPLY_LENGTH, TD_REPLY_CALLS };

/* Longest beginning of a call, symbols; see the grammar above. */
enum { TD_REPLY_HELD_MAX = 192, TD_REPLY_NAME_MAX = 128 };

struct td_reply_record;

struct td_reply {
    const struct td_chat *chat;
    bool plain, calls, one_call, enforced;
    uint32_t min_ids; /* still to come */
    bool early;       /* the present id is one of them */
    struct td_stops stops;

    /* the step's events */
    struct td_bytes out;
    struct td_reply_record *records; /* [cap_records] */
    size_t n_records, cap_records, next;
    bool failed; /* out of memory: something is missing */

    /* bytes to symbols */
    uint8_t pending[4]; /* incomplete UTF-8 */
    uint8_t pending_n;
    uint8_t spelled; /* code points of a mark spelled in ordinary tokens */

    /* text */
    bool reasoning; /* which part */
    bool begun;     /* the part has text */
    bool stopped;   /* a stop string, or the end of the calls: later ids give nothing */
    bool ended;
    uint32_t line_ends;               /* held */
    uint32_t held[TD_REPLY_HELD_MAX]; /* symbols that may be the beginning of a call */
    uint32_t n_held;
    uint8_t open, open_at;            /* where in the grammar they lead */
    char keep[TD_STOP_BYTES_MAX + 4]; /* content that may become a stop string */
    size_t n_keep;

    /* calls */
    uint8_t state, after; /* enum of reply_parts.h; `after`: behind what is being skipped */
    uint8_t tag;
    char word[16];
    uint8_t word_n;
    uint32_t n_calls;   /* begun */
    uint32_t completed; /* of them */
    uint8_t value_at, false_at;
    bool call_open, any_argument, is_string;
};

/* Takes all memory that ordinary steps need. TD_INVALID: bad stop strings; TD_NO_MEMORY. After a
 * failure td_reply_free is allowed, not needed. */
TD_MUST_USE td_status td_reply_init(struct td_reply *r, const struct td_reply_params *p,
                                    struct td_error *err);
void td_reply_free(struct td_reply *r);

/* One generated id. Its events are read with td_reply_next before the next call. */
void td_reply_push(struct td_reply *r, int32_t id);

/* End of the stream: gives out what is held. `cut`: the length limit ended generation, so an
 * incomplete code point and a call that only began are left out; else they are U+FFFD and text. */
void td_reply_end(struct td_reply *r, bool cut);

/* Text points into the machine and is valid until its next step. */
bool td_reply_next(struct td_reply *r, struct td_reply_event *ret_ev);

/* Whether the next id belongs to the reasoning. */
bool td_reply_in_reasoning(const struct td_reply *r);

/* Why the answer ended; `cut` as above. LENGTH only when something was still open. */
enum td_reply_finish td_reply_finish(const struct td_reply *r, bool cut);

#endif
