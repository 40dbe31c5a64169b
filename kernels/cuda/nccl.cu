/* Finding NCCL; nccl.h says why at run time. */
#include "kernels/cuda/nccl.h"

#ifndef TD_CUDA_EMULATED /* which has a definition of its own */

#include <dlfcn.h>
#include <string.h>

/* Kept for the life of the process: communicators hold code of it. */
static bool load(struct td_nccl *n) {
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib) return false;
    const struct {
        const char *name;
        void *to;
    } of[] = {{"ncclGetVersion", &n->get_version},
              {"ncclGetUniqueId", &n->get_id},
              {"ncclCommInitRank", &n->init_rank},
              {"ncclCommDestroy", &n->destroy},
              {"ncclCommAbort", &n->abort},
              {"ncclCommGetAsyncError", &n->async_error},
              {"ncclGetErrorString", &n->error_text},
              {"ncclAllReduce", &n->all_reduce}};
    for (auto &f : of) {
        void *at = dlsym(lib, f.name);
        if (!at) return false;
        memcpy(f.to, &at, sizeof at);
    }
    return true;
}

/* Ranks ask at the same time. */
const struct td_nccl *td_nccl_find(void) {
    static struct td_nccl n;
    static const bool there = load(&n);
    return there ? &n : NULL;
}

#endif
