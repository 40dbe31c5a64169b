/* JSON schemas inside the compiler: what one value may be, collected from all schemas that hold
 * for it. Private to the compiler.
 *
 * A value is described by a list of schemas that must all hold (a property named by two branches
 * of an allOf has two). Collecting reads every keyword of each into one td_gs_node, intersecting;
 * $ref and allOf are more of the same, anyOf and oneOf stay as choices and are distributed when
 * the node is drawn. Lists that can hold objects or arrays become rules, one per list, so recursion
 * ends. */
#ifndef TD_COMMON_TEXT_GRAMMAR_SCHEMA_H
#define TD_COMMON_TEXT_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "common/text/grammar_build.h"

/* ---- patterns (grammar_regex.c) ---- */

struct td_gb_text_form {
    bool json;           /* characters of a JSON string */
    bool search;         /* may match anywhere in the text */
    bool no_less;        /* without the character < */
    uint32_t need, room; /* characters */
};

/* TD_UNSUPPORTED: what the subset lacks. */
void td_gb_pattern(struct td_gb *b, uint32_t from, uint32_t to, const char *p, size_t n,
                   const struct td_gb_text_form *f);
/* The pattern of a format, NULL: there is none. */
const char *td_gb_format(const char *name);

/* ---- numbers (grammar_number.c) ---- */

/* A decimal: sign, digits before and behind the point. */
struct td_decimal {
    bool set, exclusive, negative;
    char whole[24], fraction[24]; /* no needless zeros; "0", "" */
};

/* False: it has an exponent or too many digits. */
bool td_decimal_of(const json_t *number, struct td_decimal *ret_d);
int td_decimal_compare(const struct td_decimal *a, const struct td_decimal *b);
void td_gb_integer(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                   const struct td_decimal *hi);
void td_gb_bounded(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                   const struct td_decimal *hi);

/* ---- collected schemas (grammar_schema.c) ---- */

enum {
    TD_GS_NULL = 1,
    TD_GS_BOOLEAN = 2,
    TD_GS_INTEGER = 4,
    TD_GS_FRACTION = 8, /* numbers that are no integers */
    TD_GS_STRING = 16,
    TD_GS_ARRAY = 32,
    TD_GS_OBJECT = 64,
    TD_GS_ANY = 127,
};

struct td_gs_list {
    const json_t **p;
    size_t n, cap;
};

struct td_gs_node {
    uint32_t types;
    bool has_values;
    struct td_gs_list values;  /* enum, const */
    uint32_t need, room;       /* characters */
    const json_t *pattern, *format; /* schemas that have one */
    struct td_decimal lo, hi;
    uint32_t items_min, items_max; /* max UINT32_MAX: any */
    struct td_gs_list arrays;      /* schemas with keywords for items */
    struct td_gs_list objects;     /* schemas with keywords for members */
    struct td_gs_list required;    /* strings */
    struct td_gs_list choices;     /* schemas with anyOf, then those with oneOf marked beside */
    struct td_gs_list one_of;
    uint32_t members_min, members_max;
    const json_t *members_at; /* the schema of these */
};

struct td_gs {
    struct td_gb *b;
    const json_t *root;
    struct td_gs_rule *rules; /* lists that have a rule */
    size_t n_rules, cap_rules, drawn;
    uint32_t buckets[1024]; /* 1 + index of the first, by hash */
    int depth;              /* choices inside each other */
};

struct td_gs_rule {
    struct td_gs_list parts;
    uint32_t types, rule, next;
};

void td_gs_list_add(struct td_gb *b, struct td_gs_list *l, const json_t *v);

/* Counts steps of reading, so that a few bytes cannot ask for hours: whatever looks at a part of
 * the schema more than once says how much it looked at. False: compilation has failed, or now
 * does. */
bool td_gs_spend(struct td_gs *s, uint64_t steps);

/* Fails with the sentence, which begins with the place of `schema`'s `keyword`. */
void td_gs_fail(struct td_gs *s, td_status st, const json_t *schema, const char *keyword,
                const char *why);
/* The same with TD_UNSUPPORTED. */
void td_gs_refuse(struct td_gs *s, const json_t *schema, const char *keyword, const char *why);

void td_gs_node_init(struct td_gs_node *n);
void td_gs_node_free(struct td_gs_node *n);
void td_gs_node_copy(struct td_gb *b, struct td_gs_node *to, const struct td_gs_node *from);
/* Adds what `schema` says. */
void td_gs_collect(struct td_gs *s, struct td_gs_node *n, const json_t *schema, int depth);
/* Whether no value can be in both; false also when that cannot be shown. */
bool td_gs_disjoint(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b,
                    int depth);
/* Whether a value of enum or const satisfies the rest of the node. */
bool td_gs_value_fits(struct td_gs *s, const struct td_gs_node *n, const json_t *v);
bool td_gs_equal(struct td_gs *s, const json_t *a, const json_t *b);
/* The schemas of a member: adds them to `l`; false: it is forbidden. NULL: of additional ones. */
bool td_gs_member(struct td_gs *s, const struct td_gs_node *n, const char *name,
                  struct td_gs_list *l);

/* ---- keys (grammar_keys.c) ---- */

struct td_gs_names {
    const char **p; /* [n] in the order in which the schemas have them */
    bool *required; /* [n] */
    size_t n, n_required;
};

/* The caller frees both lists. */
void td_gs_names_of(struct td_gs *s, const struct td_gs_node *n, struct td_gs_names *m);
/* Every key but the names, up to and with its closing quote: as a JSON string, or behind the
 * opening quote of a tag's attribute. */
void td_gs_other_key(struct td_gb *b, uint32_t from, uint32_t to, const struct td_gs_names *m,
                     bool json);

/* ---- drawing (grammar_value.c) ---- */

/* The values that all of `parts` allow, of these types, from one state to another. */
void td_gs_draw(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_list *parts,
                uint32_t types);
/* Calls `draw` for each node that the choices of one come down to. */
typedef void td_gs_draw_one(struct td_gs *s, const struct td_gs_node *n, void *context);
void td_gs_alternatives(struct td_gs *s, const struct td_gs_node *n, td_gs_draw_one *draw,
                        void *context);
/* The text of a node's pattern or format. */
void td_gs_pattern(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n,
                   bool json, bool no_less);
/* Refuses counts of members that do not follow from the names; `open`: there may be other keys. */
void td_gs_check_counts(struct td_gs *s, const struct td_gs_node *n, const struct td_gs_names *m,
                        bool open);
/* Calls of the tools, from behind <|DSML| to the end of the answer; `each`: a schema per tool. */
void td_gs_calls(struct td_gb *b, struct td_gs *each, const struct td_grammar_spec *spec,
                 uint32_t from, uint32_t to);
/* Puts the name of a tool before the sentence of a failure in its schema. */
void td_gs_name_tool(struct td_gb *b, const struct td_grammar_spec *spec, size_t i);
/* Draws the rules that are waiting. */
void td_gs_finish(struct td_gs *s);
void td_gs_free(struct td_gs *s);

#endif
