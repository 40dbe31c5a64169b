/* Expecting that a folder is refused with a sentence that holds certain words. */
#ifndef TD_TESTS_KERNELS_MODEL_REFUSE_H
#define TD_TESTS_KERNELS_MODEL_REFUSE_H

#include "common/base/status.h"

/* Fails the test, showing both, unless `text` holds `word`. */
void expect_word(const char *text, const char *word);

/* Opens `dir` as a model; fails the test unless the status is `want` and all `n` words occur. */
void refuse(const char *dir, td_status want, int n, ...);

#define WORDS(...) (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)), __VA_ARGS__
#define REFUSED(m, ...) refuse((m)->dir, TD_FORMAT, WORDS(__VA_ARGS__))

#endif
