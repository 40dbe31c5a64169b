/* The only two clocks: monotonic for everything that is measured or waits, wall for the user. */
#ifndef TD_COMMON_BASE_CLOCK_H
#define TD_COMMON_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Monotonic nanoseconds. Pure machines never call this: time comes with the event. */
static inline uint64_t td_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Seconds since 1970, for "created" fields. */
static inline int64_t td_wall_s(void) {
    return (int64_t)time(NULL);
}

#endif
