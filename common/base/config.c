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

bool td_config_section_holds(const char *section, const char *role, const char *instance) {
    size_t n = strlen(role);
    if (strncmp(section, role, n) != 0) return false;
    return section[n] == '\0' || (section[n] == '@' && strcmp(section + n + 1, instance) == 0);
}

/* ---- files ---- */

struct reader {
    const char *path;
    FILE *f;
    uint32_t n;      /* of the line */
    char line[1024]; /* as last read, without comment and surrounding space */
    char *text;
    bool section; /* it was `[text]` */
};

static td_status reader_open(struct reader *r, const char *path, struct td_error *err) {
    *r = (struct reader){.path = path, .f = fopen(path, "re")};
    if (r->f) return TD_OK;
    return td_fail(err, TD_CONFIG, "configuration %s: %s", path, strerror(errno));
}

/* The rest of a line that was cut, be it a comment, would be read as a setting. */
static bool whole(const struct reader *r) {
    size_t n = strlen(r->line);
    return n > 0 && (r->line[n - 1] == '\n' || feof(r->f));
}

static td_status read_section(struct reader *r, struct td_error *err) {
    size_t n = strlen(r->text);
    if (r->text[n - 1] != ']')
        return td_fail(err, TD_CONFIG, "%s:%u: section without ']'", r->path, r->n);
    r->text[n - 1] = '\0';
    r->text = trim(r->text + 1);
    r->section = true;
    if (section_known(r->text)) return TD_OK;
    return td_fail(err, TD_CONFIG, "%s:%u: expected section router, prefill or decode, found '%s'",
                   r->path, r->n, r->text);
}

/* The next line that says something; *ret_end at the end of the file. */
static td_status reader_next(struct reader *r, bool *ret_end, struct td_error *err) {
    *ret_end = false;
    while (fgets(r->line, sizeof r->line, r->f)) {
        r->n++;
        if (!whole(r))
            return td_fail(err, TD_CONFIG, "%s:%u: expected a line of text of at most %zu bytes",
                           r->path, r->n, sizeof r->line - 2);
        r->line[strcspn(r->line, "#")] = '\0';
        r->text = trim(r->line);
        r->section = false;
        if (r->text[0] == '[') return read_section(r, err);
        if (r->text[0]) return TD_OK;
    }
    *ret_end = true;
    if (ferror(r->f))
        return td_fail(err, TD_CONFIG, "configuration %s: %s", r->path, strerror(errno));
    return TD_OK;
}

td_status td_config_load(struct td_config *c, const char *path, const char *role,
                         const char *instance, struct td_error *err) {
    struct reader r;
    TD_TRY(reader_open(&r, path, err));
    bool applies = true, end = false;
    td_status st = TD_OK;
    while ((st = reader_next(&r, &end, err)) == TD_OK && !end) {
        if (r.section) {
            applies = td_config_section_holds(r.text, role, instance);
            continue;
        }
        struct td_config scratch = *c; /* settings of other roles are checked too */
        struct td_error inner = {.status = TD_OK};
        st = td_config_set(applies ? c : &scratch, r.text, &inner);
        if (st != TD_OK) {
            st = td_fail(err, st, "%s:%u: %s", path, r.n, inner.text);
            break;
        }
    }
    fclose(r.f);
    return st;
}

td_status td_config_sections(const char *path, struct td_config_section *ret, uint32_t cap,
                             uint32_t *ret_n, struct td_error *err) {
    struct reader r;
    TD_TRY(reader_open(&r, path, err));
    bool end = false;
    td_status st;
    *ret_n = 0;
    while ((st = reader_next(&r, &end, err)) == TD_OK && !end) {
        if (!r.section) continue;
        struct td_config_section *s = &ret[*ret_n];
        if (*ret_n == cap || strlen(r.text) >= sizeof s->name) {
            st =
                td_fail(err, TD_CONFIG, "%s:%u: expected at most %u sections, of at most %zu bytes",
                        path, r.n, cap, sizeof s->name - 1);
            break;
        }
        snprintf(s->name, sizeof s->name, "%s", r.text);
        s->line = r.n;
        ++*ret_n;
    }
    fclose(r.f);
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
