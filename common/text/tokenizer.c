/* Encoding, and the look-ups that need no more than the loaded tables. */
#include "common/text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "common/text/split.h"
#include "common/text/tokenizer_impl.h"

static uint32_t hash_bytes(const char *p, size_t n) {
    uint64_t h = n * 0x9E3779B97F4A7C15u, w;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    w = 0;
    for (size_t i = 0; i < n; i++) {
        w |= (uint64_t)(uint8_t)p[i] << 8 * i;
    }
    h = (h ^ w) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h ^ h >> 32);
}

td_status td_vocab_init(struct td_vocab *v, size_t count) {
    uint32_t size = 16;
    while (size < 2 * count) {
        size *= 2;
    }
    v->slots = malloc(size * sizeof *v->slots);
    if (!v->slots) return TD_NO_MEMORY;
    v->mask = size - 1;
    memset(v->slots, 0xFF, size * sizeof *v->slots); /* every id -1 */
    return TD_OK;
}

void td_vocab_finish(struct td_vocab *v) {
    free(v->slots);
    *v = (struct td_vocab){0};
}

void td_vocab_add(struct td_vocab *v, const struct td_tokenizer *t, int32_t id) {
    uint32_t hash = hash_bytes(t->blob + t->tokens[id].at, t->tokens[id].n);
    uint32_t i = hash & v->mask;
    while (v->slots[i].id >= 0) {
        i = (i + 1) & v->mask;
    }
    v->slots[i] = (struct td_vocab_slot){.hash = hash, .id = id};
}

int32_t td_vocab_find(const struct td_vocab *v, const struct td_tokenizer *t, const char *p,
                      size_t n) {
    if (!v->slots) return -1;
    uint32_t hash = hash_bytes(p, n);
    for (uint32_t i = hash & v->mask; v->slots[i].id >= 0; i = (i + 1) & v->mask) {
        const struct td_token *k = &t->tokens[v->slots[i].id];
        if (v->slots[i].hash == hash && k->n == n && memcmp(t->blob + k->at, p, n) == 0) {
            return v->slots[i].id;
        }
    }
    return -1;
}

static td_status encode_piece(const struct td_tokenizer *t, const char *p, size_t n,
                              struct td_ids *out) {
    if (n <= t->max_bytes) {
        int32_t id = td_vocab_find(&t->base, t, p, n);
        if (id >= 0 && t->tokens[id].whole) return td_ids_push(out, id);
    }
    return td_bpe_encode(&t->bpe, (const uint8_t *)p, n, out);
}

static td_status encode_text(const struct td_tokenizer *t, const char *text, size_t n,
                             struct td_ids *out) {
    while (n) {
        size_t piece = td_split_piece((const uint8_t *)text, n);
        TD_TRY(encode_piece(t, text, piece, out));
        text += piece;
        n -= piece;
    }
    return TD_OK;
}

/* The longest name that begins at p[0..n), -1 if none does. */
static int32_t added_at(const struct td_tokenizer *t, const struct td_added_pass *a, const char *p,
                        size_t n) {
    if (!a->first[(uint8_t)p[0]]) return -1;
    for (size_t k = n < a->max_bytes ? n : a->max_bytes; k > 0; k--) {
        if (!(a->lengths[k / 64] >> k % 64 & 1)) continue;
        int32_t id = td_vocab_find(&a->names, t, p, k);
        if (id >= 0) return id;
    }
    return -1;
}

/* Cuts at the names of this pass, and what is between at those of the next one. */
static td_status encode_passes(const struct td_tokenizer *t, int pass, const char *text, size_t n,
                               struct td_ids *out) {
    if (pass == 2) return encode_text(t, text, n, out);
    const struct td_added_pass *a = &t->pass[pass];
    size_t done = 0, i = 0;
    while (a->count && i < n) {
        int32_t id = added_at(t, a, text + i, n - i);
        if (id < 0) {
            i++;
            continue;
        }
        TD_TRY(encode_passes(t, pass + 1, text + done, i - done, out));
        TD_TRY(td_ids_push(out, id));
        i += t->tokens[id].n;
        done = i;
    }
    return encode_passes(t, pass + 1, text + done, n - done, out);
}

static td_status encode(const struct td_tokenizer *t, int first_pass, const char *text, size_t n,
                        struct td_ids *out, struct td_error *err) {
    if (n > TD_TEXT_BYTES_MAX) {
        return td_fail(err, TD_TOO_LONG, "text to encode: expected at most %zu bytes, found %zu",
                       TD_TEXT_BYTES_MAX, n);
    }
    size_t before = out->n;
    td_status st = encode_passes(t, first_pass, text, n, out);
    if (st == TD_OK) return TD_OK;
    out->n = before;
    return td_fail(err, st, "text to encode: no memory for the ids of %zu bytes", n);
}

td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n,
                              struct td_ids *out, struct td_error *err) {
    return encode(t, 2, text, n, out, err);
}

td_status td_tokenizer_encode_added(const struct td_tokenizer *t, const char *text, size_t n,
                                    struct td_ids *out, struct td_error *err) {
    return encode(t, 0, text, n, out, err);
}

int32_t td_tokenizer_added(const struct td_tokenizer *t, const char *name) {
    for (int i = 0; i < 2; i++) {
        int32_t id = td_vocab_find(&t->pass[i].names, t, name, strlen(name));
        if (id >= 0) return id;
    }
    return -1;
}

const char *td_tokenizer_bytes(const struct td_tokenizer *t, int32_t id, size_t *ret_n) {
    *ret_n = 0;
    if (id < 0 || id >= t->size) return "";
    *ret_n = t->tokens[id].n;
    return t->blob + t->tokens[id].at;
}

bool td_tokenizer_is_special(const struct td_tokenizer *t, int32_t id) {
    return id < 0 || id >= t->size || t->tokens[id].kind != TD_TOKEN_BASE;
}

int32_t td_tokenizer_size(const struct td_tokenizer *t) {
    return t->size;
}

size_t td_tokenizer_max_bytes(const struct td_tokenizer *t) {
    return t->max_bytes;
}

void td_tokenizer_destroy(struct td_tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < 2; i++) {
        td_vocab_finish(&t->pass[i].names);
        free(t->pass[i].lengths);
    }
    td_vocab_finish(&t->base);
    td_bpe_finish(&t->bpe);
    free(t->tokens);
    free(t->blob);
    free(t);
}
