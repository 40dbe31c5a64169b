/* What the indexer selected, as clients read it: order, ranges, tokens that wait, and the bound. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "router/topk_json.h"

static const uint32_t layer[] = {2, 4, 42}, count[] = {4, 0, 1}, entry[] = {0, 7, 8, 9, 262143};
static const struct td_selection some = {3, 5, layer, count, entry};
static const struct td_selection one = {1, 1, layer + 1, count + 2, entry + 1};

static const char *written(struct td_topk_json *t) {
    static char text[4096];
    struct td_json_out w = {0};
    td_topk_write(t, &w);
    assert_true(w.n < sizeof text);
    memcpy(text, w.p, w.n);
    text[w.n] = 0;
    td_json_out_free(&w);
    return text;
}

#define FIELD(list) "\"tandem\":{\"indexer_topk\":[" list "]}"
#define TOKEN(i, p, layers) "{\"token_index\":" #i ",\"position\":" #p ",\"layers\":[" layers "]}"
#define LAYER(n, entries, ranges)                                                                  \
    "{\"layer\":" #n ",\"entries\":[" entries "],\"ranges\":[" ranges "]}"
#define ONE(i, p) TOKEN(i, p, LAYER(4, "7", "[28,31]"))
#define SOME(i, p)                                                                                 \
    TOKEN(i, p,                                                                                    \
          LAYER(2, "0,7,8,9", "[0,3],[28,39]") "," LAYER(4, "", "") "," LAYER(                     \
              42, "262143", "[1048572,1048575]"))

static void test_tokens(void **state) {
    (void)state;
    struct td_topk_json t = {.n_prompt = 100};
    assert_string_equal(written(&t), FIELD(""));
    td_topk_add(&t, &some);
    td_topk_add(&t, &one);
    assert_string_equal(written(&t), FIELD(SOME(0, 99) "," ONE(1, 100)));
    assert_string_equal(written(&t), FIELD(""));
    td_topk_add(&t, &one);
    assert_string_equal(written(&t), FIELD(ONE(2, 101)));
    td_topk_free(&t);
}

/* Tokens 1 and 2 came before token 0; an attempt before that one is forgotten. */
static void test_held(void **state) {
    (void)state;
    struct td_topk_json t = {.n_prompt = 100};
    td_topk_hold(&t, true, 1, &some);
    td_topk_hold(&t, false, 2, &some);
    td_topk_hold(&t, true, 1, &one);
    td_topk_hold(&t, false, 2, &some);
    assert_string_equal(written(&t), FIELD(""));
    td_topk_add(&t, &some);
    td_topk_add(&t, NULL);
    td_topk_add(&t, NULL);
    td_topk_add(&t, &one);
    assert_string_equal(written(&t),
                        FIELD(SOME(0, 99) "," ONE(1, 100) "," SOME(2, 101) "," ONE(3, 102)));
    td_topk_add(&t, NULL); /* from a worker that knows no selections */
    td_topk_add(&t, &one);
    assert_string_equal(written(&t), FIELD(ONE(5, 104)));
    td_topk_free(&t);
}

/* The bound that requests are held against: as many layers as there are, no two entries side by
 * side, every number as long as it gets. */
static void test_bound(void **state) {
    (void)state;
    enum { LAYERS = TD_SELECTION_LAYERS_MAX, EACH = 40 };
    static uint32_t number[LAYERS], n[LAYERS], e[LAYERS * EACH];
    struct td_selection s = {LAYERS, LAYERS * EACH, number, n, e};
    for (uint32_t l = 0; l < LAYERS; l++) {
        number[l] = l;
        n[l] = EACH;
        for (uint32_t i = 0; i < EACH; i++)
            e[l * EACH + i] = 262143 - 2 * (EACH - i);
    }
    struct td_topk_json t = {.n_prompt = 1048576};
    td_topk_add(&t, &s);
    size_t before = t.ready.n;
    assert_true(before <= td_topk_token_bytes(s.n_entries));
    assert_true(before >= td_topk_token_bytes(s.n_entries) * 9 / 10);
    td_topk_free(&t);
    s = (struct td_selection){1, 1, number + 127, n, e};
    n[0] = 1;
    t = (struct td_topk_json){.n_prompt = 1048576};
    td_topk_add(&t, &s);
    assert_true(t.ready.n <= td_topk_token_bytes(1));
    td_topk_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
