/* What the two generating endpoints have in common: sampling, limits, stops, stream. */
#ifndef TD_ROUTER_API_PARAMS_H
#define TD_ROUTER_API_PARAMS_H

#include "common/base/sampling.h"
#include "common/text/chat.h"
#include "common/text/stops.h"
#include "router/json_request.h"

/* MESSAGES is Anthropic's, RESPONSES OpenAI's newer one; their requests are read as the CHAT they
 * mean (api_anthropic.h, api_responses.h). */
enum td_api_kind { TD_API_CHAT, TD_API_COMPLETIONS, TD_API_MESSAGES, TD_API_RESPONSES };

/* What the content must be: see api_grammar.h. */
enum td_api_form {
    TD_FORM_FREE,
    TD_FORM_OBJECT, /* a JSON object */
    TD_FORM_SCHEMA,
    TD_FORM_REGEX,
    TD_FORM_CHOICE, /* one of several strings */
};
enum td_api_force { TD_CALLS_AUTO, TD_CALLS_REQUIRED, TD_CALLS_NAMED };

/* Of the server; read-only while it runs, so that jobs in other threads may look. */
struct td_api_defaults {
    const char *model;                 /* the one name clients use */
    bool thinking;                     /* mode of a chat that names none */
    enum td_chat_effort_table efforts; /* of the checkpoint's revision */
    uint32_t max_new;
    /* the checkpoint's generation_config.json */
    float temperature, top_p;
    uint32_t top_k;
};

struct td_api_params {
    enum td_api_kind kind;
    bool stream, include_usage;
    bool thinking;
    enum td_chat_effort effort;
    enum td_chat_effort_table efforts;
    bool calls;    /* tools are declared and may be called */
    bool one_call; /* but no more than one */
    enum td_api_force force;
    bool strict; /* a tool's arguments must be what its schema says */
    enum td_api_form form;
    bool enforced; /* some of it by a grammar */
    bool echo;     /* completions: the prompt's text comes first */
    bool timings;  /* usage tells where the time went */
    struct td_sampling sampling;
    uint32_t n; /* choices */
    uint32_t priority; /* 0 goes first */
    uint32_t max_new;
    uint32_t min_new;   /* tokens before which neither end-of-text nor a stop string ends it */
    bool max_new_given; /* by the client: not shortened to what fits, but refused */
    bool seed_given;
    struct td_stop stops[TD_STOP_MAX]; /* text borrowed from the JSON */
    size_t n_stops;
};

/* Fills `p` with the defaults and reads the common fields. Everything wrong is refused with 400
 * (404 for an unknown model). The seed of a request without one is drawn by the caller. */
TD_MUST_USE td_status td_api_params_read(const json_t *root, enum td_api_kind kind,
                                         const struct td_api_defaults *d, struct td_api_params *p,
                                         struct td_api_error *e);

/* A field with stop strings, one or an array: 400 by its name when there are too many, or one is
 * empty, too long or no string. */
TD_MUST_USE td_status td_api_stops_check(const struct td_fields *f, const char *name);

/* Temperature and the like of `dir`/generation_config.json into `d`; a missing file leaves the
 * defaults 1, 1, 0. TD_FORMAT: present and not what it should be. */
TD_MUST_USE td_status td_api_defaults_load(struct td_api_defaults *d, const char *dir,
                                           struct td_error *err);

#endif
