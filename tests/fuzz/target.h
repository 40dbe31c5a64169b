/* What a fuzz target gives: libFuzzer's entry, and for the replay whether the input was taken.
 *
 * Targets never touch the disk: every input is parsed from memory. A broken promise of the parser
 * ends the process, as a sanitizer's finding does. */
#ifndef TD_TESTS_FUZZ_TARGET_H
#define TD_TESTS_FUZZ_TARGET_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Set by every call: the input was accepted, or the sentence of its refusal. */
extern int td_fuzz_accepted;
extern struct td_error td_fuzz_error;

#define PROMISE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) __builtin_trap();                                                        \
    } while (0)

#endif
