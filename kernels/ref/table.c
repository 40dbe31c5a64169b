/* The definitions of one instruction set as a table. */
#include "kernels/ref/op.h"

#define TD_TABLE_PASTE2(isa) td_ops_##isa
#define TD_TABLE_PASTE(isa) TD_TABLE_PASTE2(isa)
#define TD_STRING2(s) #s
#define TD_STRING(s) TD_STRING2(s)

extern const struct td_ops TD_TABLE_PASTE(TD_ISA);
const struct td_ops TD_TABLE_PASTE(TD_ISA) = {.name = TD_STRING(TD_ISA),
#define X(op) .op = TD_OP(op),
                                              TD_OPS_MAP(X)
#undef X
};
