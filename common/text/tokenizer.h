/* Text to token ids and back: DeepSeek's byte-level BPE, read from a checkpoint's tokenizer.json.
 *
 * A loaded tokenizer never changes, so any number of threads may use it at once. Two kinds of
 * token: base tokens stand for bytes; added tokens (role marks, <think>, end of text, place
 * holders) have a name and are written by the server only. td_tokenizer_encode never yields an
 * added token, whatever the text says. */
#ifndef TD_COMMON_TEXT_TOKENIZER_H
#define TD_COMMON_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/ids.h"

struct td_tokenizer;

/* Longest text of one encode call, bytes. */
#define TD_TEXT_BYTES_MAX ((size_t)1 << 30)

/* Reads `dir`/tokenizer.json. TD_IO: cannot be read; TD_FORMAT: not well-formed; TD_UNSUPPORTED:
 * a tokenizer of another kind (other splitters, normaliser, byte fallback, ...). */
TD_MUST_USE td_status td_tokenizer_load(const char *dir, struct td_tokenizer **ret_t,
                                        struct td_error *err);
/* The same from `size` bytes of a tokenizer.json; `path` is for sentences. */
TD_MUST_USE td_status td_tokenizer_parse(const char *path, const char *text, size_t size,
                                         struct td_tokenizer **ret_t, struct td_error *err);
void td_tokenizer_destroy(struct td_tokenizer *t);

/* Appends the ids of `n` bytes of ordinary text to `out`. Time is near linear in n for any text.
 * Bytes that are not UTF-8 are no error: each is a character of no category, and its token is its
 * byte, so decoding gives back the bytes for any input. TD_TOO_LONG beyond TD_TEXT_BYTES_MAX,
 * TD_NO_MEMORY; on failure `out` is as before. */
TD_MUST_USE td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n,
                                          struct td_ids *out, struct td_error *err);

/* The same, but names of added tokens in the text become those tokens, as in Hugging Face's
 * encode. For tools and comparisons; never for text that came from a client. */
TD_MUST_USE td_status td_tokenizer_encode_added(const struct td_tokenizer *t, const char *text,
                                                size_t n, struct td_ids *out, struct td_error *err);

/* Id of the added token of that name, -1 if the checkpoint has none. */
int32_t td_tokenizer_added(const struct td_tokenizer *t, const char *name);

/* Bytes of a token, owned by the tokenizer: raw bytes of a base token, the name of an added one.
 * Ids that name nothing (negative, between or beyond the named ones) have no bytes: n = 0. */
const char *td_tokenizer_bytes(const struct td_tokenizer *t, int32_t id, size_t *ret_n);

/* Whether `id` is not a base token: an added token or an id that names nothing. Such ids never
 * become text for a client. */
bool td_tokenizer_is_special(const struct td_tokenizer *t, int32_t id);

/* Highest named id plus one. The model's vocabulary can be larger. */
int32_t td_tokenizer_size(const struct td_tokenizer *t);

/* Bytes of the longest base token. */
size_t td_tokenizer_max_bytes(const struct td_tokenizer *t);

#endif
