/* A bounded queue of equal items in memory taken at start-up: how a step machine hands out its
 * actions. Start-up memory that is never reached is never touched: an emptied queue begins again
 * at its first item. */
#ifndef TD_COMMON_BASE_FIFO_H
#define TD_COMMON_BASE_FIFO_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct td_fifo {
    uint8_t *items; /* [capacity] of item_size */
    size_t item_size;
    uint32_t capacity, head, n;
};

/* False: no memory. */
static inline bool td_fifo_create(struct td_fifo *f, size_t item_size, uint32_t capacity) {
    *f = (struct td_fifo){.item_size = item_size, .capacity = capacity};
    f->items = calloc(capacity, item_size);
    return f->items != NULL;
}
static inline void td_fifo_destroy(struct td_fifo *f) {
    free(f->items);
    f->items = NULL;
}

/* A zeroed item at the end, to be filled by the caller. The owner of the queue proves that it is
 * large enough; a full one is a programming error. */
static inline void *td_fifo_push(struct td_fifo *f) {
    assert(f->n < f->capacity);
    if (f->n == 0) f->head = 0;
    uint32_t i = f->head + f->n++;
    if (i >= f->capacity) i -= f->capacity;
    return memset(f->items + (size_t)i * f->item_size, 0, f->item_size);
}

/* Copies the oldest item out and removes it; false when there is none. */
static inline bool td_fifo_pop(struct td_fifo *f, void *ret_item) {
    if (f->n == 0) return false;
    memcpy(ret_item, f->items + (size_t)f->head * f->item_size, f->item_size);
    f->head = f->head + 1 == f->capacity ? 0 : f->head + 1;
    f->n--;
    return true;
}

#endif
