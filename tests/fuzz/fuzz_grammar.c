/* The grammar compiler over any schema, pattern and tools, and the matcher over any text; compiled
 * bytes from anywhere; saved positions from anywhere. What compiles opens; a mask allows exactly
 * the tokens that the matcher takes; a text in one piece and byte by byte is the same position.
 *
 * Input: a byte of options, the schema or pattern, then (behind FF) the tool's schema or text to be
 * matched, and (behind FF) the text; with RAW the rest is compiled bytes instead, or a saved
 * position in the object grammar. Accepted: it compiles or opens. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar.h"
#include "tests/common/text/tiny.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

enum { CONTENT = 7, REASONING = 8, ONE_CALL = 16, DSML_TOKEN = 32, TOOL = 64, RAW = 128 };
enum { VOCAB = TINY_SIZE + 1, WORDS = (VOCAB + 31) / 32, TEXT_MAX = 200 };

static struct td_tokenizer *tok;
static struct td_grammars *store;
static struct td_grammar object;

static void load(void) {
    static uint32_t aligned[1 << 14];
    struct td_error err;
    struct td_bytes bytes = {0};
    json_t *root = tiny_json();
    tiny_add(root, TINY_SIZE, "｜DSML｜", true);
    PROMISE(tiny_load(root, &tok, &err) == TD_OK);
    struct td_grammars_params p = {.t = tok,
                                   .vocab = VOCAB,
                                   .eos = TINY_EOS,
                                   .dsml = TINY_SIZE,
                                   .think_end = TINY_THINK_END,
                                   .grammars_max = 2,
                                   .mask_bytes = 1 << 20};
    PROMISE(td_grammars_create(&p, &store, &err) == TD_OK);
    struct td_grammar_spec s = {.content = TD_CONTENT_OBJECT};
    PROMISE(td_grammar_compile(&s, &bytes, &err) == TD_OK && bytes.n <= sizeof aligned);
    memcpy(aligned, bytes.p, bytes.n);
    PROMISE(td_grammar_open(aligned, bytes.n, &object, &err) == TD_OK);
    td_bytes_free(&bytes);
}

static bool same(const struct td_matcher *a, const struct td_matcher *b) {
    uint8_t x[TD_MATCH_SAVED_MAX], y[TD_MATCH_SAVED_MAX];
    size_t n = td_matcher_save(a, x);
    return n == td_matcher_save(b, y) && memcmp(x, y, n) == 0;
}

/* `honest`: compiled here, so that there is always a way on. */
static void check(const struct td_grammar *g, struct td_matcher *m, bool honest) {
    uint32_t mask[WORDS], any = 0;
    td_grammars_mask(store, m, mask);
    for (int32_t id = 0; id < VOCAB; id++) {
        struct td_matcher next = *m;
        bool allowed = mask[id / 32] >> (id % 32) & 1;
        any |= allowed;
        PROMISE(td_grammars_token(store, &next, id) == allowed);
    }
    PROMISE(any || m->ended || !honest);
    uint8_t saved[TD_MATCH_SAVED_MAX];
    struct td_matcher l;
    size_t n = td_matcher_save(m, saved);
    PROMISE(!honest || (td_matcher_load(&l, g, saved, n, &td_fuzz_error) == TD_OK && same(&l, m)));
}

static void match(const struct td_grammar *g, const uint8_t *p, size_t n, bool honest) {
    struct td_matcher m, whole;
    td_matcher_init(&m, g);
    whole = m;
    n = n < TEXT_MAX ? n : TEXT_MAX;
    size_t at = 0;
    for (; at < n; at++) {
        if (at % 16 == 0) check(g, &m, honest);
        if (p[at] == 0xFE ? !td_grammars_token(store, &m, TINY_SIZE)
                          : !td_matcher_bytes(&m, (const char *)p + at, 1))
            break;
    }
    check(g, &m, honest);
    if (memchr(p, 0xFE, at) || m.n_paths == TD_MATCH_PATHS) return;
    PROMISE(td_matcher_bytes(&whole, (const char *)p, at) && same(&whole, &m));
}

static const uint8_t *part(const uint8_t **at, const uint8_t *end, size_t *ret_n) {
    const uint8_t *p = *at, *cut = p < end ? memchr(p, 0xFF, (size_t)(end - p)) : NULL;
    *ret_n = (size_t)((cut ? cut : end) - p);
    *at = cut ? cut + 1 : end;
    return p;
}

static void compiled(uint8_t options, const uint8_t *p, const uint8_t *end) {
    size_t n, tool_n = 0, text_n;
    const char *source = (const char *)part(&p, end, &n), *tool = "";
    if (options & TOOL) tool = (const char *)part(&p, end, &tool_n);
    const uint8_t *text = part(&p, end, &text_n);
    struct td_grammar_tool tools[] = {{"name", 4, tool, tool_n}, {"other", 5, "", 0}};
    struct td_grammar_spec s = {.content = (enum td_grammar_content)((options & CONTENT) % 5),
                                .text = source,
                                .n = n,
                                .tools = tools,
                                .n_tools = options & TOOL ? 2 : 0,
                                .one_call = options & ONE_CALL,
                                .reasoning = options & REASONING,
                                .dsml_token = options & DSML_TOKEN};
    struct td_bytes out = {0};
    const struct td_grammar *g;
    td_status st = td_grammar_compile(&s, &out, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    PROMISE(st == TD_OK ? out.n <= TD_GRAMMAR_BYTES_MAX : out.n == 0 && *td_fuzz_error.text);
    PROMISE(st != TD_INTERNAL);
    if (st == TD_OK) {
        PROMISE(td_grammars_open(store, out.p, out.n, &g, &td_fuzz_error) == TD_OK);
        match(g, text, text_n, true);
        td_grammars_close(store, g);
    }
    td_bytes_free(&out);
}

static void raw(const uint8_t *p, size_t n) {
    const struct td_grammar *g;
    struct td_matcher m;
    td_fuzz_accepted = td_grammars_open(store, p, n, &g, &td_fuzz_error) == TD_OK;
    if (td_fuzz_accepted) {
        match(g, p, n < 64 ? n : 64, false);
        td_grammars_close(store, g);
    } else if (td_matcher_load(&m, &object, p, n, &td_fuzz_error) == TD_OK) {
        td_fuzz_accepted = 1;
        for (size_t i = 0; i < n && td_matcher_bytes(&m, (const char *)p + i, 1);)
            i++;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!tok) load();
    td_fuzz_accepted = 0;
    td_fuzz_error = (struct td_error){.text = "nothing"};
    if (size == 0) return 0;
    if (data[0] & RAW)
        raw(data + 1, size - 1);
    else
        compiled(data[0], data + 1, data + size);
    return 0;
}
