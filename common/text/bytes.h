/* A growable run of bytes, owned by the caller, for text that is put together before it is encoded.
 * Zero-initialised is empty and valid. A failed append leaves `failed` set and the bytes as they
 * were, so a caller may append many times and look once. */
#ifndef TD_COMMON_TEXT_BYTES_H
#define TD_COMMON_TEXT_BYTES_H

#include <stdbool.h>
#include <stddef.h>

struct td_bytes {
    char *p; /* [cap], the first n in use; not terminated */
    size_t n, cap;
    bool failed; /* out of memory: something is missing */
};

void td_bytes_add(struct td_bytes *b, const void *p, size_t n);
void td_bytes_free(struct td_bytes *b);

#endif
