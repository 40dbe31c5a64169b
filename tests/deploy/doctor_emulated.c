/* `tandem doctor` over the emulated GPUs of tests/kernels/cuda/peers.h, with copies that an
 * emulation can make in no time. */
#include "deploy/tool/doctor.h"
#include "kernels/probe.h"

extern const struct td_gpu_probe td_gpu_probe_emulated;

int main(int argc, char **argv) {
    static const struct td_doctor_options o = {
        .bytes = 1u << 16, .times = 2, .limit_s = 60, .gpus = &td_gpu_probe_emulated};
    return td_cmd_doctor_with(argc, argv, &o);
}
