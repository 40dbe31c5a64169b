/* TD_HD marks small functions of plain arithmetic that CUDA compiles for both sides. */
#ifndef TD_COMMON_BASE_HD_H
#define TD_COMMON_BASE_HD_H

#ifdef __CUDACC__
#define TD_HD __host__ __device__
#else
#define TD_HD
#endif

#endif
