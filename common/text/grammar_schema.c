/* Reads the keywords of JSON schemas. One table: each keyword has its reader, or is known to say
 * nothing about values, or cannot be enforced; a word that is not in the table is refused, for it
 * may be meant. */
#include "common/text/grammar_schema.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLACE_DEPTH = 512 };

/* ---- places ---- */

/* Appends the JSON pointer from `at` to `to`; false: it is not below. */
static bool find_place(const json_t *at, const json_t *to, struct td_bytes *out, int depth) {
    const char *key;
    json_t *v;
    size_t i, n = out->n;
    char number[24];
    if (at == to) return true;
    if (depth == 0) return false;
    if (json_is_object(at)) {
        json_object_foreach((json_t *)(uintptr_t)at, key, v) {
            td_bytes_add(out, "/", 1);
            for (const char *p = key; *p; p++)
                td_bytes_add(out, *p == '~' ? "~0" : *p == '/' ? "~1" : p, *p == '~' || *p == '/' ? 2 : 1);
            if (find_place(v, to, out, depth - 1)) return true;
            out->n = n;
        }
    } else if (json_is_array(at)) {
        json_array_foreach(at, i, v) {
            td_bytes_add(out, number, (size_t)snprintf(number, sizeof number, "/%zu", i));
            if (find_place(v, to, out, depth - 1)) return true;
            out->n = n;
        }
    }
    return false;
}

void td_gs_fail(struct td_gs *s, td_status st, const json_t *schema, const char *keyword,
                const char *why) {
    struct td_bytes place = {0};
    bool found = s->b->st == TD_OK && find_place(s->root, schema, &place, PLACE_DEPTH);
    td_gb_fail(s->b, st, "#%.*s/%s: %s", found ? (int)(place.n < 200 ? place.n : 200) : 0,
               place.p ? place.p : "", keyword, why);
    td_bytes_free(&place);
}

void td_gs_refuse(struct td_gs *s, const json_t *schema, const char *keyword, const char *why) {
    td_gs_fail(s, TD_UNSUPPORTED, schema, keyword, why);
}

static void invalid(struct td_gs *s, const json_t *schema, const char *keyword, const char *why) {
    td_gs_fail(s, TD_INVALID, schema, keyword, why);
}

bool td_gs_spend(struct td_gs *s, uint64_t steps) {
    s->b->work += steps;
    if (s->b->work > TD_GB_WORK_MAX) td_gb_fail(s->b, TD_TOO_LONG, "the schema is too complex");
    return s->b->st == TD_OK;
}

/* ---- nodes ---- */

void td_gs_list_add(struct td_gb *b, struct td_gs_list *l, const json_t *v) {
    if (td_gb_grow(b, (void **)(uintptr_t)&l->p, &l->cap, l->n, sizeof *l->p)) l->p[l->n++] = v;
}

static void list_copy(struct td_gb *b, struct td_gs_list *to, const struct td_gs_list *from) {
    *to = (struct td_gs_list){0};
    for (size_t i = 0; i < from->n; i++)
        td_gs_list_add(b, to, from->p[i]);
}

void td_gs_node_init(struct td_gs_node *n) {
    *n = (struct td_gs_node){.types = TD_GS_ANY,
                             .room = TD_ROOM_ANY,
                             .items_max = UINT32_MAX,
                             .members_max = UINT32_MAX};
}

void td_gs_node_free(struct td_gs_node *n) {
    free(n->values.p);
    free(n->arrays.p);
    free(n->objects.p);
    free(n->required.p);
    free(n->choices.p);
    free(n->one_of.p);
    td_gs_node_init(n);
}

void td_gs_node_copy(struct td_gb *b, struct td_gs_node *to, const struct td_gs_node *from) {
    *to = *from;
    list_copy(b, &to->values, &from->values);
    list_copy(b, &to->arrays, &from->arrays);
    list_copy(b, &to->objects, &from->objects);
    list_copy(b, &to->required, &from->required);
    list_copy(b, &to->choices, &from->choices);
    list_copy(b, &to->one_of, &from->one_of);
    b->work += 64 + from->values.n + from->arrays.n + from->objects.n + from->required.n +
               from->choices.n + from->one_of.n;
}

/* ---- values ---- */

static bool is_whole(const json_t *v) {
    return json_is_integer(v) || (json_is_real(v) && floor(json_real_value(v)) == json_real_value(v));
}

static uint32_t type_of(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_NULL:
        return TD_GS_NULL;
    case JSON_TRUE:
    case JSON_FALSE:
        return TD_GS_BOOLEAN;
    case JSON_STRING:
        return TD_GS_STRING;
    case JSON_ARRAY:
        return TD_GS_ARRAY;
    case JSON_OBJECT:
        return TD_GS_OBJECT;
    default:
        return is_whole(v) ? TD_GS_INTEGER : TD_GS_FRACTION;
    }
}

/* What comparing costs at most. */
static uint64_t steps_of(const json_t *v) {
    uint64_t n = 1 + json_string_length(v) / 64;
    const char *key;
    json_t *part;
    size_t i;
    if (json_is_object(v)) json_object_foreach((json_t *)(uintptr_t)v, key, part) n += 4 + steps_of(part);
    if (json_is_array(v)) json_array_foreach(v, i, part) n += 1 + steps_of(part);
    return n;
}

bool td_gs_equal(struct td_gs *s, const json_t *a, const json_t *b) {
    if (a == b) return true;
    if (json_typeof(a) == json_typeof(b) && !td_gs_spend(s, steps_of(a))) return false;
    if (json_is_number(a) && json_is_number(b)) {
        if (json_is_integer(a) && json_is_integer(b))
            return json_integer_value(a) == json_integer_value(b);
        return json_number_value(a) == json_number_value(b);
    }
    return json_equal(a, b) == 1;
}

static size_t characters(const json_t *string) {
    const char *p = json_string_value(string);
    size_t n = 0;
    for (size_t i = 0; i < json_string_length(string); i++)
        n += (p[i] & 0xC0) != 0x80;
    return n;
}

bool td_gs_value_fits(struct td_gs *s, const struct td_gs_node *n, const json_t *v) {
    uint32_t type = type_of(v);
    if (!(n->types & type) || !td_gs_spend(s, 32 + json_string_length(v) / 16)) return false;
    if (type == TD_GS_STRING) {
        if (n->pattern) td_gs_refuse(s, n->pattern, "pattern", "beside enum or const");
        if (n->format) td_gs_refuse(s, n->format, "format", "beside enum or const");
        size_t k = characters(v);
        return k >= n->need && (n->room == TD_ROOM_ANY || k <= n->room);
    }
    if (type == TD_GS_INTEGER || type == TD_GS_FRACTION) {
        struct td_decimal d = {0};
        if (!n->lo.set && !n->hi.set) return true;
        if (!td_decimal_of(v, &d)) return false;
        int lo = n->lo.set ? td_decimal_compare(&d, &n->lo) : 1;
        int hi = n->hi.set ? td_decimal_compare(&d, &n->hi) : -1;
        return (lo > 0 || (lo == 0 && !n->lo.exclusive)) && (hi < 0 || (hi == 0 && !n->hi.exclusive));
    }
    if (type == TD_GS_ARRAY) {
        if (n->arrays.n) td_gs_refuse(s, n->arrays.p[0], "items", "beside enum or const");
        return json_array_size(v) >= n->items_min && json_array_size(v) <= n->items_max;
    }
    if (type == TD_GS_OBJECT && (n->objects.n || n->required.n || n->members_at))
        td_gs_refuse(s, n->objects.n ? n->objects.p[0] : s->root, "properties", "beside enum or const");
    return true;
}

/* Keeps of the values so far those that are among the new ones too. */
static void only(struct td_gs *s, struct td_gs_node *n, const json_t *const *values, size_t count) {
    struct td_gs_list both = {0};
    for (size_t i = 0; i < count; i++) {
        bool in = !n->has_values, twice = false;
        for (size_t k = 0; k < n->values.n && !in; k++)
            in = td_gs_equal(s, values[i], n->values.p[k]);
        for (size_t k = 0; k < both.n && !twice && count < 256; k++)
            twice = td_gs_equal(s, values[i], both.p[k]);
        if (!td_gs_spend(s, 1 + n->values.n + (count < 256 ? both.n : 0))) break;
        if (in && !twice) td_gs_list_add(s->b, &both, values[i]);
    }
    free(n->values.p);
    n->values = both;
    n->has_values = true;
}

/* ---- keywords ---- */

struct read {
    struct td_gs *s;
    struct td_gs_node *n;
    const json_t *schema, *v;
    const char *key;
    int depth;
};

static uint32_t type_bit(const char *name) {
    static const struct {
        const char *name;
        uint32_t bits;
    } types[] = {{"null", TD_GS_NULL},
                 {"boolean", TD_GS_BOOLEAN},
                 {"integer", TD_GS_INTEGER},
                 {"number", TD_GS_INTEGER | TD_GS_FRACTION},
                 {"string", TD_GS_STRING},
                 {"array", TD_GS_ARRAY},
                 {"object", TD_GS_OBJECT}};
    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0) return types[i].bits;
    return 0;
}

static void read_type(struct read *r) {
    uint32_t bits = type_bit(json_string_value(r->v)), one = bits;
    size_t i;
    json_t *v;
    if (json_is_array(r->v)) {
        json_array_foreach(r->v, i, v) {
            one = type_bit(json_string_value(v));
            if (!one) break;
            bits |= one;
        }
    }
    if (!bits || !one) {
        invalid(r->s, r->schema, r->key, "expected a type's name or a list of them");
        return;
    }
    if (json_is_true(json_object_get(r->schema, "nullable"))) bits |= TD_GS_NULL;
    r->n->types &= bits;
}

static void read_nullable(struct read *r) {
    if (!json_is_boolean(r->v)) invalid(r->s, r->schema, r->key, "expected true or false");
}

static void read_enum(struct read *r) {
    if (!json_is_array(r->v)) {
        invalid(r->s, r->schema, r->key, "expected an array");
        return;
    }
    size_t count = json_array_size(r->v);
    const json_t **all = calloc(count + 1, sizeof *all);
    if (!all) {
        td_gb_fail(r->s->b, TD_NO_MEMORY, "no memory for a grammar");
        return;
    }
    for (size_t i = 0; i < count; i++)
        all[i] = json_array_get(r->v, i);
    only(r->s, r->n, all, count);
    free(all);
}

static void read_const(struct read *r) { only(r->s, r->n, &r->v, 1); }

static bool count_of(struct read *r, uint32_t *ret) {
    double v = json_number_value(r->v);
    if (!json_is_number(r->v) || !is_whole(r->v) || v < 0) {
        invalid(r->s, r->schema, r->key, "expected a whole number, 0 or more");
        return false;
    }
    *ret = v > UINT32_MAX - 1 ? UINT32_MAX - 1 : (uint32_t)v;
    return true;
}

static void read_length(struct read *r) {
    uint32_t v;
    if (!count_of(r, &v)) return;
    if (r->key[1] == 'i') {
        if (v >= TD_ROOM_ANY) td_gs_refuse(r->s, r->schema, r->key, "more than 1048574");
        if (v > r->n->need) r->n->need = v;
    } else if (v < r->n->room) {
        r->n->room = v;
    }
}

static void read_items_count(struct read *r) {
    uint32_t v;
    if (!count_of(r, &v)) return;
    if (r->key[1] == 'i' && v > r->n->items_min) r->n->items_min = v;
    if (r->key[1] == 'a' && v < r->n->items_max) r->n->items_max = v;
}

static void read_members_count(struct read *r) {
    uint32_t v;
    if (!count_of(r, &v)) return;
    if (r->key[1] == 'i' && v > r->n->members_min) r->n->members_min = v;
    if (r->key[1] == 'a' && v < r->n->members_max) r->n->members_max = v;
    r->n->members_at = r->schema;
}

static void read_bound(struct read *r) {
    struct td_decimal d = {0};
    bool low = strstr(r->key, "in") != NULL && !strstr(r->key, "ax"), exclusive = *r->key == 'e';
    if (!json_is_number(r->v)) {
        invalid(r->s, r->schema, r->key, "expected a number");
        return;
    }
    if (!td_decimal_of(r->v, &d)) {
        td_gs_refuse(r->s, r->schema, r->key, "a bound with an exponent or too many digits");
        return;
    }
    d.exclusive = exclusive;
    if (exclusive && strlen(d.whole) > 6)
        td_gs_refuse(r->s, r->schema, r->key, "an exclusive bound of a million or more");
    struct td_decimal *have = low ? &r->n->lo : &r->n->hi;
    int c = have->set ? td_decimal_compare(&d, have) : 0;
    if (!have->set || (low ? c > 0 : c < 0) || (c == 0 && exclusive)) *have = d;
}

static void read_multiple(struct read *r) {
    if (json_number_value(r->v) == 1)
        r->n->types &= ~(uint32_t)TD_GS_FRACTION;
    else
        td_gs_refuse(r->s, r->schema, r->key, "only 1 can be enforced");
}

static void read_pattern(struct read *r) {
    const json_t *have = r->n->pattern;
    if (!json_is_string(r->v))
        invalid(r->s, r->schema, r->key, "expected a string");
    else if (have && !json_equal(json_object_get(have, r->key), r->v))
        td_gs_refuse(r->s, r->schema, r->key, "beside another pattern");
    else if (r->n->format)
        td_gs_refuse(r->s, r->schema, r->key, "beside a format");
    else
        r->n->pattern = r->schema;
}

static void read_format(struct read *r) {
    const char *name = json_string_value(r->v);
    static const char *const numeric[] = {"float", "double", "int64", "int32", "uint32", "uint64", "decimal"};
    struct td_gs_node *n = r->n;
    if (!name) {
        invalid(r->s, r->schema, r->key, "expected a string");
        return;
    }
    /* Sizes of numbers are not conditions of JSON Schema; they say nothing about strings. */
    for (size_t i = 0; i < sizeof numeric / sizeof *numeric; i++)
        if (strcmp(name, numeric[i]) == 0 && !(n->types & TD_GS_STRING)) return;
    if (!td_gb_format(name))
        td_gs_refuse(r->s, r->schema, r->key, "a format that cannot be enforced");
    else if (n->format && !json_equal(json_object_get(n->format, r->key), r->v))
        td_gs_refuse(r->s, r->schema, r->key, "beside another format");
    else if (n->pattern)
        td_gs_refuse(r->s, r->schema, r->key, "beside a pattern");
    else
        n->format = r->schema;
}

static void read_for_arrays(struct read *r) {
    struct td_gs_list *l = &r->n->arrays;
    if (!l->n || l->p[l->n - 1] != r->schema) td_gs_list_add(r->s->b, l, r->schema);
}

static void read_for_objects(struct read *r) {
    struct td_gs_list *l = &r->n->objects;
    if (!strcmp(r->key, "properties") && !json_is_object(r->v))
        invalid(r->s, r->schema, r->key, "expected an object");
    if (!l->n || l->p[l->n - 1] != r->schema) td_gs_list_add(r->s->b, l, r->schema);
}

static void read_required(struct read *r) {
    size_t i, k;
    json_t *v;
    if (!json_is_array(r->v)) {
        invalid(r->s, r->schema, r->key, "expected an array of strings");
        return;
    }
    json_array_foreach(r->v, i, v) {
        struct td_gs_list *l = &r->n->required;
        if (!td_gs_spend(r->s, 1 + l->n)) return;
        if (!json_is_string(v)) {
            invalid(r->s, r->schema, r->key, "expected an array of strings");
            return;
        }
        for (k = 0; k < l->n && !json_equal(l->p[k], v);)
            k++;
        if (k == l->n) td_gs_list_add(r->s->b, l, v);
    }
}

static void read_ref(struct read *r) {
    const char *ref = json_string_value(r->v);
    const json_t *at = r->s->root;
    if (!ref || *ref != '#' || (ref[1] && ref[1] != '/')) {
        td_gs_refuse(r->s, r->schema, r->key, "expected a pointer into this schema (#/...)");
        return;
    }
    char step[256];
    if (!td_gs_spend(r->s, json_string_length(r->v))) return;
    for (const char *p = ref + 1; *p && at;) {
        size_t n = 0;
        for (p++; *p && *p != '/' && n + 1 < sizeof step; p++) {
            if (*p == '~' && (p[1] == '0' || p[1] == '1'))
                step[n++] = *++p == '0' ? '~' : '/';
            else if (*p == '%' && p[1] && p[2])
                step[n++] = (char)strtol((char[3]){p[1], p[2], 0}, NULL, 16), p += 2;
            else
                step[n++] = *p;
        }
        step[n] = 0;
        char *end;
        if (*p && *p != '/')
            at = NULL; /* too long a name */
        else if (json_is_array(at)) {
            unsigned long k = strtoul(step, &end, 10);
            at = *step && !*end ? json_array_get(at, k) : NULL;
        } else {
            at = json_object_get(at, step);
        }
    }
    if (!at)
        invalid(r->s, r->schema, r->key, "points to nothing");
    else
        td_gs_collect(r->s, r->n, at, r->depth - 1);
}

static void read_all_of(struct read *r) {
    size_t i;
    json_t *v;
    if (!json_is_array(r->v)) invalid(r->s, r->schema, r->key, "expected an array");
    json_array_foreach(r->v, i, v) td_gs_collect(r->s, r->n, v, r->depth - 1);
}

static void read_choice(struct read *r) {
    bool one = *r->key == 'o';
    if (!json_is_array(r->v) || json_array_size(r->v) == 0)
        invalid(r->s, r->schema, r->key, "expected an array with at least one schema");
    else
        td_gs_list_add(r->s->b, one ? &r->n->one_of : &r->n->choices, r->v);
}

static void read_false_only(struct read *r) {
    if (!json_is_false(r->v)) td_gs_refuse(r->s, r->schema, r->key, "cannot be enforced");
}

static bool is_empty(const json_t *v) {
    return json_is_true(v) || (json_is_object(v) && json_object_size(v) == 0);
}

static void read_empty_only(struct read *r) {
    if (!is_empty(r->v)) td_gs_refuse(r->s, r->schema, r->key, "cannot be enforced");
}

static void read_nothing(struct read *r) { (void)r; }

static void read_never(struct read *r) { td_gs_refuse(r->s, r->schema, r->key, "cannot be enforced"); }

static const struct {
    const char *key;
    void (*read)(struct read *);
} keywords[] = {
    {"$ref", read_ref},
    {"type", read_type},
    {"nullable", read_nullable},
    {"enum", read_enum},
    {"const", read_const},
    {"allOf", read_all_of},
    {"anyOf", read_choice},
    {"oneOf", read_choice},
    {"properties", read_for_objects},
    {"additionalProperties", read_for_objects},
    {"required", read_required},
    {"minProperties", read_members_count},
    {"maxProperties", read_members_count},
    {"items", read_for_arrays},
    {"prefixItems", read_for_arrays},
    {"additionalItems", read_for_arrays},
    {"minItems", read_items_count},
    {"maxItems", read_items_count},
    {"uniqueItems", read_false_only},
    {"minLength", read_length},
    {"maxLength", read_length},
    {"pattern", read_pattern},
    {"format", read_format},
    {"minimum", read_bound},
    {"maximum", read_bound},
    {"exclusiveMinimum", read_bound},
    {"exclusiveMaximum", read_bound},
    {"multipleOf", read_multiple},
    {"patternProperties", read_empty_only},
    {"propertyNames", read_empty_only},
    {"unevaluatedProperties", read_empty_only},
    {"unevaluatedItems", read_empty_only},
    {"dependentRequired", read_empty_only},
    {"dependentSchemas", read_empty_only},
    {"dependencies", read_empty_only},
    {"not", read_never},
    {"if", read_never},
    {"then", read_never},
    {"else", read_never},
    {"contains", read_never},
    {"minContains", read_never},
    {"maxContains", read_never},
    {"$dynamicRef", read_never},
    {"$recursiveRef", read_never},
    {"$defs", read_nothing},
    {"definitions", read_nothing},
    {"title", read_nothing},
    {"description", read_nothing},
    {"default", read_nothing},
    {"example", read_nothing},
    {"examples", read_nothing},
    {"$schema", read_nothing},
    {"$id", read_nothing},
    {"id", read_nothing},
    {"$anchor", read_nothing},
    {"$dynamicAnchor", read_nothing},
    {"$vocabulary", read_nothing},
    {"$comment", read_nothing},
    {"deprecated", read_nothing},
    {"readOnly", read_nothing},
    {"writeOnly", read_nothing},
    {"discriminator", read_nothing},
    {"externalDocs", read_nothing},
    {"xml", read_nothing},
    {"contentEncoding", read_nothing},
    {"contentMediaType", read_nothing},
    {"contentSchema", read_nothing},
};

void td_gs_collect(struct td_gs *s, struct td_gs_node *n, const json_t *schema, int depth) {
    struct read r = {.s = s, .n = n, .schema = schema, .depth = depth};
    const char *key;
    json_t *v;
    if (!td_gs_spend(s, 32) || json_is_true(schema)) return;
    if (json_is_false(schema)) {
        n->types = 0;
    } else if (!json_is_object(schema)) {
        td_gb_fail(s->b, TD_INVALID, "expected a schema: an object, true or false");
    } else if (depth == 0) {
        td_gs_refuse(s, schema, "$ref", "refers to itself without anything between");
    } else {
        json_object_foreach((json_t *)(uintptr_t)schema, key, v) {
            size_t i = 0, all = sizeof keywords / sizeof *keywords;
            if (!td_gs_spend(s, 16)) return;
            while (i < all && strcmp(keywords[i].key, key) != 0)
                i++;
            r.key = key;
            r.v = v;
            if (i < all)
                keywords[i].read(&r);
            else if (strncmp(key, "x-", 2) != 0)
                td_gs_refuse(s, schema, key, "an unknown keyword");
        }
    }
}

/* ---- members ---- */

bool td_gs_member(struct td_gs *s, const struct td_gs_node *n, const char *name,
                  struct td_gs_list *l) {
    if (!td_gs_spend(s, 4 * n->objects.n)) return false;
    for (size_t i = 0; i < n->objects.n; i++) {
        const json_t *schema = n->objects.p[i], *v = NULL;
        if (name) v = json_object_get(json_object_get(schema, "properties"), name);
        if (!v) v = json_object_get(schema, "additionalProperties");
        if (json_is_false(v)) return false;
        if (v && !is_empty(v)) td_gs_list_add(s->b, l, v);
    }
    return true;
}
