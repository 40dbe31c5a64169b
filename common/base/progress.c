/* Progress lines: "checkpoint: 30 % of 156016 MB, 412 MB/s". */
#include "common/base/progress.h"

#include "common/base/clock.h"
#include "common/base/log.h"

bool td_progress_due(struct td_progress *p, size_t done, size_t total, uint64_t now_ns) {
    enum { SECOND = 1000000000 };
    if (p->start_ns == 0) p->start_ns = p->line_ns = now_ns;
    unsigned tenths = total ? (unsigned)((double)done / (double)total * 10.0) : 10;
    if (done >= total) tenths = 10;
    bool end = tenths == 10;
    if (tenths <= p->tenths || (!end && now_ns - p->line_ns < SECOND)) return false;
    p->tenths = tenths;
    p->line_ns = now_ns;
    return true;
}

void td_progress_log(void *progress, size_t done, size_t total) {
    struct td_progress *p = progress;
    uint64_t now = td_now_ns();
    if (!td_progress_due(p, done, total, now)) return;
    double s = (double)(now - p->start_ns) / 1e9, mb = (double)done / 1e6;
    td_info("%s: %u %% of %.0f MB after %.1f s, %.0f MB/s", p->what, p->tenths * 10,
            (double)total / 1e6, s, s > 0 ? mb / s : 0.0);
}
