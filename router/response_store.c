/* See response_store.h. */
#include "router/response_store.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct td_response_store {
    pthread_mutex_t lock;
    uint64_t limit_bytes;
    uint32_t limit_count, n_buckets;
    struct td_stored **bucket;         /* [n_buckets] chains */
    struct td_stored *newest, *oldest; /* of those that can be found */
    struct td_response_store_counts counts;
};

td_status td_response_store_create(uint64_t bytes, uint32_t count, struct td_response_store **ret,
                                   struct td_error *err) {
    assert(bytes >= 1 && count >= 1);
    struct td_response_store *s = calloc(1, sizeof *s);
    if (s) s->bucket = calloc(count, sizeof *s->bucket);
    if (!s || !s->bucket || pthread_mutex_init(&s->lock, NULL) != 0) {
        if (s) free(s->bucket);
        free(s);
        return td_fail(err, TD_NO_MEMORY, "a store of %u responses: out of memory", count);
    }
    s->limit_bytes = bytes;
    s->limit_count = s->n_buckets = count;
    *ret = s;
    return TD_OK;
}

static uint64_t size_of(const struct td_stored *e) {
    return sizeof *e + e->input_n + e->document_n;
}

/* Conversations are long: no recursion along them. */
static void drop(struct td_response_store *s, struct td_stored *e) {
    while (e && --e->holders == 0) {
        struct td_stored *previous = e->previous;
        s->counts.bytes -= size_of(e);
        free(e->input);
        free(e->document);
        free(e);
        e = previous;
    }
}

static struct td_stored **find(struct td_response_store *s, const char *id) {
    uint64_t h = 14695981039346656037u; /* FNV-1a; ids are random, so nobody can aim */
    for (const char *p = id; *p; p++)
        h = (h ^ (unsigned char)*p) * 1099511628211u;
    struct td_stored **at = &s->bucket[h % s->n_buckets];
    while (*at && strcmp((*at)->id, id) != 0)
        at = &(*at)->chain;
    return at;
}

static void forget(struct td_response_store *s, struct td_stored **at) {
    struct td_stored *e = *at;
    *at = e->chain;
    *(e->newer ? &e->newer->older : &s->newest) = e->older;
    *(e->older ? &e->older->newer : &s->oldest) = e->newer;
    s->counts.kept--;
    drop(s, e);
}

void td_response_store_destroy(struct td_response_store *s) {
    if (!s) return;
    while (s->oldest)
        forget(s, find(s, s->oldest->id));
    assert(s->counts.bytes == 0);
    pthread_mutex_destroy(&s->lock);
    free(s->bucket);
    free(s);
}

/* NULL: there is none of this owner. */
static struct td_stored **find_of(struct td_response_store *s, const char *owner, const char *id) {
    struct td_stored **at = find(s, id);
    return *at && strcmp((*at)->owner, owner) == 0 ? at : NULL;
}

struct td_stored *td_response_store_hold(struct td_response_store *s, const char *owner,
                                         const char *id) {
    pthread_mutex_lock(&s->lock);
    struct td_stored **at = find_of(s, owner, id), *e = at ? *at : NULL;
    if (e) e->holders++;
    pthread_mutex_unlock(&s->lock);
    return e;
}

void td_response_store_drop(struct td_response_store *s, struct td_stored *e) {
    if (!e) return;
    pthread_mutex_lock(&s->lock);
    drop(s, e);
    pthread_mutex_unlock(&s->lock);
}

static struct td_stored *make(const char *id, const char *input, size_t input_n,
                              const char *document, size_t document_n) {
    struct td_stored *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->input = malloc(input_n + 1);
    e->document = malloc(document_n + 1);
    if (!e->input || !e->document) {
        free(e->input);
        free(e->document);
        free(e);
        return NULL;
    }
    memcpy(e->input, input, input_n);
    memcpy(e->document, document, document_n);
    e->input_n = input_n;
    e->document_n = document_n;
    memcpy(e->id, id, strlen(id) + 1);
    return e;
}

/* What goes may still be held by what continues it; then its bytes stay, and younger ones go. */
static bool make_room(struct td_response_store *s, uint64_t need) {
    while (s->oldest &&
           (s->counts.kept >= s->limit_count || s->counts.bytes + need > s->limit_bytes)) {
        forget(s, find(s, s->oldest->id));
        s->counts.evicted++;
    }
    return s->counts.bytes + need <= s->limit_bytes;
}

td_status td_response_store_put(struct td_response_store *s, const char *owner, const char *id,
                                struct td_stored *previous, const char *input, size_t input_n,
                                const char *document, size_t document_n) {
    assert(strlen(id) < TD_RESPONSE_ID_MAX && strlen(owner) < TD_RESPONSE_OWNER_MAX);
    struct td_stored *e = make(id, input, input_n, document, document_n);
    if (!e) return TD_NO_MEMORY;
    memcpy(e->owner, owner, strlen(owner) + 1);
    e->conversation_n = input_n + document_n + (previous ? previous->conversation_n : 0);
    pthread_mutex_lock(&s->lock);
    assert(!*find(s, id));
    e->holders = 1;
    e->previous = previous;
    if (previous) previous->holders++;
    bool fits = make_room(s, size_of(e));
    s->counts.bytes += size_of(e);
    if (fits) {
        struct td_stored **at = find(s, id);
        *at = e;
        e->older = s->newest;
        *(s->newest ? &s->newest->newer : &s->oldest) = e;
        s->newest = e;
        s->counts.kept++;
    } else {
        drop(s, e);
    }
    pthread_mutex_unlock(&s->lock);
    return fits ? TD_OK : TD_TOO_LONG;
}

bool td_response_store_delete(struct td_response_store *s, const char *owner, const char *id) {
    pthread_mutex_lock(&s->lock);
    struct td_stored **at = find_of(s, owner, id);
    bool found = at != NULL;
    if (found) forget(s, at);
    pthread_mutex_unlock(&s->lock);
    return found;
}

void td_response_store_counts(struct td_response_store *s, struct td_response_store_counts *ret) {
    pthread_mutex_lock(&s->lock);
    *ret = s->counts;
    pthread_mutex_unlock(&s->lock);
}
