/* See bytes.h. */
#include "common/text/bytes.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void td_bytes_add(struct td_bytes *b, const void *p, size_t n) {
    if (n == 0 || b->failed) return;
    if (n > b->cap - b->n) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap - b->n < n && cap <= SIZE_MAX / 2) {
            cap *= 2;
        }
        char *grown = cap - b->n < n ? NULL : realloc(b->p, cap);
        if (!grown) {
            b->failed = true;
            return;
        }
        b->p = grown;
        b->cap = cap;
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

void td_bytes_free(struct td_bytes *b) {
    free(b->p);
    *b = (struct td_bytes){0};
}
