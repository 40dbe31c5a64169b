/* Parsing of one safetensors file. Everything the header says is hostile until checked. */
#include "kernels/model/safetensors.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/file.h"

enum { PREFIX_BYTES = 8, MAX_HEADER_BYTES = 128 << 20 };

static const struct {
    const char *name;
    enum td_dtype dtype;
    size_t size;
} dtypes[] = {
    {"F32", TD_DTYPE_F32, 4}, {"BF16", TD_DTYPE_BF16, 2},       {"I64", TD_DTYPE_I64, 8},
    {"I32", TD_DTYPE_I32, 4}, {"F8_E4M3", TD_DTYPE_F8_E4M3, 1}, {"F8_E8M0", TD_DTYPE_F8_E8M0, 1},
    {"I8", TD_DTYPE_I8, 1},   {"U8", TD_DTYPE_U8, 1},
};

size_t td_dtype_size(enum td_dtype t) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].dtype == t) return dtypes[i].size;
    return 0;
}

static enum td_dtype dtype_of(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0) return dtypes[i].dtype;
    return TD_DTYPE_OTHER;
}

const char *td_shape_text(const uint64_t *shape, uint32_t rank, char buf[128]) {
    size_t at = 0, cap = 128;
    buf[at++] = '[';
    for (uint32_t i = 0; i < rank && at + 24 < cap; i++)
        at += (size_t)snprintf(buf + at, cap - at, "%s%llu", i ? ", " : "",
                               (unsigned long long)shape[i]);
    buf[at++] = ']';
    buf[at] = '\0';
    return buf;
}

const char *td_name_text(const char *name, char buf[104]) {
    size_t n = 0;
    for (; n < 100 && name[n]; n++)
        buf[n] = name[n] >= 0x20 && name[n] < 0x7f ? name[n] : '?';
    memcpy(buf + n, name[n] ? "..." : "", name[n] ? 4 : 1);
    return buf;
}

static td_status bad(const struct td_safetensors *f, const char *name, struct td_error *err,
                     const char *what) {
    char shown[104];
    return td_fail(err, TD_FORMAT, "%.150s: tensor %s: %s", f->path, td_name_text(name, shown),
                   what);
}

/* data_offsets -> begin, end inside `area` bytes of data. */
static td_status parse_offsets(const struct td_safetensors *f, const char *name,
                               const json_t *entry, size_t area, uint64_t *ret_begin,
                               uint64_t *ret_end, struct td_error *err) {
    const json_t *o = json_object_get(entry, "data_offsets");
    if (!json_is_array(o) || json_array_size(o) != 2 || !json_is_integer(json_array_get(o, 0)) ||
        !json_is_integer(json_array_get(o, 1)))
        return bad(f, name, err, "data_offsets: expected two integers");
    json_int_t b = json_integer_value(json_array_get(o, 0));
    json_int_t e = json_integer_value(json_array_get(o, 1));
    if (b < 0 || e < b || (uint64_t)e > area) {
        char shown[104];
        return td_fail(err, TD_FORMAT,
                       "%.150s: tensor %s: data_offsets: expected 0 <= begin <= end <= %zu (the "
                       "data area), found [%lld, %lld]",
                       f->path, td_name_text(name, shown), area, (long long)b, (long long)e);
    }
    *ret_begin = (uint64_t)b;
    *ret_end = (uint64_t)e;
    return TD_OK;
}

static td_status parse_shape(const struct td_safetensors *f, const char *name, const json_t *entry,
                             struct td_tensor *t, uint64_t *ret_elements, struct td_error *err) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > TD_TENSOR_MAX_RANK)
        return bad(f, name, err, "shape: expected an array of at most 8 sizes");
    uint64_t elements = 1;
    t->rank = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < t->rank; i++) {
        const json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return bad(f, name, err, "shape: expected integers of at least 0");
        t->shape[i] = (uint64_t)json_integer_value(d);
        if (__builtin_mul_overflow(elements, t->shape[i], &elements))
            return bad(f, name, err, "shape: the number of elements does not fit 64 bits");
    }
    *ret_elements = elements;
    return TD_OK;
}

static td_status parse_entry(const struct td_safetensors *f, const char *name, const json_t *entry,
                             size_t data_start, struct td_tensor *t, struct td_error *err) {
    uint64_t begin = 0, end = 0, elements = 0, bytes;
    if (!json_is_object(entry)) return bad(f, name, err, "expected an object with dtype and shape");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype) return bad(f, name, err, "dtype: expected a string");
    *t = (struct td_tensor){
        .name = name, .stored = name, .dtype_name = dtype, .dtype = dtype_of(dtype), .file = f};
    TD_TRY(parse_shape(f, name, entry, t, &elements, err));
    TD_TRY(parse_offsets(f, name, entry, f->size - data_start, &begin, &end, err));
    size_t unit = td_dtype_size(t->dtype);
    if (unit && (__builtin_mul_overflow(elements, unit, &bytes) || bytes != end - begin)) {
        char shown[104], shape[128];
        return td_fail(err, TD_FORMAT,
                       "%.120s: tensor %s: expected as many bytes as %.12s %s has, found %llu",
                       f->path, td_name_text(name, shown), dtype,
                       td_shape_text(t->shape, t->rank, shape), (unsigned long long)(end - begin));
    }
    t->data = f->map + data_start + begin;
    t->bytes = (size_t)(end - begin);
    return TD_OK;
}

static int by_offset(const void *a, const void *b) {
    const struct td_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static td_status check_overlap(const struct td_safetensors *f, struct td_error *err) {
    char a[104], b[104];
    for (size_t i = 1; i < f->count; i++) {
        const struct td_tensor *p = &f->tensors[i - 1], *t = &f->tensors[i];
        if (t->data < p->data + p->bytes)
            return td_fail(err, TD_FORMAT,
                           "%.150s: tensor %s: expected its own bytes, found an "
                           "overlap with %s",
                           f->path, td_name_text(t->name, a), td_name_text(p->name, b));
    }
    return TD_OK;
}

static td_status parse_header(struct td_safetensors *f, struct td_error *err) {
    uint64_t n = 0;
    if (f->size < PREFIX_BYTES)
        return td_fail(err, TD_FORMAT,
                       "%.250s: expected at least the 8 bytes of the header length, found %zu",
                       f->path, f->size);
    for (int i = PREFIX_BYTES - 1; i >= 0; i--)
        n = n << 8 | f->map[i];
    if (n > f->size - PREFIX_BYTES || n > MAX_HEADER_BYTES)
        return td_fail(err, TD_FORMAT,
                       "%.250s: header length: expected at most %zu (the rest of the file) and "
                       "at most 128 MiB, found %llu",
                       f->path, f->size - PREFIX_BYTES, (unsigned long long)n);
    json_error_t je;
    json_t *root =
        json_loadb((const char *)f->map + PREFIX_BYTES, (size_t)n, JSON_REJECT_DUPLICATES, &je);
    f->header = root;
    if (!json_is_object(root)) {
        char shown[104];
        return td_fail(err, TD_FORMAT, "%.150s: header: expected a JSON object, found: %s", f->path,
                       root ? "another JSON value" : td_name_text(je.text, shown));
    }
    f->tensors = calloc(json_object_size(root) + 1, sizeof *f->tensors);
    if (!f->tensors) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", f->path);
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        TD_TRY(parse_entry(f, name, entry, PREFIX_BYTES + (size_t)n, &f->tensors[f->count], err));
        f->count++;
    }
    qsort(f->tensors, f->count, sizeof *f->tensors, by_offset);
    return check_overlap(f, err);
}

td_status td_safetensors_open(struct td_safetensors *f, const char *path, struct td_error *err) {
    *f = (struct td_safetensors){.path = strdup(path)};
    if (!f->path) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", path);
    td_status st = td_file_map(path, &f->map, &f->size, err);
    if (st == TD_OK) st = parse_header(f, err);
    if (st != TD_OK) td_safetensors_finish(f);
    return st;
}

td_status td_safetensors_parse(struct td_safetensors *f, const char *path, const uint8_t *data,
                               size_t size, struct td_error *err) {
    *f = (struct td_safetensors){.path = strdup(path), .map = data, .size = size, .borrowed = true};
    if (!f->path) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", path);
    td_status st = parse_header(f, err);
    if (st != TD_OK) td_safetensors_finish(f);
    return st;
}

void td_safetensors_drop_header(struct td_safetensors *f) {
    for (size_t i = 0; i < f->count; i++)
        if (f->tensors[i].name != f->tensors[i].stored) free((char *)(uintptr_t)f->tensors[i].name);
    free(f->tensors);
    f->tensors = NULL;
    f->count = 0;
    json_decref(f->header);
    f->header = NULL;
}

void td_safetensors_finish(struct td_safetensors *f) {
    td_safetensors_drop_header(f);
    if (!f->borrowed) td_file_unmap(f->map, f->size);
    free(f->path);
    *f = (struct td_safetensors){0};
}

const struct td_tensor *td_safetensors_find(const struct td_safetensors *f, const char *name) {
    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    return NULL;
}

const char *td_safetensors_meta(const struct td_safetensors *f, const char *key) {
    return json_string_value(json_object_get(json_object_get(f->header, "__metadata__"), key));
}
