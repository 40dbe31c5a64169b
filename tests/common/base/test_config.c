/* Files of settings: what holds for whom, and what is no such file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/config.h"

static struct td_config config;
static struct td_error err;

/* A file of these bytes; `path` is a template of mkstemp. */
static void file_of(char *path, const void *bytes, size_t n) {
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

static td_status load(const void *bytes, size_t n) {
    char path[] = "/tmp/td-config-XXXXXX";
    file_of(path, bytes, n);
    td_config_defaults(&config);
    td_status st = td_config_load(&config, path, "decode", "1", &err);
    unlink(path);
    return st;
}

static td_status load_text(const char *text) {
    return load(text, strlen(text));
}

static void test_sections(void **state) {
    (void)state;
    assert_int_equal(load_text("threads = 1 # one\n\n[prefill]\nthreads = 2\n[decode]\n"
                               "max_running=3\n[decode@1]\nthreads = 4\n[decode@2]\nthreads = 5"),
                     TD_OK);
    assert_int_equal(config.threads, 4);
    assert_int_equal(config.max_running, 3);
    assert_int_equal(load_text("[prefill]\nthreads = 257\n"), TD_CONFIG);
    assert_non_null(strstr(err.text, ":2: threads"));
    assert_int_equal(load_text("[cook]\n"), TD_CONFIG);
}

static void test_a_long_line_is_not_two(void **state) {
    (void)state;
    char text[1200];
    memset(text, '#', sizeof text);
    /* Where a reader with room for 1,024 bytes would begin again. */
    memcpy(text + 1023, "threads = 7\n", 13);
    assert_int_equal(load_text(text), TD_CONFIG);
    assert_non_null(strstr(err.text, ":1: "));
    assert_int_equal(config.threads, 0);
    memset(text, '#', 1022);
    memcpy(text + 1022, "\nthreads = 7", 13); /* the longest there may be; no break at the end */
    assert_int_equal(load_text(text), TD_OK);
    assert_int_equal(config.threads, 7);
}

static void test_no_text(void **state) {
    (void)state;
    assert_int_equal(load("threads = 3\0 4\nthreads = 5\n", 26), TD_CONFIG);
    td_config_defaults(&config);
    assert_int_equal(td_config_load(&config, "/tmp", "decode", "1", &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "irectory"));
    assert_int_equal(td_config_load(&config, "/no/such/file", "decode", "1", &err), TD_CONFIG);
}

static void test_names_of_sections(void **state) {
    (void)state;
    static const char text[] =
        "threads = 1 # [router]\n[ prefill ]\n\n[decode@1] # one\nthreads = 2\n[decode@1]\n";
    static const struct td_config_section expected[] = {
        {"prefill", 2}, {"decode@1", 4}, {"decode@1", 6}};
    char path[] = "/tmp/td-config-XXXXXX";
    struct td_config_section found[3];
    uint32_t n;
    file_of(path, text, sizeof text - 1);
    assert_int_equal(td_config_sections(path, found, 3, &n, &err), TD_OK);
    assert_int_equal(n, 3);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(found[i].name, expected[i].name);
        assert_int_equal(found[i].line, expected[i].line);
    }
    assert_int_equal(td_config_sections(path, found, 2, &n, &err), TD_CONFIG);
    assert_non_null(strstr(err.text, ":6: expected at most 2 sections"));
    unlink(path);
    assert_int_equal(td_config_sections(path, found, 3, &n, &err), TD_CONFIG);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sections),
        cmocka_unit_test(test_a_long_line_is_not_two),
        cmocka_unit_test(test_no_text),
        cmocka_unit_test(test_names_of_sections),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
