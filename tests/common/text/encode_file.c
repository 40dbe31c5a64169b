/* Companion of compare_hf.py: encodes a file of many texts and writes the ids, so that one start
 * of a C program serves a whole comparison.
 *
 *   encode_file DIR|split IN OUT [REPEAT]
 *
 * IN: per text a little-endian uint32 length and the bytes. OUT: per text a uint32 count and the
 * int32 ids, or for `split` the int32 lengths in bytes of the pieces. With REPEAT the encoding
 * alone is repeated and its best speed printed, as "bytes seconds". Every text is also decoded
 * again and must come out the same. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/text/split.h"
#include "common/text/tokenizer.h"

struct input {
    char *all;
    size_t n;
};

static bool read_file(const char *path, struct input *in) {
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    fseek(f, 0, SEEK_END);
    in->n = (size_t)ftell(f);
    rewind(f);
    in->all = malloc(in->n + 1);
    bool ok = in->all && fread(in->all, 1, in->n, f) == in->n;
    fclose(f);
    return ok;
}

static bool decodes_to(const struct td_tokenizer *t, const struct td_ids *ids, const char *text,
                       size_t n) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t k;
        const char *p = td_tokenizer_bytes(t, ids->ids[i], &k);
        if (k > n || memcmp(p, text, k) != 0) return false;
        text += k;
        n -= k;
    }
    return n == 0;
}

static bool lengths_of_pieces(const char *text, size_t n, struct td_ids *out) {
    while (n) {
        size_t piece = td_split_piece((const uint8_t *)text, n);
        if (td_ids_push(out, (int32_t)piece) != TD_OK) return false;
        text += piece;
        n -= piece;
    }
    return true;
}

/* One pass over all texts; writes to `out` and checks the way back unless it is NULL. Without a
 * tokenizer only the splitters run. */
static bool pass(const struct td_tokenizer *t, const struct input *in, FILE *out, size_t *ret_n) {
    struct td_ids ids = {0};
    struct td_error err;
    bool ok = true;
    *ret_n = 0;
    for (size_t at = 0; ok && at + 4 <= in->n;) {
        uint32_t n, count;
        memcpy(&n, in->all + at, 4);
        const char *text = in->all + at + 4;
        at += 4 + (size_t)n;
        ids.n = 0;
        ok = at <= in->n && (t ? td_tokenizer_encode_added(t, text, n, &ids, &err) == TD_OK
                               : lengths_of_pieces(text, n, &ids));
        *ret_n += n;
        if (!ok || !out) continue;
        count = (uint32_t)ids.n;
        ok = (!t || decodes_to(t, &ids, text, n)) && fwrite(&count, 4, 1, out) == 1 &&
             (ids.n == 0 || fwrite(ids.ids, 4, ids.n, out) == ids.n);
    }
    td_ids_free(&ids);
    return ok;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    struct td_tokenizer *t = NULL;
    struct td_error err;
    struct input in = {0};
    uint64_t start = td_now_ns();
    if (strcmp(argv[1], "split") != 0 && td_tokenizer_load(argv[1], &t, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    fprintf(stderr, "loaded in %.0f ms\n", (double)(td_now_ns() - start) / 1e6);
    FILE *out = fopen(argv[3], "wb");
    size_t n;
    bool ok = read_file(argv[2], &in) && out && pass(t, &in, out, &n);
    if (out && fclose(out) != 0) ok = false;
    uint64_t best = UINT64_MAX;
    for (long r = argc > 4 ? strtol(argv[4], NULL, 10) : 0; ok && r > 0; r--) {
        start = td_now_ns();
        ok = pass(t, &in, NULL, &n);
        uint64_t took = td_now_ns() - start;
        if (took < best) best = took;
    }
    if (ok && argc > 4) printf("%zu %.9f\n", n, (double)best / 1e9);
    free(in.all);
    td_tokenizer_destroy(t);
    if (!ok) fprintf(stderr, "encode_file failed\n");
    return ok ? 0 : 1;
}
