/* Finds the files of a checkpoint and joins their tensors into one sorted list. */
#include "kernels/model/checkpoint.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/model/file.h"

enum { PATH_BYTES = 4096, MAX_SHARDS = 4096, MAX_INDEX_BYTES = 256 << 20 };

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

static int string_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

struct td_tensor *td_files_find(const struct td_model_files *f, const char *name) {
    struct td_tensor **t =
        bsearch(name, f->by_name, f->tensors, sizeof *f->by_name, name_of_tensor);
    return t ? *t : NULL;
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
    qsort(f->by_name, total, sizeof *f->by_name, tensor_by_name);
    for (size_t i = 1; i < total; i++) {
        const struct td_tensor *a = f->by_name[i - 1], *b = f->by_name[i];
        char shown[104];
        if (strcmp(a->name, b->name) == 0)
            return td_fail(err, TD_FORMAT, "%.130s: tensor %s: expected once, found also in %.130s",
                           b->file->path, td_name_text(b->name, shown), a->file->path);
    }
    return TD_OK;
}

/* A shard's name must be a plain file of the same folder. */
static bool plain_name(const char *s) {
    return s && *s && *s != '.' && !strchr(s, '/') && strlen(s) < 256;
}

/* The distinct file names of the weight map, sorted, in one heap array of borrowed strings. */
static td_status shard_names(const char *path, const json_t *map, const char ***ret,
                             size_t *ret_count, struct td_error *err) {
    const char *name;
    json_t *v;
    char shown[104];
    size_t n = 0, distinct = 0;
    const char **names = calloc(json_object_size(map) + 1, sizeof *names);
    if (!names) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", path);
    json_object_foreach((json_t *)(uintptr_t)map, name, v) {
        if (!plain_name(json_string_value(v))) {
            free(names);
            return td_fail(err, TD_FORMAT,
                           "%.150s: tensor %s: expected the name of a file in this folder", path,
                           td_name_text(name, shown));
        }
        names[n++] = json_string_value(v);
    }
    qsort(names, n, sizeof *names, string_by_text);
    for (size_t i = 0; i < n; i++)
        if (distinct == 0 || strcmp(names[distinct - 1], names[i]) != 0)
            names[distinct++] = names[i];
    if (distinct == 0 || distinct > MAX_SHARDS) {
        free(names);
        return td_fail(err, TD_FORMAT, "%.250s: weight_map: expected 1 to %d files, found %zu",
                       path, MAX_SHARDS, distinct);
    }
    *ret = names;
    *ret_count = distinct;
    return TD_OK;
}

/* Index and shards must tell the same story, mtp.* included (it is not used, but a file that
 * lacks it is not the file the index was made for). */
static td_status check_index(const struct td_model_files *f, const char *path, const json_t *map,
                             struct td_error *err) {
    char shown[104];
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v) {
        const struct td_tensor *t = td_files_find(f, name);
        const char *found = t ? strrchr(t->file->path, '/') + 1 : "in no shard";
        if (!t || strcmp(found, json_string_value(v)) != 0)
            return td_fail(err, TD_FORMAT, "%.130s: tensor %s: expected in %.60s, found %s%.60s",
                           path, td_name_text(name, shown), json_string_value(v), t ? "in " : "",
                           found);
    }
    for (size_t i = 0; i < f->tensors; i++)
        if (!json_object_get(map, f->by_name[i]->name))
            return td_fail(err, TD_FORMAT, "%.130s: tensor %s: expected in %s, not found there",
                           f->by_name[i]->file->path, td_name_text(f->by_name[i]->name, shown),
                           index_name);
    return TD_OK;
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
    char *text = NULL, shown[104];
    const char **names = NULL;
    size_t size, n = 0;
    json_error_t je;
    TD_TRY(td_file_read(path, MAX_INDEX_BYTES, &text, &size, err));
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &je);
    free(text);
    const json_t *map = json_object_get(root, "weight_map");
    td_status st;
    if (!root)
        st = td_fail(err, TD_FORMAT, "%.150s: expected JSON, found: %s (line %d)", path,
                     td_name_text(je.text, shown), je.line);
    else if (!json_is_object(map))
        st = td_fail(err, TD_FORMAT, "%.250s: weight_map: expected an object", path);
    else
        st = shard_names(path, map, &names, &n, err);
    if (st == TD_OK) st = open_list(f, dir, names, n, err);
    if (st == TD_OK) st = check_index(f, path, map, err);
    free(names);
    json_decref(root);
    return st;
}

td_status td_files_open(struct td_model_files *f, const char *dir, struct td_error *err) {
    static const char *const single[] = {"model.safetensors"};
    char path[PATH_BYTES], one[PATH_BYTES];
    *f = (struct td_model_files){0};
    TD_TRY(join(path, dir, index_name, err));
    TD_TRY(join(one, dir, single[0], err));
    bool single_file = access(one, F_OK) == 0;
    if (!single_file && access(path, F_OK) != 0)
        return td_fail(err, TD_NOT_FOUND, "%.250s: expected model.safetensors or %s, found neither",
                       dir, index_name);
    f->source = strdup(single_file ? one : path);
    td_status st;
    if (!f->source)
        st = td_fail(err, TD_NO_MEMORY, "%.250s: no memory", dir);
    else
        st = single_file ? open_list(f, dir, single, 1, err) : open_indexed(f, dir, path, err);
    if (st != TD_OK) td_files_finish(f);
    return st;
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

const struct td_tensor *td_files_unused(const struct td_model_files *f) {
    for (size_t i = 0; i < f->tensors; i++)
        if (!f->by_name[i]->used && strncmp(f->by_name[i]->name, "mtp.", 4) != 0)
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
