/* Keeps UCX's TCP port closed to everybody outside the subnet of its interface. UCX parses what a
 * connection brings before our handshake is asked (xfer.h), so a stranger must not get a connection
 * at all: a socket filter of the kernel drops his packets unseen. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/xfer/internal.h"

static bool is_port(int fd) {
    int listens = 0;
    socklen_t len = sizeof listens;
    struct sockaddr_storage sa;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &len) != 0 || !listens) return false;
    len = sizeof sa;
    return getsockname(fd, (struct sockaddr *)&sa, &len) == 0 && sa.ss_family == AF_INET;
}

void td_xfer_fence_look(struct td_xfer_ports *ports) {
    ports->n = 0;
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    while (d && (e = readdir(d)) && ports->n < TD_XFER_PORTS_MAX) {
        int fd = (int)strtol(e->d_name, NULL, 10);
        if (e->d_name[0] != '.' && is_port(fd)) ports->fd[ports->n++] = fd;
    }
    if (d) closedir(d);
}

static bool contains(const struct td_xfer_ports *ports, int fd) {
    for (int i = 0; i < ports->n; i++)
        if (ports->fd[i] == fd) return true;
    return false;
}

static int fence(int fd, uint32_t net, uint32_t mask) {
    enum { SOURCE = 12 }; /* of an IPv4 header */
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)SKF_NET_OFF + SOURCE),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, mask),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, net, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, UINT32_MAX),
        BPF_STMT(BPF_RET | BPF_K, 0),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

td_status td_xfer_fence(const struct td_xfer_ports *before, const char *device,
                        struct td_error *err) {
    struct td_xfer_ports now;
    struct in_addr address, mask;
    int fenced = 0;
    TD_TRY(td_xfer_interface(device, &address, &mask, err));
    td_xfer_fence_look(&now);
    for (int i = 0; i < now.n; i++) {
        if (contains(before, now.fd[i])) continue;
        if (fence(now.fd[i], ntohl(address.s_addr & mask.s_addr), ntohl(mask.s_addr)) != 0)
            return td_fail(err, TD_CONFIG,
                           "UCX: its TCP port cannot be closed to strangers: SO_ATTACH_FILTER: %s",
                           strerror(errno));
        fenced++;
    }
    if (fenced == 0)
        return td_fail(
            err, TD_CONFIG,
            "UCX: expected its TCP port among our descriptors, to close it to strangers; "
            "found none");
    return TD_OK;
}
