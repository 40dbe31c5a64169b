/* What UCX there is: its version and the transports that its libraries bring, whatever a process
 * chooses of them. For people who look for a fault. */
#include <stdio.h>
#include <string.h>

#include <ucp/api/ucp.h>
#include <uct/api/uct.h>

#include "common/xfer/xfer.h"

const char *td_xfer_ucx_version(void) {
    return ucp_get_version_string();
}

td_status td_xfer_ucx_components(char *buf, size_t cap, struct td_error *err) {
    uct_component_h *list;
    unsigned n;
    size_t used = 0;
    buf[0] = 0;
    ucs_status_t s = uct_query_components(&list, &n);
    if (s != UCS_OK) return td_fail(err, TD_IO, "UCX: its components: %s", ucs_status_string(s));
    for (unsigned i = 0; i < n; i++) {
        uct_component_attr_t a = {.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME |
                                                UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT};
        if (uct_component_query(list[i], &a) != UCS_OK || a.md_resource_count == 0) continue;
        int w = snprintf(buf + used, cap - used, "%s%s", used ? " " : "", a.name);
        if (w < 0 || (size_t)w >= cap - used) break;
        used += (size_t)w;
    }
    uct_release_component_list(list);
    return TD_OK;
}
