/* A log line stays one line, whatever it quotes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/log.h"

static char said[8192];

/* Runs what follows with stderr in a pipe. */
static int pipe_end[2], terminal;

static void listen_in(void) {
    assert_int_equal(pipe(pipe_end), 0);
    terminal = dup(STDERR_FILENO);
    assert_true(dup2(pipe_end[1], STDERR_FILENO) >= 0);
}

static void hear(void) {
    assert_true(dup2(terminal, STDERR_FILENO) >= 0);
    close(terminal);
    close(pipe_end[1]);
    ssize_t n = read(pipe_end[0], said, sizeof said - 1);
    said[n > 0 ? n : 0] = '\0';
    close(pipe_end[0]);
}

static void test_quoted_control_characters(void **state) {
    (void)state;
    listen_in();
    td_warn("the model '%s' does not exist",
            "x\n2026-01-02T03:04:05.678Z E router a lie\r\x1b[2J\x7f");
    hear();
    char *end = strchr(said, '\n');
    assert_non_null(end);
    assert_string_equal(end, "\n");
    assert_non_null(strstr(said, "'x?2026-01-02T03:04:05.678Z E router a lie??[2J?'"));
}

static void test_other_bytes_stay(void **state) {
    (void)state;
    listen_in();
    td_warn("%s", "\xc3\xa4 ~ tab-free");
    hear();
    assert_non_null(strstr(said, "W tandem \xc3\xa4 ~ tab-free\n"));
}

static void test_a_long_line_is_cut(void **state) {
    (void)state;
    char text[4000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    listen_in();
    td_warn("%s", text);
    hear();
    size_t n = strlen(said);
    assert_in_range(n, 1000, 2048);
    assert_int_equal(said[n - 1], '\n');
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quoted_control_characters),
        cmocka_unit_test(test_other_bytes_stay),
        cmocka_unit_test(test_a_long_line_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
