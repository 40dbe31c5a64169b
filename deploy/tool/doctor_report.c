/* Collecting findings and printing them, for people and for programs. */
#include <jansson.h>
#include <stdarg.h>

#include "deploy/tool/doctor.h"

static const char *const verdict_names[] = {
    [TD_FINE] = "ok", [TD_SKIPPED] = "skipped", [TD_WARNING] = "warning", [TD_ERROR] = "error"};

void td_find(struct td_report *r, enum td_verdict v, const char *area, const char *fmt, ...) {
    va_list ap;
    r->count[v]++;
    if (r->n == TD_FINDINGS_MAX) {
        r->lost++;
        return;
    }
    struct td_diagnosis *f = &r->finding[r->n++];
    f->verdict = v;
    f->area = area;
    f->cure[0] = 0;
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof f->text, fmt, ap);
    va_end(ap);
}

void td_cure(struct td_report *r, const char *fmt, ...) {
    va_list ap;
    if (r->n == 0 || r->lost) return;
    struct td_diagnosis *f = &r->finding[r->n - 1];
    va_start(ap, fmt);
    vsnprintf(f->cure, sizeof f->cure, fmt, ap);
    va_end(ap);
}

void td_report_text(const struct td_report *r, bool quiet, FILE *out) {
    for (uint32_t i = 0; i < r->n; i++) {
        const struct td_diagnosis *f = &r->finding[i];
        if (f->verdict == TD_FINE && quiet) continue;
        fprintf(out, "%-8s %-7s %s%s%s\n", verdict_names[f->verdict], f->area, f->text,
                f->cure[0] ? "; cure: " : "", f->cure);
    }
    if (r->lost)
        fprintf(out, "%-8s %-7s %u more findings than there is room for\n", "warning", "doctor",
                r->lost);
    fprintf(out, "doctor: %u ok, %u skipped, %u warnings, %u errors\n", r->count[TD_FINE],
            r->count[TD_SKIPPED], r->count[TD_WARNING], r->count[TD_ERROR]);
}

bool td_report_json(const struct td_report *r, FILE *out) {
    json_t *list = json_array(), *all = json_object();
    for (uint32_t i = 0; list && i < r->n; i++) {
        const struct td_diagnosis *f = &r->finding[i];
        /* Sentences quote files and drivers, which need not be UTF-8. */
        json_t *text = json_string(f->text), *cure = json_string(f->cure);
        json_t *o = json_object();
        json_object_set_new(o, "verdict", json_string(verdict_names[f->verdict]));
        json_object_set_new(o, "area", json_string(f->area));
        json_object_set_new(o, "text", text ? text : json_string("(not UTF-8)"));
        json_object_set_new(o, "cure", cure ? cure : json_string(""));
        json_array_append_new(list, o);
    }
    bool ok = json_object_set_new(all, "findings", list) == 0;
    json_object_set_new(all, "ok", json_integer(r->count[TD_FINE]));
    json_object_set_new(all, "skipped", json_integer(r->count[TD_SKIPPED]));
    json_object_set_new(all, "warnings", json_integer(r->count[TD_WARNING]));
    json_object_set_new(all, "errors", json_integer(r->count[TD_ERROR]));
    ok = ok && json_dumpf(all, out, JSON_INDENT(2) | JSON_PRESERVE_ORDER) == 0;
    fputc('\n', out);
    json_decref(all);
    return ok;
}
