/* See ledger.h. */
#include "router/ledger.h"

#include <stdio.h>
#include <string.h>

const char *td_phase_name(enum td_phase p) {
    static const char *const names[] = {
#define X(NAME, name, help) #name,
        TD_PHASE_MAP(X)
#undef X
    };
    return p < TD_PHASES ? names[p] : "?";
}

static void seconds(struct td_json_out *w, const char *key, uint64_t ns) {
    td_json_key(w, key);
    td_json_num(w, (double)ns * 1e-9);
}

static void worker(struct td_json_out *w, const char *key, const char *name) {
    td_json_key(w, key);
    if (*name)
        td_json_text(w, name);
    else
        td_json_null(w);
}

void td_ledger_write(const struct td_ledger *l, struct td_json_out *w) {
    td_json_key(w, "tandem");
    td_json_open(w, '{');
    td_json_key(w, "phases");
    td_json_open(w, '{');
    for (int i = 0; i < TD_PHASES; i++)
        seconds(w, td_phase_name((enum td_phase)i), l->phase_ns[i]);
    td_json_close(w, '}');
    seconds(w, "total", l->total_ns);
    seconds(w, "first_token", l->first_ns);
    td_json_key(w, "attempts");
    td_json_u64(w, l->attempts);
    worker(w, "prefill_worker", l->prefill);
    worker(w, "decode_worker", l->decode);
    td_json_close(w, '}');
}

/* Names come from hellos: what would break a quoted string stays out. */
static void describe(char *out, size_t size, const char *name) {
    if (*name && !strpbrk(name, "\"\\")) {
        size_t n = strlen(out);
        snprintf(out + n, size - n, ";desc=\"%s\"", name);
    }
}

void td_ledger_header(const struct td_ledger *l, char out[TD_LEDGER_HEADER_MAX]) {
    out[0] = 0;
    for (int i = 0; i < TD_PHASES; i++) {
        size_t n = strlen(out);
        if (l->phase_ns[i] == 0) continue;
        snprintf(out + n, TD_LEDGER_HEADER_MAX - n, "%s%s;dur=%.3f", n ? ", " : "",
                 td_phase_name((enum td_phase)i), (double)l->phase_ns[i] * 1e-6);
        if (i == TD_PHASE_PREFILL) describe(out, TD_LEDGER_HEADER_MAX, l->prefill);
        if (i == TD_PHASE_DECODE) describe(out, TD_LEDGER_HEADER_MAX, l->decode);
    }
    size_t n = strlen(out);
    if (l->total_ns)
        snprintf(out + n, TD_LEDGER_HEADER_MAX - n, ", total;dur=%.3f", (double)l->total_ns * 1e-6);
}
