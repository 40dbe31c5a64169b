/* Clients' keys: what the file may say, who is found, and when a limit holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "router/api_keys.h"

#define A "aaaaaaaaaaaaaaaa"
#define B "bbbbbbbbbbbbbbbb"
#define C "cccccccccccccccc"
#define S 1000000000ull

static struct td_api_keys *k;
static struct td_error err;

static int setup(void **state) {
    (void)state;
    return td_api_keys_create(&k, &err);
}

static int teardown(void **state) {
    (void)state;
    td_api_keys_destroy(k);
    return 0;
}

static td_status read_text(const char *text) {
    return td_api_keys_read(k, "keys", text, strlen(text), &err);
}

static void reads(const char *text) {
    td_status st = read_text(text);
    if (st != TD_OK) print_message("%s\n", err.text);
    assert_int_equal(st, TD_OK);
}

static const char *who(const char *presented) {
    struct td_api_key *key = td_api_keys_find(k, presented);
    return key ? key->name : "nobody";
}

static void test_names(void **state) {
    (void)state;
    reads("# comment\n\n  ann " A "\r\n\tbob\t" B "  requests=3 # bob's\nc-d.e " C "#x");
    assert_int_equal(td_api_keys_count(k), 3);
    assert_string_equal(who(A), "ann");
    assert_string_equal(who(B), "bob");
    assert_string_equal(who(C "#x"), "c-d.e");
    assert_string_equal(who(""), "nobody");
    assert_string_equal(who(C), "nobody");
    assert_string_equal(who(A "a"), "nobody");
    assert_string_equal(who("aaaaaaaaaaaaaaa"), "nobody");
    char far[1000];
    memset(far, 'a', sizeof far);
    far[sizeof far - 1] = 0;
    assert_string_equal(who(far), "nobody");
    assert_int_equal(td_api_keys_find(k, B)->requests_max, 3);
    assert_int_equal(td_api_keys_find(k, B)->per_minute_max, 0);
}

static void test_refused_files(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"", "found 0"},
        {"# nobody\n", "found 0"},
        {"ann\n", "keys:1: expected a key of 16"},
        {"\nann aaaaaaaaaaaaaaa\n", "keys:2: expected a key of 16"},
        {"ann " A "\x7f\n", "keys:1: expected a key of 16"},
        {"a/b " A, "a name of letters"},
        {"ann " A "\nann " B, "keys:2: expected another name"},
        {"ann " A "\nbob " A, "keys:2: expected another key"},
        {"ann " A " requests=0", "requests=N"},
        {"ann " A " requests=", "requests=N"},
        {"ann " A " requests=1x", "requests=N"},
        {"ann " A " requests=1000001", "requests=N"},
        {"ann " A " requests=99999999999", "requests=N"},
        {"ann " A " requests=1 requests=2", "requests=N"},
        {"ann " A " per_hour=1", "requests=N"},
        {"ann " A " requests", "requests=N"},
        {"aaaaaaaaaabbbbbbbbbbaaaaaaaaaabbbbbbbbbbaaaaaaaaaabbbbbbbbbbaaaa " A, "at most 63"},
    };
    reads("old " C);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        td_status st = read_text(bad[i].text);
        if (st != TD_CONFIG || !strstr(err.text, bad[i].says))
            fail_msg("%s: %s: %s", bad[i].text, td_status_name(st), err.text);
        assert_null(strstr(err.text, "aaaaaaaaaaaaaaa"));
        assert_string_equal(who(C), "old");
        assert_string_equal(who(A), "nobody");
    }
}

static td_status take(struct td_api_key *key, uint64_t now, uint32_t *retry) {
    return td_api_key_take(key, now, retry, &err);
}

static void test_running(void **state) {
    (void)state;
    uint32_t retry = 0;
    reads("ann " A " requests=2\nbob " B);
    struct td_api_key *ann = td_api_keys_find(k, A), *bob = td_api_keys_find(k, B);
    assert_int_equal(take(ann, 1, &retry), TD_OK);
    assert_int_equal(take(ann, 1, &retry), TD_OK);
    assert_int_equal(take(ann, 1, &retry), TD_BUSY);
    assert_int_equal(retry, 1);
    assert_non_null(strstr(err.text, "its limit is 2"));
    for (int i = 0; i < 1000; i++)
        assert_int_equal(take(bob, 1, &retry), TD_OK);
    td_api_key_give(ann);
    assert_int_equal(take(ann, 1, &retry), TD_OK);
    assert_int_equal(ann->taken, 3);
    assert_int_equal(ann->refused, 1);
}

static void test_per_minute(void **state) {
    (void)state;
    uint32_t retry = 0;
    reads("ann " A " per_minute=6");
    struct td_api_key *ann = td_api_keys_find(k, A);
    uint64_t now = 1000 * S;
    for (int i = 0; i < 6; i++)
        assert_int_equal(take(ann, now, &retry), TD_OK);
    assert_int_equal(take(ann, now, &retry), TD_BUSY);
    assert_int_equal(retry, 10);
    assert_int_equal(take(ann, now + 10 * S - 1, &retry), TD_BUSY);
    assert_int_equal(retry, 1);
    assert_int_equal(take(ann, now + 10 * S, &retry), TD_OK);
    assert_int_equal(take(ann, now + 10 * S, &retry), TD_BUSY);
    now += 1000 * S; /* idle time earns one minute's worth, not more */
    for (int i = 0; i < 6; i++)
        assert_int_equal(take(ann, now, &retry), TD_OK);
    assert_int_equal(take(ann, now, &retry), TD_BUSY);
}

/* What runs keeps its key, and its place in the limit, over a new file. */
static void test_replaced(void **state) {
    (void)state;
    uint32_t retry = 0;
    reads("ann " A " requests=2\nbob " B);
    struct td_api_key *ann = td_api_keys_find(k, A), *bob = td_api_keys_find(k, B);
    assert_int_equal(take(ann, 1, &retry), TD_OK);
    assert_int_equal(take(bob, 1, &retry), TD_OK);
    reads("ann " C " requests=1");
    assert_string_equal(who(A), "nobody");
    assert_string_equal(who(B), "nobody");
    assert_ptr_equal(td_api_keys_find(k, C), ann);
    assert_int_equal(take(ann, 1, &retry), TD_BUSY);
    struct td_json_out w = {0};
    td_api_keys_metrics(k, &w);
    assert_null(memmem(w.p, w.n, "bob", 3));
    assert_non_null(memmem(w.p, w.n, "{key=\"ann\",result=\"refused\"} 1\n", 31));
    td_json_out_free(&w);
    reads("ann " C "\nbob " B); /* another bob: the first one still runs */
    assert_ptr_not_equal(td_api_keys_find(k, B), bob);
    td_api_key_give(bob); /* the last of it */
    td_api_key_give(ann);
    assert_string_equal(who(B), "bob");
}

static void test_file(void **state) {
    (void)state;
    char path[] = "/tmp/td-keys-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "ann " A "\n", 21), 21);
    fchmod(fd, 0644);
    assert_int_equal(td_api_keys_load(k, path, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "expected mode 0600"));
    fchmod(fd, 0600);
    assert_int_equal(td_api_keys_load(k, path, &err), TD_OK);
    assert_string_equal(who(A), "ann");
    assert_int_equal(ftruncate(fd, TD_API_KEYS_BYTES), 0);
    assert_int_equal(td_api_keys_load(k, path, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "less than"));
    close(fd);
    unlink(path);
    assert_int_equal(td_api_keys_load(k, path, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, path));
    assert_string_equal(who(A), "ann");
}

int main(void) {
#define EACH(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {EACH(test_names),    EACH(test_refused_files),
                                       EACH(test_running),  EACH(test_per_minute),
                                       EACH(test_replaced), EACH(test_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
