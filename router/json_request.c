/* See json_request.h. */
#include "router/json_request.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "router/json_read.h"

td_status td_request_parse(const char *body, size_t n, json_t **ret, struct td_api_error *e) {
    struct td_error why;
    json_t *v = NULL;
    if (n == 0)
        return td_api_refuse(e, 400, NULL, NULL, "the body is empty; expected a JSON object");
    td_status read = td_json_read(body, n, TD_JSON_STRICT, &v, &why);
    if (read == TD_NO_MEMORY) return td_api_no_memory(e);
    if (read != TD_OK)
        return td_api_refuse(e, 400, NULL, NULL, "the body is not valid JSON: %s", why.text);
    if (!json_is_object(v)) {
        char buf[40];
        td_status st =
            td_api_refuse(e, 400, NULL, NULL, "the body: expected a JSON object, found %s",
                          td_request_found(v, buf));
        json_decref(v);
        return st;
    }
    *ret = v;
    return TD_OK;
}

const char *td_request_found(const json_t *v, char buf[40]) {
    if (!v) return "nothing";
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return json_array_size(v) ? "an array" : "an empty array";
    case JSON_STRING: {
        size_t n = json_string_length(v);
        bool plain = n <= 24;
        const char *s = json_string_value(v);
        for (size_t i = 0; plain && i < n; i++)
            if ((unsigned char)s[i] < 0x20 || (unsigned char)s[i] >= 0x7f) plain = false;
        if (!plain) return "a string";
        snprintf(buf, 40, "the string \"%s\"", s);
        return buf;
    }
    case JSON_INTEGER:
        snprintf(buf, 40, "%lld", (long long)json_integer_value(v));
        return buf;
    case JSON_REAL: {
        /* "expected an integer, found 2" would not say what is wrong with 2.0. */
        double d = json_real_value(v);
        snprintf(buf, 40, fabs(d) < 1e9 && trunc(d) == d ? "%.1f" : "%.9g", d);
        return buf;
    }
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    default:
        return "null";
    }
}

const json_t *td_field(const struct td_fields *f, const char *name) {
    const json_t *v = json_object_get(f->object, name);
    return json_is_null(v) ? NULL : v;
}

const char *td_field_name(const struct td_fields *f, const char *name, char buf[96]) {
    snprintf(buf, 96, "%s%s", f->path, name);
    return buf;
}

td_status td_field_wrong(const struct td_fields *f, const char *name, const char *expected) {
    char full[96], found[40];
    td_field_name(f, name, full);
    return td_api_refuse(f->e, 400, NULL, full, "%s: expected %s, found %s", full, expected,
                         td_request_found(json_object_get(f->object, name), found));
}

td_status td_field_bool(const struct td_fields *f, const char *name, bool *ret) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    if (!json_is_boolean(v)) return td_field_wrong(f, name, "true or false");
    *ret = json_is_true(v);
    return TD_OK;
}

td_status td_field_u64(const struct td_fields *f, const char *name, uint64_t lo, uint64_t hi,
                       uint64_t *ret) {
    char expected[80];
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    json_int_t i = json_integer_value(v);
    if (json_is_integer(v) && i >= 0 && (uint64_t)i >= lo && (uint64_t)i <= hi) {
        *ret = (uint64_t)i;
        return TD_OK;
    }
    snprintf(expected, sizeof expected, "an integer from %llu to %llu", (unsigned long long)lo,
             (unsigned long long)hi);
    return td_field_wrong(f, name, expected);
}

td_status td_field_num(const struct td_fields *f, const char *name, double lo, double hi,
                       double *ret) {
    char expected[80];
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    double d = json_number_value(v);
    if (json_is_number(v) && isfinite(d) && d >= lo && d <= hi) {
        *ret = d;
        return TD_OK;
    }
    snprintf(expected, sizeof expected, "a number from %g to %g", lo, hi);
    return td_field_wrong(f, name, expected);
}

td_status td_field_str(const struct td_fields *f, const char *name, const char **ret,
                       size_t *ret_n) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    if (!json_is_string(v)) return td_field_wrong(f, name, "a string");
    *ret = json_string_value(v);
    *ret_n = json_string_length(v);
    return TD_OK;
}

td_status td_field_array(const struct td_fields *f, const char *name, const json_t **ret) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    if (!json_is_array(v)) return td_field_wrong(f, name, "an array");
    *ret = v;
    return TD_OK;
}

td_status td_field_object(const struct td_fields *f, const char *name, const json_t **ret) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    if (!json_is_object(v)) return td_field_wrong(f, name, "an object");
    *ret = v;
    return TD_OK;
}

static bool is_word(const json_t *v, const char *words) {
    if (json_is_object(v)) v = json_object_get(v, "type");
    if (json_is_array(v) && json_array_size(v) == 1) v = json_array_get(v, 0);
    if (!json_is_string(v)) return false;
    size_t n = json_string_length(v);
    for (const char *w = words; *w;) {
        size_t len = strcspn(w, "|");
        if (len == n && memcmp(w, json_string_value(v), n) == 0) return true;
        w += len + (w[len] == '|');
    }
    return false;
}

static bool asks_nothing(const json_t *v, const struct td_param *p) {
    if (json_is_null(v)) return true;
    switch (p->use) {
    case TD_PARAM_READ:
    case TD_PARAM_HARMLESS:
        return true;
    case TD_PARAM_ZERO:
        return json_is_number(v) && json_number_value(v) == 0.0;
    case TD_PARAM_ONE:
        return json_is_integer(v) && json_integer_value(v) == 1;
    case TD_PARAM_FALSE:
        return json_is_false(v);
    case TD_PARAM_EMPTY:
        return (json_is_array(v) && json_array_size(v) == 0) ||
               (json_is_object(v) && json_object_size(v) == 0) ||
               (json_is_string(v) && json_string_length(v) == 0);
    case TD_PARAM_WORD:
        return is_word(v, p->words);
    case TD_PARAM_REFUSED:
        break;
    }
    return false;
}

static const struct td_param *find(const struct td_param *list, const char *name) {
    for (; list->name; list++)
        if (strcmp(list->name, name) == 0) return list;
    return NULL;
}

td_status td_fields_known(const struct td_fields *f, const struct td_param *list,
                          const struct td_param *more) {
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)f->object, key, v) {
        char full[96], found[40];
        const struct td_param *p = find(list, key);
        if (!p && more) p = find(more, key);
        if (p && asks_nothing(v, p)) continue;
        td_field_name(f, key, full);
        if (!p)
            return td_api_refuse(f->e, 400, "unknown_parameter", full, "unknown parameter '%s'",
                                 full);
        return td_api_refuse(f->e, 400, "unsupported_parameter", full,
                             "%s is not supported here (found %s)", full,
                             td_request_found(v, found));
    }
    return TD_OK;
}
