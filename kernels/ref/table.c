/* The definitions as a table. */
#include "kernels/ref/op.h"

const struct td_ops td_ops_ref = {.name = "ref",
#define X(op) .op = TD_OP(op),
                                  TD_OPS_MAP(X)
#undef X
};
