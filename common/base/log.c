/* Log lines: "2026-01-02T03:04:05.678Z I decode@0 text\n", one write(2) each. */
#include "common/base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"

static const char *log_who = "tandem";
static enum td_log_level log_min = TD_LOG_INFO;

void td_log_init(const char *who, enum td_log_level min) {
    log_who = who;
    log_min = min;
}

/* Sentences quote what strangers sent: a line break in it would look like a line of ours, an escape
 * would speak to the reader's terminal. */
static void harmless(char *line, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = '?';
}

void td_log(enum td_log_level level, const char *fmt, ...) {
    if (level < log_min) return;
    char line[2048];
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t used = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &tm);
    used += (size_t)snprintf(line + used, sizeof line - used, ".%03dZ %c %s ",
                             (int)(now.tv_nsec / 1000000), "DIWE"[level], log_who);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line + used, sizeof line - used - 1, fmt, ap);
    va_end(ap);
    if (n > 0) used += (size_t)n;
    if (used > sizeof line - 2) used = sizeof line - 2;
    harmless(line, used);
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written; /* nowhere to report that reporting failed */
}

bool td_log_due(uint64_t *last_ns) {
    uint64_t now = td_now_ns();
    if (*last_ns != 0 && now - *last_ns < 10000000000u) return false;
    *last_ns = now;
    return true;
}

void td_log_lines(enum td_log_level level, const char *prefix, const char *text) {
    char line[1024];
    for (size_t n = 0;; text++) {
        bool end = *text == 0 || *text == '\n';
        if (!end && n < sizeof line - 1) line[n++] = *text;
        if (!end) continue;
        line[n] = 0;
        if (n > 0) td_log(level, "%s%s", prefix, line);
        if (*text == 0) return;
        n = 0;
    }
}
