/* See near.h. */
#include "kernels/near.h"

#include <ctype.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool read_core(const char **at, unsigned long *ret) {
    char *end;
    if (!isdigit((unsigned char)**at)) return false;
    *ret = strtoul(*at, &end, 10);
    *at = end;
    return *ret < TD_NEAR_CORES;
}

bool td_near_parse(const char *list, struct td_cores *ret) {
    enum { BITS = 8 * sizeof(unsigned long) };
    struct td_cores c = {0};
    for (const char *at = list;; at++) {
        unsigned long first, last;
        if (!read_core(&at, &first)) return false;
        last = first;
        if (*at == '-') {
            at++;
            if (!read_core(&at, &last) || last < first) return false;
        }
        for (unsigned long i = first; i <= last; i++)
            c.bit[i / BITS] |= 1ul << i % BITS;
        if (*at == ',') continue;
        if (*at != '\0' && strcmp(at, "\n") != 0) return false;
        *ret = c;
        return true;
    }
}

static bool read_list(const char *pci, char *buf, size_t cap) {
    char path[96];
    int n = snprintf(path, sizeof path, "/sys/bus/pci/devices/%.16s/local_cpulist", pci);
    for (int i = 0; i < n; i++) /* the driver writes hexadecimal digits large, sysfs small */
        path[i] = (char)tolower((unsigned char)path[i]);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    bool ok = fgets(buf, (int)cap, f) != NULL;
    fclose(f);
    return ok;
}

void td_near_stay(const char *pci) {
    char list[1024];
    struct td_cores near;
    cpu_set_t mine, both;
    if (!read_list(pci, list, sizeof list) || !td_near_parse(list, &near)) return;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) return;
    CPU_ZERO(&both);
    for (unsigned i = 0; i < CPU_SETSIZE && i < TD_NEAR_CORES; i++)
        if (CPU_ISSET(i, &mine) && td_near_has(&near, i)) CPU_SET(i, &both);
    if (CPU_COUNT(&both) > 0) (void)sched_setaffinity(0, sizeof both, &both);
}
