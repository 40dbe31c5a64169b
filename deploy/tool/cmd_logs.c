/* `tandem logs`: the log files of `tandem up`, or the journal. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/tool/target.h"
#include "deploy/tool/tool.h"

static const char help[] =
    "usage: tandem logs [ROLE[@N]] [--lines N] [--follow] [--config FILE]\n\n"
    "Shows the last lines (default 50) of one role's log, or of every role's, and with --follow\n"
    "what comes.\n"
    "Without --config: the installed configuration. A role that `tandem up` did not start is read\n"
    "from the journal.\n";

enum { LINES = 50 };

static int show_files(const struct td_target *t, const char *lines, bool follow) {
    static char path[TD_PROCS_MAX][TD_CONFIG_STRING_MAX + TD_PROC_NAME_MAX + 8];
    const char *argv[TD_PROCS_MAX + TD_TARGET_ARGS_MAX] = {"tail", "-n", lines};
    int n = 3;
    if (follow) argv[n++] = "-F";
    for (int i = 0; i < t->procs.n; i++) {
        if (t->name[0] && i != t->index) continue;
        td_proc_log(&t->procs, i, path[i], sizeof path[i]);
        argv[n++] = path[i];
    }
    execvp(argv[0], (char *const *)argv);
    fprintf(stderr, "tandem logs: tail: %s\n", strerror(errno));
    return TD_EXIT_FAILED;
}

static int show_journal(const struct td_target *t, const char *lines, bool follow) {
    const char *argv[TD_TARGET_ARGS_MAX] = {"journalctl", "--no-pager", "-o", "cat",
                                            "-u",         t->unit,      "-n", lines};
    if (follow) argv[8] = "-f";
    execvp(argv[0], (char *const *)argv);
    fprintf(stderr, "tandem logs: journalctl: %s\n", strerror(errno));
    return TD_EXIT_FAILED;
}

int td_cmd_logs(int argc, char **argv) {
    struct td_target_options o;
    static struct td_target t;
    struct td_error err;
    char lines[24];
    int code = td_target_options(argc, argv, help, "nf", &o);
    if (code >= 0) return code;
    if (td_target_find(&t, o.config, o.role, &err) != TD_OK) {
        fprintf(stderr, "tandem logs: %s\n", err.text);
        return TD_EXIT_FAILED;
    }
    snprintf(lines, sizeof lines, "%ld", o.lines < 0 ? LINES : o.lines);
    return t.local ? show_files(&t, lines, o.follow) : show_journal(&t, lines, o.follow);
}
