/* UCX's settings and what it says. UCX is configured by the process environment alone, in three
 * places: by its loader (too late for main, so undone by call here), by its context, and by each
 * transport; all ours are set in one table and proved to be in force when a td_xfer starts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <signal.h>
#include <ucm/api/ucm.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "common/xfer/internal.h"

#define TEXT(x) #x
#define NUMBER(x) TEXT(x)
#define FIFO_ELEMENTS 2048
_Static_assert(FIFO_ELEMENTS == TD_XFER_FIFO, "the table below spells it");

static const char transport[] = "posix";

static const struct {
    const char *name, *value;
} settings[] = {
    /* One transport carries messages and puts. sysv would do the same with a second set of FIFOs;
     * TCP writes where a packet says; cma and self cannot report a dead peer as we need it. */
    {"UCX_TLS", "posix"},
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
    /* How soon a killed process is noticed by UCX itself. */
    {"UCX_KEEPALIVE_INTERVAL", "1s"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_MEM_EVENTS", "n"},
};

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

td_status td_xfer_env(struct td_error *err) {
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (setenv(settings[i].name, settings[i].value, 1) != 0)
            return td_fail(err, TD_NO_MEMORY, "environment: no room for %s", settings[i].name);

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
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        const char *found = getenv(settings[i].name);
        if (!found || strcmp(found, settings[i].value) != 0)
            return td_fail(err, TD_CONFIG,
                           "%s: expected %s, found %s; the transfer settings must be made first "
                           "in main",
                           settings[i].name, settings[i].value, found ? found : "nothing");
    }
    return TD_OK;
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
    td_status st = TD_OK;
    char *save = NULL, *name, *roles;
    for (char *line = strtok_r(text, "\n", &save); line && st == TD_OK;
         line = strtok_r(NULL, "\n", &save)) {
        if (!parse_lane(line, &name, &roles)) continue;
        int n = snprintf(buf + used, TD_XFER_LANES_MAX - used, "%s%s[%s]", used ? " " : "", name,
                         roles);
        used += (size_t)n < TD_XFER_LANES_MAX - used ? (size_t)n : TD_XFER_LANES_MAX - 1 - used;
        size_t name_len = strcspn(name, "/");
        if (name_len != sizeof transport - 1 || memcmp(name, transport, name_len) != 0)
            st = td_fail(err, TD_CONFIG, "lanes of a link: expected %s only, found %s", transport,
                         name);
    }
    if (st == TD_OK && used == 0)
        st = td_fail(err, TD_CONFIG, "lanes of a link: expected %s, found none", transport);
    free(text);
    return st;
}
