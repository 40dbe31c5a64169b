/* The body of a request for tokens, all the way to the prompt: it is taken, or refused as the
 * client's mistake with a sentence; nothing in it is the server's fault.
 *
 * Its answer's form, where it names one, becomes a grammar.
 *
 * Input: a byte (modulo 4: chat, completions, Anthropic's messages, OpenAI's responses), then the
 * body. Accepted: the prompts were made. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar.h"
#include "router/api_anthropic.h"
#include "router/api_grammar.h"
#include "router/api_prompt.h"
#include "router/api_responses.h"
#include "router/http_server.h"
#include "tests/common/text/tiny.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

static struct td_chat chat;

/* No answer is sent here, so the HTTP server stays out of the program. */
void td_http_reply(struct td_http_conn *c, int status, const char *type, const char *body,
                   size_t n) {
    (void)c, (void)status, (void)type, (void)body, (void)n;
    PROMISE(0);
}

void td_http_add_header(struct td_http_conn *c, const char *name, const char *value) {
    (void)c, (void)name, (void)value;
    PROMISE(0);
}

static void load(void) {
    struct td_error err;
    struct td_tokenizer *t;
    json_t *root = tiny_json();
    tiny_add(root, TINY_SIZE, "｜DSML｜", true);
    PROMISE(tiny_load(root, &t, &err) == TD_OK);
    td_chat_init(&chat, t);
}

enum { CHAT, COMPLETIONS, MESSAGES, RESPONSES };

/* The chat request that `root` means, which it takes over. */
static td_status as_chat(int api, json_t **root, struct td_responses **responses,
                         struct td_api_error *e) {
    static struct td_response_store *store;
    struct td_error err;
    if (!store) PROMISE(td_response_store_create(1 << 20, 4, &store, &err) == TD_OK);
    json_t *same = NULL;
    td_status st = TD_OK;
    if (api == MESSAGES)
        st = td_api_anthropic_read(*root, false, &same, e);
    else
        st = td_api_responses_read(*root, &(struct td_kept){store, "", 1 << 20}, "resp_1", &same, responses, e);
    PROMISE(st != TD_OK || same);
    json_decref(*root);
    *root = same;
    return st;
}

/* What shapes the answer's tokens: a grammar that was made is one that workers take. */
static td_status form(const json_t *root, struct td_api_params *p, struct td_prompts *prompts,
                      struct td_api_error *e) {
    struct td_bytes *bytes = &prompts->grammar;
    struct td_grammar g;
    struct td_error err;
    TD_TRY(td_api_grammar_make(root, p, &chat, p->thinking, bytes, e));
    PROMISE((bytes->n > 0) == p->enforced);
    if (bytes->n) PROMISE(td_grammar_open(bytes->p, bytes->n, &g, &err) == TD_OK);
    TD_TRY(td_api_guide_make(root, p, &prompts->p[0].ids, td_tokenizer_size(chat.t), bytes,
                             &prompts->p[0].guide, e));
    const struct td_guide *guide = p->sampling.guide;
    PROMISE(!guide || guide->n_bias + guide->n_prompt_ids + guide->grammar_n > 0);
    return TD_OK;
}

static td_status prepare(int api, const char *body, size_t n, struct td_prompts *prompts,
                         struct td_api_error *e) {
    enum td_api_kind kind = api == COMPLETIONS ? TD_API_COMPLETIONS : TD_API_CHAT;
    static const struct td_api_defaults defaults = {
        .model = "m", .thinking = true, .max_new = 64, .temperature = 1, .top_p = 1};
    struct td_api_params p;
    json_t *root = NULL, *whole;
    struct td_responses *responses = NULL;
    TD_TRY(td_request_parse(body, n, &root, e));
    td_status st = TD_OK;
    whole = json_incref(root);
    if (api == MESSAGES || api == RESPONSES) st = as_chat(api, &root, &responses, e);
    if (st == TD_OK) st = td_api_params_read(root, kind, &defaults, &p, e);
    if (st == TD_OK) {
        PROMISE(p.max_new >= 1 && p.n_stops <= TD_STOP_MAX);
        struct td_ids *ids = kind == TD_API_CHAT ? td_prompts_add(prompts, e) : NULL;
        st = ids ? td_api_chat_prompt(root, &p, &chat, ids, e)
                 : td_api_completions_prompts(root, &chat, prompts, e);
    }
    if (st == TD_OK) st = form(root, &p, prompts, e);
    if (st == TD_OK && responses) {
        st = td_api_responses_echo(responses, whole, &p, e);
        PROMISE(st == TD_OK && responses->echo.n > 0);
        PROMISE((responses->input != NULL) == (responses->store != NULL));
    }
    if (st != TD_OK && responses) td_api_responses_rename(e);
    td_responses_free(responses);
    json_decref(whole);
    json_decref(root);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!chat.t) load();
    int api = size ? data[0] % 4 : CHAT;
    struct td_prompts prompts = {0};
    struct td_api_error e = {0};
    td_status st = prepare(api, (const char *)data + (size > 0), size - (size > 0), &prompts, &e);
    td_fuzz_accepted = st == TD_OK;
    if (st == TD_OK) {
        PROMISE(prompts.n > 0 && e.status == 0);
        for (uint32_t i = 0; i < prompts.n; i++) {
            PROMISE(prompts.p[i].ids.n > 0);
            PROMISE(api == COMPLETIONS || prompts.p[i].ids.ids[0] == chat.bos);
        }
    } else {
        PROMISE(e.status == 400 || e.status == 404);
        (void)td_fail(&td_fuzz_error, st, "%s", e.message);
        PROMISE(td_fuzz_error.text[0]);
    }
    td_prompts_free(&prompts);
    return 0;
}
