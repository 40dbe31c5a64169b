/* JSON text as the model was trained to see it: the form of Python's
 * json.dumps(json.loads(text), ensure_ascii=False), made from text to text, so that integers keep
 * all their digits and keys their order. Separators ", " and ": "; non-ASCII raw; \" \\ \n \r \t \b
 * \f and \u00xx for other control characters; floats in the shortest form that reads back. What
 * Python's reader takes is taken: NaN, Infinity, -Infinity, lone surrogates (which become U+FFFD).
 * A key that occurs twice in an object is kept twice. */
#ifndef TD_COMMON_TEXT_PYJSON_H
#define TD_COMMON_TEXT_PYJSON_H

#include <stdint.h>

#include "common/base/status.h"
#include "common/text/bytes.h"

/* Arrays and objects inside each other, at most. */
enum { TD_PYJSON_DEPTH_MAX = 512 };

/* Appends the form of the one value that `text` holds. TD_FORMAT: not JSON (in UTF-8); TD_TOO_LONG:
 * too deep; TD_NO_MEMORY. On failure `out` is as before. */
TD_MUST_USE td_status td_pyjson(const char *text, size_t n, struct td_bytes *out,
                                struct td_error *err);

/* Walks the members of an object, one by one. Zero-initialise `at`. */
struct td_pyjson_member {
    struct td_bytes key;   /* its text, escapes resolved; owned, used again by the next call */
    struct td_bytes value; /* as td_pyjson writes it; of a string: its text, escapes resolved */
    bool is_string;
    size_t at; /* how far the text was read */
};

/* Reads the next member into `m`, or sets *ret_end. The same failures, and TD_FORMAT when the text
 * is no object. */
TD_MUST_USE td_status td_pyjson_next(const char *text, size_t n, struct td_pyjson_member *m,
                                     bool *ret_end, struct td_error *err);
void td_pyjson_member_free(struct td_pyjson_member *m);

/* Appends the form of a float, as Python's repr writes it. */
void td_pyjson_float(struct td_bytes *out, double v);

/* How one code point (1 to 4 bytes of UTF-8) stands inside a JSON string: itself, or its escape in
 * `buf`. */
const char *td_pyjson_escape(const char *bytes, size_t n, char buf[8], size_t *ret_n);

#endif
