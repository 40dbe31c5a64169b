/* JSON text into a buffer that is used again for every chunk, so that streaming allocates nothing
 * per token once the buffer has grown to the largest chunk. Commas are placed by the writer.
 * Strings may hold any bytes: what is not UTF-8 becomes U+FFFD. */
#ifndef TD_ROUTER_JSON_WRITE_H
#define TD_ROUTER_JSON_WRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct td_json_out {
    char *p; /* [cap], the first n in use; not terminated */
    size_t n, cap;
    bool comma;  /* a value was written at this level */
    bool failed; /* out of memory: the text is not whole */
};

void td_json_out_reset(struct td_json_out *w);
void td_json_out_free(struct td_json_out *w);

/* Bytes as they are: frames around JSON, or JSON written before. */
void td_json_raw(struct td_json_out *w, const char *bytes, size_t n);
/* A whole JSON value written elsewhere, with the comma it needs. */
void td_json_value(struct td_json_out *w, const char *json, size_t n);

void td_json_open(struct td_json_out *w, char bracket);   /* '{' or '[' */
void td_json_close(struct td_json_out *w, char bracket);  /* '}' or ']' */
void td_json_key(struct td_json_out *w, const char *key); /* a name of ours: nothing to escape */
void td_json_str(struct td_json_out *w, const char *s, size_t n);
void td_json_text(struct td_json_out *w, const char *s); /* terminated */
void td_json_u64(struct td_json_out *w, uint64_t v);
void td_json_i64(struct td_json_out *w, int64_t v);
/* Finite numbers only have a form in JSON; -inf and NaN are written as -9999, as clients of
 * logprobs expect. */
void td_json_num(struct td_json_out *w, double v);
void td_json_bool(struct td_json_out *w, bool v);
void td_json_null(struct td_json_out *w);

#endif
