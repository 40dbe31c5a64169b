/* Names and sentences of the error list in status.h. */
#include "common/base/status.h"

#include <stddef.h>
#include <stdio.h>

const char *td_status_name(td_status s) {
    switch (s) {
#define X(name, value, text)                                                                       \
    case TD_##name:                                                                                \
        return #name;
        TD_STATUS_MAP(X)
#undef X
    }
    return "UNKNOWN";
}

const char *td_status_text(td_status s) {
    switch (s) {
#define X(name, value, text)                                                                       \
    case TD_##name:                                                                                \
        return text;
        TD_STATUS_MAP(X)
#undef X
    }
    return "unknown error";
}

td_status td_fail(struct td_error *err, td_status s, const char *fmt, ...) {
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        err->status = s;
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
    }
    return s;
}
