/* Typed reading of a client's JSON: every error is a sentence that names the field, what was
 * expected and what was found, ready to be sent. A field that is absent or null leaves its output
 * as it was, so callers fill in defaults first. */
#ifndef TD_ROUTER_JSON_REQUEST_H
#define TD_ROUTER_JSON_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "router/api_error.h"

/* Parses a body that must be one JSON object (400 with the position otherwise). Duplicate keys are
 * refused: which one counts would be a guess. The caller releases it with json_decref. */
TD_MUST_USE td_status td_request_parse(const char *body, size_t n, json_t **ret,
                                       struct td_api_error *e);

/* What a message says was found: "string", "number 1.5", "array", ... */
const char *td_request_found(const json_t *v, char buf[40]);

/* One object being read; `path` is what its fields are called in errors: "" or "messages[2].". */
struct td_fields {
    const json_t *object;
    const char *path;
    struct td_api_error *e;
};

/* The field itself, NULL when absent or null. */
const json_t *td_field(const struct td_fields *f, const char *name);
/* Its full name for errors, in `buf`. */
const char *td_field_name(const struct td_fields *f, const char *name, char buf[96]);
/* "<name>: expected <expected>, found ...", status 400. */
td_status td_field_wrong(const struct td_fields *f, const char *name, const char *expected);

TD_MUST_USE td_status td_field_bool(const struct td_fields *f, const char *name, bool *ret);
TD_MUST_USE td_status td_field_u64(const struct td_fields *f, const char *name, uint64_t lo,
                                   uint64_t hi, uint64_t *ret);
TD_MUST_USE td_status td_field_num(const struct td_fields *f, const char *name, double lo,
                                   double hi, double *ret);
/* Borrowed from the JSON; may hold U+0000. */
TD_MUST_USE td_status td_field_str(const struct td_fields *f, const char *name, const char **ret,
                                   size_t *ret_n);
TD_MUST_USE td_status td_field_array(const struct td_fields *f, const char *name,
                                     const json_t **ret);
TD_MUST_USE td_status td_field_object(const struct td_fields *f, const char *name,
                                      const json_t **ret);

/* What may stand in an object. A parameter of the API that is not served is refused by name unless
 * its value asks for nothing: silence would be a wrong answer. */
enum td_param_use {
    TD_PARAM_READ,     /* read elsewhere */
    TD_PARAM_HARMLESS, /* cannot change the answer */
    TD_PARAM_ZERO,     /* served when 0 */
    TD_PARAM_ONE,      /* served when 1 */
    TD_PARAM_FALSE,    /* served when false */
    TD_PARAM_EMPTY,    /* served when [], {} or "" */
    TD_PARAM_WORD,     /* served when it is one of `words`, [one] or {"type": one} */
    TD_PARAM_REFUSED,  /* never served */
};

struct td_param {
    const char *name;
    enum td_param_use use;
    const char *words; /* 'a|b' */
};

/* Checks every key of the object against the list, which ends with a NULL name, and a second one
 * (may be NULL). */
TD_MUST_USE td_status td_fields_known(const struct td_fields *f, const struct td_param *list,
                                      const struct td_param *more);

#endif
