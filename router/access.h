/* Who may ask: by a key, from this host, from which pages of browsers. */
#ifndef TD_ROUTER_ACCESS_H
#define TD_ROUTER_ACCESS_H

#include "router/api_error.h"
#include "router/api_keys.h"

struct td_access {
    struct td_api_keys *keys; /* NULL: everybody may ask */
    const char *origins;      /* router.cors_origins */
};

enum td_access_kind {
    TD_ACCESS_KEY,   /* with a key, where there are keys */
    TD_ACCESS_WATCH, /* the same, and directly from this host without one */
    TD_ACCESS_OPEN,  /* everybody: what load balancers and generators of clients read */
};

/* NULL when the request comes from a process of this host itself; else why not: "" for another
 * address, or the name of the header that a browser or a proxy added. */
const char *td_access_indirect(const struct td_http_conn *c);

/* INVALID with a 401 in *e: no key, or none of ours. *ret_key: whose request it is, NULL where no
 * key was needed. */
TD_MUST_USE td_status td_access_check(const struct td_access *a, const struct td_http_conn *c,
                                      enum td_access_kind kind, struct td_api_key **ret_key,
                                      struct td_api_error *e);

/* "*", or origins as browsers write them, separated by commas. CONFIG with a sentence. */
TD_MUST_USE td_status td_access_origins_check(const char *origins, struct td_error *err);
/* Adds to the answer what lets pages of these origins read it. Before it begins. */
void td_access_share(const struct td_access *a, struct td_http_conn *c);
/* A browser asks, before its page may, for an endpoint that takes `methods`: true if this was such
 * a question and is answered. */
bool td_access_preflight(const struct td_access *a, struct td_http_conn *c, const char *methods);

#endif
