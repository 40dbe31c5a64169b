/* Facts about lanes, by running tandem-lane, and what follows from them. */
#include "deploy/tool/doctor_lane.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <string.h>

#include "deploy/tool/procs.h"

enum { ARGS_MAX = 160 };

/* ---- facts ---- */

static void device(const char *name, struct td_lane_facts *f) {
    struct ifaddrs *list;
    if (!name[0] || getifaddrs(&list) != 0) return;
    for (struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (strcmp(i->ifa_name, name) != 0 || !(i->ifa_flags & IFF_UP)) continue;
        f->device_there = true;
        f->device_loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && !f->address)
            f->address = ntohl(((struct sockaddr_in *)(void *)i->ifa_addr)->sin_addr.s_addr);
    }
    freeifaddrs(list);
}

void td_lane_read(char *text, struct td_lane_facts *f) {
    const struct {
        const char *key;
        char *value;
        size_t cap;
    } line[] = {{"version ", f->version, sizeof f->version},
                {"components ", f->components, sizeof f->components},
                {"lane ", f->lane, sizeof f->lane},
                {"links ", f->links, sizeof f->links},
                {"failed ", f->failed, sizeof f->failed}};
    char *save = NULL;
    for (char *s = strtok_r(text, "\n", &save); s; s = strtok_r(NULL, "\n", &save))
        for (size_t i = 0; i < sizeof line / sizeof *line; i++)
            if (strncmp(s, line[i].key, strlen(line[i].key)) == 0)
                snprintf(line[i].value, line[i].cap, "%s", s + strlen(line[i].key));
}

void td_lane_look(const char *worker, const struct td_config *c, const char *const args[],
                  uint32_t limit_s, struct td_lane_facts *f) {
    char program[1024], said[2048];
    const char *argv[ARGS_MAX] = {program};
    struct td_error unheard;
    *f = (struct td_lane_facts){.limit_s = limit_s, .gpus = strcmp(c->device, "cpu") != 0};
    snprintf(f->worker, sizeof f->worker, "%s", worker);
    snprintf(f->device, sizeof f->device, "%s", c->lane_device);
    device(c->lane_device, f);
    f->program = td_proc_program("lane", program, sizeof program, &unheard) == TD_OK;
    if (!f->program) return;
    for (int i = 0; args[i] && i < ARGS_MAX - 2; i++)
        argv[i + 1] = args[i];
    f->end = td_apart_program(argv, limit_s * 1000, said, sizeof said);
    td_lane_read(said, f);
}

/* ---- rules ---- */

/* RFC 1918, carrier-grade, link-local and loopback ranges. */
static bool is_private(uint32_t a) {
    return a >> 24 == 10 || a >> 20 == 0xac1 || a >> 16 == 0xc0a8 || a >> 22 == 0x191 ||
           a >> 16 == 0xa9fe || a >> 24 == 127;
}

static bool has(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || at[n] == 0)) return true;
    return false;
}

static void device_rules(const struct td_lane_facts *f, struct td_report *r) {
    if (strcmp(f->lane, "tcp") != 0 || !f->device_there) return; /* said by the lane itself */
    if (f->address && !is_private(f->address)) {
        td_find(r, TD_WARNING, "lane",
                "%s: lane_device %s: %u.%u.%u.%u is a public address; UCX trusts whoever is in its "
                "subnet",
                f->worker, f->device, f->address >> 24, f->address >> 16 & 255,
                f->address >> 8 & 255, f->address & 255);
        td_cure(r, "a device of a private network, and a firewall in front of it");
    } else if (f->device_loopback) {
        td_find(r, TD_WARNING, "lane",
                "%s: lane_device %s: the loopback device joins nothing but this host", f->worker,
                f->device);
        td_cure(r, "lane = shm on one host; a private network's device for several");
    } else
        td_find(r, TD_FINE, "lane", "%s: lane_device %s is of a private network", f->worker,
                f->device);
}

void td_lane_rules(const struct td_lane_facts *f, struct td_report *r) {
    if (!f->program) {
        td_find(
            r, TD_SKIPPED, "lane",
            "%s: no program tandem-lane beside this one to start its lane with (a build without "
            "UCX has none, and no workers)",
            f->worker);
        return;
    }
    if (f->end.how == TD_APART_LATE) {
        td_find(r, TD_ERROR, "lane", "%s: UCX %s did not start its lane within %u s", f->worker,
                f->version, f->limit_s);
        td_cure(r, "a firewall that drops packets on lane_device, or a file system under /dev/shm "
                   "that hangs");
    } else if (f->failed[0]) {
        td_find(r, TD_ERROR, "lane", "%s: %s", f->worker, f->failed);
        td_cure(r, strcmp(f->lane, "tcp") == 0
                       ? "lane_device, cluster_key_file and UCX's tcp transport; or lane = shm"
                       : "UCX's posix transport and /dev/shm; UCX_TLS and other UCX_ settings of "
                         "the environment do not count");
    } else if (f->end.how != TD_APART_DONE) {
        td_find(r, TD_ERROR, "lane", "%s: UCX %s ended the process (%s %d)", f->worker, f->version,
                f->end.code > 0 ? "signal" : "exit code",
                f->end.code > 0 ? f->end.code : -f->end.code);
        td_cure(r, "UCX 1.13 or later of one installation: `ldd` shows which libraries are found");
    } else
        td_find(r, TD_FINE, "lane", "%s: lane %s: %s", f->worker, f->lane, f->links);
    device_rules(f, r);
}

void td_lane_ucx_rules(const struct td_lane_facts *f, struct td_report *r) {
    if (!f->version[0]) return;
    td_find(r, TD_FINE, "lane", "UCX %s offers %s; it has %scuda_ipc%s", f->version, f->components,
            has(f->components, "cuda_ipc") ? "" : "no ",
            f->gpus ? ", and slabs go through pinned memory of the host either way" : "");
}
