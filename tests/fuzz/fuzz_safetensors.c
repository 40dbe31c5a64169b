/* A safetensors file and its names: whatever the header says, every tensor lies in the file, none
 * overlap, and names are sorted and distinct. */
#include <string.h>

#include "kernels/model/checkpoint.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

static void check_tensor(const struct td_tensor *t, const uint8_t *data, size_t size) {
    uint64_t elements = 1;
    char text[128], name[104];
    PROMISE(t->data >= data && t->bytes <= size && (size_t)(t->data - data) <= size - t->bytes);
    PROMISE(t->rank <= TD_TENSOR_MAX_RANK);
    for (uint32_t i = 0; i < t->rank; i++)
        elements *= t->shape[i];
    if (td_dtype_size(t->dtype)) PROMISE(elements * td_dtype_size(t->dtype) == t->bytes);
    PROMISE(strlen(td_shape_text(t->shape, t->rank, text)) < sizeof text);
    PROMISE(strlen(td_name_text(t->stored, name)) < sizeof name);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct td_model_files f;
    td_status st = td_files_parse(&f, "input", data, size, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st != TD_OK) {
        PROMISE(st == TD_FORMAT && td_fuzz_error.text[0] &&
                strlen(td_fuzz_error.text) < sizeof td_fuzz_error.text);
        return 0;
    }
    const struct td_tensor *t = f.file[0].tensors;
    for (size_t i = 0; i < f.file[0].count; i++) {
        check_tensor(&t[i], data, size);
        if (i) PROMISE(t[i - 1].data + t[i - 1].bytes <= t[i].data);
    }
    PROMISE(f.tensors == f.file[0].count);
    for (size_t i = 0; i < f.tensors; i++) {
        PROMISE(td_files_find(&f, f.by_name[i]->name) == f.by_name[i]);
        if (i) PROMISE(strcmp(f.by_name[i - 1]->name, f.by_name[i]->name) < 0);
    }
    const char *meta = td_safetensors_meta(&f.file[0], "format");
    if (meta) PROMISE(strlen(meta) <= size);
    td_files_finish(&f);
    return 0;
}
