/* See topology_units.h. Devices are not narrowed per instance: a process that may open some of the
 * GPUs alone sees them numbered anew from 0, and puts between workers open both sides' devices. */
#include "deploy/tool/topology_units.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- what the machine shows ---- */

/* The first line of SYS/bus/pci/devices/ADDRESS/NAME; false: there is none. */
static bool pci_line(const char *sys, const char *address, const char *name, char *ret,
                     size_t cap) {
    char path[512];
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/%s", sys, address, name);
    FILE *f = fopen(path, "re");
    bool read = f && fgets(ret, (int)cap, f);
    if (f) fclose(f);
    if (read) ret[strcspn(ret, "\n")] = '\0';
    return read;
}

static bool is_gpu(const char *sys, const char *address) {
    char vendor[16], class[16];
    if (!pci_line(sys, address, "vendor", vendor, sizeof vendor) ||
        !pci_line(sys, address, "class", class, sizeof class))
        return false;
    return strcmp(vendor, "0x10de") == 0 && strncmp(class, "0x03", 4) == 0;
}

static int by_address(const void *a, const void *b) {
    const struct td_gpu_place *x = a, *y = b;
    return strcmp(x->address, y->address);
}

void td_gpu_places_read(const char *sys, struct td_gpu_places *ret) {
    char path[512], node[16];
    ret->n = 0;
    snprintf(path, sizeof path, "%s/bus/pci/devices", sys);
    DIR *d = opendir(path);
    if (!d) return;
    for (const struct dirent *e; ret->n < TD_PLACES && (e = readdir(d));) {
        struct td_gpu_place *p = &ret->at[ret->n];
        if (strlen(e->d_name) >= sizeof p->address || !is_gpu(sys, e->d_name)) continue;
        *p = (struct td_gpu_place){.node = -1};
        snprintf(p->address, sizeof p->address, "%.15s", e->d_name);
        if (pci_line(sys, p->address, "numa_node", node, sizeof node))
            p->node = (int)strtol(node, NULL, 10);
        if (!pci_line(sys, p->address, "local_cpulist", p->cpus, sizeof p->cpus)) p->node = -1;
        ret->n++;
    }
    closedir(d);
    qsort(ret->at, ret->n, sizeof ret->at[0], by_address);
}

static bool several_nodes(const struct td_gpu_places *places) {
    for (uint32_t i = 1; i < places->n; i++)
        if (places->at[i].node != places->at[0].node) return true;
    return false;
}

/* ---- drop-ins ---- */

struct text {
    char *at;
    size_t n, cap;
};

__attribute__((format(printf, 2, 3))) static void put(struct text *t, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(t->at + t->n, t->cap - t->n, format, ap);
    va_end(ap);
    if (n > 0) t->n = t->n + (size_t)n < t->cap ? t->n + (size_t)n : t->cap - 1;
}

/* Is place `i` of the worker's GPUs the first on its node? */
static bool first_on_node(const struct td_topology_worker *w, const struct td_gpu_places *places,
                          uint32_t i) {
    for (uint32_t k = 0; k < i; k++)
        if (places->at[w->gpu[k]].node == places->at[w->gpu[i]].node) return false;
    return true;
}

bool td_units_dropin(const struct td_topology *t, const struct td_topology_worker *w,
                     const struct td_gpu_places *places, char *ret, size_t cap) {
    struct text x = {ret, 0, cap};
    uint32_t nodes = 0;
    if (w->gpus == 0 || !several_nodes(places)) return false;
    for (uint32_t i = 0; i < w->gpus; i++) {
        if (w->gpu[i] >= places->n || places->at[w->gpu[i]].node < 0) return false;
        nodes += first_on_node(w, places, i);
    }
    put(&x, "# %s of %s, near its GPUs; written by `tandem topology --units`.\n", w->name, t->path);
    for (uint32_t i = 0; i < w->gpus; i++)
        put(&x, "# cuda:%u is %s, node %d\n", w->gpu[i], places->at[w->gpu[i]].address,
            places->at[w->gpu[i]].node);
    put(&x, "[Service]\nCPUAffinity=");
    for (uint32_t i = 0, n = 0; i < w->gpus; i++)
        if (first_on_node(w, places, i))
            put(&x, "%s%s", n++ ? " " : "", places->at[w->gpu[i]].cpus);
    put(&x, "\n");
    /* a preference: what does not fit there may lie elsewhere; of several nodes each rank's thread
     * takes its own */
    if (nodes == 1) put(&x, "NUMAPolicy=preferred\nNUMAMask=%d\n", places->at[w->gpu[0]].node);
    return true;
}

static td_status write_dropin(const char *dir, const struct td_topology_worker *w,
                              const char *content, struct td_error *err) {
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s/tandem-%s.service.d", dir, w->name);
    if (mkdir(folder, 0755) != 0 && errno != EEXIST)
        return td_fail(err, TD_IO, "%s: %s", folder, strerror(errno));
    snprintf(path, sizeof path, "%s/topology.conf", folder);
    FILE *f = fopen(path, "we");
    if (!f) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    bool written = fputs(content, f) >= 0;
    if (fclose(f) != 0 || !written) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    printf("%s\n", path);
    return TD_OK;
}

td_status td_units_write(const struct td_topology *t, const struct td_gpu_places *places,
                         const char *dir, struct td_error *err) {
    char content[2048];
    for (uint32_t i = 0; i < t->workers; i++) {
        const struct td_topology_worker *w = &t->worker[i];
        if (td_units_dropin(t, w, places, content, sizeof content))
            TD_TRY(write_dropin(dir, w, content, err));
    }
    return TD_OK;
}

/* ---- commands ---- */

/* "prefill@1" of so many workers? */
static bool one_of(const char *name, uint32_t prefill, uint32_t decode) {
    char own[32];
    for (uint32_t i = 0; i < prefill + decode; i++) {
        snprintf(own, sizeof own, "%s@%u", i < prefill ? "prefill" : "decode",
                 i < prefill ? i : i - prefill);
        if (strcmp(name, own) == 0) return true;
    }
    return false;
}

/* Instances that were enabled for another configuration. */
static void disable_others(uint32_t prefill, uint32_t decode, const char *wants, const char *prefix,
                           FILE *out) {
    struct dirent **found;
    int n = wants ? scandir(wants, &found, NULL, alphasort) : -1;
    for (int i = 0; i < n; i++) {
        char *name = found[i]->d_name, *end = strstr(name, ".service");
        if (strncmp(name, "tandem-", 7) == 0 && strchr(name, '@') && end) {
            *end = '\0';
            if (!one_of(name + 7, prefill, decode))
                fprintf(out, "%ssudo systemctl disable --now %s\n", prefix, name);
        }
        free(found[i]);
    }
    if (n >= 0) free(found);
}

void td_units_commands(uint32_t prefill, uint32_t decode, const char *wants, const char *prefix,
                       FILE *out) {
    disable_others(prefill, decode, wants, prefix, out);
    fprintf(out, "%ssudo systemctl enable tandem.target tandem-router", prefix);
    for (uint32_t i = 0; i < prefill; i++)
        fprintf(out, " tandem-prefill@%u", i);
    for (uint32_t i = 0; i < decode; i++)
        fprintf(out, " tandem-decode@%u", i);
    /* starts what is enabled and restarts what already runs */
    fprintf(out, "\n%ssudo systemctl restart tandem.target\n", prefix);
}
