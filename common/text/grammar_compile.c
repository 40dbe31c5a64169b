/* From what an answer may be to a compiled grammar: the parts around content and calls. */
#include "common/text/grammar_build.h"

static void root(struct td_gb *b, const struct td_grammar_spec *s) {
    uint32_t rule = td_gb_rule(b), start = td_gb_begin(b), at = start, end = td_gb_new(b);
    if (s->reasoning) {
        at = td_gb_new(b);
        td_gb_call(b, start, at, TD_CORE_REASONING);
    }
    if (s->content == TD_CONTENT_OBJECT && s->n_tools == 0)
        td_gb_call(b, at, end, TD_CORE_OBJECT);
    else
        td_gb_fail(b, TD_UNSUPPORTED, "only a JSON object can be enforced");
    td_gb_finish(b, rule, start, end, false);
}

td_status td_grammar_compile(const struct td_grammar_spec *s, struct td_bytes *out,
                             struct td_error *err) {
    struct td_gb b = {.err = err};
    td_gb_core(&b);
    root(&b, s);
    td_status st = td_gb_pack(&b, (uint32_t)b.n_rules - 1, out);
    td_gb_free(&b);
    return st;
}
