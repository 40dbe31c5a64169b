/* The command line of a worker: order of file and --set, instances, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/role_args.h"

static td_status read_args(struct td_role_args *a, struct td_error *err, const char *const *argv) {
    int argc = 0;
    while (argv[argc])
        argc++;
    return td_role_args_read(argc, (char **)argv, "decode", a, err);
}
#define READ(...) read_args(&a, &err, (const char *const[]){"tandem-decode", __VA_ARGS__, NULL})

static void test_sources(void **state) {
    (void)state;
    struct td_role_args a;
    struct td_error err;
    char path[] = "/tmp/td-args-XXXXXX";
    static const char text[] = "max_running = 3\nthreads = 1\n[decode@1]\nthreads = 7\n";
    int fd = mkstemp(path);
    assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    assert_int_equal(READ("--set", "max_running=5", "--config", path), TD_OK);
    assert_string_equal(a.name, "decode@0");
    assert_int_equal(a.config.max_running, 5); /* after the file, wherever it stands */
    assert_int_equal(a.config.threads, 1);
    assert_int_equal(
        READ("--config", path, "--name", "1", "--set", "max_running=5", "--set", "max_running=6"),
        TD_OK);
    assert_string_equal(a.name, "decode@1");
    assert_int_equal(a.config.threads, 7);
    assert_int_equal(a.config.max_running, 6);
    unlink(path);
}

static void test_refusals(void **state) {
    (void)state;
    struct td_role_args a;
    struct td_error err;
    assert_int_equal(READ("--nonsense", "x"), TD_CONFIG);
    assert_non_null(strstr(err.text, "--nonsense"));
    assert_int_equal(READ("--set"), TD_CONFIG);
    assert_non_null(strstr(err.text, "a value is missing"));
    assert_int_equal(READ("--name", ""), TD_CONFIG);
    assert_int_equal(READ("--name", "a name that is much longer than thirty-one characters"),
                     TD_CONFIG);
    assert_int_not_equal(READ("--set", "no_such=1"), TD_OK);
    assert_int_not_equal(READ("--config", "/no/such/file"), TD_OK);
    assert_int_equal(READ("--set", "max_running=2", "--help"), TD_OK);
    assert_true(a.help);
}

static void test_text(void **state) {
    (void)state;
    struct td_config c;
    char text[16 << 10], small[40];
    td_config_defaults(&c);
    c.max_running = 77;
    size_t n = td_config_text(&c, text, sizeof text);
    assert_int_equal(n, strlen(text));
    assert_non_null(strstr(text, "max_running = 77\n"));
    assert_non_null(strstr(text, "log_level = info\n"));
    n = td_config_text(&c, small, sizeof small); /* whole lines only */
    assert_int_equal(n, strlen(small));
    assert_true(n == 0 || small[n - 1] == '\n');
    assert_memory_equal(small, text, n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sources),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
