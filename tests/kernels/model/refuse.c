/* See refuse.h. */
#include "tests/kernels/model/refuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/model/model.h"

void refuse(const char *dir, td_status want, int n, ...) {
    struct td_model *model = NULL;
    struct td_error err = {0};
    td_status st = td_model_open(dir, &model, &err);
    va_list ap;
    if (st != want) print_message("status %d: %s\n", st, err.text);
    assert_int_equal(st, want);
    assert_null(model);
    va_start(ap, n);
    for (int i = 0; i < n; i++) {
        const char *word = va_arg(ap, const char *);
        if (!strstr(err.text, word)) print_message("'%s' is missing in: %s\n", word, err.text);
        assert_non_null(strstr(err.text, word));
    }
    va_end(ap);
}
