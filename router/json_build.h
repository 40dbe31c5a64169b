/* Putting a client's JSON together anew: a request of another API becomes the chat request that
 * says the same. Whatever cannot be put there is 503 "out of memory", ready to be sent. */
#ifndef TD_ROUTER_JSON_BUILD_H
#define TD_ROUTER_JSON_BUILD_H

#include "router/json_request.h"

/* Take `v` over, also when they fail; NULL (nothing could be made) fails. */
TD_MUST_USE td_status td_build_put(json_t *object, const char *key, json_t *v,
                                   struct td_api_error *e);
TD_MUST_USE td_status td_build_append(json_t *array, json_t *v, struct td_api_error *e);
/* A copy of field `from`, as `to` of `out`; nothing when it is absent or null. */
TD_MUST_USE td_status td_build_copy(const struct td_fields *f, const char *from, json_t *out,
                                    const char *to);

/* The array `name`, if there is one, as `to` of `out`: `each` appends what element `i` becomes. */
TD_MUST_USE td_status td_build_list(const struct td_fields *f, const char *name, json_t *out,
                                    const char *to,
                                    td_status (*each)(const json_t *v, size_t i, json_t *list,
                                                      struct td_api_error *e));

#endif
