/* What the ranks of a worker tell each other where their memory is the host's: they meet, and each
 * reads what the others have (td_backend in device.h has the contracts). */
#ifndef TD_KERNELS_COLLECTIVES_H
#define TD_KERNELS_COLLECTIVES_H

#include "kernels/device.h"

void td_host_all_reduce(const struct td_device *d, const struct td_all_reduce_args *a);
void td_host_all_gather(const struct td_device *d, const struct td_all_gather_args *a);
void td_host_all_to_all(const struct td_device *d, const struct td_all_to_all_args *a);

#endif
