/* tandem-lane: starts the lane of a worker as the worker would, says what UCX made of it, and ends.
 * A program of its own so that `tandem` needs no UCX, whose libraries change a process by being
 * loaded, and so that a UCX that hangs or aborts is a finding of `tandem doctor`, which runs it.
 *
 * usage: tandem-lane prefill|decode [--config FILE] [--name N] [--set key=value]...
 * Prints lines "key value": version, components, lane, device, links. Exit codes as the roles'. */
#include <stdio.h>
#include <string.h>

#include "common/base/role_args.h"
#include "common/xfer/xfer.h"
#include "proto/worker_host.h"

static void on_accept(void *user, struct td_xfer_peer *peer) {
    (void)user;
    td_xfer_peer_close(peer);
}
static void on_message(void *user, struct td_xfer_peer *peer, const void *bytes, size_t len) {
    (void)user, (void)peer, (void)bytes, (void)len;
}
static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *sentence) {
    (void)user, (void)peer, (void)why, (void)sentence;
}
static void on_closed(void *user, struct td_xfer_peer *peer) {
    (void)user, (void)peer;
}

static td_status start(struct td_config *c, struct td_error *err) {
    struct td_cluster_key *key = NULL;
    struct td_xfer *x = NULL;
    char components[400];
    printf("version %s\n", td_xfer_ucx_version());
    TD_TRY(td_xfer_ucx_components(components, sizeof components, err));
    printf("components %s\n", components);
    TD_TRY(td_host_env(c, err));
    printf("lane %s\n", c->lane == TD_LANE_TCP ? "tcp" : "shm");
    if (c->lane == TD_LANE_TCP) printf("device %s\n", c->lane_device);
    fflush(stdout); /* whatever comes */
    if (c->cluster_key_file[0]) TD_TRY(td_cluster_key_load(c->cluster_key_file, &key, err));
    struct td_xfer_options o = {.on_accept = on_accept,
                                .on_message = on_message,
                                .on_lost = on_lost,
                                .on_closed = on_closed,
                                .key = key,
                                .role = 1,
                                .epoch = td_host_epoch()};
    td_status st = td_xfer_create(&o, &x, err);
    if (st == TD_OK) printf("links %s\n", td_xfer_transport(x));
    td_xfer_destroy(x);
    td_cluster_key_free(key);
    return st;
}

int main(int argc, char **argv) {
    static struct td_role_args args;
    struct td_error err = {0};
    const char *role = argc > 1 ? argv[1] : "";
    if (strcmp(role, "prefill") != 0 && strcmp(role, "decode") != 0) {
        fprintf(stderr, "usage: tandem-lane prefill|decode [--config FILE] [--name N]\n");
        return TD_ROLE_EXIT_CONFIG;
    }
    td_status st = td_role_args_read(argc - 1, argv + 1, role, &args, &err);
    if (st == TD_OK) st = start(&args.config, &err);
    if (st != TD_OK) {
        fflush(stdout);
        printf("failed %s\n", err.text);
    }
    return td_role_exit(st);
}
