/* `tandem`: one program for everything beside the three roles. */
#include <stdio.h>
#include <string.h>

#include "deploy/tool/tool.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"up", td_cmd_up, "start a local cluster from one configuration file"},
    {"down", td_cmd_down, "stop it"},
    {"status", td_cmd_status, "show a running cluster: workers, ledgers, effective settings"},
    {"restart", td_cmd_restart, "restart one role; no other process is touched"},
    {"rolling-restart", td_cmd_rolling, "restart workers one after another, losing no stream"},
    {"drain", td_cmd_drain, "give a worker no new work and wait until it has none"},
    {"resume", td_cmd_resume, "give it work again"},
    {"logs", td_cmd_logs, "show the log of one role or of all"},
    {"doctor", td_cmd_doctor, "what would go wrong here: files, limits, GPUs, links, each with its cure"},
    {"plan", td_cmd_plan, "what workers take in memory and how much they hold, from config.json"},
    {"topology", td_cmd_topology, "a configuration for eight GPUs, checked; units for it"},
    {"needle", td_cmd_needle, "does the cluster find facts hidden in long prompts?"},
    {"index-diff", td_cmd_index_diff, "which entries the indexer chooses, by type of stored key"},
    {"golden", td_cmd_golden, "run recorded results through the engine and compare"},
    {"tokenize", td_cmd_tokenize, "text to token ids and back"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void usage(FILE *out) {
    fprintf(out, "usage: tandem COMMAND [OPTION...]\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-15s %s\n", commands[i].name, commands[i].help);
    fprintf(
        out,
        "\n`tandem COMMAND --help` explains one. Exit codes: 0 done, 1 failed, 2 wrong usage.\n");
}

int main(int argc, char **argv) {
    if (argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0)) {
        usage(stdout);
        return TD_EXIT_OK;
    }
    for (int i = 0; argc >= 2 && i < N_COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    if (argc >= 2) fprintf(stderr, "tandem: unknown command '%s'\n\n", argv[1]);
    usage(stderr);
    return TD_EXIT_USAGE;
}
