/* See stops.h. */
#include "common/text/stops.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/unicode.h"

struct td_stop_match {
    uint16_t n;
    uint16_t state;                       /* bytes matched, < n between steps */
    uint16_t fail[TD_STOP_BYTES_MAX + 1]; /* [k]: longest proper border of the first k bytes */
    char text[TD_STOP_BYTES_MAX];
};

static void match_init(struct td_stop_match *m, const char *text, size_t n) {
    m->n = (uint16_t)n;
    m->state = 0;
    memcpy(m->text, text, n);
    m->fail[0] = m->fail[1] = 0;
    for (uint16_t i = 1, k = 0; i < n; i++) {
        while (k && text[i] != text[k]) {
            k = m->fail[k];
        }
        if (text[i] == text[k]) k++;
        m->fail[i + 1] = k;
    }
}

static td_status check(const struct td_stop *list, size_t n, struct td_error *err) {
    if (n > TD_STOP_MAX) {
        return td_fail(err, TD_INVALID, "stop: expected at most %d strings, found %zu", TD_STOP_MAX,
                       n);
    }
    for (size_t i = 0; i < n; i++) {
        if (list[i].n == 0 || list[i].n > TD_STOP_BYTES_MAX) {
            return td_fail(err, TD_INVALID, "stop string %zu: expected 1 to %d bytes, found %zu", i,
                           TD_STOP_BYTES_MAX, list[i].n);
        }
        if (!td_utf8_valid(list[i].text, list[i].n)) {
            return td_fail(err, TD_INVALID, "stop string %zu: expected UTF-8, found other bytes",
                           i);
        }
    }
    return TD_OK;
}

td_status td_stops_init(struct td_stops *s, const struct td_stop *list, size_t n,
                        struct td_error *err) {
    *s = (struct td_stops){0};
    TD_TRY(check(list, n, err));
    if (n == 0) return TD_OK;
    s->match = malloc(n * sizeof *s->match);
    if (!s->match) return td_fail(err, TD_NO_MEMORY, "stop: no memory for %zu strings", n);
    s->n = n;
    for (size_t i = 0; i < n; i++) {
        match_init(&s->match[i], list[i].text, list[i].n);
    }
    return TD_OK;
}

void td_stops_finish(struct td_stops *s) {
    free(s->match);
    *s = (struct td_stops){0};
}

size_t td_stops_byte(struct td_stops *s, char byte) {
    size_t longest = 0;
    s->held = 0;
    for (size_t i = 0; i < s->n; i++) {
        struct td_stop_match *m = &s->match[i];
        while (m->state && m->text[m->state] != byte) {
            m->state = m->fail[m->state];
        }
        if (m->text[m->state] == byte) m->state++;
        if (m->state > s->held) s->held = m->state;
        if (m->state != m->n || m->n <= longest) continue;
        longest = m->n;
        s->matched = i + 1;
    }
    return longest;
}

const char *td_stops_matched(const struct td_stops *s, size_t *ret_n) {
    if (s->matched == 0) return NULL;
    *ret_n = s->match[s->matched - 1].n;
    return s->match[s->matched - 1].text;
}
