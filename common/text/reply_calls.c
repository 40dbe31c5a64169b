/* Inside the calls: tags, keys, values. The wrapper is tolerant, for what a model gets slightly
 * wrong is still meant as a call; a value is not, for its text is the client's. */
#include <string.h>

#include "common/text/pyjson.h"
#include "common/text/reply_parts.h"

/* Where a tag is: outside, < , </ , <|word , </|word */
enum { TAG_NONE, TAG_LESS, TAG_SLASH, TAG_OPEN, TAG_CLOSE };

static const uint32_t value_end[] = {'<', '/', TD_SYM_DSML, 'p', 'a', 'r',
                                     'a', 'm', 'e',         't', 'e', 'r'};
enum { VALUE_END = sizeof value_end / sizeof *value_end, VALUE_MARK = 3 };

static void argument(struct td_reply *r, const char *text) {
    td_reply_event_open(r, TD_REPLY_ARGUMENTS);
    td_reply_event_text(r, text, strlen(text));
}

static void argument_symbol(struct td_reply *r, uint32_t sym, bool escaped) {
    char utf8[16], buf[8];
    size_t n = td_reply_utf8(sym, utf8);
    const char *p = escaped && sym < TD_SYM_DSML ? td_pyjson_escape(utf8, n, buf, &n) : utf8;
    td_reply_event_open(r, TD_REPLY_ARGUMENTS);
    td_reply_event_text(r, p, n);
}

/* ---- calls ---- */

/* Nothing that follows is part of the answer. */
static void stop(struct td_reply *r) {
    r->state = TD_IN_DONE;
    r->stopped = true;
}

void td_reply_call_begin(struct td_reply *r, const uint32_t *name, size_t n) {
    r->n_calls++;
    r->call_open = true;
    r->any_argument = false;
    r->state = TD_IN_ARGS;
    r->tag = TAG_NONE;
    td_reply_event_open(r, TD_REPLY_CALL);
    for (size_t i = 0; i < n; i++) {
        char utf8[16];
        td_reply_event_text(r, utf8, td_reply_utf8(name[i], utf8));
    }
}

static void close_call(struct td_reply *r) {
    if (!r->call_open) return;
    argument(r, r->any_argument ? "}" : "{}");
    r->call_open = false;
    r->completed++;
    td_reply_event_open(r, TD_REPLY_CALL_END);
    if (r->one_call) stop(r);
}

/* ---- tags ---- */

static void go(struct td_reply *r, uint8_t state) {
    r->state = state;
    r->tag = TAG_NONE;
}

/* To the end of the tag whose word `sym` ended, then to `state`. */
static void skip_to(struct td_reply *r, uint8_t state, uint32_t sym) {
    go(r, state);
    if (sym == '>') return;
    r->after = state;
    r->state = TD_IN_SKIP;
}

static bool word_is(const struct td_reply *r, const char *word) {
    return r->word_n == strlen(word) && memcmp(r->word, word, r->word_n) == 0;
}

static void open_tag(struct td_reply *r, uint32_t sym) {
    if (word_is(r, "invoke")) {
        close_call(r); /* its closing tag was forgotten */
        if (r->stopped) return;
        r->after = TD_IN_NAME;
        r->n_held = 0;
        if (sym == '>')
            stop(r); /* no name */
        else
            go(r, TD_IN_ATTR);
    } else if (word_is(r, "parameter") && r->state == TD_IN_ARGS && sym != '>') {
        r->after = TD_IN_KEY;
        go(r, TD_IN_ATTR);
    } else {
        skip_to(r, r->state, sym);
    }
}

static void close_tag(struct td_reply *r, uint32_t sym) {
    bool calls = word_is(r, "tool_calls");
    if (!calls && !word_is(r, "invoke")) {
        skip_to(r, r->state, sym);
        return;
    }
    close_call(r);
    if (r->stopped) return;
    skip_to(r, calls ? TD_IN_DONE : TD_IN_CALLS, sym);
}

/* Between tags there is white space; text that stands between calls ends the answer. */
static void no_tag(struct td_reply *r, uint32_t sym) {
    r->tag = sym == '<' ? TAG_LESS : TAG_NONE;
    if (sym != '<' && !td_sym_is_space(sym) && r->state == TD_IN_CALLS) stop(r);
}

static void tag_symbol(struct td_reply *r, uint32_t sym) {
    switch (r->tag) {
    case TAG_LESS:
        if (sym == '/')
            r->tag = TAG_SLASH;
        else if (sym == TD_SYM_DSML)
            r->tag = TAG_OPEN;
        else
            no_tag(r, sym);
        r->word_n = 0;
        return;
    case TAG_SLASH:
        if (sym == TD_SYM_DSML)
            r->tag = TAG_CLOSE;
        else
            no_tag(r, sym);
        return;
    case TAG_OPEN:
    case TAG_CLOSE:
        if ((sym >= 'a' && sym <= 'z') || sym == '_') {
            if (r->word_n < sizeof r->word) r->word[r->word_n++] = (char)sym;
            return;
        }
        if (r->tag == TAG_OPEN)
            open_tag(r, sym);
        else
            close_tag(r, sym);
        return;
    default:
        no_tag(r, sym);
    }
}

/* ---- names, keys, values ---- */

static void attribute_symbol(struct td_reply *r, uint32_t sym) {
    if (sym == '"') {
        if (r->after == TD_IN_KEY) {
            argument(r, r->any_argument ? ", \"" : "{\"");
            r->any_argument = true;
        }
        go(r, r->after);
    } else if (sym == '>') { /* a tag without the name it needs */
        if (r->after == TD_IN_KEY)
            go(r, TD_IN_ARGS);
        else
            stop(r);
    }
}

static void name_symbol(struct td_reply *r, uint32_t sym) {
    bool fits = sym >= ' ' && sym != '<' && sym != '>' && sym < TD_SYM_DSML;
    if (sym == '"' && r->n_held > 0) {
        uint32_t n = r->n_held;
        r->n_held = 0;
        td_reply_call_begin(r, r->held, n);
    } else if (sym == '"' || !fits || r->n_held == TD_REPLY_NAME_MAX) {
        r->n_held = 0;
        stop(r);
    } else {
        r->held[r->n_held++] = sym;
    }
}

static void key_symbol(struct td_reply *r, uint32_t sym) {
    if (sym != '"') {
        argument_symbol(r, sym, true);
        return;
    }
    argument(r, "\": ");
    r->false_at = 0;
    go(r, TD_IN_TYPE);
}

/* Attributes between key and value: string="false" somewhere among them makes it raw. */
static void type_symbol(struct td_reply *r, uint32_t sym) {
    static const char word[] = "false";
    if (sym == '>') {
        r->is_string = r->false_at != sizeof word - 1;
        if (r->is_string) argument(r, "\"");
        r->value_at = 0;
        go(r, TD_IN_VALUE);
    } else if (r->false_at < sizeof word - 1) {
        bool next = sym == (unsigned char)word[r->false_at];
        r->false_at = (uint8_t)(next ? r->false_at + 1 : sym == 'f');
    }
}

static void value_held(struct td_reply *r) {
    for (uint8_t i = 0; i < r->value_at; i++) {
        argument_symbol(r, value_end[i], r->is_string);
    }
    r->value_at = 0;
}

static void value_symbol(struct td_reply *r, uint32_t sym) {
    if (sym != value_end[r->value_at]) value_held(r);
    if (sym != value_end[r->value_at]) {
        argument_symbol(r, sym, r->is_string);
        return;
    }
    r->value_at++;
    if (r->value_at < VALUE_END) return;
    if (r->is_string) argument(r, "\"");
    r->value_at = 0;
    skip_to(r, TD_IN_ARGS, 0);
}

static void skip_symbol(struct td_reply *r, uint32_t sym) {
    if (sym == '>' || sym == '<') go(r, r->after);
    if (sym == '<') r->tag = TAG_LESS; /* the end of the tag was forgotten */
}

void td_reply_call_symbol(struct td_reply *r, uint32_t sym) {
    switch (r->state) {
    case TD_IN_CALLS:
    case TD_IN_ARGS:
        tag_symbol(r, sym);
        return;
    case TD_IN_ATTR:
        attribute_symbol(r, sym);
        return;
    case TD_IN_NAME:
        name_symbol(r, sym);
        return;
    case TD_IN_KEY:
        key_symbol(r, sym);
        return;
    case TD_IN_TYPE:
        type_symbol(r, sym);
        return;
    case TD_IN_VALUE:
        value_symbol(r, sym);
        return;
    case TD_IN_SKIP:
        skip_symbol(r, sym);
        return;
    default:
        if (!td_sym_is_space(sym)) stop(r);
    }
}

void td_reply_call_end(struct td_reply *r, bool cut) {
    if (r->state != TD_IN_VALUE) return;
    if (cut && r->value_at >= VALUE_MARK)
        r->value_at = 0; /* a closing tag that was cut is no text */
    else
        value_held(r);
}
