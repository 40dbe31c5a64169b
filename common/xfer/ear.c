/* When a process has become deaf: see ear.h. */
#include "common/xfer/ear.h"

enum { NS_PER_MS = 1000000 };

enum td_ear_verdict td_ear_look(struct td_ear *e, uint64_t now_ns, bool waiting, bool heard) {
    uint64_t since = now_ns - e->looked_ns, most = (uint64_t)TD_EAR_LOOK_MS * NS_PER_MS;
    bool first = e->looked_ns == 0;
    e->looked_ns = now_ns;
    if (first || heard || !waiting) {
        e->silent_ns = 0;
        e->asked = false;
        return TD_EAR_FINE;
    }
    e->silent_ns += since < most ? since : most;
    if (!e->asked && e->silent_ns >= (uint64_t)TD_EAR_ASK_MS * NS_PER_MS) {
        e->asked = true;
        return TD_EAR_ASK;
    }
    if (e->silent_ns < (uint64_t)TD_EAR_DEAF_MS * NS_PER_MS) return TD_EAR_FINE;
    *e = (struct td_ear){.looked_ns = now_ns};
    return TD_EAR_DEAF;
}
