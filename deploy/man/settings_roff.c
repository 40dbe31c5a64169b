/* Writes tandem.conf(5): a template with the settings table of common/base/config.h in it, so that
 * the page cannot lag behind the program.
 * usage: settings_roff TEMPLATE > tandem.conf.5 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/config.h"

enum kind { KIND_S, KIND_U, KIND_B, KIND_E };

static const struct row {
    const char *key;
    enum kind kind;
    uint64_t def, min, max;
    const char *text; /* S: default; E: words */
    const char *help;
} rows[] = {
#define ROW_S(key, def, a, b, help) {key, KIND_S, 0, 0, 0, def, help},
#define ROW_U(key, def, a, b, help) {key, KIND_U, def, a, b, NULL, help},
#define ROW_B(key, def, a, b, help) {key, KIND_B, def, 0, 0, NULL, help},
#define ROW_E(key, def, a, b, help) {key, KIND_E, def, 0, 0, b, help},
#define X(key, field, kind, def, a, b, help) ROW_##kind(key, def, a, b, help)
    TD_CONFIG_MAP(X)
#undef X
};

/* Text as roff takes it literally. */
static void put(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\\')
            fputs("\\e", stdout);
        else if (s[i] == '-')
            fputs("\\-", stdout);
        else if (s[i] == '`')
            fputs("\\(ga", stdout);
        else if ((s[i] == '.' || s[i] == '\'') && i == 0)
            printf("\\&%c", s[i]);
        else
            putchar(s[i]);
    }
}

static void put_text(const char *s) {
    put(s, strlen(s));
}

static void put_words(const char *words, uint64_t def) {
    uint64_t i = 0;
    fputs("One of", stdout);
    for (const char *w = words; *w; i++) {
        size_t n = strcspn(w, "|");
        fputs(i == 0 ? " " : ", ", stdout);
        fputs(i == def ? "\\fB" : "", stdout);
        put(w, n);
        fputs(i == def ? "\\fR" : "", stdout);
        w += n + (w[n] != '\0');
    }
    puts("; the default is in bold.");
}

static void put_row(const struct row *r) {
    fputs(".TP\n.B ", stdout);
    put_text(r->key);
    putchar('\n');
    put_text(r->help);
    puts(".\n.br");
    switch (r->kind) {
    case KIND_S:
        fputs(r->text[0] ? "Text; default " : "Text; no default.", stdout);
        if (r->text[0]) {
            put_text(r->text);
            putchar('.');
        }
        putchar('\n');
        break;
    case KIND_U:
        printf("A number from %llu to %llu; default %llu.\n", (unsigned long long)r->min,
               (unsigned long long)r->max, (unsigned long long)r->def);
        break;
    case KIND_B:
        printf("on or off; default %s.\n", r->def ? "on" : "off");
        break;
    case KIND_E:
        put_words(r->text, r->def);
        break;
    }
}

int main(int argc, char **argv) {
    char line[1024];
    FILE *f = argc == 2 ? fopen(argv[1], "re") : NULL;
    int tables = 0;
    if (!f) {
        fprintf(stderr, "settings_roff: %s\n", argc == 2 ? strerror(errno) : "expected TEMPLATE");
        return 2;
    }
    while (fgets(line, sizeof line, f)) {
        if (strcmp(line, ".\\\" SETTINGS\n") != 0) {
            fputs(line, stdout);
            continue;
        }
        tables++;
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            put_row(&rows[i]);
    }
    fclose(f);
    if (tables == 1 && fflush(stdout) == 0) return 0;
    fprintf(stderr, "settings_roff: %s: expected one line for the settings, found %d\n", argv[1],
            tables);
    return 1;
}
