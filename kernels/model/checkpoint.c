/* Finds the files of a checkpoint and joins their tensors into one sorted list. */
#include "kernels/model/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/model/file.h"
#include "kernels/model/index.h"
#include "kernels/model/names.h"

enum { PATH_BYTES = 4096, MAX_INDEX_BYTES = 256 << 20 };

static const char index_name[] = "model.safetensors.index.json";

static td_status join(char path[PATH_BYTES], const char *dir, const char *name,
                      struct td_error *err) {
    int n = snprintf(path, PATH_BYTES, "%s/%s", dir, name);
    if (n < 0 || n >= PATH_BYTES)
        return td_fail(err, TD_TOO_LONG, "%.200s...: the path is longer than %d bytes", dir,
                       PATH_BYTES - 1);
    return TD_OK;
}

static int tensor_by_name(const void *a, const void *b) {
    return strcmp((*(struct td_tensor *const *)a)->name, (*(struct td_tensor *const *)b)->name);
}

static int name_of_tensor(const void *key, const void *t) {
    return strcmp(key, (*(struct td_tensor *const *)t)->name);
}

struct td_tensor *td_files_find(const struct td_model_files *f, const char *name) {
    struct td_tensor **t =
        bsearch(name, f->by_name, f->tensors, sizeof *f->by_name, name_of_tensor);
    return t ? *t : NULL;
}

static td_status sort_again(struct td_model_files *f, struct td_error *err) {
    qsort(f->by_name, f->tensors, sizeof *f->by_name, tensor_by_name);
    for (size_t i = 1; i < f->tensors; i++) {
        const struct td_tensor *a = f->by_name[i - 1], *b = f->by_name[i];
        char shown[104], other[104];
        if (strcmp(a->name, b->name) != 0) continue;
        return td_fail(err, TD_FORMAT, "%.90s: tensor %s: expected once, found also %s in %.90s",
                       b->file->path, td_name_text(b->stored, shown),
                       strcmp(a->stored, b->stored) == 0 ? "" : td_name_text(a->stored, other),
                       a->file->path);
    }
    return TD_OK;
}

static td_status sort_names(struct td_model_files *f, struct td_error *err) {
    size_t total = 0, at = 0;
    for (size_t i = 0; i < f->files; i++)
        total += f->file[i].count;
    f->by_name = calloc(total + 1, sizeof *f->by_name);
    if (!f->by_name) return td_fail(err, TD_NO_MEMORY, "no memory for %zu tensor names", total);
    for (size_t i = 0; i < f->files; i++)
        for (size_t j = 0; j < f->file[i].count; j++)
            f->by_name[at++] = &f->file[i].tensors[j];
    f->tensors = total;
    return sort_again(f, err);
}

static td_status open_list(struct td_model_files *f, const char *dir, const char *const *names,
                           size_t n, struct td_error *err) {
    char path[PATH_BYTES];
    f->file = calloc(n, sizeof *f->file);
    if (!f->file) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", dir);
    for (size_t i = 0; i < n; i++) {
        TD_TRY(join(path, dir, names[i], err));
        TD_TRY(td_safetensors_open(&f->file[i], path, err));
        f->files = i + 1;
    }
    return sort_names(f, err);
}

static td_status open_indexed(struct td_model_files *f, const char *dir, const char *path,
                              struct td_error *err) {
    char *text = NULL;
    size_t size;
    struct td_index x;
    TD_TRY(td_file_read(path, MAX_INDEX_BYTES, &text, &size, err));
    td_status st = td_index_parse(&x, path, text, size, err);
    free(text);
    if (st == TD_OK) st = open_list(f, dir, x.shards, x.n, err);
    if (st == TD_OK) st = td_index_check(&x, f, path, err);
    td_index_finish(&x);
    return st;
}

/* Files that hold everything, in the order in which they are looked for; the second is what the
 * reference converter writes for one rank. */
static const char *const whole_names[] = {"model.safetensors", "model0-mp1.safetensors"};

td_status td_files_open(struct td_model_files *f, const char *dir, struct td_error *err) {
    char index[PATH_BYTES], whole[PATH_BYTES];
    *f = (struct td_model_files){0};
    size_t n = sizeof whole_names / sizeof *whole_names, i = 0;
    for (; i < n; i++) {
        TD_TRY(join(whole, dir, whole_names[i], err));
        if (access(whole, F_OK) == 0) break;
    }
    TD_TRY(join(index, dir, index_name, err));
    if (i == n && access(index, F_OK) != 0)
        return td_fail(err, TD_NOT_FOUND, "%.250s: expected %s, %s or %s, found none of them", dir,
                       whole_names[0], index_name, whole_names[1]);
    f->source = strdup(i < n ? whole : index);
    td_status st;
    if (!f->source)
        st = td_fail(err, TD_NO_MEMORY, "%.250s: no memory", dir);
    else
        st = i < n ? open_list(f, dir, &whole_names[i], 1, err) : open_indexed(f, dir, index, err);
    if (st == TD_OK) st = td_files_use_official_names(f, err);
    if (st != TD_OK) td_files_finish(f);
    return st;
}

td_status td_files_parse(struct td_model_files *f, const char *source, const uint8_t *data,
                         size_t size, struct td_error *err) {
    td_status st = TD_NO_MEMORY;
    *f = (struct td_model_files){.source = strdup(source), .file = calloc(1, sizeof *f->file)};
    if (!f->source || !f->file) {
        td_fail(err, TD_NO_MEMORY, "%.250s: no memory", source);
        goto finish;
    }
    TD_TRY_GOTO(td_safetensors_parse(&f->file[0], source, data, size, err), finish);
    f->files = 1;
    TD_TRY_GOTO(sort_names(f, err), finish);
    TD_TRY_GOTO(td_files_use_official_names(f, err), finish);
    return TD_OK;
finish:
    td_files_finish(f);
    return st;
}

td_status td_files_use_official_names(struct td_model_files *f, struct td_error *err) {
    struct td_name_styles styles = {0};
    for (size_t i = 0; i < f->tensors; i++) {
        struct td_tensor *t = f->by_name[i];
        char name[TD_NAME_MAX];
        TD_TRY(td_name_official(&styles, f->source, t->stored, name, err));
        if (strcmp(name, t->stored) == 0) continue;
        char *copy = strdup(name);
        if (!copy) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", f->source);
        t->name = copy;
        f->renamed = true;
    }
    return f->renamed ? sort_again(f, err) : TD_OK;
}

td_status td_files_aligned(struct td_model_files *f, const struct td_tensor *t, const void **ret,
                           struct td_error *err) {
    size_t unit = td_dtype_size(t->dtype);
    if (unit <= 1 || (uintptr_t)t->data % unit == 0) {
        *ret = t->data;
        return TD_OK;
    }
    if (f->copies == f->copies_cap) {
        size_t cap = f->copies_cap ? 2 * f->copies_cap : 64;
        void **grown = realloc(f->copy, cap * sizeof *grown);
        if (!grown) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", t->file->path);
        f->copy = grown;
        f->copies_cap = cap;
    }
    void *copy = malloc(t->bytes + 1);
    if (!copy)
        return td_fail(err, TD_NO_MEMORY, "%.250s: no memory for %zu bytes", t->file->path,
                       t->bytes);
    memcpy(copy, t->data, t->bytes);
    f->copy[f->copies++] = copy;
    *ret = copy;
    return TD_OK;
}

const struct td_tensor *td_files_unused(const struct td_model_files *f, uint32_t layers,
                                        uint32_t drafts) {
    for (size_t i = 0; i < f->tensors; i++)
        if (!f->by_name[i]->used && !td_name_is_draft(f->by_name[i]->name, layers, drafts))
            return f->by_name[i];
    return NULL;
}

void td_files_drop_names(struct td_model_files *f) {
    free(f->by_name);
    f->by_name = NULL;
    f->tensors = 0;
    for (size_t i = 0; i < f->files; i++)
        td_safetensors_drop_header(&f->file[i]);
}

void td_files_finish(struct td_model_files *f) {
    td_files_drop_names(f);
    for (size_t i = 0; i < f->files; i++)
        td_safetensors_finish(&f->file[i]);
    for (size_t i = 0; i < f->copies; i++)
        free(f->copy[i]);
    free(f->source);
    free(f->file);
    free(f->copy);
    *f = (struct td_model_files){0};
}
