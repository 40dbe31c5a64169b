/* What the stream's files share: parsed addresses and the making of a stream around a libuv
 * handle. Private to common/io. */
#ifndef TD_COMMON_IO_STREAM_INTERNAL_H
#define TD_COMMON_IO_STREAM_INTERNAL_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "common/io/stream.h"

struct td_address {
    bool is_unix;
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
    struct sockaddr_storage tcp;
};

TD_MUST_USE td_status td_address_parse(const char *text, struct td_address *ret,
                                       struct td_error *err);

union td_stream_handle {
    uv_handle_t any;
    uv_stream_t stream;
    uv_pipe_t pipe;
    uv_tcp_t tcp;
};

/* Tells the maker once that the stream's memory is about to be freed. */
typedef void td_stream_gone_fn(void *user);

/* A stream with an initialised, not yet connected handle. */
TD_MUST_USE td_status td_stream_create(uv_loop_t *loop, bool is_unix,
                                       const struct td_stream_limits *limits,
                                       struct td_stream **ret);
union td_stream_handle *td_stream_handle(struct td_stream *s);
void td_stream_set_gone(struct td_stream *s, td_stream_gone_fn *fn, void *user);
/* Unix: true when the other end runs as our user or root. TCP: true. */
bool td_stream_peer_allowed(struct td_stream *s);

#endif
