/* Recall as a picture: prompt length across, depth down, one cell each. */
#ifndef TD_DEPLOY_TOOL_NEEDLE_SVG_H
#define TD_DEPLOY_TOOL_NEEDLE_SVG_H

#include <stdint.h>

#include "common/base/status.h"

struct td_needle_grid {
    const uint32_t *lengths, *depths;
    int n_lengths, n_depths;
    const uint32_t *found, *asked; /* [n_lengths][n_depths]; asked 0: not tried */
};

TD_MUST_USE td_status td_needle_svg(const struct td_needle_grid *g, const char *title,
                                    const char *path, struct td_error *err);

#endif
