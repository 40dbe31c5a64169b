/* Server-sent events as the OpenAI API frames them: "data: JSON" and an empty line. JSON holds no
 * raw line ends, so one event is always one data line. */
#ifndef TD_ROUTER_SSE_H
#define TD_ROUTER_SSE_H

#include "router/http_server.h"
#include "router/json_write.h"

#define TD_SSE_CONTENT_TYPE "text/event-stream; charset=utf-8"

/* Starts an event in the (reset) buffer; JSON is written behind it. */
void td_sse_open(struct td_json_out *w);
/* Ends the event and sends it. TD_NO_MEMORY: nothing was sent. */
TD_MUST_USE td_status td_sse_send(struct td_http_conn *c, struct td_json_out *w);
/* A comment, which clients skip, so that idle proxies and clients see life. */
void td_sse_keep_alive(struct td_http_conn *c);
/* The event that says that the stream is whole. */
void td_sse_done(struct td_http_conn *c);

#endif
