/* The 32 rotary frequencies of a layer, by the exact fp32 steps of the model (s.3). */
#ifndef TD_KERNELS_ROPE_TABLE_H
#define TD_KERNELS_ROPE_TABLE_H

#include "kernels/model/config.h"

/* SWA layers: theta alone. Compressing layers: their theta and YaRN. */
void td_rope_table(const struct td_model_config *c, bool compressing, float ret[TD_ROPE_DIM / 2]);

#endif
