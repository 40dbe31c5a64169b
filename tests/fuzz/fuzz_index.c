/* The index: shard names are plain, sorted and distinct, and its comparison with one opened shard
 * survives every story it tells. */
#include <stdlib.h>
#include <string.h>

#include "kernels/model/index.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

/* One shard with three tensors of one byte. */
static const struct td_model_files *shard(void) {
    static const char header[] =
        "{\"norm.weight\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
        "\"embed.weight\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},"
        "\"head.weight\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}";
    static uint8_t file[8 + sizeof header - 1 + 3] = {sizeof header - 1};
    static struct td_model_files files;
    struct td_error err;
    if (files.files) return &files;
    memcpy(file + 8, header, sizeof header - 1);
    PROMISE(td_files_parse(&files, "folder/a.safetensors", file, sizeof file, &err) == TD_OK);
    return &files;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct td_index x;
    td_status st = td_index_parse(&x, "input", (const char *)data, size, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st != TD_OK) {
        PROMISE(st == TD_FORMAT && td_fuzz_error.text[0]);
        return 0;
    }
    PROMISE(x.n > 0);
    for (size_t i = 0; i < x.n; i++) {
        PROMISE(x.shards[i][0] && x.shards[i][0] != '.' && !strchr(x.shards[i], '/'));
        if (i) PROMISE(strcmp(x.shards[i - 1], x.shards[i]) < 0);
    }
    st = td_index_check(&x, shard(), "folder/input", &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st == TD_OK) PROMISE(x.n == 1 && strcmp(x.shards[0], "a.safetensors") == 0);
    td_index_finish(&x);
    return 0;
}
