/* One CUDA source, named by the build, as C++ over the emulator. */
#include "tests/kernels/cuda/emulator.h"

#include TD_EMULATED_SOURCE
