/* See ledger.h. */
#include "router/ledger.h"

#include <string.h>

#include "common/base/put.h"

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
static char *describe(char *at, const char *name) {
    if (!*name || strpbrk(name, "\"\\")) return at;
    return td_put(td_put(td_put(at, ";desc=\""), name), "\"");
}

static char *duration(char *at, bool first, const char *name, uint64_t ns) {
    if (!first) at = td_put(at, ", ");
    return td_put_ms(td_put(td_put(at, name), ";dur="), ns);
}

void td_ledger_header(const struct td_ledger *l, char out[TD_LEDGER_HEADER_MAX]) {
    /* Two names, and of each of the phases and the sum ", ", ten letters, ";dur=" and a number. */
    _Static_assert(2 * (TD_NAME_MAX + 8) + (TD_PHASES + 1) * (2 + 10 + 5 + 19) < TD_LEDGER_HEADER_MAX,
                   "Server-Timing");
    char *at = out;
    for (int i = 0; i < TD_PHASES; i++) {
        if (l->phase_ns[i] == 0) continue;
        at = duration(at, at == out, td_phase_name((enum td_phase)i), l->phase_ns[i]);
        if (i == TD_PHASE_PREFILL) at = describe(at, l->prefill);
        if (i == TD_PHASE_DECODE) at = describe(at, l->decode);
    }
    if (l->total_ns) at = duration(at, at == out, "total", l->total_ns);
    *at = 0;
}
