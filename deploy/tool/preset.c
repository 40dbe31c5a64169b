/* See preset.h. */
#include "deploy/tool/preset.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/tool/topology_units.h"

/* A worker's share of the eight GPUs. With two GPUs the weights leave little, hence smaller chunks,
 * fewer slots, a shorter context and more of the card. */
struct shape {
    uint32_t workers, gpus; /* of each */
};
static const struct division {
    const char *name, *what;
    struct shape prefill, decode;
    const char *max_context;
} divisions[] = {
    {"4+4", "1 prefill worker of 4 GPUs, 1 decode worker of 4 GPUs", {1, 4}, {1, 4}, "1048576"},
    {"2x2+4", "2 prefill workers of 2 GPUs, 1 decode worker of 4 GPUs", {2, 2}, {1, 4}, "524288"},
    {"2+2+2+2",
     "2 prefill workers of 2 GPUs, 2 decode workers of 2 GPUs",
     {2, 2},
     {2, 2},
     "262144"},
};
enum { N_DIVISIONS = sizeof divisions / sizeof divisions[0] };

/* Lines that hold for all, in the order in which a person asks. */
static const struct td_preset_line common_lines[] = {
    {"", "model.dir", "/var/lib/tandem/model",
     "checkpoint folder; the user tandem must be able to read it, so not below /home"},
    {"", "router.listen", "127.0.0.1:8000", "where clients ask; for other hosts: README, Access"},
    {"", "router.max_requests", "256", "at a time; more are told to come back"},
    {"", "run_dir", "/run/tandem-router", "control socket; the router's unit makes this folder"},
};

const char *td_preset_name(uint32_t i) {
    return i < N_DIVISIONS ? divisions[i].name : NULL;
}

static void add(struct td_preset *p, const char *section, const char *key, const char *value,
                const char *comment) {
    struct td_preset_line *l = &p->line[p->lines++];
    snprintf(l->section, sizeof l->section, "%s", section);
    snprintf(l->key, sizeof l->key, "%s", key);
    snprintf(l->value, sizeof l->value, "%s", value);
    l->comment = comment;
}

static void add_number(struct td_preset *p, const char *section, const char *key, uint32_t value,
                       const char *comment) {
    char text[16];
    snprintf(text, sizeof text, "%" PRIu32, value);
    add(p, section, key, text, comment);
}

/* [ROLE] and its instances, from GPU `first` on. */
static void add_role(struct td_preset *p, const char *role, const struct shape *s, uint32_t first) {
    bool prefill = strcmp(role, "prefill") == 0, large = s->gpus > 2;
    add_number(p, role, "tp", s->gpus, "GPUs that share one worker's model");
    if (prefill) {
        add_number(p, role, "max_running", large ? 8 : 4, "prompts in work at a time, a worker");
        add_number(p, role, "chunk_tokens", large ? 8192 : 4096,
                   "of a prompt in one step; every step reads all experts");
    } else {
        add_number(p, role, "max_running", large ? 64 : 32, "sequences at a time, a worker");
        add_number(p, role, "chunk_tokens", 512, "of a prompt that decode computes itself");
    }
    if (!large)
        add_number(p, role, "mem_fraction", 95, "percent of a card; of 96 GB the weights take 87");
    for (uint32_t i = 0; i < s->workers; i++) {
        char section[32], device[64] = "cuda:";
        size_t n = strlen(device);
        snprintf(section, sizeof section, "%s@%" PRIu32, role, i);
        for (uint32_t k = 0; k < s->gpus; k++)
            n += (size_t)snprintf(device + n, sizeof device - n, "%s%" PRIu32, k ? "," : "",
                                  first + i * s->gpus + k);
        add(p, section, "device", device, NULL);
    }
}

td_status td_preset_find(const char *name, struct td_preset *ret, struct td_error *err) {
    const struct division *d = NULL;
    for (int i = 0; i < N_DIVISIONS && !d; i++)
        if (strcmp(divisions[i].name, name) == 0) d = &divisions[i];
    if (!d)
        return td_fail(err, TD_INVALID, "expected preset 4+4, 2x2+4 or 2+2+2+2, found '%s'", name);
    memset(ret, 0, sizeof *ret);
    ret->name = d->name, ret->what = d->what;
    for (size_t i = 0; i < sizeof common_lines / sizeof common_lines[0]; i++)
        ret->line[ret->lines++] = common_lines[i];
    add(ret, "", "max_context", d->max_context, "tokens of one request, prompt and answer");
    add_number(ret, "", "cluster.prefill", d->prefill.workers, "workers: prefill@0 and on");
    add_number(ret, "", "cluster.decode", d->decode.workers, "workers: decode@0 and on");
    add_role(ret, "prefill", &d->prefill, 0);
    add_role(ret, "decode", &d->decode, d->prefill.workers * d->prefill.gpus);
    return TD_OK;
}

/* ---- changes ---- */

/* Behind the last line of its section, or NULL: there is none such. */
static struct td_preset_line *end_of(struct td_preset *p, const char *section) {
    for (uint32_t i = p->lines; i > 0; i--)
        if (strcmp(p->line[i - 1].section, section) == 0) return &p->line[i];
    return NULL;
}

static td_status insert(struct td_preset *p, const char *section, const char *key,
                        const char *value, struct td_error *err) {
    struct td_preset_line *at = end_of(p, section);
    if (!at)
        return td_fail(err, TD_CONFIG, "%s: expected a role or worker of the preset %s, found '%s'",
                       key, p->name, section);
    if (p->lines == TD_PRESET_LINES)
        return td_fail(err, TD_CONFIG, "expected at most %d settings, found one more: %s",
                       TD_PRESET_LINES, key);
    memmove(at + 1, at, (size_t)(&p->line[p->lines++] - at) * sizeof *at);
    *at = (struct td_preset_line){.comment = NULL};
    snprintf(at->section, sizeof at->section, "%s", section);
    snprintf(at->key, sizeof at->key, "%.*s", (int)sizeof at->key - 1, key); /* a known one */
    snprintf(at->value, sizeof at->value, "%s", value);
    return TD_OK;
}

static void cut_at(char *s, char *end) {
    while (end > s && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *end = '\0';
}

td_status td_preset_set(struct td_preset *p, const char *assignment, struct td_error *err) {
    struct td_config scratch;
    char text[2 * TD_CONFIG_STRING_MAX], section[sizeof p->line[0].section] = "";
    size_t colon = strcspn(assignment, ":=");
    bool named = assignment[colon] == ':';
    if (named) {
        snprintf(section, sizeof section, "%.*s", (int)colon, assignment);
        assignment += colon + 1;
    }
    td_config_defaults(&scratch);
    TD_TRY(td_config_set(&scratch, assignment, err));
    snprintf(text, sizeof text, "%s", assignment + strspn(assignment, " \t"));
    char *value = strchr(text, '=');
    cut_at(text, value);
    value += 1 + strspn(value + 1, " \t");
    bool found = false;
    for (uint32_t i = 0; i < p->lines; i++) {
        struct td_preset_line *l = &p->line[i];
        if (strcmp(l->key, text) != 0 || (named && strcmp(l->section, section) != 0)) continue;
        snprintf(l->value, sizeof l->value, "%s", value);
        found = true;
    }
    return found ? TD_OK : insert(p, section, text, value, err);
}

td_status td_preset_config(const struct td_preset *p, const char *role, const char *instance,
                           struct td_config *ret, struct td_error *err) {
    td_config_defaults(ret);
    for (uint32_t i = 0; i < p->lines; i++) {
        const struct td_preset_line *l = &p->line[i];
        char text[sizeof l->key + sizeof l->value + 1];
        if (l->section[0] && !td_config_section_holds(l->section, role, instance)) continue;
        snprintf(text, sizeof text, "%s=%s", l->key, l->value);
        TD_TRY(td_config_set(ret, text, err));
    }
    return TD_OK;
}

/* ---- the file ---- */

static uint32_t number_of(const struct td_preset *p, const char *key) {
    for (uint32_t i = 0; i < p->lines; i++)
        if (strcmp(p->line[i].key, key) == 0) return (uint32_t)strtoul(p->line[i].value, NULL, 10);
    return 0;
}

static void write_line(const struct td_preset_line *l, FILE *out) {
    int n = fprintf(out, "%s = %s", l->key, l->value);
    if (l->comment) fprintf(out, "%*s# %s", n < 33 ? 34 - n : 1, "", l->comment);
    fputc('\n', out);
}

void td_preset_write(const struct td_preset *p, FILE *out) {
    fprintf(out,
            "# Eight GPUs, %s: %s.\n"
            "#\n"
            "# Every setting, its range and default: tandem.conf(5). Lines above the first section "
            "hold for\n"
            "# all processes, those below [ROLE] for its workers, those below [ROLE@N] for one. "
            "What does\n"
            "# not fit together, and what to change: `tandem topology --check` with this file. "
            "Without\n"
            "# systemd: `tandem up --config` with it. Under systemd, as %s:\n",
            p->name, p->what, TD_SYSTEM_CONFIG);
    td_units_commands(number_of(p, "cluster.prefill"), number_of(p, "cluster.decode"), NULL, "#   ",
                      out);
    fputc('\n', out);
    const char *section = "";
    for (uint32_t i = 0; i < p->lines; i++) {
        const struct td_preset_line *l = &p->line[i];
        if (strcmp(section, l->section) != 0) fprintf(out, "\n[%s]\n", l->section);
        section = l->section;
        write_line(l, out);
    }
}
