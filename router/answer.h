/* The text side of one answer: tokens in, JSON out, as a stream of chunks or as one document, for
 * all generating endpoints: OpenAI's (answer_json.c and, for the Responses API, answer_responses.c)
 * and Anthropic's (answer_messages.c). Knows no worker and no clock. An answer has n choices; their
 * chunks come as their tokens do, and the document or the stream ends with the last of them.
 *
 * completion_tokens in the usage counts what was sampled: end of text counts, and so do the tokens
 * of a stop string that the client does not see. logprobs leave end of text out.
 *
 * Chunks are written into the server's one scratch buffer. What an answer keeps itself is bounded
 * by its own text: the whole text when it is not streamed, or is the Responses API's, whose streams
 * end with the whole; logprobs of the tokens whose text is
 * still held back (as part of a stop string or of a code point) when it is. */
#ifndef TD_ROUTER_ANSWER_H
#define TD_ROUTER_ANSWER_H

#include "common/text/reply.h"
#include "proto/msg.h"
#include "router/api_params.h"
#include "router/api_prompt.h"
#include "router/api_responses.h"
#include "router/ledger.h"
#include "router/sse.h"
#include "router/topk_json.h"

/* A tool call of an answer that is not streamed. */
struct td_answer_call {
    struct td_json_out name, arguments; /* plain text */
};

/* The text of one choice: from its tokens to what its client was told or will be. */
struct td_answer_text {
    struct td_reply reply;
    bool reply_ready;
    bool stopped; /* a stop string is complete, or the calls are */
    /* plain text, of an answer that is not streamed; the prompt's first, if it shall be echoed */
    struct td_json_out content, reasoning;
    struct td_answer_call *calls; /* [n_calls] */
    uint32_t n_calls;
    struct td_token *tokens; /* [cap_tokens]: logprobs not yet written */
    uint32_t n_tokens, cap_tokens;
    struct td_topk_json topk; /* with params.sampling.selections */
    uint64_t text_offset;     /* code points before tokens[0] */
    uint32_t n_reasoning;     /* tokens inside the reasoning, the mark that ends it included */
    uint32_t n_sampled;       /* of the whole choice */
    const char *finish;       /* its finish_reason; NULL: not ended */
};

struct td_answer;

/* How an API of named events writes, one choice; each fills `w` with whole events, or with the
 * document. */
struct td_answer_form {
    bool keeps; /* the text of a stream too */
    void (*begin)(struct td_answer *a, struct td_json_out *w);
    void (*event)(struct td_answer *a, struct td_json_out *w, const struct td_reply_event *ev);
    void (*last)(struct td_answer *a, struct td_json_out *w, const struct td_answer_text *t);
    void (*document)(struct td_answer *a, struct td_json_out *w, const struct td_answer_text *t);
    /* In a stream; true: it says by itself that the stream ends, so the end may be clean. */
    bool (*error)(struct td_answer *a, struct td_json_out *w, const struct td_api_error *e);
};

extern const struct td_answer_form td_answer_messages, td_answer_responses;

struct td_answer {
    const struct td_answer_form *form; /* NULL: OpenAI's chat and completions */
    struct td_responses *responses;    /* owned; of the Responses API */
    struct td_api_params params;       /* its stops are not valid any more */
    const struct td_chat *chat;        /* borrowed */
    const char *model;                 /* borrowed */
    char id[40];                       /* "chatcmpl-...", "cmpl-...", "msg_..." or "resp_..." */
    int64_t created;
    bool broken;                 /* no memory: the stream was cut, the connection let go */
    uint64_t n_sent;             /* chunks */
    struct td_answer_text *text; /* [n]: params.n for each prompt, prompt after prompt */
    uint32_t n, n_ended;
    uint32_t n_prompt;       /* tokens of all prompts */
    struct td_ledger ledger; /* filled in before the last td_answer_end */
    char fingerprint[24];    /* of the workers, before td_answer_begin; "": not known */
    struct td_json_out head; /* what every chunk of OpenAI's begins with; of a stream */
    uint32_t n_blocks;       /* of a form: opened, and what the last one is */
    uint8_t block;
};

/* Takes the parameters and the memory of the output machines. The prompt tells whether the answer
 * starts inside the reasoning; only completions have several. td_answer_finish is allowed whatever
 * happened. */
TD_MUST_USE td_status td_answer_init(struct td_answer *a, const struct td_api_params *p,
                                     const struct td_chat *chat, const struct td_prompts *prompts,
                                     const char *model, struct td_error *err);
void td_answer_finish(struct td_answer *a);

/* Streamed answers: head and first chunk of each choice. Others: nothing yet. */
void td_answer_begin(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch);
/* Tokens of a choice in order. When its text is complete, text[choice].stopped is set; later tokens
 * are dropped. `selections` [n] or NULL. Afterwards a->broken says whether `c` is gone. */
void td_answer_tokens(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                      uint32_t choice, const struct td_token *tokens,
                      const struct td_selection *selections, uint32_t n);
/* A choice is complete after n_tokens: its last chunk. The last choice to end brings the whole
 * document, or the end of the stream, and ends the exchange. */
void td_answer_end(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                   uint32_t choice, enum td_finish reason, uint32_t n_tokens);
/* It will not be completed: an error frame and an unclean end when streaming has begun, else an
 * error answer. Ends the exchange. */
void td_answer_fail(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                    bool begun, const struct td_api_error *e);

/* ---- answer_json.c, for answer.c ---- */

enum td_chunk {
    TD_CHUNK_ROLE,
    TD_CHUNK_REASONING,
    TD_CHUNK_CONTENT,
    TD_CHUNK_CALL,      /* a call begins: text is its name */
    TD_CHUNK_ARGUMENTS, /* more of its arguments */
    TD_CHUNK_LAST,
};

/* Writes a->head. */
void td_answer_head(struct td_answer *a);
/* One chunk of a choice with its text and the logprobs that wait (and then wait no more). `call`:
 * number of the call it is about. `finish` NULL: none. */
void td_answer_chunk(struct td_answer *a, uint32_t choice, struct td_json_out *w,
                     enum td_chunk kind, uint32_t call, const char *text, size_t n,
                     const char *finish);
void td_answer_usage_chunk(const struct td_answer *a, struct td_json_out *w);
void td_answer_document(struct td_answer *a, struct td_json_out *w);

/* The array of logprobs of tokens `from`.. of a choice, as the chat API writes it. */
void td_answer_logprobs(struct td_json_out *w, const struct td_answer *a,
                        const struct td_answer_text *t, uint32_t from);

#endif
