/* See tiny.h. The byte alphabet is written out here a second time, on purpose. */
#include "tests/common/text/tiny.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"

const char *const tiny_added[TINY_SIZE - TINY_BOS] = {
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
};

/* Bytes of both sides. Some tokens are parts of characters: 毕 is E6 AF 95, 🙂 is F0 9F 99 82.
 */
static const char *const merges[TINY_MERGES][2] = {
    {"a", "b"},       {"b", "a"},       {"ab", "a"},      {" ", "a"},    {"\n", "\n"},
    {"\xF0", "\x9F"}, {"\xE6", "\xAF"}, {"\x99", "\x82"}, {"1", "2"},    {"12", "3"},
    {"S", "T"},       {"ST", "OP"},     {"O", "P"},       {"c", "\xE6"},
};

static void letter(int byte, char out[3]) {
    int cp = byte;
    if (!((byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE)) {
        int before = 0;
        for (int b = 0; b < byte; b++) {
            before += !((b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE);
        }
        cp = 256 + before;
    }
    int n = 0;
    if (cp >= 128) out[n++] = (char)(0xC0 | cp >> 6);
    out[n++] = (char)(cp >= 128 ? 0x80 | (cp & 63) : cp);
    out[n] = 0;
}

static void letters(const char *bytes, char *out) {
    *out = 0;
    for (; *bytes; bytes++) {
        letter((uint8_t)*bytes, out + strlen(out));
    }
}

void tiny_add(json_t *root, int id, const char *name, bool normalized) {
    json_array_append_new(json_object_get(root, "added_tokens"),
                          json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content",
                                    name, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized",
                                    normalized, "special", 1));
}

void tiny_add_base(json_t *root, int id, const char *bytes) {
    char text[256];
    assert(strlen(bytes) < sizeof text / 2);
    letters(bytes, text);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    json_object_set_new(vocab, text, json_integer(id));
}

static json_t *split(const char *pattern) {
    return json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", pattern,
                     "behavior", "Isolated", "invert", 0);
}

json_t *tiny_json(void) {
    json_t *vocab = json_object(), *rules = json_array();
    char a[64], b[64], both[128];
    for (int i = 0; i < 256; i++) {
        letter(i, a);
        json_object_set_new(vocab, a, json_integer(i));
    }
    /* A rule may need the product of a later one ("ST" + "OP"); its rank is its place all the
     * same. */
    for (int i = 0; i < TINY_MERGES; i++) {
        letters(merges[i][0], a);
        letters(merges[i][1], b);
        snprintf(both, sizeof both, "%s%s", a, b);
        json_object_set_new(vocab, both, json_integer(256 + i));
        json_array_append_new(rules, json_pack("[s, s]", a, b));
    }
    json_t *root = json_pack(
        "{s:n, s:n, s:[], s:n, s:{s:s, s:[o, o, o, {s:s, s:b, s:b}]}, s:n, s:{s:s, s:n, s:o, s:o}}",
        "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "type", "Sequence",
        "pretokenizers", split("\\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"),
        split("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
              "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
        "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0, "post_processor", "model",
        "type", "BPE", "dropout", "vocab", vocab, "merges", rules);
    assert(root);
    for (int i = 0; i < TINY_SIZE - TINY_BOS; i++) {
        tiny_add(root, TINY_BOS + i, tiny_added[i], i >= 2);
    }
    return root;
}

td_status tiny_load(json_t *root, struct td_tokenizer **ret_t, struct td_error *err) {
    char dir[] = "/tmp/td-tiny-XXXXXX", path[64];
    assert(root && mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    int rc = json_dump_file(root, path, 0);
    assert(rc == 0);
    (void)rc;
    json_decref(root);
    td_status st = td_tokenizer_load(dir, ret_t, err);
    unlink(path);
    rmdir(dir);
    return st;
}

struct td_tokenizer *tiny_tokenizer(void) {
    struct td_tokenizer *t = NULL;
    struct td_error err = {0};
    if (tiny_load(tiny_json(), &t, &err) != TD_OK) fprintf(stderr, "%s\n", err.text);
    assert(t);
    return t;
}

char *tiny_text(const struct td_tokenizer *t, const int32_t *ids, size_t n) {
    size_t len = 0, k;
    for (size_t i = 0; i < n; i++) {
        td_tokenizer_bytes(t, ids[i], &k);
        len += k;
    }
    char *text = malloc(len + 1), *p = text;
    assert(text);
    for (size_t i = 0; i < n; i++) {
        const char *bytes = td_tokenizer_bytes(t, ids[i], &k);
        memcpy(p, bytes, k);
        p += k;
    }
    *p = 0;
    return text;
}

uint64_t tiny_seed(void) {
    const char *s = getenv("TANDEM_TEST_SEED");
    uint64_t seed = s ? strtoull(s, NULL, 0) : td_now_ns();
    printf("TANDEM_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

uint32_t tiny_random(uint64_t *state, uint32_t below) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ z >> 31) >> 32) % below;
}
