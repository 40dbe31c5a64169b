/* The fast kernels of one instruction set as a table. What only copies, or is not worth a second
 * form, is the definition itself. */
#include "kernels/cpu/op.h"

#define SAME_OPS(X) X(embed) X(expand) X(round_nvfp4) X(ring_write) X(group) X(gather)
#define FAST_OPS(X)                                                                                \
    X(linear)                                                                                      \
    X(round_fp8)                                                                                   \
    X(expert_linear)                                                                               \
    X(rms_norm)                                                                                    \
    X(hc_pre)                                                                                      \
    X(hc_post)                                                                                     \
    X(hc_head)                                                                                     \
    X(rope_angles)                                                                                 \
    X(rope)                                                                                        \
    X(row_store)                                                                                   \
    X(compress)                                                                                    \
    X(index_query)                                                                                 \
    X(index)                                                                                       \
    X(attend)                                                                                      \
    X(index_merge)                                                                                 \
    X(attend_part)                                                                                 \
    X(attend_merge)                                                                                \
    X(add_shards)                                                                                  \
    X(route)                                                                                       \
    X(swiglu)                                                                                      \
    X(combine)

#define ONE(op) +1
_Static_assert((0 SAME_OPS(ONE) FAST_OPS(ONE)) == (0 TD_OPS_MAP(ONE)), "every op is listed once");

#define PASTE2(isa) td_ops_##isa
#define PASTE(isa) PASTE2(isa)
#define STRING2(s) #s
#define STRING(s) STRING2(s)

#define X(op) void td_##op##_ref(const struct td_device *d, const struct td_##op##_args *a);
SAME_OPS(X)
#undef X

extern const struct td_ops PASTE(TD_ISA);
const struct td_ops PASTE(TD_ISA) = {.name = STRING(TD_ISA),
#define X(op) .op = td_##op##_ref,
                                     SAME_OPS(X)
#undef X
#define X(op) .op = TD_OP(op),
                                         FAST_OPS(X)
#undef X
};
