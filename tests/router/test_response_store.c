/* The store of responses: what is found, what makes room, and that a conversation is held by its
 * last answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "router/response_store.h"

enum { EACH = 1000 }; /* bytes of a document here */

static struct td_response_store *make(uint64_t bytes, uint32_t count) {
    struct td_response_store *s;
    struct td_error err;
    assert_int_equal(td_response_store_create(bytes, count, &s, &err), TD_OK);
    return s;
}

static td_status put(struct td_response_store *s, const char *id, struct td_stored *previous) {
    char document[EACH];
    memset(document, id[0], sizeof document);
    return td_response_store_put(s, "me", id, previous, id, strlen(id), document, sizeof document);
}

static bool has(struct td_response_store *s, const char *id) {
    struct td_stored *e = td_response_store_hold(s, "me", id);
    if (e) {
        assert_int_equal(e->input_n, strlen(id));
        assert_memory_equal(e->input, id, e->input_n);
        assert_int_equal(e->document_n, EACH);
        assert_int_equal(e->document[EACH - 1], id[0]);
    }
    td_response_store_drop(s, e);
    return e != NULL;
}

static struct td_response_store_counts counts(struct td_response_store *s) {
    struct td_response_store_counts c;
    td_response_store_counts(s, &c);
    return c;
}

static void test_count(void **state) {
    struct td_response_store *s = make(1 << 20, 3);
    (void)state;
    char id[16];
    for (int i = 0; i < 10; i++) {
        snprintf(id, sizeof id, "%d", i);
        assert_int_equal(put(s, id, NULL), TD_OK);
    }
    assert_false(has(s, "6"));
    assert_true(has(s, "7") && has(s, "8") && has(s, "9"));
    assert_true(td_response_store_delete(s, "me", "8"));
    assert_false(td_response_store_delete(s, "me", "8"));
    assert_int_equal(counts(s).kept, 2);
    assert_int_equal(counts(s).evicted, 7);
    assert_int_equal(put(s, "a", NULL), TD_OK); /* the deleted one's place */
    assert_true(has(s, "7") && has(s, "9") && has(s, "a"));
    td_response_store_destroy(s);
}

static void test_owner(void **state) {
    struct td_response_store *s = make(1 << 20, 3);
    (void)state;
    assert_int_equal(put(s, "1", NULL), TD_OK);
    assert_null(td_response_store_hold(s, "other", "1"));
    assert_null(td_response_store_hold(s, "", "1"));
    assert_false(td_response_store_delete(s, "other", "1"));
    assert_true(has(s, "1"));
    struct td_stored *one = td_response_store_hold(s, "me", "1");
    assert_int_equal(one->conversation_n, 1 + EACH);
    assert_int_equal(put(s, "2", one), TD_OK);
    td_response_store_drop(s, one);
    struct td_stored *two = td_response_store_hold(s, "me", "2");
    assert_int_equal(two->conversation_n, 2 * (1 + EACH));
    td_response_store_drop(s, two);
    td_response_store_destroy(s);
}

/* An answer that is continued goes out of sight, not out of the conversation. */
static void test_conversation(void **state) {
    struct td_response_store *s = make(1 << 20, 2);
    (void)state;
    assert_int_equal(put(s, "1", NULL), TD_OK);
    struct td_stored *one = td_response_store_hold(s, "me", "1");
    assert_int_equal(put(s, "2", one), TD_OK);
    td_response_store_drop(s, one);
    assert_int_equal(put(s, "3", NULL), TD_OK);
    assert_false(has(s, "1"));
    struct td_stored *two = td_response_store_hold(s, "me", "2");
    assert_non_null(two->previous);
    assert_string_equal(two->previous->id, "1");
    uint64_t three = counts(s).bytes;
    assert_true(three > 3 * EACH);
    assert_true(td_response_store_delete(s, "me", "2"));
    assert_int_equal(counts(s).bytes, three); /* somebody reads it */
    td_response_store_drop(s, two);
    assert_true(counts(s).bytes < 2 * EACH); /* and its beginning went with it */
    td_response_store_destroy(s);
}

static void test_bytes(void **state) {
    const uint64_t limit = 5 * EACH;
    struct td_response_store *s = make(limit, 100);
    (void)state;
    char id[16];
    struct td_stored *last = NULL;
    td_status st = TD_OK;
    int made = 0;
    for (; st == TD_OK && made < 10; made++) {
        snprintf(id, sizeof id, "%d", made);
        st = put(s, id, last);
        td_response_store_drop(s, last);
        last = st == TD_OK ? td_response_store_hold(s, "me", id) : NULL;
        assert_true(counts(s).bytes <= limit);
    }
    /* A chain that has outgrown the limit is not kept, and nothing older stands in its way. */
    assert_int_equal(st, TD_TOO_LONG);
    assert_int_equal(made, 5);
    assert_false(has(s, "4"));
    assert_int_equal(counts(s).kept, 0);
    assert_int_equal(counts(s).bytes, 0);
    for (int i = 0; i < 9; i++) {
        snprintf(id, sizeof id, "x%d", i);
        assert_int_equal(put(s, id, NULL), TD_OK);
    }
    assert_int_equal(counts(s).kept, 4);
    assert_true(has(s, "x5") && has(s, "x8") && !has(s, "x4"));
    td_response_store_destroy(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_count), cmocka_unit_test(test_owner),
        cmocka_unit_test(test_conversation),
        cmocka_unit_test(test_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
