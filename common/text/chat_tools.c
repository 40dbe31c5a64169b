/* Tools in a prompt: their declaration behind a system's or developer's message, and calls that
 * the assistant made, in the model's own markup (DSML). Values are raw: nothing is escaped, since
 * the mark in a closing tag is a token that client text cannot hold. */
#include <string.h>

#include "common/text/chat_parts.h"
#include "common/text/pyjson.h"

static const char tools_head[] =
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by "
    "writing a \"<｜DSML｜tool_calls>\" block like the following:\n\n"
    "<｜DSML｜tool_calls>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE"
    "</｜DSML｜parameter>\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"$TOOL_NAME2\">\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types "
    "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
    "`string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning "
    "inside <think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";

static const char tools_tail[] =
    "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n";

static const char format_head[] =
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

static td_status add_json(struct td_chat_build *b, const struct td_chat_text *json,
                          const char *what, size_t i) {
    struct td_error err;
    b->scratch.n = 0;
    td_status st = td_pyjson(json->p, json->n, &b->scratch, &err);
    if (st == TD_NO_MEMORY) return td_fail(b->err, st, "%s", err.text);
    if (st != TD_OK) return td_fail(b->err, TD_INVALID, "%s %zu: %s", what, i, err.text);
    return td_chat_add_copy(b, b->scratch.p, b->scratch.n);
}

td_status td_chat_add_blocks(struct td_chat_build *b, const struct td_chat_message *m) {
    if (m->n_tools) {
        TD_TRY(td_chat_add_text(b, "\n\n", 2));
        TD_TRY(td_chat_add_own(b, tools_head));
        for (size_t i = 0; i < m->n_tools; i++) {
            TD_TRY(add_json(b, &m->tools[i], "tool", i));
            TD_TRY(td_chat_add_text(b, "\n", 1));
        }
        TD_TRY(td_chat_add_own(b, tools_tail));
    }
    if (m->response_format.n) {
        TD_TRY(td_chat_add_own(b, format_head));
        TD_TRY(add_json(b, &m->response_format, "response format", 0));
    }
    return TD_OK;
}

/* ---- calls ---- */

static td_status add_parameter(struct td_chat_build *b, const char *key, size_t key_n,
                               bool is_string, const char *value, size_t value_n) {
    TD_TRY(td_chat_add_own(b, "<｜DSML｜parameter name=\""));
    TD_TRY(td_chat_add_copy(b, key, key_n));
    TD_TRY(td_chat_add_own(b, is_string ? "\" string=\"true\">" : "\" string=\"false\">"));
    TD_TRY(td_chat_add_copy(b, value, value_n));
    return td_chat_add_own(b, "</｜DSML｜parameter>\n");
}

/* Whether the whole text can be walked as an object: before the first parameter is written, for it
 * is one string otherwise. */
static td_status is_object(const struct td_chat_text *json, struct td_pyjson_member *m,
                           bool *ret_object, struct td_error *err) {
    struct td_error why;
    bool end = false;
    td_status st = TD_OK;
    for (m->at = 0; st == TD_OK && !end;) {
        st = td_pyjson_next(json->p, json->n, m, &end, &why);
    }
    *ret_object = st == TD_OK;
    return st == TD_NO_MEMORY ? td_fail(err, st, "%s", why.text) : TD_OK;
}

static td_status add_members(struct td_chat_build *b, const struct td_chat_text *json,
                             struct td_pyjson_member *m) {
    bool object, end = false;
    TD_TRY(is_object(json, m, &object, b->err));
    if (!object) return add_parameter(b, "arguments", 9, true, json->p, json->n);
    m->at = 0;
    TD_TRY(td_pyjson_next(json->p, json->n, m, &end, b->err));
    if (end) return td_chat_add_text(b, "\n", 1); /* no argument: an empty line */
    while (!end) {
        TD_TRY(add_parameter(b, m->key.p, m->key.n, m->is_string, m->value.p, m->value.n));
        TD_TRY(td_pyjson_next(json->p, json->n, m, &end, b->err));
    }
    return TD_OK;
}

static td_status add_call(struct td_chat_build *b, const struct td_chat_call *call) {
    TD_TRY(td_chat_add_own(b, "<｜DSML｜invoke name=\""));
    TD_TRY(td_chat_add_text(b, call->name.p, call->name.n));
    TD_TRY(td_chat_add_own(b, "\">\n"));
    struct td_pyjson_member m = {0};
    td_status st = add_members(b, &call->arguments, &m);
    td_pyjson_member_free(&m);
    TD_TRY(st);
    return td_chat_add_own(b, "</｜DSML｜invoke>\n");
}

td_status td_chat_add_calls(struct td_chat_build *b, const struct td_chat_message *m) {
    if (m->n_calls == 0) return TD_OK;
    TD_TRY(td_chat_add_own(b, "\n\n<｜DSML｜tool_calls>\n"));
    for (size_t i = 0; i < m->n_calls; i++) {
        TD_TRY(add_call(b, &m->calls[i]));
    }
    return td_chat_add_own(b, "</｜DSML｜tool_calls>");
}
