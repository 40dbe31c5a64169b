/* Clients' JSON to jansson's tree, in one pass over the text. jansson's own reader looks at each byte
 * through a chain of calls, which was a fifth of what a small request cost, and most of what a large one
 * did. What is taken is the same (RFC 8259): strings are UTF-8 without lone surrogates, U+0000 may be in
 * them but not in keys, integers have 64 bits. */
#ifndef TD_ROUTER_JSON_READ_H
#define TD_ROUTER_JSON_READ_H

#include <jansson.h>

#include "common/base/status.h"

/* Arrays and objects inside each other, at most. */
enum { TD_JSON_DEPTH_MAX = 2048 };

enum td_json_rules {
    TD_JSON_STRICT, /* a key that comes twice in an object is wrong */
    TD_JSON_LOOSE,  /* it is not, the later one counts; integers of any length are read as reals */
};

/* The one value that `text` holds, any kind. The caller releases it with json_decref. TD_FORMAT: what is
 * wrong and where; TD_NO_MEMORY. */
TD_MUST_USE td_status td_json_read(const char *text, size_t n, enum td_json_rules rules, json_t **ret,
                                   struct td_error *err);

#endif
