/* Waiting for a word to change: spin a little, then sleep in the kernel. For threads that meet many
 * times in a step, where a mutex and a condition would be two system calls each. */
#ifndef TD_KERNELS_FUTEX_H
#define TD_KERNELS_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void td_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Sleeps while *word is `seen`, at most `ms` (0: for ever); may return early. */
static inline void td_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint32_t ms) {
    struct timespec limit = {ms / 1000, (long)(ms % 1000) * 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, ms ? &limit : NULL, NULL, 0);
}

static inline void td_futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* Until *word is no longer `seen`, after `spins` pauses asleep. */
static inline uint32_t td_futex_until(_Atomic uint32_t *word, uint32_t seen, uint32_t spins) {
    uint32_t now = atomic_load_explicit(word, memory_order_acquire);
    for (; now == seen; now = atomic_load_explicit(word, memory_order_acquire)) {
        if (spins) {
            spins--;
            td_relax();
        } else {
            td_futex_wait(word, seen, 0);
        }
    }
    return now;
}

#endif
