/* Any conversation to a prompt: it is made or refused with a sentence, its marks are those that the
 * server writes, and no byte of what a client wrote becomes one. JSON on the way: what is taken
 * once is taken again, unchanged.
 *
 * Input: a byte of options; then messages, each a byte of role and fields that end with FE, ended
 * by FF: content, reasoning, tool-call id, tools' JSON, response format, and per call its id, name
 * and arguments. Accepted: the prompt was made. */
#include <stdlib.h>
#include <string.h>

#include "common/text/chat.h"
#include "common/text/pyjson.h"
#include "tests/common/text/tiny.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

enum { SPELLED = 1, THINKING = 2, KEEP = 4, REFRESHED = 8, EFFORT_SHIFT = 4 };
enum { MESSAGES_MAX = 64, CALLS_MAX = 8, END_FIELD = 0xFE, END_MESSAGE = 0xFF };
enum { REMINDER = TINY_SIZE, DSML };

static struct td_tokenizer *tok[2]; /* with all marks, without DSML and reminder */
static struct td_chat chat[2];
static struct td_chat_message messages[MESSAGES_MAX];
static struct td_chat_call calls[MESSAGES_MAX][CALLS_MAX];
static struct td_chat_text tools[MESSAGES_MAX];

static void load(void) {
    struct td_error err;
    json_t *root = tiny_json();
    tiny_add(root, REMINDER, "<｜latest_reminder｜>", true);
    tiny_add(root, DSML, "｜DSML｜", true);
    PROMISE(tiny_load(root, &tok[0], &err) == TD_OK);
    tok[1] = tiny_tokenizer();
    for (int i = 0; i < 2; i++)
        td_chat_init(&chat[i], tok[i]);
}

static struct td_chat_text field(const uint8_t **p, const uint8_t *end) {
    const uint8_t *from = *p;
    while (*p < end && **p < END_FIELD)
        (*p)++;
    struct td_chat_text t = {(const char *)from, (size_t)(*p - from)};
    if (*p < end && **p == END_FIELD) (*p)++;
    return t;
}

static void read_message(const uint8_t **p, const uint8_t *end, size_t i) {
    struct td_chat_message *m = &messages[i];
    *m = (struct td_chat_message){.role = (enum td_chat_role)(*(*p)++ % 8)};
    struct td_chat_text content = field(p, end), reasoning = field(p, end);
    m->content = content.p;
    m->content_n = content.n;
    m->reasoning = reasoning.p;
    m->reasoning_n = reasoning.n;
    m->call_id = field(p, end);
    tools[i] = field(p, end);
    m->tools = &tools[i];
    m->n_tools = tools[i].n > 0;
    m->response_format = field(p, end);
    m->calls = calls[i];
    while (m->n_calls < CALLS_MAX && *p < end && **p != END_MESSAGE) {
        struct td_chat_call *c = &calls[i][m->n_calls++];
        c->id = field(p, end);
        c->name = field(p, end);
        c->arguments = field(p, end);
    }
    while (*p < end && *(*p)++ != END_MESSAGE)
        continue;
}

/* Two times the same form. */
static void check_json(const struct td_chat_text *json) {
    struct td_bytes once = {0}, twice = {0};
    if (td_pyjson(json->p, json->n, &once, NULL) == TD_OK) {
        PROMISE(td_pyjson(once.p, once.n, &twice, NULL) == TD_OK);
        PROMISE(once.n == twice.n && memcmp(once.p, twice.p, once.n) == 0);
    } else {
        PROMISE(once.n == 0);
    }
    td_bytes_free(&once);
    td_bytes_free(&twice);
}

static size_t count(const struct td_ids *ids, int32_t id) {
    size_t n = 0;
    for (size_t i = 0; i < ids->n; i++)
        n += ids->ids[i] == id;
    return n;
}

static void check_marks(const struct td_ids *ids, size_t n, const struct td_chat *c) {
    size_t answers = 0, users = 0, reminders = 0, dsml = 0;
    for (size_t i = 0; i < n; i++) {
        const struct td_chat_message *m = &messages[i];
        answers += m->role == TD_CHAT_ASSISTANT;
        users += m->role == TD_CHAT_USER || m->role == TD_CHAT_TOOL || m->role == TD_CHAT_DEVELOPER;
        reminders += m->role == TD_CHAT_REMINDER;
        bool may = m->role == TD_CHAT_SYSTEM || m->role == TD_CHAT_DEVELOPER;
        if (may && m->n_tools) dsml += 10;
        if (m->role == TD_CHAT_ASSISTANT && m->n_calls) dsml += 1;
    }
    PROMISE(ids->n > 0 && ids->ids[0] == c->bos && count(ids, c->bos) == 1);
    PROMISE(count(ids, c->eos) == answers);
    PROMISE(count(ids, c->user) <= users && count(ids, c->assistant) <= users);
    PROMISE(c->reminder < 0 || count(ids, c->reminder) == reminders);
    PROMISE(c->dsml < 0 || dsml > 0 || count(ids, c->dsml) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!tok[0]) load();
    const uint8_t *p = data, *end = data + size;
    uint8_t options = size ? *p++ : 0;
    size_t n = 0;
    while (p < end && n < MESSAGES_MAX) {
        read_message(&p, end, n);
        check_json(&tools[n]);
        for (size_t k = 0; k < messages[n].n_calls; k++)
            check_json(&calls[n][k].arguments);
        n++;
    }
    struct td_chat_params params = {
        .thinking = options & THINKING,
        .keep_reasoning = options & KEEP,
        .efforts = options & REFRESHED ? TD_EFFORTS_0731 : TD_EFFORTS_APRIL,
        .effort = (enum td_chat_effort)(options >> EFFORT_SHIFT & 3),
    };
    struct td_ids ids = {0};
    const struct td_chat *c = &chat[options & SPELLED];
    td_status st = td_chat_encode(c, &params, messages, n, &ids, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st == TD_OK) {
        check_marks(&ids, n, c);
    } else {
        PROMISE(ids.n == 0 && td_fuzz_error.text[0]);
        PROMISE(st == TD_INVALID);
    }
    td_ids_free(&ids);
    return 0;
}
