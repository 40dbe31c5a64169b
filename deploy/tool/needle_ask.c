/* Building, sending and judging one needle prompt. */
#include "deploy/tool/needle_ask.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ANSWER_TOKENS = 32 }; /* the longest fact has about 20 */

static uint32_t count_tokens(void *user, const char *text, size_t len) {
    struct td_ids ids = {0};
    td_status st = td_tokenizer_encode(user, text, len, &ids, NULL);
    uint32_t n = st == TD_OK ? (uint32_t)ids.n : 0;
    td_ids_free(&ids);
    return n;
}

static td_status open_served(const char *url, struct td_tokenizer **ret, struct td_error *err) {
    json_t *j = NULL;
    long http = 0;
    TD_TRY(td_client_get(url, "/v1/cluster", 5000, &j, &http, err));
    const json_t *settings = json_object_get(json_object_get(j, "router"), "settings");
    const char *dir = json_string_value(json_object_get(settings, "model.dir"));
    td_status st = dir ? td_tokenizer_load(dir, ret, err)
                       : td_fail(err, TD_NOT_FOUND,
                                 "%s/v1/cluster names no model.dir; give --tokenizer DIR", url);
    json_decref(j);
    return st;
}

td_status td_needle_target_init(struct td_needle_target *t, const char *url,
                                const char *tokenizer_dir, struct td_error *err) {
    t->url = url;
    t->tokenizer = NULL;
    TD_TRY(td_client_model(url, t->model, err));
    if (tokenizer_dir) return td_tokenizer_load(tokenizer_dir, &t->tokenizer, err);
    return open_served(url, &t->tokenizer, err);
}

void td_needle_target_finish(struct td_needle_target *t) {
    td_tokenizer_destroy(t->tokenizer);
    t->tokenizer = NULL;
}

td_status td_needle_ask(const struct td_needle_target *t, const struct td_needle_spec *spec,
                        struct td_needle_result *ret, struct td_error *err) {
    struct td_needle_prompt p;
    TD_TRY(td_needle_build(spec, count_tokens, t->tokenizer, &p, err));
    td_status st = td_client_chat(t->url, t->model, p.text, ANSWER_TOKENS, &ret->answer, err);
    free(p.text);
    if (st != TD_OK) return st;
    snprintf(ret->question, sizeof ret->question, "%s", p.question);
    snprintf(ret->expected, sizeof ret->expected, "%s", p.answer);
    ret->found = strcmp(ret->answer.text, p.answer) == 0 && strcmp(ret->answer.finish, "stop") == 0;
    return TD_OK;
}
