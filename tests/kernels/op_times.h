/* Where a step's time goes: the engine's op table with a clock around every op.
 *
 * The linker puts td_ops_init of op_times.c before the one of kernels/ops.c (--wrap), so that what
 * runs otherwise is the engine as it is. Ops that are called with several shapes have a line each.
 */
#ifndef TD_TESTS_KERNELS_OP_TIMES_H
#define TD_TESTS_KERNELS_OP_TIMES_H

#include <stdbool.h>
#include <stdint.h>

/* Before the engine is created: the variant to run instead of the best one (kernels/ops.h); false
 * when this processor does not run it. */
bool td_op_times_choose(const char *variant);
/* On: clocks run, from zero. Off: ops are called as they are but for one test. */
void td_op_times_start(void);
void td_op_times_stop(void);
/* The table since the start, the longest first; `wall_s`: of the whole, for shares and what is
 * between the ops; gflops: the machine's. */
void td_op_times_print(double wall_s, double gflops);

#endif
