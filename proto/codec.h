/* Plain message structs to protobuf bytes and back. Unknown fields are skipped, missing ones take
 * their zero: frames of older and newer versions stay readable. Every length and enum is checked
 * here, so machines see only well-formed messages. */
#ifndef TD_PROTO_CODEC_H
#define TD_PROTO_CODEC_H

#include "proto/msg.h"

/* Upper bound of the encoded size of `m`, or its exact size. */
size_t td_msg_encoded_size(const struct td_msg *m);
/* Encodes into `buf` of `cap` bytes; TD_TOO_LONG when it does not fit. */
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
