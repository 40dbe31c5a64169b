/* Parsing and printing of the configuration table in config.h. */
#include "common/base/config.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { KIND_S, KIND_U, KIND_B, KIND_E };

struct row {
    const char *key;
    enum kind kind;
    size_t offset;
    uint64_t def, min, max;
    const char *text; /* S: default; E: words */
    const char *help;
};

#define ROW_S(key, field, def, a, b, help)                                                         \
    {key, KIND_S, offsetof(struct td_config, field), 0, 0, 0, def, help},
#define ROW_U(key, field, def, a, b, help)                                                         \
    {key, KIND_U, offsetof(struct td_config, field), def, a, b, NULL, help},
#define ROW_B(key, field, def, a, b, help)                                                         \
    {key, KIND_B, offsetof(struct td_config, field), def, 0, 0, NULL, help},
#define ROW_E(key, field, def, a, b, help)                                                         \
    {key, KIND_E, offsetof(struct td_config, field), def, 0, 0, b, help},
static const struct row rows[] = {
#define X(key, field, kind, def, a, b, help) ROW_##kind(key, field, def, a, b, help)
    TD_CONFIG_MAP(X)
#undef X
};
enum { N_ROWS = sizeof rows / sizeof *rows };

static void *at(struct td_config *c, const struct row *r) {
    return (char *)c + r->offset;
}

static const void *at_const(const struct td_config *c, const struct row *r) {
    return (const char *)c + r->offset;
}

void td_config_defaults(struct td_config *c) {
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < N_ROWS; i++) {
        const struct row *r = &rows[i];
        switch (r->kind) {
        case KIND_S:
            snprintf(at(c, r), TD_CONFIG_STRING_MAX, "%s", r->text);
            break;
        case KIND_U:
            *(uint64_t *)at(c, r) = r->def;
            break;
        case KIND_B:
            *(bool *)at(c, r) = r->def != 0;
            break;
        case KIND_E:
            *(uint32_t *)at(c, r) = (uint32_t)r->def;
            break;
        }
    }
}

/* Index of `value` in the '|' list `words`, or -1. */
static int word_index(const char *words, const char *value) {
    size_t len = strlen(value);
    for (int i = 0;; i++) {
        size_t n = strcspn(words, "|");
        if (n == len && memcmp(words, value, len) == 0) return i;
        if (words[n] == '\0') return -1;
        words += n + 1;
    }
}

static td_status assign(struct td_config *c, const char *key, const char *value,
                        struct td_error *err) {
    const struct row *r = NULL;
    for (size_t i = 0; i < N_ROWS && !r; i++)
        if (strcmp(rows[i].key, key) == 0) r = &rows[i];
    if (!r) return td_fail(err, TD_CONFIG, "unknown setting '%s'", key);
    switch (r->kind) {
    case KIND_S:
        if (strlen(value) >= TD_CONFIG_STRING_MAX)
            return td_fail(err, TD_CONFIG, "%s: expected at most %d bytes, found %zu", key,
                           TD_CONFIG_STRING_MAX - 1, strlen(value));
        snprintf(at(c, r), TD_CONFIG_STRING_MAX, "%s", value);
        return TD_OK;
    case KIND_U: {
        char *end;
        errno = 0;
        unsigned long long v = strtoull(value, &end, 10);
        if (!isdigit((unsigned char)value[0]) || *end || errno || v < r->min || v > r->max)
            return td_fail(err, TD_CONFIG, "%s: expected a number from %llu to %llu, found '%s'",
                           key, (unsigned long long)r->min, (unsigned long long)r->max, value);
        *(uint64_t *)at(c, r) = v;
        return TD_OK;
    }
    case KIND_B:
        if (strcmp(value, "on") != 0 && strcmp(value, "off") != 0)
            return td_fail(err, TD_CONFIG, "%s: expected on or off, found '%s'", key, value);
        *(bool *)at(c, r) = value[1] == 'n';
        return TD_OK;
    case KIND_E: {
        int i = word_index(r->text, value);
        if (i < 0)
            return td_fail(err, TD_CONFIG, "%s: expected one of %s, found '%s'", key, r->text,
                           value);
        *(uint32_t *)at(c, r) = (uint32_t)i;
        return TD_OK;
    }
    }
    return td_fail(err, TD_INTERNAL, "%s: unknown kind of setting", key);
}

static char *trim(char *s) {
    while (isspace((unsigned char)*s))
        s++;
    size_t n = strlen(s);
    while (n && isspace((unsigned char)s[n - 1]))
        s[--n] = '\0';
    return s;
}

td_status td_config_set(struct td_config *c, const char *assignment, struct td_error *err) {
    char buf[2 * TD_CONFIG_STRING_MAX];
    const char *eq = strchr(assignment, '=');
    if (!eq) return td_fail(err, TD_CONFIG, "expected key=value, found '%s'", assignment);
    if (strlen(assignment) >= sizeof buf)
        return td_fail(err, TD_CONFIG, "setting of %zu bytes, expected at most %zu",
                       strlen(assignment), sizeof buf - 1);
    snprintf(buf, sizeof buf, "%s", assignment);
    buf[eq - assignment] = '\0';
    return assign(c, trim(buf), trim(buf + (eq - assignment) + 1), err);
}

/* Does a section name a role, or one instance of it? Both must be known words. */
static bool section_known(const char *s) {
    static const char *const roles[] = {"router", "prefill", "decode"};
    size_t n = strcspn(s, "@");
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strlen(roles[i]) == n && memcmp(roles[i], s, n) == 0) return s[n] == '\0' || s[n + 1];
    return false;
}

static bool section_applies(const char *s, const char *role, const char *instance) {
    size_t n = strlen(role);
    if (strncmp(s, role, n) != 0) return false;
    return s[n] == '\0' || (s[n] == '@' && strcmp(s + n + 1, instance) == 0);
}

/* The rest of a line that was cut, be it a comment, would be read as a setting. */
static bool whole(const char *line, FILE *f) {
    size_t n = strlen(line);
    return n > 0 && (line[n - 1] == '\n' || feof(f));
}

td_status td_config_load(struct td_config *c, const char *path, const char *role,
                         const char *instance, struct td_error *err) {
    FILE *f = fopen(path, "re");
    if (!f) return td_fail(err, TD_CONFIG, "configuration %s: %s", path, strerror(errno));
    char line[1024];
    bool applies = true;
    td_status st = TD_OK;
    for (int n = 1; st == TD_OK && fgets(line, sizeof line, f); n++) {
        struct td_error inner = {.status = TD_OK};
        if (!whole(line, f)) {
            st = td_fail(err, TD_CONFIG, "%s:%d: expected a line of text of at most %zu bytes",
                         path, n, sizeof line - 2);
            break;
        }
        char *hash = strchr(line, '#');
        if (hash) *hash = '\0';
        char *s = trim(line);
        size_t len = strlen(s);
        if (len == 0) continue;
        if (s[0] == '[') {
            if (s[len - 1] != ']') {
                st = td_fail(err, TD_CONFIG, "%s:%d: section without ']'", path, n);
                break;
            }
            s[len - 1] = '\0';
            s = trim(s + 1);
            if (!section_known(s))
                st = td_fail(err, TD_CONFIG,
                             "%s:%d: expected section router, prefill or decode, found '%s'", path,
                             n, s);
            applies = section_applies(s, role, instance);
            continue;
        }
        struct td_config scratch = *c; /* settings of other roles are checked too */
        st = td_config_set(applies ? c : &scratch, s, &inner);
        if (st != TD_OK) st = td_fail(err, st, "%s:%d: %s", path, n, inner.text);
    }
    if (st == TD_OK && ferror(f))
        st = td_fail(err, TD_CONFIG, "configuration %s: %s", path, strerror(errno));
    fclose(f);
    return st;
}

bool td_config_row(const struct td_config *c, size_t i, const char **ret_key, char *value,
                   const char **ret_help) {
    if (i >= N_ROWS) return false;
    const struct row *r = &rows[i];
    switch (r->kind) {
    case KIND_S:
        snprintf(value, TD_CONFIG_STRING_MAX, "%s", (const char *)at_const(c, r));
        break;
    case KIND_U:
        snprintf(value, TD_CONFIG_STRING_MAX, "%llu",
                 (unsigned long long)*(const uint64_t *)at_const(c, r));
        break;
    case KIND_B:
        snprintf(value, TD_CONFIG_STRING_MAX, "%s", *(const bool *)at_const(c, r) ? "on" : "off");
        break;
    case KIND_E: {
        const char *w = r->text;
        for (uint32_t k = *(const uint32_t *)at_const(c, r); k > 0; k--)
            w += strcspn(w, "|") + 1;
        snprintf(value, TD_CONFIG_STRING_MAX, "%.*s", (int)strcspn(w, "|"), w);
        break;
    }
    }
    *ret_key = r->key;
    if (ret_help) *ret_help = r->help;
    return true;
}
