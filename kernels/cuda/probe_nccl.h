/* NCCL by name: loaded when it is asked about, so that a build and a machine without it are told
 * apart from one where it does not work. Its calls that a sum needs, as NCCL 2 has them. */
#ifndef TD_KERNELS_CUDA_PROBE_NCCL_H
#define TD_KERNELS_CUDA_PROBE_NCCL_H

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

extern "C" {
#include "common/base/status.h"
}

enum { TD_NCCL_FLOAT = 7, TD_NCCL_SUM = 0 };

struct td_probe_nccl {
    int (*get_version)(int *version);
    const char *(*error_string)(int result);
    int (*init_all)(void **comm, int n, const int *gpus);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*all_reduce)(const void *from, void *to, size_t n, int type, int op, void *comm,
                      cudaStream_t stream);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
};

/* Stays loaded: the process is short. */
static inline td_status td_probe_nccl_load(struct td_probe_nccl *l, struct td_error *err) {
    static const char *const name[] = {"ncclGetVersion",  "ncclGetErrorString", "ncclCommInitAll",
                                       "ncclGroupStart",  "ncclGroupEnd",       "ncclAllReduce",
                                       "ncclCommDestroy", "ncclCommAbort"};
    enum { CALLS = sizeof name / sizeof *name };
    void *call[CALLS], *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    static_assert(sizeof call == sizeof *l, "one pointer each, in this order");
    if (!lib) return td_fail(err, TD_NOT_FOUND, "%s", dlerror());
    for (int i = 0; i < CALLS; i++) {
        call[i] = dlsym(lib, name[i]);
        if (!call[i]) return td_fail(err, TD_NOT_FOUND, "libnccl.so.2 has no %s", name[i]);
    }
    memcpy(l, call, sizeof call);
    return TD_OK;
}

#endif
