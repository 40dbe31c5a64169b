/* kernels/cuda/probe.cu as C++ over several emulated GPUs. */
#include "tests/kernels/cuda/peers.h"

#include "kernels/cuda/probe.cu"
