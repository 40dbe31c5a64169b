/* See json_build.h. */
#include "router/json_build.h"

td_status td_build_put(json_t *object, const char *key, json_t *v, struct td_api_error *e) {
    return json_object_set_new(object, key, v) == 0 ? TD_OK : td_api_no_memory(e);
}

td_status td_build_append(json_t *array, json_t *v, struct td_api_error *e) {
    return json_array_append_new(array, v) == 0 ? TD_OK : td_api_no_memory(e);
}

td_status td_build_copy(const struct td_fields *f, const char *from, json_t *out, const char *to) {
    const json_t *v = td_field(f, from);
    return v ? td_build_put(out, to, json_deep_copy(v), f->e) : TD_OK;
}

td_status td_build_list(const struct td_fields *f, const char *name, json_t *out, const char *to,
                        td_status (*each)(const json_t *v, size_t i, json_t *list,
                                          struct td_api_error *e)) {
    const json_t *from = NULL;
    TD_TRY(td_field_array(f, name, &from));
    if (!from) return TD_OK;
    json_t *list = json_array();
    TD_TRY(td_build_put(out, to, list, f->e));
    for (size_t i = 0; i < json_array_size(from); i++)
        TD_TRY(each(json_array_get(from, i), i, list, f->e));
    return TD_OK;
}
