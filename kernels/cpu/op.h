/* What every fast kernel includes: its name, by the instruction set the build sets as TD_ISA (each
 * source is compiled once per set), and the vectors it is written with. */
#ifndef TD_KERNELS_CPU_OP_H
#define TD_KERNELS_CPU_OP_H

#include "kernels/cpu/vec.h"
#include "kernels/ref/op.h"

#endif
