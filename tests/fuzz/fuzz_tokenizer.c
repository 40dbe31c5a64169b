/* Any text to ids and back, and any tokenizer.json: what is taken encodes, and decoding gives the
 * bytes back.
 *
 * Input: a byte of options; its lowest bit says what follows: 0 a text for a small tokenizer, 1 a
 * tokenizer.json. Accepted: the text always, the file when it loads. */
#include <stdlib.h>
#include <string.h>

#include "tests/common/text/tiny.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

static struct td_tokenizer *tok;

/* The bytes of the ids are the text; `added`: names may be among them. */
static void check(const struct td_tokenizer *t, const struct td_ids *ids, const char *text,
                  size_t n, bool added) {
    size_t at = 0;
    for (size_t i = 0; i < ids->n; i++) {
        size_t len;
        const char *bytes = td_tokenizer_bytes(t, ids->ids[i], &len);
        PROMISE(len > 0 && len <= n - at && memcmp(bytes, text + at, len) == 0);
        PROMISE(ids->ids[i] >= 0 && ids->ids[i] < td_tokenizer_size(t));
        bool special = td_tokenizer_is_special(t, ids->ids[i]);
        PROMISE(added || !special);
        PROMISE(special || len <= td_tokenizer_max_bytes(t));
        at += len;
    }
    PROMISE(at == n);
}

static void both_ways(const struct td_tokenizer *t, const char *text, size_t n) {
    struct td_ids plain = {0}, added = {0};
    PROMISE(td_tokenizer_encode(t, text, n, &plain, &td_fuzz_error) == TD_OK);
    check(t, &plain, text, n, false);
    PROMISE(td_tokenizer_encode_added(t, text, n, &added, &td_fuzz_error) == TD_OK);
    check(t, &added, text, n, true);
    td_ids_free(&plain);
    td_ids_free(&added);
}

static void parse(const char *text, size_t n) {
    static const char sample[] = "a ab\n\n 12 <think>\xF0\x9F\x99\x82 \xff caf\xC3\xA9 STOP";
    struct td_tokenizer *t = NULL;
    td_status st = td_tokenizer_parse("tokenizer.json", text, n, &t, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st != TD_OK) {
        PROMISE(!t && td_fuzz_error.text[0]);
        PROMISE(st == TD_FORMAT || st == TD_UNSUPPORTED);
        return;
    }
    both_ways(t, sample, sizeof sample - 1);
    td_tokenizer_destroy(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!tok) tok = tiny_tokenizer();
    const char *rest = (const char *)data + 1;
    td_fuzz_accepted = 1;
    if (size == 0) return 0;
    if (data[0] & 1)
        parse(rest, size - 1);
    else
        both_ways(tok, rest, size - 1);
    return 0;
}
