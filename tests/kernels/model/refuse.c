/* See refuse.h. */
#include "tests/kernels/model/refuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/model/model.h"

void expect_word(const char *text, const char *word) {
    /* Printed without %s: under sanitizers gcc takes the failing strstr for a null word. */
    if (!strstr(text, word)) {
        fputs(word, stderr);
        fputs(" is missing in: ", stderr);
        fputs(text, stderr);
        fputs("\n", stderr);
    }
    assert_non_null(strstr(text, word));
}

void refuse(const char *dir, td_status want, int n, ...) {
    struct td_model *model = NULL;
    struct td_error err = {0};
    td_status st = td_model_open(dir, &model, &err);
    va_list ap;
    if (st != want) print_message("status %d: %s\n", st, err.text);
    assert_int_equal(st, want);
    assert_null(model);
    va_start(ap, n);
    for (int i = 0; i < n; i++)
        expect_word(err.text, va_arg(ap, const char *));
    va_end(ap);
}
