/* When oneOf is the same as anyOf: no value can satisfy two of its alternatives. Only what can be
 * shown counts; the rest is refused, since "exactly one" cannot be enforced otherwise. */
#include "common/text/grammar_schema.h"

#include <stdlib.h>
#include <string.h>

static bool required(struct td_gs *s, const struct td_gs_node *n, const json_t *name) {
    if (!td_gs_spend(s, n->required.n)) return false;
    for (size_t i = 0; i < n->required.n; i++)
        if (json_equal(n->required.p[i], name)) return true;
    return false;
}

/* A choice that the node still has, resolved: all its alternatives must be apart from `b`. */
static bool each_choice(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b,
                        int depth) {
    bool any_of = a->choices.n > 0, apart = true;
    const struct td_gs_list *l = any_of ? &a->choices : &a->one_of;
    const json_t *list = l->p[l->n - 1];
    for (size_t i = 0; i < json_array_size(list) && apart && s->b->st == TD_OK; i++) {
        struct td_gs_node one;
        td_gs_node_copy(s->b, &one, a);
        any_of ? one.choices.n-- : one.one_of.n--;
        td_gs_collect(s, &one, json_array_get(list, i), depth);
        apart = td_gs_disjoint(s, &one, b, depth - 1);
        td_gs_node_free(&one);
    }
    return apart;
}

static bool member_apart(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b,
                         const char *name, int depth) {
    struct td_gs_list of_a = {0}, of_b = {0};
    struct td_gs_node x, y;
    td_gs_node_init(&x);
    td_gs_node_init(&y);
    bool apart = !td_gs_member(s, a, name, &of_a) || !td_gs_member(s, b, name, &of_b);
    if (!apart && depth > 0) {
        for (size_t i = 0; i < of_a.n; i++)
            td_gs_collect(s, &x, of_a.p[i], depth);
        for (size_t i = 0; i < of_b.n; i++)
            td_gs_collect(s, &y, of_b.p[i], depth);
        apart = td_gs_disjoint(s, &x, &y, depth - 1);
    }
    td_gs_node_free(&x);
    td_gs_node_free(&y);
    free(of_a.p);
    free(of_b.p);
    return apart;
}

/* A member that one of them requires and the other cannot have, or not with the same value. */
static bool objects_apart(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b,
                          int depth) {
    for (size_t i = 0; i < a->required.n; i++) {
        const char *name = json_string_value(a->required.p[i]);
        struct td_gs_list l = {0};
        bool can = td_gs_member(s, b, name, &l);
        free(l.p);
        if (!can) return true;
        if (required(s, b, a->required.p[i]) && member_apart(s, a, b, name, depth)) return true;
    }
    for (size_t i = 0; i < b->required.n; i++) {
        struct td_gs_list l = {0};
        bool can = td_gs_member(s, a, json_string_value(b->required.p[i]), &l);
        free(l.p);
        if (!can) return true;
    }
    return false;
}

static bool below(const struct td_decimal *hi, const struct td_decimal *lo) {
    if (!hi->set || !lo->set) return false;
    int c = td_decimal_compare(hi, lo);
    return c < 0 || (c == 0 && (hi->exclusive || lo->exclusive));
}

/* Whether no value of `a`'s list is in `b`. */
static bool values_apart(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b) {
    for (size_t i = 0; i < a->values.n; i++) {
        bool in = !b->has_values;
        if (!td_gs_value_fits(s, a, a->values.p[i])) continue;
        for (size_t k = 0; k < b->values.n && !in; k++)
            in = td_gs_equal(s, a->values.p[i], b->values.p[k]);
        if (!td_gs_spend(s, 1 + b->values.n)) return false;
        if (in && td_gs_value_fits(s, b, a->values.p[i])) return false;
    }
    return true;
}

bool td_gs_disjoint(struct td_gs *s, const struct td_gs_node *a, const struct td_gs_node *b,
                    int depth) {
    if (!td_gs_spend(s, 64) || depth <= 0) return false;
    uint32_t both = a->types & b->types;
    if (!both) return true;
    if (a->choices.n || a->one_of.n) return each_choice(s, a, b, depth);
    if (b->choices.n || b->one_of.n) return each_choice(s, b, a, depth);
    if (a->has_values) return values_apart(s, a, b);
    if (b->has_values) return values_apart(s, b, a);
    if (both & (TD_GS_NULL | TD_GS_BOOLEAN)) return false;
    if (both & (TD_GS_INTEGER | TD_GS_FRACTION) && !below(&a->hi, &b->lo) && !below(&b->hi, &a->lo))
        return false;
    if (both & TD_GS_STRING && !(a->room < b->need) && !(b->room < a->need)) return false;
    if (both & TD_GS_ARRAY && !(a->items_max < b->items_min) && !(b->items_max < a->items_min))
        return false;
    return !(both & TD_GS_OBJECT) || objects_apart(s, a, b, depth);
}
