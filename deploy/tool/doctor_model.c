/* Facts about a checkpoint folder, and what follows from them. */
#include "deploy/tool/doctor_model.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/text/tokenizer.h"
#include "kernels/model/checkpoint.h"
#include "kernels/model/config.h"
#include "kernels/model/file.h"
#include "kernels/model/index.h"

enum { PREFIX = 8, MAX_HEADER = 128 << 20, MAX_INDEX = 256 << 20 };

/* ---- facts ---- */

uint64_t td_shard_promised(const char *header, uint64_t n, char *bad, size_t cap) {
    json_error_t je;
    json_t *root = json_loadb(header, (size_t)n, 0, &je), *v;
    const char *name;
    uint64_t end = 0;
    bad[0] = 0;
    if (!json_is_object(root)) snprintf(bad, cap, "its header is no JSON object: %.120s", je.text);
    json_object_foreach(root, name, v) {
        json_int_t e = json_integer_value(json_array_get(json_object_get(v, "data_offsets"), 1));
        if (e > 0 && (uint64_t)e > end) end = (uint64_t)e;
    }
    json_decref(root);
    return bad[0] ? 0 : PREFIX + n + end;
}

static void read_header(int fd, struct td_shard_facts *s) {
    uint8_t prefix[PREFIX];
    uint64_t n = 0;
    if (pread(fd, prefix, PREFIX, 0) == PREFIX)
        for (int i = PREFIX - 1; i >= 0; i--)
            n = n << 8 | prefix[i];
    if (n == 0 || n > MAX_HEADER) {
        snprintf(s->bad, sizeof s->bad, "its first 8 bytes are no header's length");
        return;
    }
    char *header = malloc((size_t)n);
    if (!header || pread(fd, header, (size_t)n, PREFIX) != (ssize_t)n)
        snprintf(s->bad, sizeof s->bad, "it ends inside its header of %llu bytes",
                 (unsigned long long)n);
    else
        s->promised = td_shard_promised(header, n, s->bad, sizeof s->bad);
    free(header);
}

static void look_at_shard(const char *dir, struct td_shard_facts *s) {
    char path[2 * TD_CONFIG_STRING_MAX + 256];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, s->name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    s->open_errno = fd < 0 || fstat(fd, &st) != 0 ? errno : 0;
    if (s->open_errno == 0) {
        s->bytes = (uint64_t)st.st_size;
        read_header(fd, s);
    }
    if (fd >= 0) close(fd);
}

static td_status take_names(struct td_model_facts *f, const char *const *names, size_t n,
                            struct td_error *err) {
    f->shard = calloc(n, sizeof *f->shard);
    if (!f->shard) return td_fail(err, TD_NO_MEMORY, "no memory for %zu names", n);
    for (f->shards = 0; f->shards < n; f->shards++)
        snprintf(f->shard[f->shards].name, sizeof f->shard[0].name, "%s", names[f->shards]);
    return TD_OK;
}

/* The files that the loader would open, in its order of preference (kernels/model/checkpoint). */
static td_status list_shards(struct td_model_facts *f, struct td_error *err) {
    static const char *const whole[] = {"model.safetensors", "model0-mp1.safetensors"};
    char path[2 * TD_CONFIG_STRING_MAX];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", f->dir, whole[i]);
        if (access(path, F_OK) == 0) return take_names(f, &whole[i], 1, err);
    }
    char *text = NULL;
    size_t size;
    struct td_index x = {0};
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", f->dir);
    if (access(path, F_OK) != 0)
        return td_fail(
            err, TD_NOT_FOUND,
            "%.250s: expected %s, model.safetensors.index.json or %s, found none of them", f->dir,
            whole[0], whole[1]);
    TD_TRY(td_file_read(path, MAX_INDEX, &text, &size, err));
    td_status st = td_index_parse(&x, path, text, size, err);
    free(text);
    if (st == TD_OK) st = take_names(f, x.shards, x.n, err);
    td_index_finish(&x);
    return st;
}

/* Bytes behind the last tensor are read by nobody. */
static bool whole(const struct td_shard_facts *s) {
    return s->open_errno == 0 && s->promised != 0 && s->bytes >= s->promised;
}

void td_model_look(const char *dir, bool random, struct td_model_facts *f) {
    struct td_model_config c = {0};
    struct td_tokenizer *t = NULL;
    *f = (struct td_model_facts){.random = random};
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    if (td_model_config_load(dir, &c, &f->config) == TD_OK) {
        f->config.status = TD_OK;
        f->vocab = c.vocab;
        f->layers = c.layers;
    }
    if (td_tokenizer_load(dir, &t, &f->tokenizer) == TD_OK) {
        f->tokenizer.status = TD_OK;
        f->tokens = (uint32_t)td_tokenizer_size(t);
    }
    td_tokenizer_destroy(t);
    if (random) return;
    if (list_shards(f, &f->index) == TD_OK) f->index.status = TD_OK;
    for (size_t i = 0; i < f->shards; i++)
        look_at_shard(dir, &f->shard[i]);
    struct td_model_files files;
    if (td_files_open(&files, dir, &f->tensors) == TD_OK) {
        f->tensors.status = TD_OK;
        td_files_finish(&files);
    }
}

void td_model_facts_free(struct td_model_facts *f) {
    free(f->shard);
    f->shard = NULL;
}

/* ---- rules ---- */

/* True: nothing is wrong with it. */
static bool shard_rules(const struct td_model_facts *f, const struct td_shard_facts *s,
                        struct td_report *r) {
    if (whole(s) && s->bytes > s->promised) {
        td_find(r, TD_WARNING, "model", "%s/%s: expected %llu bytes by its own header, found %llu",
                f->dir, s->name, (unsigned long long)s->promised, (unsigned long long)s->bytes);
        td_cure(r, "it has been appended to: compare its checksum with the publisher's");
    }
    if (whole(s)) return true;
    if (s->open_errno) {
        td_find(r, TD_ERROR, "model", "%s/%s: %s", f->dir, s->name, strerror(s->open_errno));
        td_cure(r, s->open_errno == ENOENT ? "the download is not complete: fetch this file as well"
                                           : "let the user that runs the roles read it");
    } else if (s->bad[0]) {
        td_find(r, TD_ERROR, "model", "%s/%s (%llu bytes): %s", f->dir, s->name,
                (unsigned long long)s->bytes, s->bad);
        td_cure(r, "fetch it again; a file of some hundred bytes is a pointer of git-lfs: `git lfs "
                   "pull`");
    } else {
        td_find(r, TD_ERROR, "model", "%s/%s: expected %llu bytes by its own header, found %llu",
                f->dir, s->name, (unsigned long long)s->promised, (unsigned long long)s->bytes);
        td_cure(r, "it was cut short: fetch it again");
    }
    return false;
}

static void files_rules(const struct td_model_facts *f, struct td_report *r) {
    uint64_t bytes = 0;
    bool all = true;
    if (f->index.status != TD_OK) {
        td_find(r, TD_ERROR, "model", "%s", f->index.text);
        td_cure(r, "model.dir must name the folder of a whole checkpoint");
        return;
    }
    for (size_t i = 0; i < f->shards; i++) {
        all = shard_rules(f, &f->shard[i], r) && all;
        bytes += f->shard[i].bytes;
    }
    if (!all) return;
    if (f->tensors.status != TD_OK) {
        td_find(r, TD_ERROR, "model", "%s", f->tensors.text);
        td_cure(r, "files of different revisions are mixed: fetch the folder again");
    } else
        td_find(r, TD_FINE, "model", "%s: %zu file%s, %.3f GB, index and headers agree", f->dir,
                f->shards, f->shards == 1 ? "" : "s", (double)bytes / 1e9);
}

void td_model_rules(const struct td_model_facts *f, struct td_report *r) {
    if (f->config.status != TD_OK) {
        td_find(r, TD_ERROR, "model", "%s", f->config.text);
        td_cure(r, "model.dir must name the folder of a whole checkpoint");
    } else
        td_find(r, TD_FINE, "model", "%s/config.json: %u layers, vocabulary %u", f->dir, f->layers,
                f->vocab);
    if (f->random)
        td_find(r, TD_SKIPPED, "model", "weights: load_format = random needs no files");
    else
        files_rules(f, r);
    if (f->tokenizer.status != TD_OK) {
        td_find(r, TD_ERROR, "model", "%s", f->tokenizer.text);
        td_cure(r, "the checkpoint's own tokenizer.json belongs into %s", f->dir);
    } else if (f->config.status == TD_OK && f->tokens > f->vocab) {
        td_find(r, TD_ERROR, "model",
                "tokenizer.json: expected at most the model's vocabulary of %u, found %u tokens",
                f->vocab, f->tokens);
        td_cure(r, "the tokenizer is another checkpoint's: take the one of %s", f->dir);
    } else
        td_find(r, TD_FINE, "model", "tokenizer.json: %u tokens", f->tokens);
}
