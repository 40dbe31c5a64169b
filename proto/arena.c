/* The arena of one decoded message. Protobuf-c asks for many small pieces; they come from one
 * block that is forgotten at the next decode. A message larger than the block spills into extra
 * blocks, and the next reset replaces all by one block of the whole size, so the steady state
 * allocates nothing. */
#include <stdlib.h>

#include "proto/codec_parts.h"

enum {
    ARENA_FIRST_BYTES = 32 << 10,
    /* Decoded messages are larger than their frames (ids as varints, columns as tokens); this is
     * the most that the largest legal frame needs, and what a hostile one may take. */
    ARENA_BYTES_MAX = TD_FRAME_BYTES_MAX,
    ARENA_ALIGN = 16,
};

struct block {
    struct block *next;
    size_t cap, used;
    _Alignas(ARENA_ALIGN) unsigned char bytes[];
};

struct td_msg_arena {
    struct block *first; /* the newest, where pieces are taken from */
    size_t total;        /* capacity of all blocks */
};

static struct block *block_create(size_t cap) {
    struct block *b = malloc(sizeof *b + cap);
    if (!b) return NULL;
    b->next = NULL;
    b->cap = cap;
    b->used = 0;
    return b;
}

static void blocks_destroy(struct block *b) {
    while (b) {
        struct block *next = b->next;
        free(b);
        b = next;
    }
}

td_status td_msg_arena_create(struct td_msg_arena **ret) {
    struct td_msg_arena *a = malloc(sizeof *a);
    if (!a) return TD_NO_MEMORY;
    a->first = block_create(ARENA_FIRST_BYTES);
    a->total = ARENA_FIRST_BYTES;
    if (!a->first) {
        free(a);
        return TD_NO_MEMORY;
    }
    *ret = a;
    return TD_OK;
}

void td_msg_arena_destroy(struct td_msg_arena *a) {
    if (!a) return;
    blocks_destroy(a->first);
    free(a);
}

void td_msg_arena_reset(struct td_msg_arena *a) {
    if (a->first->next) {
        struct block *one = block_create(a->total);
        if (one) {
            blocks_destroy(a->first);
            a->first = one;
        } else { /* keep the largest that is there */
            blocks_destroy(a->first->next);
            a->first->next = NULL;
            a->total = a->first->cap;
        }
    }
    a->first->used = 0;
}

void *td_msg_arena_take(struct td_msg_arena *a, size_t bytes) {
    if (bytes > ARENA_BYTES_MAX) return NULL;
    bytes = (bytes + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    struct block *b = a->first;
    if (b->cap - b->used < bytes) {
        if (a->total + bytes > ARENA_BYTES_MAX) return NULL;
        size_t cap = a->total; /* doubling */
        if (cap < bytes) cap = bytes;
        if (cap > ARENA_BYTES_MAX - a->total) cap = ARENA_BYTES_MAX - a->total;
        b = block_create(cap);
        if (!b) return NULL;
        b->next = a->first;
        a->first = b;
        a->total += cap;
    }
    void *p = b->bytes + b->used;
    b->used += bytes;
    return p;
}
