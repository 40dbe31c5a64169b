/* What in a configuration does not fit together, as `tandem topology --check` tells it, among the
 * findings: workers on one GPU, sections of nobody, settings in which processes must agree. */
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/doctor_roles.h"
#include "deploy/tool/topology_check.h"

/* "error: FILE: decode@1: what is wrong: what to do": the last part is the cure. */
static void tell(char *line, const char *path, struct td_report *r) {
    enum td_verdict v = strncmp(line, "error: ", 7) == 0     ? TD_ERROR
                        : strncmp(line, "warning: ", 9) == 0 ? TD_WARNING
                                                             : TD_FINE;
    char *text = strchr(line, ' ') + 1, *cure = NULL;
    if (strncmp(text, path, strlen(path)) == 0) text += strlen(path) + 2;
    for (char *at = text; (at = strstr(at, ": ")); at++)
        cure = at;
    if (v == TD_FINE) cure = NULL; /* a note */
    if (cure) *cure = 0;
    td_find(r, v, "config", "%s", text);
    if (cure) td_cure(r, "%s", cure + 2);
}

void td_agreement_rules(const char *path, uint32_t host_gpus, struct td_report *r) {
    struct td_topology *t = NULL;
    struct td_error told_already;
    char *text = NULL, *save = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    if (out && td_topology_load(path, &t, &told_already) == TD_OK) {
        struct td_check c = {.t = t, .out = out, .host_gpus = host_gpus};
        td_check_instances(&c);
        td_check_gpus(&c);
        td_check_agreement(&c);
    }
    if (out) fclose(out);
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save))
        tell(line, path, r);
    free(text);
    td_topology_free(t);
}
