/* Runs one fuzz target over the files of a folder, without a fuzzer: the corpus as a test.
 *
 * usage: replay FOLDER    Names say what must happen: "ok-..." is accepted, "bad-..." refused;
 * any other file only has to do no harm. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/target.h"

static uint8_t *read_whole(const char *path, size_t *ret_size) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0) return NULL;
    long size = ftell(f);
    /* Exactly as large as the input: a sanitizer then sees the first byte too many. */
    uint8_t *data = size < 0 ? NULL : malloc(size ? (size_t)size : 1);
    rewind(f);
    if (data && fread(data, 1, (size_t)size, f) != (size_t)size) {
        free(data);
        data = NULL;
    }
    fclose(f);
    *ret_size = (size_t)size;
    return data;
}

static int replay(const char *folder, const char *name) {
    char path[4096];
    size_t size;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    uint8_t *data = read_whole(path, &size);
    if (!data) {
        perror(path);
        return 1;
    }
    printf("%s: ", name);
    fflush(stdout); /* a crash then shows after which name */
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    printf("%s\n", td_fuzz_accepted ? "accepted" : td_fuzz_error.text);
    int ok = strncmp(name, "ok-", 3) == 0, bad = strncmp(name, "bad-", 4) == 0;
    if ((!ok || td_fuzz_accepted) && (!bad || !td_fuzz_accepted)) return 0;
    printf("%s: expected %s, found the opposite\n", name, ok ? "accepted" : "refused");
    return 1;
}

int main(int argc, char **argv) {
    int failures = 0, files = 0;
    DIR *d = argc == 2 ? opendir(argv[1]) : NULL;
    if (!d) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        if (e->d_name[0] == '.') continue;
        failures += replay(argv[1], e->d_name);
        files++;
    }
    closedir(d);
    printf("%d files, %d failures\n", files, failures);
    return files == 0 || failures > 0;
}
