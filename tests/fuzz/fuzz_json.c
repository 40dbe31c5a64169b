/* A client's JSON to a tree, beside jansson's own reader: both take it and give the same, or both refuse
 * it. An error says where.
 *
 * Input: a byte (even: strict), then the text. Accepted: a value was read. */
#include <stdbool.h>
#include <string.h>

#include "router/json_read.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bool loose = size && data[0] & 1;
    const char *text = (const char *)data + (size > 0);
    size_t n = size - (size > 0);
    const size_t base = JSON_ALLOW_NUL | JSON_DECODE_ANY;
    json_t *ours = NULL;
    td_fuzz_error = (struct td_error){0};
    td_status st = td_json_read(text, n, loose ? TD_JSON_LOOSE : TD_JSON_STRICT, &ours, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    PROMISE(st == TD_OK || st == TD_FORMAT);
    PROMISE((st == TD_OK) == (ours != NULL));
    if (st != TD_OK) PROMISE(strstr(td_fuzz_error.text, "byte "));
    if (memchr(text, 0, n)) { /* which jansson takes for the end */
        PROMISE(!ours);
        return 0;
    }
    json_error_t why;
    json_t *theirs = json_loadb(text, n, base | (loose ? 0 : JSON_REJECT_DUPLICATES), &why);
    if (loose && !theirs && json_error_code(&why) == json_error_numeric_overflow) {
        /* Integers of any length are reals with this flag, and short ones too. */
        theirs = json_loadb(text, n, base | JSON_DECODE_INT_AS_REAL, NULL);
        PROMISE((theirs != NULL) == (ours != NULL));
    } else {
        PROMISE((theirs != NULL) == (ours != NULL));
        if (ours) PROMISE(json_equal(ours, theirs));
    }
    json_decref(ours);
    json_decref(theirs);
    return 0;
}
