/* tandem-decode: options, then the worker. Everything else is in the library. */
#include <stdio.h>
#include <unistd.h>

#include "common/base/log.h"
#include "kernels/worker_engine.h"
#include "decode/worker.h"
#include "proto/worker_host.h"

int main(int argc, char **argv) {
    static struct td_role_args args;
    struct td_error err = {0};
    td_status st = td_role_args_read(argc, argv, "decode", &args, &err);
    if (st == TD_OK && args.help) {
        td_role_args_help(
            stdout, "tandem-decode",
            "Takes prompts from prefill workers, or computes them itself, and generates tokens.");
        return 0;
    }
    if (st == TD_OK) {
        /* Before any thread, and before UCX reads its settings. */
        st = td_host_env(&args.config, &err);
    }
    if (st == TD_OK) {
        td_log_init(args.name, (enum td_log_level)args.config.log_level);
        st = td_decode_worker_run(&args, &err);
    }
    if (st != TD_OK) fprintf(stderr, "tandem-decode: %s\n", err.text);
    int code = td_role_exit(st);
    if (td_worker_engine_lost()) _exit(code);
    return code;
}
