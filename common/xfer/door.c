/* How links of the tcp lane are made in UCX: by its client-server interface, one side calling a
 * port, the other opening what called. So both sides' endpoints belong together by construction.
 * (Made from worker addresses, UCX joins number k of one side with number k of the other, in its
 * TCP transport too, and a process that was stopped while links came and went is out of step from
 * then on.)
 *
 * A caller is nobody until its greeting came over its own endpoint; see prove.c. */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"

struct td_xfer_door { /* UCX's part of an address on the tcp lane */
    uint32_t ip;      /* network order */
    uint16_t port;    /* network order */
    uint16_t reserved;
    uint64_t random; /* an address is one process's, also when the port is given to the next */
};

/* From UCX, perhaps in a moment that allows no more than a note. */
static void on_caller(ucp_conn_request_h request, void *arg) {
    struct td_xfer *x = arg;
    if (x->callers == TD_XFER_UNPROVEN_MAX || x->destroying) {
        (void)ucp_listener_reject(x->listener, request);
        return;
    }
    x->caller[x->callers++] = request;
}

td_status td_xfer_door_open(struct td_xfer *x, struct td_error *err) {
    struct sockaddr_in sa = {.sin_family = AF_INET};
    struct in_addr mask;
    TD_TRY(td_xfer_interface(td_xfer_device(), &sa.sin_addr, &mask, err));
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (const struct sockaddr *)&sa, .addrlen = sizeof sa},
        .conn_handler = {.cb = on_caller, .arg = x}};
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_listener_create(x->queue.worker, &params, &x->listener);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: no port on %s: %s. %s", td_xfer_device(),
                       ucs_status_string(s), td_xfer_ucx_said());
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    s = ucp_listener_query(x->listener, &attr);
    if (s != UCS_OK || attr.sockaddr.ss_family != AF_INET)
        return td_fail(err, TD_CONFIG, "UCX: its port on %s cannot be asked for", td_xfer_device());
    struct td_xfer_door door = {.ip = sa.sin_addr.s_addr,
                                .port = ((struct sockaddr_in *)&attr.sockaddr)->sin_port,
                                .random = x->random};
    struct td_xfer_envelope e = {0};
    return td_xfer_seal(&e, TD_XFER_ADDRESS_MAGIC, &door, sizeof door, x->queue.address,
                        sizeof x->queue.address, &x->queue.address_len, err);
}

void td_xfer_door_close(struct td_xfer *x) {
    while (x->callers > 0)
        (void)ucp_listener_reject(x->listener, x->caller[--x->callers]);
    if (x->listener) ucp_listener_destroy(x->listener);
    x->listener = NULL;
}

td_status td_xfer_door_call(struct td_xfer_peer *peer, const void *inner, size_t len,
                            ucp_ep_params_t *params, struct td_error *err) {
    struct td_xfer_door door;
    if (len != sizeof door)
        return td_fail(err, TD_PROTOCOL, "transfer address: expected %zu bytes inside, found %zu",
                       sizeof door, len);
    memcpy(&door, inner, sizeof door);
    peer->to = door.random;
    struct sockaddr_in sa = {
        .sin_family = AF_INET, .sin_port = door.port, .sin_addr.s_addr = door.ip};
    params->field_mask |= UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
    params->flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params->sockaddr = (ucs_sock_addr_t){(const struct sockaddr *)&sa, sizeof sa};
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_ep_create(peer->x->queue.worker, params, &peer->ep);
    if (s != UCS_OK)
        return td_fail(err, TD_UNREACHABLE, "no link to a peer: %s. %s", ucs_status_string(s),
                       td_xfer_ucx_said());
    return TD_OK;
}

unsigned td_xfer_door_answer(struct td_xfer *x) {
    unsigned n = x->callers;
    while (x->callers > 0) {
        ucp_conn_request_h request = x->caller[--x->callers];
        if (td_xfer_peer_called(x, request) != TD_OK) x->counts.stale_dropped++;
    }
    return n;
}
