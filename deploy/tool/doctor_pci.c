/* What /sys and the kernel's command line say of a GPU's place: its NUMA node, its IOMMU group, the
 * bridges above it and whether they send traffic between devices up to the root. */
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/tool/doctor_gpu.h"

static bool read_line(const char *path, char *line, size_t cap) {
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool got = fgets(line, (int)cap, f) != NULL;
    fclose(f);
    if (got) line[strcspn(line, "\n")] = 0;
    return got;
}

/* "0-3,8" against the cores that this process may use. */
static int cores_in(const char *list) {
    cpu_set_t mine;
    int n = 0;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) return -1;
    for (const char *at = list; isdigit((unsigned char)*at);) {
        char *end;
        long from = strtol(at, &end, 10), to = from;
        if (*end == '-') to = strtol(end + 1, &end, 10);
        for (long c = from; c <= to && c < CPU_SETSIZE; c++)
            n += CPU_ISSET((size_t)c, &mine) != 0;
        at = *end == ',' ? end + 1 : end;
    }
    return n;
}

/* ---- bridges ---- */

int td_acs_redirects(const uint8_t *config, size_t n) {
    /* Extended capabilities: a list from 0x100 on, of 16 bits id, 4 bits version, 12 bits next.
     * ACS: id 13, its control word 6 bytes further; request redirect, completion redirect. */
    enum { FIRST = 0x100, ACS = 13, CONTROL = 6, REDIRECT = 1 << 2 | 1 << 3, STEPS = 48 };
    if (n < FIRST + 4) return -1;
    size_t at = FIRST;
    for (int i = 0; i < STEPS && at >= FIRST && at + CONTROL + 2 <= n; i++) {
        uint32_t head = config[at] | (uint32_t)config[at + 1] << 8 |
                        (uint32_t)config[at + 2] << 16 | (uint32_t)config[at + 3] << 24;
        if ((head & 0xffff) == ACS)
            return ((config[at + CONTROL] | config[at + CONTROL + 1] << 8) & REDIRECT) != 0;
        at = head >> 20;
    }
    return 0; /* a bridge without it sends straight */
}

/* Folders of a device's path whose names are bus addresses are the bridges above it. */
static bool is_address(const char *s, size_t n) {
    return n >= 12 && s[4] == ':' && s[7] == ':' && s[10] == '.';
}

static void look_at_bridges(const char *path, struct td_pci_facts *f) {
    char up[PATH_MAX + 16];
    size_t n = strlen(path);
    for (;;) {
        while (n > 0 && path[n - 1] != '/')
            n--;
        if (n == 0) return;
        n--; /* the slash */
        size_t start = n;
        while (start > 0 && path[start - 1] != '/')
            start--;
        if (!is_address(path + start, n - start)) return;
        uint8_t config[4096];
        snprintf(up, sizeof up, "%.*s/config", (int)n, path);
        int fd = open(up, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? 0 : read(fd, config, sizeof config);
        if (fd >= 0) close(fd);
        f->bridges++;
        int redirects = td_acs_redirects(config, got > 0 ? (size_t)got : 0);
        if (redirects < 0)
            f->redirecting = -1;
        else if (f->redirecting >= 0)
            f->redirecting += redirects;
    }
}

/* ---- one GPU ---- */

/* Its folder; false when there is none. The runtime writes capitals, /sys small letters; NVML a
 * domain of eight digits. */
static bool folder_of(const char *root, const char *bus, char *device, size_t cap) {
    char path[PATH_MAX], name[32];
    size_t n = strlen(bus), skip = n > 12 ? n - 12 : 0;
    snprintf(name, sizeof name, "%.12s", bus + skip);
    for (char *c = name; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%s", root, name);
    char *real = n ? realpath(path, NULL) : NULL;
    if (real) snprintf(device, cap, "%s", real);
    bool there = real != NULL;
    free(real);
    return there;
}

static int attribute(const char *device, const char *name) {
    char file[PATH_MAX], line[64];
    snprintf(file, sizeof file, "%s/%s", device, name);
    return read_line(file, line, sizeof line) ? (int)strtol(line, NULL, 10) : -1;
}

/* "32.0 GT/s PCIe" is generation 5. */
static int generation(int gigatransfers) {
    static const int speed[] = {2, 5, 8, 16, 32, 64};
    for (int i = 0; i < (int)(sizeof speed / sizeof *speed); i++)
        if (speed[i] == gigatransfers) return i + 1;
    return -1;
}

int td_pci_generation(const char *root, const char *bus) {
    char device[PATH_MAX - 64];
    if (!folder_of(root, bus, device, sizeof device)) return -1;
    return generation(attribute(device, "current_link_speed"));
}

void td_pci_look(const char *root, const char *bus, struct td_pci_facts *f) {
    char device[PATH_MAX - 64], file[PATH_MAX], line[256];
    *f = (struct td_pci_facts){.node = -1,
                               .near_cores = -1,
                               .group = -1,
                               .generation_max = -1,
                               .lanes = -1,
                               .lanes_max = -1};
    if (!folder_of(root, bus, device, sizeof device)) return;
    f->there = true;
    f->generation_max = generation(attribute(device, "max_link_speed"));
    f->lanes = attribute(device, "current_link_width");
    f->lanes_max = attribute(device, "max_link_width");
    f->node = attribute(device, "numa_node");
    snprintf(file, sizeof file, "%s/local_cpulist", device);
    if (f->node >= 0 && read_line(file, line, sizeof line)) f->near_cores = cores_in(line);
    snprintf(file, sizeof file, "%s/iommu_group", device);
    char *real = realpath(file, NULL);
    if (real) {
        f->group = (int)strtol(strrchr(real, '/') + 1, NULL, 10);
        snprintf(file, sizeof file, "%s/type", real);
        if (read_line(file, line, sizeof line))
            snprintf(f->domain, sizeof f->domain, "%.15s", line);
        free(real);
    }
    look_at_bridges(device, f);
}

/* ---- the machine ---- */

void td_iommu_look(const char *root, struct td_iommu_facts *f) {
    static const char *const about[] = {
        "iommu",        "amd_iommu",         "intel_iommu", "iommu.passthrough",
        "iommu.strict", "pcie_acs_override", "pci"};
    char path[PATH_MAX], line[4096], *save = NULL;
    *f = (struct td_iommu_facts){0};
    snprintf(path, sizeof path, "%s/proc/cmdline", root);
    if (read_line(path, line, sizeof line))
        for (char *w = strtok_r(line, " ", &save); w; w = strtok_r(NULL, " ", &save))
            for (size_t i = 0; i < sizeof about / sizeof *about; i++) {
                size_t n = strlen(about[i]), used = strlen(f->words);
                if (strncmp(w, about[i], n) == 0 && w[n] == '=')
                    snprintf(f->words + used, sizeof f->words - used, "%s%s", used ? " " : "", w);
            }
    snprintf(path, sizeof path, "%s/sys/kernel/iommu_groups", root);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        f->groups += isdigit((unsigned char)e->d_name[0]) != 0;
    if (d) closedir(d);
    snprintf(path, sizeof path, "%s/proc/cpuinfo", root);
    FILE *c = fopen(path, "re");
    while (c && !f->guest && fgets(line, sizeof line, c))
        f->guest = strncmp(line, "flags", 5) == 0 && strstr(line, " hypervisor") != NULL;
    if (c) fclose(c);
}
