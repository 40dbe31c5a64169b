/* What form an answer must have, from a request's JSON to a compiled grammar
 * (common/text/grammar.h): response_format, the fields that vLLM and SGLang have for the same
 * (guided_json, guided_regex, guided_choice, regex, structured_outputs), tool_choice, strict tools.
 *
 *   calls forced (required, a named tool)   the answer is calls and nothing else
 *   a form, and tools that may be called    content of that form, or calls
 *   strict tools                            any content, then calls
 * In calls the arguments of a strict tool are enforced by its schema; those of another one too when
 * calls are forced and its schema can be, else they are any JSON object. */
#ifndef TD_ROUTER_API_GRAMMAR_H
#define TD_ROUTER_API_GRAMMAR_H

#include "common/text/bytes.h"
#include "common/text/chat.h"
#include "router/api_params.h"

/* Reads the fields of the form into p->form; 400 for what is malformed, contradicts, or is not
 * served. Tools are read before. */
TD_MUST_USE td_status td_api_form_check(const struct td_fields *f, struct td_api_params *p);

/* Appends the grammar to `out`; nothing, where nothing is enforced. `reasoning`: the answer begins
 * in it. What cannot be enforced is 400 with the keyword. Takes up to some tenths of a second: for
 * the thread pool. */
TD_MUST_USE td_status td_api_grammar_make(const json_t *root, const struct td_api_params *p,
                                          const struct td_chat *chat, bool reasoning,
                                          struct td_bytes *out, struct td_api_error *e);

#endif
