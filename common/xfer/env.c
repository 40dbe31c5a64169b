/* UCX's settings and what it says. UCX is configured by the process environment alone, in three
 * places: by its loader (too late for main, so undone by call here), by its context, and by each
 * transport; all ours are set from the tables below and proved to be in force when a td_xfer
 * starts. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ucm/api/ucm.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "common/xfer/internal.h"

#define TEXT(x) #x
#define NUMBER(x) TEXT(x)
#define FIFO_ELEMENTS 2048
#define TCP_SEGMENT 66560
_Static_assert(TCP_SEGMENT >= TD_XFER_PIECE_BYTES + 1024, "a piece and its heads");
_Static_assert(FIFO_ELEMENTS == TD_XFER_FIFO, "the table below spells it");

struct setting {
    const char *name, *value;
};

static const struct setting of_both[] = {
    /* How soon a killed process is noticed by UCX itself. */
    {"UCX_KEEPALIVE_INTERVAL", "1s"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_MEM_EVENTS", "n"},
    {NULL, NULL},
};

static const struct setting of_shm[] = {
    /* One transport carries messages and puts. sysv would do the same with a second set of FIFOs;
     * TCP writes where a packet says; cma and self cannot report a dead peer as we need it. */
    {"UCX_TLS", "posix"},
    {"UCX_NET_DEVICES", "all"},
    /* Without it links that can be force-closed find no shared-memory lane. */
    {"UCX_POSIX_ERROR_HANDLING", "y"},
    {"UCX_SYSV_ERROR_HANDLING", "y"},
    /* Same on both sides of a link: the sender maps the receiver's FIFO by its own figure. */
    {"UCX_POSIX_FIFO_SIZE", NUMBER(FIFO_ELEMENTS)},
    /* A file under /proc/PID/fd instead of a name in /dev/shm: nothing to leave behind. */
    {"UCX_POSIX_USE_PROC_LINK", "y"},
    {"UCX_POSIX_HUGETLB_MODE", "n"},
    /* No silent fallback to memory peers cannot reach. */
    {"UCX_ALLOC_PRIO", "md:posix"},
    {NULL, NULL},
};

static char device[64]; /* of the tcp lane */

static const struct setting of_tcp[] = {
    {"UCX_TLS", "tcp"},
    {"UCX_NET_DEVICES", device},
    /* Its put is a header with an address in the receiver. We send none, and no protocol of UCX's
     * may choose it for us. */
    {"UCX_TCP_PUT_ENABLE", "n"},
    {"UCX_RNDV_THRESH", "inf"},
    /* A piece of a put is one message of TCP: read from the caller's memory by the system call that
     * sends it, found whole in the receive buffer. UCX's default takes 8 KB of it. */
    {"UCX_TCP_RX_SEG_SIZE", NUMBER(TCP_SEGMENT)},
    {"UCX_ZCOPY_THRESH", "8192"},
    {"UCX_SOCKADDR_TLS_PRIORITY", "tcp"},
    /* Else connecting to a host that does not answer holds up the loop for minutes. */
    {"UCX_TCP_CONN_NB", "y"},
    {NULL, NULL},
};

static enum td_xfer_lane lane; /* 0: not chosen yet */

enum td_xfer_lane td_xfer_lane_chosen(void) {
    return lane;
}

const char *td_xfer_device(void) {
    return device;
}

const char *td_xfer_lane_name(uint32_t l) {
    return l == TD_XFER_SHM ? "shm" : l == TD_XFER_TCP ? "tcp" : "?";
}

static char said[200];

/* UCX prints to stdout; libraries do not log. Kept for the sentence of the call that failed. */
static ucs_log_func_rc_t keep_complaint(const char *file, unsigned line, const char *function,
                                        ucs_log_level_t level,
                                        const ucs_log_component_config_t *component,
                                        const char *message, va_list ap) {
    (void)file, (void)line, (void)function, (void)component;
    if (level == UCS_LOG_LEVEL_FATAL) return UCS_LOG_FUNC_RC_CONTINUE;
    if (level <= UCS_LOG_LEVEL_ERROR && said[0] == 0) {
        /* The format is UCX's own. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        vsnprintf(said, sizeof said, message, ap);
#pragma GCC diagnostic pop
    }
    return UCS_LOG_FUNC_RC_STOP;
}

void td_xfer_ucx_forget(void) {
    said[0] = 0;
}

const char *td_xfer_ucx_said(void) {
    return said;
}

static td_status set(const struct setting *s, struct td_error *err) {
    for (; s->name; s++)
        if (setenv(s->name, s->value, 1) != 0)
            return td_fail(err, TD_NO_MEMORY, "environment: no room for %s", s->name);
    return TD_OK;
}

static td_status check(const struct setting *s, struct td_error *err) {
    for (; s->name; s++) {
        const char *found = getenv(s->name);
        if (!found || strcmp(found, s->value) != 0)
            return td_fail(err, TD_CONFIG,
                           "%s: expected %s, found %s; the transfer settings must be made first "
                           "in main",
                           s->name, s->value, found ? found : "nothing");
    }
    return TD_OK;
}

/* UCX's name of an interface is the system's, with one address or more. */
td_status td_xfer_interface(const char *name, struct in_addr *ret_address, struct in_addr *ret_mask,
                            struct td_error *err) {
    char all[200] = "";
    struct ifaddrs *list, *i, *found = NULL;
    if (getifaddrs(&list) != 0)
        return td_fail(err, TD_IO, "lane_device: the network interfaces cannot be listed: %s",
                       strerror(errno));
    for (i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || !i->ifa_netmask || i->ifa_addr->sa_family != AF_INET ||
            !(i->ifa_flags & IFF_UP))
            continue;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, " %s", i->ifa_name);
        if (!found && strcmp(i->ifa_name, name) == 0) found = i;
    }
    if (found) {
        *ret_address = ((struct sockaddr_in *)(void *)found->ifa_addr)->sin_addr;
        *ret_mask = ((struct sockaddr_in *)(void *)found->ifa_netmask)->sin_addr;
    }
    freeifaddrs(list);
    if (found && strlen(name) < sizeof device) return TD_OK;
    return td_fail(err, TD_CONFIG,
                   "lane_device: expected an interface that is up and has an IPv4 address (of a "
                   "private network; there are:%s), found '%s'",
                   all, name);
}

td_status td_xfer_env(enum td_xfer_lane l, const char *interface, struct td_error *err) {
    struct in_addr unused[2];
    if (l == TD_XFER_TCP) TD_TRY(td_xfer_interface(interface, &unused[0], &unused[1], err));
    lane = l;
    if (l == TD_XFER_TCP) snprintf(device, sizeof device, "%s", interface);
    TD_TRY(set(of_both, err));
    TD_TRY(set(l == TD_XFER_TCP ? of_tcp : of_shm, err));

    /* What UCX's loader has read already. Its crash handlers hide ours (and a sanitizer's); its
     * hooks in mmap and malloc serve registration caches, which shared memory does not use. */
    static const int caught[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
    for (size_t i = 0; i < sizeof caught / sizeof caught[0]; i++)
        ucs_debug_disable_signal(caught[i]);
    ucm_global_config_t hooks = ucm_global_opts;
    hooks.enable_events = 0;
    ucm_set_global_opts(&hooks);
    if (ucs_global_opts_set_value("WARN_UNUSED_ENV_VARS", "n") != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: this version has no setting WARN_UNUSED_ENV_VARS");

    static bool listening;
    if (!listening) ucs_log_push_handler(keep_complaint);
    listening = true;
    return TD_OK;
}

td_status td_xfer_env_check(struct td_error *err) {
    if (lane == 0)
        return td_fail(err, TD_CONFIG,
                       "no lane was chosen; the transfer settings must be made "
                       "first in main");
    TD_TRY(check(of_both, err));
    return check(lane == TD_XFER_TCP ? of_tcp : of_shm, err);
}

td_status td_xfer_from_ucs(ucs_status_t s) {
    switch (s) {
    case UCS_OK:
        return TD_OK;
    case UCS_ERR_CANCELED:
        return TD_CANCELLED;
    case UCS_ERR_NO_MEMORY:
        return TD_NO_MEMORY;
    default:
        return TD_PEER_LOST;
    }
}

/* "  lane[0]:  1:posix/memory.0 md[1]   -> md[1]/posix/sysdev[255] am am_bw#0" becomes
 * "posix/memory.0[am am_bw#0]". False when the line is none. */
static bool parse_lane(char *line, char **ret_name, char **ret_roles) {
    char *p = strstr(line, "lane[");
    if (!p || !(p = strchr(p, ':'))) return false;
    p += 1 + strspn(p + 1, " 0123456789");
    if (*p == ':') p++;
    *ret_name = p;
    p += strcspn(p, " \n");
    char *roles = *p ? strstr(p, "sysdev[") : NULL;
    *p = 0;
    roles = roles ? strchr(roles, ' ') : NULL;
    if (roles) {
        roles++;
        roles[strcspn(roles, "\n")] = 0;
    }
    *ret_roles = roles ? roles : p;
    return true;
}

td_status td_xfer_ep_lanes(ucp_ep_h ep, char *buf, struct td_error *err) {
    char *text = NULL;
    size_t text_len = 0, used = 0;
    FILE *f = open_memstream(&text, &text_len);
    if (!f) return td_fail(err, TD_NO_MEMORY, "no memory to list a link's lanes");
    ucp_ep_print_info(ep, f);
    fclose(f);
    buf[0] = 0;
    char expected[sizeof device + 8];
    snprintf(expected, sizeof expected, "%s/%s", lane == TD_XFER_TCP ? "tcp" : "posix",
             lane == TD_XFER_TCP ? device : "memory");
    td_status st = TD_OK;
    char *save = NULL, *name, *roles;
    for (char *line = strtok_r(text, "\n", &save); line && st == TD_OK;
         line = strtok_r(NULL, "\n", &save)) {
        if (!parse_lane(line, &name, &roles)) continue;
        if (strncmp(name, "cm", 2) == 0)
            continue; /* how the link was opened; carries nothing of ours */
        int n = snprintf(buf + used, TD_XFER_LANES_MAX - used, "%s%s[%s]", used ? " " : "", name,
                         roles);
        used += (size_t)n < TD_XFER_LANES_MAX - used ? (size_t)n : TD_XFER_LANES_MAX - 1 - used;
        /* "posix/memory.0", "tcp/eth1.0" */
        size_t want = strlen(expected);
        if (strncmp(name, expected, want) != 0 || (name[want] != '.' && name[want] != 0))
            st = td_fail(err, TD_CONFIG, "lanes of a link: expected %s only, found %s", expected,
                         name);
    }
    if (st == TD_OK && used == 0)
        st = td_fail(err, TD_CONFIG, "lanes of a link: expected %s, found none", expected);
    free(text);
    return st;
}
