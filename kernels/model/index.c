/* Parsing of the index, and its comparison with the files it names. */
#include "kernels/model/index.h"

#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHARDS = 4096 };

static int string_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
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

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

td_status td_index_check(const struct td_index *x, const struct td_model_files *f, const char *path,
                         struct td_error *err) {
    const json_t *map = json_object_get(x->root, "weight_map");
    char shown[104];
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v) {
        const struct td_tensor *t = td_files_find(f, name);
        const char *found = t ? base_name(t->file->path) : "in no shard";
        if (!t || strcmp(found, json_string_value(v)) != 0)
            return td_fail(err, TD_FORMAT, "%.130s: tensor %s: expected in %.60s, found %s%.60s",
                           path, td_name_text(name, shown), json_string_value(v), t ? "in " : "",
                           found);
    }
    for (size_t i = 0; i < f->tensors; i++)
        if (!json_object_get(map, f->by_name[i]->name))
            return td_fail(err, TD_FORMAT, "%.130s: tensor %s: expected in %.60s, not found there",
                           f->by_name[i]->file->path, td_name_text(f->by_name[i]->name, shown),
                           base_name(path));
    return TD_OK;
}

td_status td_index_parse(struct td_index *x, const char *path, const char *text, size_t size,
                         struct td_error *err) {
    char shown[104];
    json_error_t je;
    *x = (struct td_index){.root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &je)};
    const json_t *map = json_object_get(x->root, "weight_map");
    td_status st;
    if (!x->root)
        st = td_fail(err, TD_FORMAT, "%.150s: expected JSON, found: %s (line %d)", path,
                     td_name_text(je.text, shown), je.line);
    else if (!json_is_object(map))
        st = td_fail(err, TD_FORMAT, "%.250s: weight_map: expected an object", path);
    else
        st = shard_names(path, map, &x->shards, &x->n, err);
    if (st != TD_OK) td_index_finish(x);
    return st;
}

void td_index_finish(struct td_index *x) {
    free(x->shards);
    json_decref(x->root);
    *x = (struct td_index){0};
}
