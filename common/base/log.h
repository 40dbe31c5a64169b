/* One line per event on stderr, with time, level and role. Only roles and tools log; libraries
 * return errors. Thread-safe (one write per line). Control characters are written as '?'. */
#ifndef TD_COMMON_BASE_LOG_H
#define TD_COMMON_BASE_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum td_log_level { TD_LOG_DEBUG, TD_LOG_INFO, TD_LOG_WARN, TD_LOG_ERROR };

/* `who` ("router", "prefill@0") must outlive the process; lines below `min` are dropped. */
void td_log_init(const char *who, enum td_log_level min);
/* One line per line of `text`, each after `prefix`. */
void td_log_lines(enum td_log_level level, const char *prefix, const char *text);
void td_log(enum td_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* For what strangers can cause as often as they like: true at most every ten seconds. *last_ns is 0
 * at first. */
bool td_log_due(uint64_t *last_ns);

#define td_debug(...) td_log(TD_LOG_DEBUG, __VA_ARGS__)
#define td_info(...) td_log(TD_LOG_INFO, __VA_ARGS__)
#define td_warn(...) td_log(TD_LOG_WARN, __VA_ARGS__)
#define td_err(...) td_log(TD_LOG_ERROR, __VA_ARGS__)

#endif
