/* Structured output: what an answer may look like, as a compiled grammar, and which tokens may come
 * next.
 *
 * Compiler (router): reads schemas and patterns; gives position-independent bytes that travel with
 * the request. Store and matcher (workers): read these bytes only and never see a JSON schema, so
 * one reading of a keyword exists in a cluster, and a worker's cost does not depend on a client's
 * text. A matcher is a value of fixed size: where in the grammar one sequence is. It moves by
 * tokens, and its saved bytes go with the handoff.
 *
 * An answer is: [reasoning, any text up to </think>] then content or calls, then the end of text.
 * JSON is written compact or with these gaps and no others, before and behind the members of
 * objects and arrays and behind colons: one space, or a line end and at most 32 spaces or 8 tabs. So
 * "{"a": 1}" and indented forms are allowed and an endless run of blanks is not. Keys come in the
 * schema's order, additional ones last. Keys, and strings with a pattern, format, enum or const,
 * have one spelling (that of Python's json.dumps with ensure_ascii=False); other strings have every
 * escape JSON has, surrogates in pairs only. Integers are digits; numbers with bounds that are not
 * integers have no exponent. Nesting: TD_MATCH_DEPTH at most. */
#ifndef TD_COMMON_TEXT_GRAMMAR_H
#define TD_COMMON_TEXT_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/bytes.h"
#include "common/text/tokenizer.h"

enum {
    TD_GRAMMAR_BYTES_MAX = 1 << 20,  /* compiled */
    TD_GRAMMAR_SOURCE_MAX = 1 << 18, /* schemas and pattern of one answer together */
    TD_GRAMMAR_TOOLS_MAX = 128,
};

/* ---- compiler ---- */

enum td_grammar_content {
    TD_CONTENT_NONE,   /* no content: the answer is calls */
    TD_CONTENT_TEXT,   /* any text; calls may follow it when there are tools */
    TD_CONTENT_OBJECT, /* any JSON object */
    TD_CONTENT_SCHEMA, /* JSON that a JSON schema allows */
    TD_CONTENT_REGEX,  /* text that a pattern matches as a whole */
};

/* Borrowed UTF-8. */
struct td_grammar_tool {
    const char *name; /* no " < > or control character, 1..128 bytes */
    size_t name_n;
    const char *schema; /* JSON schema of the arguments, an object's; n = 0: any arguments */
    size_t schema_n;
};

struct td_grammar_spec {
    enum td_grammar_content content;
    const char *text; /* SCHEMA, REGEX: the schema's JSON text, the pattern */
    size_t n;
    const struct td_grammar_tool *tools; /* [n_tools] the answer may, with NONE must, be calls */
    size_t n_tools;
    bool one_call;   /* one call at most */
    bool reasoning;  /* the prompt ended with <think> */
    bool dsml_token; /* the vocabulary has the mark ｜DSML｜ as a token; else it is spelled */
};

/* Appends the compiled grammar to `out`. TD_UNSUPPORTED: the sentence names the keyword that cannot
 * be enforced and its place (JSON pointer; for calls behind "tool NAME: "). TD_INVALID: not JSON,
 * not a schema, or nothing is allowed by it. TD_TOO_LONG: beyond a limit, the sentence says which.
 * TD_NO_MEMORY. On failure `out` is as before. Pure and thread-safe; its time is bounded. */
TD_MUST_USE td_status td_grammar_compile(const struct td_grammar_spec *s, struct td_bytes *out,
                                         struct td_error *err);

/* ---- compiled grammar ---- */

/* A view of compiled bytes, caller-owned; borrows them, never writes. Fields are private. */
struct td_grammar {
    const uint32_t *words; /* [n / 4] */
    const uint32_t *rules, *states, *edges, *calls;
    uint32_t n_rules, n_states, n_edges, n_calls;
    uint32_t cache_id; /* set by a store */
    uint64_t hash;     /* of the bytes: equal grammars, equal hashes */
};

/* Checks `n` bytes, 4-aligned, from wherever they came: what is opened cannot send a matcher out of
 * bounds or into a loop. TD_CORRUPT names what is wrong. */
TD_MUST_USE td_status td_grammar_open(const void *bytes, size_t n, struct td_grammar *ret_g,
                                      struct td_error *err);

/* ---- matcher ---- */

enum {
    TD_MATCH_DEPTH = 64, /* frames: objects, arrays and strings inside each other */
    TD_MATCH_PATHS = 16, /* readings of the text that are still possible side by side */
    TD_MATCH_SAVED_MAX = 16 + TD_MATCH_PATHS * (1 + TD_MATCH_DEPTH * 8),
};

/* One way to read the text so far: states to return to, the current one last. */
struct td_match_path {
    uint32_t n;
    uint64_t frames[TD_MATCH_DEPTH];
};

/* Caller-owned value, copied by assignment; borrows the grammar. */
struct td_matcher {
    const struct td_grammar *g;
    uint32_t n_paths; /* 0 never: a matcher that refuses a byte stays where it was */
    bool ended;       /* the end of text was taken */
    struct td_match_path paths[TD_MATCH_PATHS];
};

void td_matcher_init(struct td_matcher *m, const struct td_grammar *g);

/* Takes `n` bytes of text if the grammar allows them here; else false, and `m` is as before. */
TD_MUST_USE bool td_matcher_bytes(struct td_matcher *m, const char *p, size_t n);

/* Whether the text so far is a complete answer (the end of text is allowed). */
bool td_matcher_may_end(const struct td_matcher *m);

/* Position as bytes, the same on every host; returns their number, <= TD_MATCH_SAVED_MAX. */
size_t td_matcher_save(const struct td_matcher *m, uint8_t out[TD_MATCH_SAVED_MAX]);

/* TD_CORRUPT: not a position in this grammar. */
TD_MUST_USE td_status td_matcher_load(struct td_matcher *m, const struct td_grammar *g,
                                      const uint8_t *p, size_t n, struct td_error *err);

/* ---- store: vocabulary, open grammars, masks ---- */

/* One per engine thread, used by that thread alone. Holds the vocabulary as a tree of bytes, the
 * grammars of running sequences, and masks computed before, of any grammar, in a fixed budget. */
struct td_grammars;

struct td_grammars_params {
    const struct td_tokenizer *t; /* needed during the call only */
    int32_t vocab;                /* rows of the model's head: bits of a mask */
    int32_t eos, dsml, think_end; /* ids of the marks (td_chat), -1: none */
    size_t grammars_max;          /* open at a time, kept ones included */
    size_t mask_bytes;            /* budget for masks, 1 MiB at least */
};

/* Takes all memory. TD_INVALID, TD_NO_MEMORY. */
TD_MUST_USE td_status td_grammars_create(const struct td_grammars_params *p,
                                         struct td_grammars **ret_s, struct td_error *err);
void td_grammars_destroy(struct td_grammars *s);

/* Bytes that a store of these parameters takes, for a memory plan, compiled grammars (at most
 * grammars_max * TD_GRAMMAR_BYTES_MAX, allocated when opened) not included. */
size_t td_grammars_bytes(const struct td_grammars *s);

/* Opens a copy of the bytes; equal bytes give the same grammar again, with what is known about it.
 * Closed ones are kept until room is needed. TD_CORRUPT; TD_BUSY: grammars_max are open;
 * TD_NO_MEMORY. */
TD_MUST_USE td_status td_grammars_open(struct td_grammars *s, const void *bytes, size_t n,
                                       const struct td_grammar **ret_g, struct td_error *err);
void td_grammars_close(struct td_grammars *s, const struct td_grammar *g);

/* The tokens that may come next, bit id % 32 of mask[id / 32]: [(vocab + 31) / 32] words, all
 * written. The end of text is among them when the text may end here. Never empty before the end;
 * empty behind it. Allocates nothing. */
void td_grammars_mask(struct td_grammars *s, const struct td_matcher *m, uint32_t *mask);

/* Takes one token; exactly those in the mask are taken. False: not allowed, `m` is as before. When
 * more than TD_MATCH_PATHS readings are possible the first ones are kept: then some texts that the
 * grammar allows are no longer offered, and none that it does not. */
TD_MUST_USE bool td_grammars_token(const struct td_grammars *s, struct td_matcher *m, int32_t id);

/* Computes masks that this grammar's first tokens and strings will need, for at most `budget_us`;
 * returns whether all are there. For idle time, such as the wait for a prefill. */
bool td_grammars_warm(struct td_grammars *s, const struct td_grammar *g, uint32_t budget_us);

#endif
