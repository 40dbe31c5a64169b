/* A growable list of token ids, owned by the caller, so that encoders append to one buffer
 * wherever the prompt is being put together. Zero-initialised is empty and valid. */
#ifndef TD_COMMON_TEXT_IDS_H
#define TD_COMMON_TEXT_IDS_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_ids {
    int32_t *ids; /* [cap], the first n in use */
    size_t n, cap;
};

/* Room for `more` ids behind the n present. TD_NO_MEMORY leaves the list as it was. */
TD_MUST_USE td_status td_ids_reserve(struct td_ids *l, size_t more);

/* Appends; on failure nothing is appended. */
TD_MUST_USE td_status td_ids_append(struct td_ids *l, const int32_t *ids, size_t n);
TD_MUST_USE td_status td_ids_push(struct td_ids *l, int32_t id);

/* Releases the memory; the list is empty and usable afterwards. */
void td_ids_free(struct td_ids *l);

#endif
