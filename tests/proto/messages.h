/* Random but repeatable messages of every type, and their comparison field by field: from one table
 * of all fields, so that a field the codec forgets is found. */
#ifndef TD_TESTS_PROTO_MESSAGES_H
#define TD_TESTS_PROTO_MESSAGES_H

#include "proto/msg.h"

enum {
    TEST_IDS_MAX = 5000,
    TEST_TYPES = 22,
    TEST_LAYERS_MAX = 3,
    TEST_ENTRIES_MAX = 20,
    TEST_GUIDE_MAX = 100
};

extern const enum td_msg_type test_types[TEST_TYPES];
const char *test_type_name(enum td_msg_type t);

/* What a message's pointers point to. */
struct test_room {
    int32_t ids[TEST_IDS_MAX];
    struct td_token tokens[TD_TOKENS_PER_MSG_MAX];
    struct td_selection selections[TD_TOKENS_PER_MSG_MAX];
    uint32_t layer[TD_TOKENS_PER_MSG_MAX][TEST_LAYERS_MAX];
    uint32_t count[TD_TOKENS_PER_MSG_MAX][TEST_LAYERS_MAX];
    uint32_t entry[TD_TOKENS_PER_MSG_MAX][TEST_LAYERS_MAX * TEST_ENTRIES_MAX];
    struct td_guide guide;
    int32_t guide_id[3][TEST_GUIDE_MAX]; /* bias, prompt, said */
    float bias[TEST_GUIDE_MAX];
    uint8_t grammar[TEST_GUIDE_MAX];
    uint8_t blob[TD_MSG_ADDRESS_MAX];
    char settings[1000];
};

/* Each field's value depends on `seed`, type and field name alone. */
void test_message_fill(struct td_msg *m, enum td_msg_type type, uint64_t seed,
                       struct test_room *room);
/* NULL, or the name of the first field that differs. `recorded_only`: only fields that recorded
 * frames of the first version have. */
const char *test_message_differs(const struct td_msg *a, const struct td_msg *b,
                                 bool recorded_only);

uint64_t test_random(uint64_t *state);

#endif
