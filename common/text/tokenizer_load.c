/* Reads tokenizer.json. The splitters are written by hand (split.c), so the file's own description
 * of them, and of everything else that could change ids, must be the one kind they implement;
 * anything else is refused with a sentence rather than encoded almost right. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer_impl.h"
#include "common/text/unicode.h"

/* State of one load. */
struct load {
    const char *path;
    struct td_tokenizer *t;
    struct td_error *err;
    int16_t byte_of[512]; /* GPT-2's alphabet: code point -> byte, -1: none */
};

#define BAD(ld, status, fmt, ...) td_fail((ld)->err, status, "%s: " fmt, (ld)->path, __VA_ARGS__)

static void alphabet_init(int16_t byte_of[512]) {
    memset(byte_of, 0xFF, 512 * sizeof *byte_of);
    int next = 256;
    for (int b = 0; b < 256; b++) {
        bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        byte_of[self ? b : next++] = (int16_t)b;
    }
}

static const char *text_of(const json_t *o, const char *key) {
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

/* Null, absent, false, 0 and "" all mean that the feature is off. */
static bool is_off(const json_t *v) {
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_number(v) && json_number_value(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0);
}

/* Line ends stand in the pattern as themselves or as escapes: both are the same pattern. */
static bool same_pattern(const char *found, const char *expected) {
    while (*expected) {
        if ((*found == '\r' || *found == '\n') && expected[0] == '\\' &&
            expected[1] == (*found == '\r' ? 'r' : 'n')) {
            found++;
            expected += 2;
        } else if (*found++ != *expected++) {
            return false;
        }
    }
    return *found == 0;
}

static const char *const patterns[3] = {
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
};

static td_status check_splitters(const struct load *ld, const json_t *root) {
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    const json_t *list = json_object_get(pre, "pretokenizers");
    if (strcmp(text_of(pre, "type"), "Sequence") != 0 || json_array_size(list) != 4) {
        return BAD(ld, TD_UNSUPPORTED,
                   "pre_tokenizer: expected a Sequence of 4 steps (DeepSeek-V3's), found type "
                   "'%s' with %zu",
                   text_of(pre, "type"), json_array_size(list));
    }
    for (size_t i = 0; i < 3; i++) {
        const json_t *step = json_array_get(list, i);
        const char *pattern = text_of(json_object_get(step, "pattern"), "Regex");
        if (strcmp(text_of(step, "type"), "Split") != 0 ||
            strcmp(text_of(step, "behavior"), "Isolated") != 0 ||
            !is_off(json_object_get(step, "invert")) || !same_pattern(pattern, patterns[i])) {
            return BAD(ld, TD_UNSUPPORTED,
                       "pre_tokenizer step %zu: expected an isolating Split at %s, found %s '%s' "
                       "at %s",
                       i, patterns[i], text_of(step, "type"), text_of(step, "behavior"), pattern);
        }
    }
    const json_t *last = json_array_get(list, 3);
    if (strcmp(text_of(last, "type"), "ByteLevel") != 0 ||
        !is_off(json_object_get(last, "add_prefix_space")) ||
        !json_is_false(json_object_get(last, "use_regex"))) {
        return BAD(ld, TD_UNSUPPORTED,
                   "pre_tokenizer step 3: expected ByteLevel without prefix space and pattern, "
                   "found '%s'",
                   text_of(last, "type"));
    }
    return TD_OK;
}

static td_status check_kind(const struct load *ld, const json_t *root) {
    TD_TRY(check_splitters(ld, root));
    const json_t *norm = json_object_get(root, "normalizer");
    if (!is_off(norm) && (strcmp(text_of(norm, "type"), "Sequence") != 0 ||
                          json_array_size(json_object_get(norm, "normalizers")) != 0)) {
        return BAD(ld, TD_UNSUPPORTED, "normalizer: expected none, found '%s'",
                   text_of(norm, "type"));
    }
    const json_t *post = json_object_get(root, "post_processor");
    if (!is_off(post) && strcmp(text_of(post, "type"), "ByteLevel") != 0) {
        return BAD(ld, TD_UNSUPPORTED, "post_processor: expected none or ByteLevel, found '%s'",
                   text_of(post, "type"));
    }
    static const char *const off[] = {"truncation", "padding"};
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        if (!is_off(json_object_get(root, off[i]))) {
            return BAD(ld, TD_UNSUPPORTED, "%s: expected null, found a value", off[i]);
        }
    }
    const json_t *model = json_object_get(root, "model");
    if (strcmp(text_of(model, "type"), "BPE") != 0) {
        return BAD(ld, TD_UNSUPPORTED, "model.type: expected 'BPE', found '%s'",
                   text_of(model, "type"));
    }
    static const char *const model_off[] = {
        "dropout",       "unk_token",    "continuing_subword_prefix", "end_of_word_suffix",
        "byte_fallback", "ignore_merges"};
    for (size_t i = 0; i < sizeof model_off / sizeof *model_off; i++) {
        if (!is_off(json_object_get(model, model_off[i]))) {
            return BAD(ld, TD_UNSUPPORTED, "model.%s: expected off, found a value", model_off[i]);
        }
    }
    if (!json_is_object(json_object_get(model, "vocab")) ||
        !json_is_array(json_object_get(model, "merges")) ||
        !json_is_array(json_object_get(root, "added_tokens"))) {
        return BAD(ld, TD_FORMAT, "expected %s, found at least one missing",
                   "model.vocab, model.merges and added_tokens");
    }
    return TD_OK;
}

/* Grows `size` to hold the id and adds the name's length to the bytes needed. */
static td_status measure(const struct load *ld, const json_t *id, const char *name) {
    json_int_t v = json_integer_value(id);
    if (!json_is_integer(id) || v < 0 || v > TD_TOKEN_ID_MAX) {
        return BAD(ld, TD_FORMAT, "token '%.60s': expected an id of 0..%d, found %lld", name,
                   TD_TOKEN_ID_MAX, (long long)v);
    }
    if (v >= ld->t->size) ld->t->size = (int32_t)v + 1;
    ld->t->blob_cap += strlen(name);
    return TD_OK;
}

static td_status allocate(const struct load *ld, json_t *vocab, const json_t *added) {
    const char *name;
    json_t *v;
    size_t i;
    json_object_foreach(vocab, name, v) {
        TD_TRY(measure(ld, v, name));
    }
    json_array_foreach(added, i, v) {
        TD_TRY(measure(ld, json_object_get(v, "id"), text_of(v, "content")));
    }
    struct td_tokenizer *t = ld->t;
    if (t->blob_cap > UINT32_MAX) {
        return BAD(ld, TD_FORMAT, "expected names below 4 GiB, found %zu bytes", t->blob_cap);
    }
    t->tokens = calloc((size_t)t->size + 1, sizeof *t->tokens);
    t->blob = malloc(t->blob_cap + 1);
    if (!t->tokens || !t->blob || td_vocab_init(&t->base, json_object_size(vocab)) != TD_OK) {
        return BAD(ld, TD_NO_MEMORY, "no memory for %d tokens", t->size);
    }
    return TD_OK;
}

/* The token's bytes are the next n of the blob. */
static void take(struct td_tokenizer *t, int32_t id, enum td_token_kind kind, size_t n) {
    t->tokens[id] =
        (struct td_token){.at = (uint32_t)t->blob_n, .n = (uint32_t)n, .kind = (uint8_t)kind};
    t->blob_n += n;
}

static td_status add_added(const struct load *ld, const json_t *v) {
    struct td_tokenizer *t = ld->t;
    int32_t id = (int32_t)json_integer_value(json_object_get(v, "id"));
    const char *name = text_of(v, "content");
    static const char *const off[] = {"single_word", "lstrip", "rstrip"};
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        if (!is_off(json_object_get(v, off[i]))) {
            return BAD(ld, TD_UNSUPPORTED, "added token '%.60s': expected %s off, found on", name,
                       off[i]);
        }
    }
    size_t n = strlen(name);
    if (n == 0 || t->tokens[id].kind != TD_TOKEN_NONE || td_tokenizer_added(t, name) >= 0) {
        return BAD(ld, TD_FORMAT,
                   "added token '%.60s', id %d: expected a name and an id of its own", name, id);
    }
    struct td_added_pass *a = &t->pass[json_is_true(json_object_get(v, "normalized"))];
    memcpy(t->blob + t->blob_n, name, n);
    take(t, id, TD_TOKEN_ADDED, n);
    td_vocab_add(&a->names, t, id);
    a->count++;
    a->first[(uint8_t)name[0]] = true;
    a->lengths[n / 64] |= (uint64_t)1 << n % 64;
    if (n > a->max_bytes) a->max_bytes = n;
    return TD_OK;
}

static td_status load_added(const struct load *ld, const json_t *added) {
    const json_t *v;
    size_t i, longest = 0;
    json_array_foreach(added, i, v) {
        size_t n = strlen(text_of(v, "content"));
        if (n > longest) longest = n;
    }
    for (int k = 0; k < 2; k++) {
        struct td_added_pass *a = &ld->t->pass[k];
        a->lengths = calloc(longest / 64 + 1, sizeof *a->lengths);
        if (!a->lengths || td_vocab_init(&a->names, json_array_size(added)) != TD_OK) {
            return BAD(ld, TD_NO_MEMORY, "no memory for %zu added tokens", json_array_size(added));
        }
    }
    json_array_foreach(added, i, v) {
        TD_TRY(add_added(ld, v));
    }
    return TD_OK;
}

/* Bytes that a name in the alphabet stands for, into `bytes` (as long as the name is enough);
 * -1 if some character is not in the alphabet. */
static ptrdiff_t bytes_of(const struct load *ld, const char *name, size_t n, char *bytes) {
    ptrdiff_t k = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = td_utf8_decode((const uint8_t *)name + i, n - i, &cp);
        if (len <= 0 || cp >= 512 || ld->byte_of[cp] < 0) return -1;
        bytes[k++] = (char)ld->byte_of[cp];
        i += (size_t)len;
    }
    return k;
}

static td_status load_vocab(const struct load *ld, json_t *vocab) {
    struct td_tokenizer *t = ld->t;
    const char *name;
    json_t *v;
    json_object_foreach(vocab, name, v) {
        int32_t id = (int32_t)json_integer_value(v);
        size_t n = strlen(name);
        struct td_token *k = &t->tokens[id];
        if (k->kind == TD_TOKEN_ADDED && k->n == n && memcmp(t->blob + k->at, name, n) == 0) {
            continue; /* ids 0..2 stand in both lists */
        }
        if (k->kind != TD_TOKEN_NONE) {
            return BAD(ld, TD_FORMAT, "token '%.60s': expected an id of its own, found %d again",
                       name, id);
        }
        ptrdiff_t len = bytes_of(ld, name, n, t->blob + t->blob_n);
        if (len <= 0) {
            return BAD(ld, TD_FORMAT,
                       "token '%.60s', id %d: expected characters of the byte alphabet", name, id);
        }
        take(t, id, TD_TOKEN_BASE, (size_t)len);
        td_vocab_add(&t->base, t, id);
        if ((size_t)len > t->max_bytes) t->max_bytes = (size_t)len;
    }
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        t->bpe.byte_id[b] = td_vocab_find(&t->base, t, &c, 1);
        if (t->bpe.byte_id[b] < 0) {
            return BAD(ld, TD_FORMAT,
                       "model.vocab: expected a token for every byte, found none for "
                       "0x%02X",
                       b);
        }
    }
    return TD_OK;
}

/* A rule is written "left right" or ["left", "right"]; the alphabet has no space in it. */
static bool merge_sides(const json_t *v, const char *side[2], size_t n[2]) {
    if (json_is_array(v)) {
        if (json_array_size(v) != 2) return false;
        for (size_t i = 0; i < 2; i++) {
            side[i] = json_string_value(json_array_get(v, i));
            if (!side[i]) return false;
            n[i] = strlen(side[i]);
        }
        return true;
    }
    const char *s = json_string_value(v), *space = s ? strchr(s, ' ') : NULL;
    if (!space) return false;
    side[0] = s;
    n[0] = (size_t)(space - s);
    side[1] = space + 1;
    n[1] = strlen(space + 1);
    return true;
}

static td_status add_merge(const struct load *ld, const json_t *v, size_t rank) {
    struct td_tokenizer *t = ld->t;
    const char *side[2];
    size_t n[2];
    char bytes[2048];
    int32_t id[3] = {-1, -1, -1};
    if (merge_sides(v, side, n) && n[0] <= sizeof bytes / 2 && n[1] <= sizeof bytes / 2) {
        ptrdiff_t a = bytes_of(ld, side[0], n[0], bytes);
        ptrdiff_t b = a < 0 ? -1 : bytes_of(ld, side[1], n[1], bytes + a);
        if (b >= 0) {
            id[0] = td_vocab_find(&t->base, t, bytes, (size_t)a);
            id[1] = td_vocab_find(&t->base, t, bytes + a, (size_t)b);
            id[2] = td_vocab_find(&t->base, t, bytes, (size_t)(a + b));
        }
    }
    if (id[0] < 0 || id[1] < 0 || id[2] < 0) {
        return BAD(ld, TD_FORMAT,
                   "merge %zu: expected two tokens whose concatenation is a token, found otherwise",
                   rank);
    }
    if (td_bpe_add(&t->bpe, id[0], id[1], id[2]) != TD_OK) {
        return BAD(ld, TD_FORMAT, "merge %zu: expected a new pair, found ids %d and %d again", rank,
                   id[0], id[1]);
    }
    return TD_OK;
}

static td_status load_merges(const struct load *ld, const json_t *merges) {
    struct td_tokenizer *t = ld->t;
    size_t n = json_array_size(merges);
    if (n > (size_t)TD_TOKEN_ID_MAX) {
        return BAD(ld, TD_FORMAT, "model.merges: expected at most %d, found %zu", TD_TOKEN_ID_MAX,
                   n);
    }
    int32_t byte_id[256];
    memcpy(byte_id, t->bpe.byte_id, sizeof byte_id);
    if (td_bpe_init(&t->bpe, (uint32_t)n) != TD_OK) {
        return BAD(ld, TD_NO_MEMORY, "no memory for %zu merges", n);
    }
    memcpy(t->bpe.byte_id, byte_id, sizeof byte_id);
    const json_t *v;
    size_t i;
    json_array_foreach(merges, i, v) {
        TD_TRY(add_merge(ld, v, i));
    }
    return TD_OK;
}

/* Finds the tokens that their own bytes merge into, which is what lets the encoder take a whole
 * piece by one look-up. (A token can be unreachable: BPE may prefer other merges on the way.) */
static td_status mark_whole(const struct load *ld) {
    struct td_tokenizer *t = ld->t;
    struct td_ids ids = {0};
    td_status st = TD_OK;
    for (int32_t id = 0; st == TD_OK && id < t->size; id++) {
        struct td_token *k = &t->tokens[id];
        if (k->kind != TD_TOKEN_BASE) continue;
        ids.n = 0;
        st = td_bpe_encode(&t->bpe, (const uint8_t *)t->blob + k->at, k->n, &ids);
        k->whole = st == TD_OK && ids.n == 1 && ids.ids[0] == id;
    }
    td_ids_free(&ids);
    return st == TD_OK ? TD_OK : BAD(ld, st, "no memory for %d tokens", t->size);
}

static td_status load_all(const struct load *ld, const json_t *root) {
    TD_TRY(check_kind(ld, root));
    const json_t *model = json_object_get(root, "model");
    const json_t *added = json_object_get(root, "added_tokens");
    json_t *vocab = json_object_get(model, "vocab");
    TD_TRY(allocate(ld, vocab, added));
    TD_TRY(load_added(ld, added));
    TD_TRY(load_vocab(ld, vocab));
    TD_TRY(load_merges(ld, json_object_get(model, "merges")));
    return mark_whole(ld);
}

/* `root` is taken over. */
static td_status from_json(const char *path, json_t *root, struct td_tokenizer **ret_t,
                           struct td_error *err) {
    struct load ld = {.path = path, .t = calloc(1, sizeof *ld.t), .err = err};
    alphabet_init(ld.byte_of);
    td_status st = ld.t ? load_all(&ld, root) : td_fail(err, TD_NO_MEMORY, "%s: no memory", path);
    json_decref(root);
    if (st != TD_OK) {
        td_tokenizer_destroy(ld.t);
        return st;
    }
    *ret_t = ld.t;
    return TD_OK;
}

static td_status not_json(const char *path, const json_error_t *e, struct td_error *err) {
    return td_fail(err, TD_FORMAT, "%s: expected JSON, found at line %d: %s", path, e->line,
                   e->text);
}

td_status td_tokenizer_parse(const char *path, const char *text, size_t size,
                             struct td_tokenizer **ret_t, struct td_error *err) {
    json_error_t e;
    json_t *root = json_loadb(text, size, 0, &e);
    return root ? from_json(path, root, ret_t, err) : not_json(path, &e, err);
}

td_status td_tokenizer_load(const char *dir, struct td_tokenizer **ret_t, struct td_error *err) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/tokenizer.json", dir) >= (int)sizeof path) {
        return td_fail(err, TD_INVALID, "tokenizer folder: expected a path below %zu bytes",
                       sizeof path);
    }
    json_error_t e;
    json_t *root = json_load_file(path, 0, &e);
    if (!root && json_error_code(&e) == json_error_cannot_open_file)
        return td_fail(err, TD_IO, "%s: cannot be opened: %s", path, strerror(errno));
    return root ? from_json(path, root, ret_t, err) : not_json(path, &e, err);
}
