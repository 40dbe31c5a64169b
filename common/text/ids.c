/* Growable id list: doubles, so that appending one id at a time stays linear. */
#include "common/text/ids.h"

#include <stdlib.h>
#include <string.h>

td_status td_ids_reserve(struct td_ids *l, size_t more) {
    if (more <= l->cap - l->n) return TD_OK;
    if (more > SIZE_MAX / sizeof *l->ids / 2 - l->n) return TD_NO_MEMORY;
    size_t cap = l->cap < 64 ? 64 : l->cap;
    while (cap - l->n < more) {
        cap *= 2;
    }
    int32_t *ids = realloc(l->ids, cap * sizeof *ids);
    if (!ids) return TD_NO_MEMORY;
    l->ids = ids;
    l->cap = cap;
    return TD_OK;
}

td_status td_ids_append(struct td_ids *l, const int32_t *ids, size_t n) {
    if (n == 0) return TD_OK;
    TD_TRY(td_ids_reserve(l, n));
    memcpy(l->ids + l->n, ids, n * sizeof *ids);
    l->n += n;
    return TD_OK;
}

td_status td_ids_push(struct td_ids *l, int32_t id) {
    return td_ids_append(l, &id, 1);
}

void td_ids_free(struct td_ids *l) {
    free(l->ids);
    *l = (struct td_ids){0};
}
