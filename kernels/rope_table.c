/* Base frequency, YaRN mix and nothing else: cos and sin are taken per position. */
#include "kernels/rope_table.h"

#include <math.h>

/* The dimension whose wavelength makes `turns` turns over the original length. */
static double correction(const struct td_model_config *c, double turns) {
    const double two_pi = 6.283185307179586;
    return TD_ROPE_DIM * log((double)c->yarn_original_positions / (turns * two_pi)) /
           (2.0 * log((double)c->compress_rope_theta));
}

void td_rope_table(const struct td_model_config *c, bool compressing, float ret[TD_ROPE_DIM / 2]) {
    double theta = compressing ? c->compress_rope_theta : c->rope_theta;
    for (uint32_t i = 0; i < TD_ROPE_DIM / 2; i++)
        ret[i] = 1.0f / (float)pow(theta, 2.0 * i / TD_ROPE_DIM);
    if (!compressing) return;
    double low = fmax(floor(correction(c, c->yarn_beta_fast)), 0.0);
    double high = fmin(ceil(correction(c, c->yarn_beta_slow)), TD_ROPE_DIM - 1.0);
    if (high <= low) high = low + 0.001;
    for (uint32_t i = 0; i < TD_ROPE_DIM / 2; i++) {
        float ramp = ((float)i - (float)low) / (float)(high - low);
        ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
        ret[i] = ret[i] * (1.0f - ramp) + ret[i] / c->yarn_factor * ramp;
    }
}
