/* The commands of the program `tandem`. Each gets argv with its own name first and returns the
 * process's exit code: 0 done, 1 it ran and the answer is no (or it failed), 2 wrong usage. */
#ifndef TD_DEPLOY_TOOL_TOOL_H
#define TD_DEPLOY_TOOL_TOOL_H

enum { TD_EXIT_OK = 0, TD_EXIT_FAILED = 1, TD_EXIT_USAGE = 2 };

int td_cmd_doctor(int argc, char **argv);
int td_cmd_golden(int argc, char **argv);
int td_cmd_index_diff(int argc, char **argv);
int td_cmd_needle(int argc, char **argv);
int td_cmd_plan(int argc, char **argv);
int td_cmd_tokenize(int argc, char **argv);
int td_cmd_topology(int argc, char **argv);
int td_cmd_up(int argc, char **argv);
int td_cmd_down(int argc, char **argv);
int td_cmd_status(int argc, char **argv);
int td_cmd_restart(int argc, char **argv);
int td_cmd_rolling(int argc, char **argv);
int td_cmd_drain(int argc, char **argv);
int td_cmd_resume(int argc, char **argv);
int td_cmd_logs(int argc, char **argv);

#endif
