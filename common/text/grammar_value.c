/* Draws what schemas allow: values, members, items. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"
#include "common/text/pyjson.h"
#include "common/text/unicode.h"

enum { COLLECT_DEPTH = 64, VALUE_DEPTH = 64 };

/* ---- given values ---- */

/* Text without its quotes, each character in its one spelling. */
static uint32_t json_text(struct td_gb *b, uint32_t from, const char *p, size_t n) {
    for (size_t i = 0; i < n;) {
        uint32_t cp, to = td_gb_new(b);
        int k = td_utf8_decode((const uint8_t *)p + i, n - i, &cp);
        if (k <= 0) {
            td_gb_fail(b, TD_INVALID, "a string is not UTF-8");
            return from;
        }
        td_gb_json_points(b, from, to, cp, cp);
        from = to;
        i += (size_t)k;
    }
    return from;
}

static uint32_t json_string_of(struct td_gb *b, uint32_t from, const char *p, size_t n) {
    return td_gb_text(b, json_text(b, td_gb_text(b, from, "\""), p, n), "\"");
}

static uint32_t value(struct td_gb *b, uint32_t from, const json_t *v, int depth);

static uint32_t members_of(struct td_gb *b, uint32_t at, const json_t *v, int depth) {
    const char *key;
    json_t *member;
    bool first = true;
    at = td_gb_gap(b, td_gb_text(b, at, "{"));
    json_object_foreach((json_t *)(uintptr_t)v, key, member) {
        if (!first) at = td_gb_gap(b, td_gb_text(b, at, ","));
        at = json_string_of(b, at, key, strlen(key));
        at = value(b, td_gb_gap(b, td_gb_text(b, at, ":")), member, depth);
        first = false;
    }
    return td_gb_text(b, first ? at : td_gb_gap(b, at), "}");
}

static uint32_t value(struct td_gb *b, uint32_t from, const json_t *v, int depth) {
    struct td_bytes text = {0};
    char whole[32];
    json_t *item;
    size_t i;
    if (depth == 0) {
        td_gb_fail(b, TD_TOO_LONG, "a value of enum or const is nested deeper than %d", VALUE_DEPTH);
        return from;
    }
    switch (json_typeof(v)) {
    case JSON_NULL:
        return td_gb_text(b, from, "null");
    case JSON_TRUE:
        return td_gb_text(b, from, "true");
    case JSON_FALSE:
        return td_gb_text(b, from, "false");
    case JSON_STRING:
        return json_string_of(b, from, json_string_value(v), json_string_length(v));
    case JSON_INTEGER:
        snprintf(whole, sizeof whole, "%lld", (long long)json_integer_value(v));
        return td_gb_text(b, from, whole);
    case JSON_REAL:
        td_pyjson_float(&text, json_real_value(v));
        if (text.failed)
            td_gb_fail(b, TD_NO_MEMORY, "no memory for a grammar");
        else
            from = td_gb_bytes(b, from, text.p, text.n);
        td_bytes_free(&text);
        return from;
    case JSON_OBJECT:
        return members_of(b, from, v, depth - 1);
    default:
        from = td_gb_gap(b, td_gb_text(b, from, "["));
        json_array_foreach(v, i, item) {
            if (i) from = td_gb_gap(b, td_gb_text(b, from, ","));
            from = value(b, from, item, depth - 1);
        }
        return td_gb_text(b, i ? td_gb_gap(b, from) : from, "]");
    }
}

/* ---- strings ---- */

void td_gs_pattern(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n,
                   bool json, bool no_less) {
    struct td_gb *b = s->b;
    const json_t *at = n->pattern ? n->pattern : n->format;
    const char *key = n->pattern ? "pattern" : "format";
    const char *text = json_string_value(json_object_get(at, key));
    const char *p = n->pattern ? text : td_gb_format(text);
    struct td_gb_text_form f = {
        .json = json, .search = n->pattern != NULL, .no_less = no_less, .need = n->need, .room = n->room};
    struct td_error why = {0}, *err = b->err;
    if (b->st != TD_OK || n->need > n->room) return;
    b->err = &why; /* the sentence gets its place */
    td_gb_pattern(b, from, to, p, strlen(p), &f);
    b->err = err;
    td_status st = b->st;
    b->st = TD_OK;
    if (st == TD_UNSUPPORTED || st == TD_TOO_LONG)
        td_gs_fail(s, st, at, key, why.text);
    else if (st != TD_OK)
        td_gb_fail(b, st, "%s", why.text);
}

static void string(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n) {
    struct td_gb *b = s->b;
    if (n->need > n->room) return;
    if (!n->pattern && !n->format) {
        td_gb_call_counted(b, from, to, TD_CORE_STRING, n->need, n->room);
        return;
    }
    uint32_t open = td_gb_text(b, from, "\""), close = td_gb_new(b);
    td_gs_pattern(s, open, close, n, true, false);
    td_gb_empty(b, td_gb_text(b, close, "\""), to);
}

/* ---- arrays ---- */

/* Schemas of the item at `i`; past all prefixes those of the rest. False: there can be none. */
static bool item(struct td_gs *s, const struct td_gs_node *n, size_t i, struct td_gs_list *l) {
    if (!td_gs_spend(s, 4 * n->arrays.n)) return false;
    for (size_t k = 0; k < n->arrays.n; k++) {
        const json_t *schema = n->arrays.p[k], *items = json_object_get(schema, "items");
        const json_t *prefix = json_object_get(schema, "prefixItems");
        bool old = json_is_array(items); /* until 2019-09 */
        if (old) prefix = items, items = json_object_get(schema, "additionalItems");
        const json_t *v = prefix && i < json_array_size(prefix) ? json_array_get(prefix, i) : items;
        if (json_is_false(v)) return false;
        if (v && !json_is_true(v)) td_gs_list_add(s->b, l, v);
    }
    return true;
}

static size_t longest_prefix(const struct td_gs_node *n) {
    size_t most = 0;
    for (size_t k = 0; k < n->arrays.n; k++) {
        const json_t *p = json_object_get(n->arrays.p[k], "prefixItems");
        const json_t *items = json_object_get(n->arrays.p[k], "items");
        size_t size = json_array_size(json_is_array(items) ? items : p);
        most = size > most ? size : most;
    }
    return most;
}

static uint32_t draw_item(struct td_gs *s, uint32_t from, const struct td_gs_node *n, size_t i) {
    struct td_gs_list l = {0};
    uint32_t to = td_gb_new(s->b);
    if (item(s, n, i, &l)) td_gs_draw(s, from, to, &l, TD_GS_ANY);
    free(l.p);
    return to;
}

static void array(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n) {
    struct td_gb *b = s->b;
    size_t fixed = longest_prefix(n), i = 0;
    if (n->items_min > fixed) fixed = n->items_min;
    bool any = n->items_max == UINT32_MAX;
    if (!any) fixed = n->items_max;
    if (fixed > TD_GB_NFA_MAX / 8) {
        td_gb_fail(b, TD_TOO_LONG, "minItems or maxItems beyond %d", TD_GB_NFA_MAX / 8);
        return;
    }
    uint32_t at = td_gb_gap(b, td_gb_text(b, from, "[")), close = td_gb_new(b);
    td_gb_empty(b, td_gb_text(b, close, "]"), to);
    if (n->items_min == 0) td_gb_empty(b, at, close);
    uint32_t before_close = td_gb_new(b); /* behind an item */
    td_gb_empty(b, td_gb_gap(b, before_close), close);
    for (; i < fixed && b->st == TD_OK; i++) {
        if (i) at = td_gb_gap(b, td_gb_text(b, at, ","));
        at = draw_item(s, at, n, i);
        if (i + 1 >= n->items_min) td_gb_empty(b, at, before_close);
    }
    if (!any) return;
    uint32_t begin = td_gb_new(b); /* only an item follows a comma */
    td_gb_empty(b, i ? td_gb_gap(b, td_gb_text(b, at, ",")) : at, begin);
    uint32_t behind = draw_item(s, begin, n, i);
    td_gb_empty(b, behind, before_close);
    td_gb_empty(b, td_gb_gap(b, td_gb_text(b, behind, ",")), begin);
}

/* ---- objects ---- */

static uint32_t member(struct td_gs *s, uint32_t key_end, const struct td_gs_list *l) {
    uint32_t to = td_gb_new(s->b);
    uint32_t at = td_gb_gap(s->b, td_gb_text(s->b, key_end, ":"));
    td_gs_draw(s, at, to, l, TD_GS_ANY);
    return to;
}

/* Counts of members: only where they follow from the names. */
void td_gs_check_counts(struct td_gs *s, const struct td_gs_node *n, const struct td_gs_names *m,
                        bool open) {
    if (n->members_min > m->n_required)
        td_gs_refuse(s, n->members_at, "minProperties", "more than are required cannot be enforced");
    if (n->members_max != UINT32_MAX && (open || n->members_max < m->n))
        td_gs_refuse(s, n->members_at, "maxProperties", "less than the schema's names cannot be enforced");
}

static void object(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n) {
    struct td_gb *b = s->b;
    struct td_gs_names m = {0};
    struct td_gs_list more = {0};
    bool open = td_gs_member(s, n, NULL, &more);
    td_gs_names_of(s, n, &m);
    td_gs_check_counts(s, n, &m, open);
    if (b->st == TD_OK && m.n == 0 && open && more.n == 0) {
        td_gb_call(b, from, to, TD_CORE_OBJECT);
    } else if (b->st == TD_OK) {
        /* `none`: no member yet; `some`: behind one. Both lead to the key of the next. */
        uint32_t none = td_gb_gap(b, td_gb_text(b, from, "{")), some = td_gb_new(b);
        uint32_t close = td_gb_new(b);
        for (size_t i = 0; i < m.n && b->st == TD_OK; i++) {
            struct td_gs_list l = {0};
            uint32_t next_none = td_gb_new(b), next_some = td_gb_new(b);
            if (td_gs_member(s, n, m.p[i], &l)) {
                uint32_t key = td_gb_new(b);
                td_gb_empty(b, none, key);
                td_gb_empty(b, td_gb_gap(b, td_gb_text(b, some, ",")), key);
                td_gb_empty(b, member(s, json_string_of(b, key, m.p[i], strlen(m.p[i])), &l), next_some);
            }
            free(l.p);
            if (!m.required[i]) {
                td_gb_empty(b, none, next_none);
                td_gb_empty(b, some, next_some);
            }
            none = next_none;
            some = next_some;
        }
        if (open) {
            uint32_t key = td_gb_new(b), key_end = td_gb_new(b);
            td_gb_empty(b, none, key);
            td_gb_empty(b, td_gb_gap(b, td_gb_text(b, some, ",")), key);
            td_gs_other_key(b, key, key_end, &m, true);
            td_gb_empty(b, member(s, key_end, &more), some);
        }
        td_gb_empty(b, none, close);
        td_gb_empty(b, td_gb_gap(b, some), close);
        td_gb_empty(b, td_gb_text(b, close, "}"), to);
    }
    free(m.p);
    free(m.required);
    free(more.p);
}

/* ---- nodes ---- */

static void draw_types(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n) {
    struct td_gb *b = s->b;
    uint32_t t = n->types;
    bool bounded = n->lo.set || n->hi.set;
    if (t & TD_GS_NULL) td_gb_empty(b, td_gb_text(b, from, "null"), to);
    if (t & TD_GS_BOOLEAN) {
        td_gb_empty(b, td_gb_text(b, from, "true"), to);
        td_gb_empty(b, td_gb_text(b, from, "false"), to);
    }
    if (t & TD_GS_FRACTION && !bounded)
        td_gb_empty(b, td_gb_number(b, from), to);
    else if (t & TD_GS_FRACTION)
        td_gb_bounded(b, from, to, &n->lo, &n->hi);
    else if (t & TD_GS_INTEGER)
        td_gb_integer(b, from, to, &n->lo, &n->hi);
    if (t & TD_GS_STRING) string(s, from, to, n);
    if (t & TD_GS_ARRAY) {
        if (n->arrays.n || n->items_min || n->items_max != UINT32_MAX)
            array(s, from, to, n);
        else
            td_gb_call(b, from, to, TD_CORE_ARRAY);
    }
    if (t & TD_GS_OBJECT) object(s, from, to, n);
}

static void check_one_of(struct td_gs *s, const struct td_gs_node *base, const json_t *list) {
    size_t count = json_array_size(list);
    char why[128];
    struct td_gs_node *all = calloc(count, sizeof *all);
    if (!all) td_gb_fail(s->b, TD_NO_MEMORY, "no memory for a grammar");
    for (size_t i = 0; all && i < count; i++) {
        td_gs_node_copy(s->b, &all[i], base);
        td_gs_collect(s, &all[i], json_array_get(list, i), COLLECT_DEPTH);
    }
    for (size_t i = 0; all && i < count; i++)
        for (size_t k = i + 1; k < count && s->b->st == TD_OK; k++) {
            if (td_gs_disjoint(s, &all[i], &all[k], 8)) continue;
            snprintf(why, sizeof why,
                     "alternatives %zu and %zu may hold at once, which oneOf forbids; anyOf can be "
                     "enforced", i, k);
            td_gs_refuse(s, json_array_get(list, i), "", why);
        }
    for (size_t i = 0; all && i < count; i++)
        td_gs_node_free(&all[i]);
    free(all);
}

void td_gs_alternatives(struct td_gs *s, const struct td_gs_node *n, td_gs_draw_one *draw,
                        void *context) {
    struct td_gs_node one;
    bool any_of = n->choices.n > 0;
    if (s->b->st != TD_OK || n->types == 0) return;
    if (!any_of && n->one_of.n == 0) {
        draw(s, n, context);
        return;
    }
    const json_t *list = any_of ? n->choices.p[n->choices.n - 1] : n->one_of.p[n->one_of.n - 1];
    if (++s->depth > COLLECT_DEPTH)
        td_gb_fail(s->b, TD_UNSUPPORTED, "a choice refers to itself without anything between");
    for (size_t i = 0; i < json_array_size(list) && s->b->st == TD_OK; i++) {
        td_gs_node_copy(s->b, &one, n);
        any_of ? one.choices.n-- : one.one_of.n--;
        if (!any_of && i == 0) check_one_of(s, &one, list);
        td_gs_collect(s, &one, json_array_get(list, i), COLLECT_DEPTH);
        td_gs_alternatives(s, &one, draw, context);
        td_gs_node_free(&one);
    }
    s->depth--;
}

struct between {
    uint32_t from, to;
};

static void draw_resolved(struct td_gs *s, const struct td_gs_node *n, void *context) {
    const struct between *at = context;
    if (!n->has_values) draw_types(s, at->from, at->to, n);
    for (size_t i = 0; i < n->values.n && s->b->st == TD_OK; i++)
        if (td_gs_value_fits(s, n, n->values.p[i]))
            td_gb_empty(s->b, value(s->b, at->from, n->values.p[i], VALUE_DEPTH), at->to);
}

static void draw_node(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_node *n) {
    td_gs_alternatives(s, n, draw_resolved, &(struct between){from, to});
}

/* ---- rules of lists ---- */

static int by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)*(const json_t *const *)a, y = (uintptr_t)*(const json_t *const *)b;
    return (x > y) - (x < y);
}

static uint32_t rule_of(struct td_gs *s, const struct td_gs_list *parts, uint32_t types) {
    struct td_gs_list l = {0};
    for (size_t i = 0; i < parts->n; i++)
        td_gs_list_add(s->b, &l, parts->p[i]);
    if (l.n) qsort(l.p, l.n, sizeof *l.p, by_address);
    size_t n = 0;
    for (size_t i = 0; i < l.n; i++)
        if (i == 0 || l.p[i] != l.p[i - 1]) l.p[n++] = l.p[i];
    l.n = n;
    uint64_t h = types;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (uintptr_t)l.p[i]) * 0x9E3779B97F4A7C15ull, h ^= h >> 32;
    uint32_t *bucket = &s->buckets[h % 1024];
    for (uint32_t k = *bucket; k; k = s->rules[k - 1].next) {
        const struct td_gs_rule *r = &s->rules[k - 1];
        s->b->work++;
        if (r->types != types || r->parts.n != n || memcmp(r->parts.p, l.p, n * sizeof *l.p) != 0)
            continue;
        free(l.p);
        return r->rule;
    }
    uint32_t rule = td_gb_rule(s->b);
    if (!td_gb_grow(s->b, (void **)&s->rules, &s->cap_rules, s->n_rules, sizeof *s->rules)) {
        free(l.p);
        return 0;
    }
    s->rules[s->n_rules++] =
        (struct td_gs_rule){.parts = l, .types = types, .rule = rule, .next = *bucket};
    *bucket = (uint32_t)s->n_rules;
    return rule;
}

void td_gs_draw(struct td_gs *s, uint32_t from, uint32_t to, const struct td_gs_list *parts,
                uint32_t types) {
    struct td_gs_node n;
    td_gs_node_init(&n);
    for (size_t i = 0; i < parts->n; i++)
        td_gs_collect(s, &n, parts->p[i], COLLECT_DEPTH);
    n.types &= types;
    bool plain = parts->n == 0 && n.types == TD_GS_ANY;
    bool nests = n.types & (TD_GS_ARRAY | TD_GS_OBJECT) && !n.has_values;
    bool pattern = (n.pattern || n.format) && n.types & TD_GS_STRING;
    if (s->b->st == TD_OK) {
        if (plain)
            td_gb_call(s->b, from, to, TD_CORE_VALUE);
        else if (nests || pattern || n.choices.n || n.one_of.n)
            td_gb_call(s->b, from, to, rule_of(s, parts, types));
        else
            draw_node(s, from, to, &n);
    }
    td_gs_node_free(&n);
}

void td_gs_finish(struct td_gs *s) {
    for (; s->drawn < s->n_rules && s->b->st == TD_OK; s->drawn++) {
        struct td_gs_node n;
        uint32_t start = td_gb_begin(s->b), end = td_gb_new(s->b), rule = s->rules[s->drawn].rule;
        td_gs_node_init(&n);
        for (size_t i = 0; i < s->rules[s->drawn].parts.n; i++)
            td_gs_collect(s, &n, s->rules[s->drawn].parts.p[i], COLLECT_DEPTH);
        n.types &= s->rules[s->drawn].types;
        draw_node(s, start, end, &n);
        td_gs_node_free(&n);
        if (s->b->st == TD_OK) td_gb_finish(s->b, rule, start, end, false);
    }
}

void td_gs_free(struct td_gs *s) {
    for (size_t i = 0; i < s->n_rules; i++)
        free(s->rules[i].parts.p);
    free(s->rules);
}
