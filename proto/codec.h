/* Plain message structs to protobuf bytes and back. Unknown fields are skipped, missing ones take
 * their zero: frames of older and newer versions stay readable. Every length and enum is checked
 * here, so machines see only well-formed messages. */
#ifndef TD_PROTO_CODEC_H
#define TD_PROTO_CODEC_H

#include "proto/msg.h"

/* The limits of every field that has one; the same facts for what is sent and what arrived. */
TD_MUST_USE td_status td_msg_check(const struct td_msg *m, struct td_error *err);

/* Of a message that td_msg_check accepted: no less than its size as a frame, and its encoding into
 * `buf` of `cap` bytes; TD_TOO_LONG when it does not fit. */
size_t td_msg_size_bound(const struct td_msg *m);
TD_MUST_USE td_status td_msg_pack(const struct td_msg *m, uint8_t *buf, size_t cap, size_t *ret_len,
                                  struct td_error *err);
/* Checks and encodes into `buf` of `cap` bytes; TD_TOO_LONG when it does not fit. */
TD_MUST_USE td_status td_msg_encode(const struct td_msg *m, uint8_t *buf, size_t cap,
                                    size_t *ret_len, struct td_error *err);

/* Memory for one decoded message at a time, reused: grows to the largest message seen, bounded by
 * TD_FRAME_BYTES_MAX. Pointers in the message live until the next decode with the same arena. */
struct td_msg_arena;
TD_MUST_USE td_status td_msg_arena_create(struct td_msg_arena **ret);
void td_msg_arena_destroy(struct td_msg_arena *a);

/* On an error *ret holds nothing of use. */
TD_MUST_USE td_status td_msg_decode(const uint8_t *bytes, size_t len, struct td_msg_arena *a,
                                    struct td_msg *ret, struct td_error *err);

#endif
