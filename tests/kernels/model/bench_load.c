/* How fast a checkpoint is opened, beside how fast its files can be read at all.
 *
 * usage: bench_load [MEGABYTES [ROUNDS]]     (2000, 3)
 * Writes a checkpoint of FP8 experts into a temporary folder (TMPDIR, /tmp without), and then in
 * turns, each time with the files dropped from the page cache: reads them with read(2) into one
 * buffer, opens them as a model, and opens them as a model whose every byte is then summed; then
 * reads and opens once more from the page cache. Cold, opening is compared with what the disk gives;
 * warm, with what copying out of the page cache gives. Removes the folder again. */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "kernels/model/checkpoint.h"
#include "kernels/model/model.h"

enum { HIDDEN = 1024, INNER = 1024, EXPERTS = 64, VOCAB = 32768, LORA = 64, MAX_FILES = 66 };
enum { BLOCK = 8 << 20, MAX_ROUNDS = 16, PATH_BYTES = 320 };

struct bench {
    char dir[256];
    char (*path)[PATH_BYTES]; /* [MAX_FILES] */
    int files, layers;
    size_t bytes;
    uint8_t *block;
};

/* Gigabytes are not left behind, whatever ends the program. */
static struct bench the_bench;

static void clean(void) {
    for (int i = 0; i < the_bench.files; i++)
        unlink(the_bench.path[i]);
    rmdir(the_bench.dir);
}

static void on_signal(int sig) {
    clean();
    _exit(128 + sig);
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* ---- writing ---- */

struct shard {
    char header[1 << 16];
    size_t n, bytes;
};

static void put(struct shard *s, const char *dtype, size_t rows, size_t cols, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
static void put(struct shard *s, const char *dtype, size_t rows, size_t cols, const char *fmt,
                ...) {
    size_t unit = strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 ? 2 : 1;
    size_t bytes = (rows ? rows : 1) * cols * unit, cap = sizeof s->header;
    char name[96], shape[48];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    if (rows)
        snprintf(shape, sizeof shape, "%zu,%zu", rows, cols);
    else
        snprintf(shape, sizeof shape, "%zu", cols);
    s->n +=
        (size_t)snprintf(s->header + s->n, cap - s->n,
                         "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                         s->n > 1 ? "," : "", name, dtype, shape, s->bytes, s->bytes + bytes);
    if (s->n >= cap) {
        fprintf(stderr, "the header does not fit\n");
        exit(1);
    }
    s->bytes += bytes;
}

static void put_fp8(struct shard *s, size_t rows, size_t cols, int layer, const char *name) {
    put(s, "F8_E4M3", rows, cols, "layers.%d.%s.weight", layer, name);
    put(s, "F8_E8M0", (rows + 127) / 128, (cols + 127) / 128, "layers.%d.%s.scale", layer, name);
}

static void put_hc(struct shard *s, const char *base, size_t rows, size_t scales) {
    put(s, "F32", rows, 4 * HIDDEN, "%s_fn", base);
    put(s, "F32", 0, rows, "%s_base", base);
    put(s, "F32", 0, scales, "%s_scale", base);
}

static void put_layer(struct shard *s, int l) {
    char base[64];
    put(s, "BF16", 0, HIDDEN, "layers.%d.attn_norm.weight", l);
    put(s, "BF16", 0, HIDDEN, "layers.%d.ffn_norm.weight", l);
    for (int i = 0; i < 2; i++) {
        snprintf(base, sizeof base, "layers.%d.hc_%s", l, i ? "ffn" : "attn");
        put_hc(s, base, 24, 3);
    }
    put(s, "F32", 0, 2, "layers.%d.attn.attn_sink", l);
    put(s, "BF16", 0, LORA, "layers.%d.attn.q_norm.weight", l);
    put(s, "BF16", 0, 512, "layers.%d.attn.kv_norm.weight", l);
    put_fp8(s, LORA, HIDDEN, l, "attn.wq_a");
    put_fp8(s, 1024, LORA, l, "attn.wq_b");
    put_fp8(s, 512, HIDDEN, l, "attn.wkv");
    put_fp8(s, 2 * LORA, 512, l, "attn.wo_a");
    put_fp8(s, HIDDEN, 2 * LORA, l, "attn.wo_b");
    put(s, "BF16", EXPERTS, HIDDEN, "layers.%d.ffn.gate.weight", l);
    put(s, "F32", 0, EXPERTS, "layers.%d.ffn.gate.bias", l);
    for (int e = -1; e < EXPERTS; e++)
        for (int w = 1; w <= 3; w++) {
            if (e < 0)
                snprintf(base, sizeof base, "ffn.shared_experts.w%d", w);
            else
                snprintf(base, sizeof base, "ffn.experts.%d.w%d", e, w);
            put_fp8(s, w == 2 ? HIDDEN : INNER, w == 2 ? INNER : HIDDEN, l, base);
        }
}

static void write_all(int fd, const void *data, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t w = write(fd, (const char *)data + at, n - at);
        if (w <= 0) die("write");
        at += (size_t)w;
    }
}

static char *next_path(struct bench *b, const char *name) {
    char *path = b->path[b->files++];
    snprintf(path, PATH_BYTES, "%s/%s", b->dir, name);
    return path;
}

/* No two blocks alike, so that nothing below can store one for the other; no NaN code in it. */
static void write_shard(struct bench *b, const char *name, struct shard *s) {
    static uint64_t x = 88172645463325252u;
    int fd = open(next_path(b, name), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) die(name);
    s->n += (size_t)snprintf(s->header + s->n, sizeof s->header - s->n, "}");
    uint64_t n = s->n;
    write_all(fd, &n, sizeof n);
    write_all(fd, s->header, s->n);
    for (size_t at = 0; at < s->bytes; at += BLOCK) {
        uint64_t *words = (uint64_t *)(void *)b->block;
        for (size_t i = 0; i < BLOCK / 8; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            words[i] = x & 0x7777777777777777u;
        }
        write_all(fd, b->block, s->bytes - at < BLOCK ? s->bytes - at : BLOCK);
    }
    if (fsync(fd) != 0 || close(fd) != 0) die(name);
    b->bytes += 8 + s->n + s->bytes;
}

static void write_config(struct bench *b) {
    FILE *f = fopen(next_path(b, "config.json"), "w");
    if (!f) die("config.json");
    fprintf(f,
            "{\"dim\": %d, \"moe_inter_dim\": %d, \"n_layers\": %d, \"n_hash_layers\": 0,"
            "\"n_heads\": 2, \"n_activated_experts\": 2, \"route_scale\": 1.5, \"q_lora_rank\": %d,"
            "\"norm_eps\": 1e-6, \"o_groups\": 2, \"o_lora_rank\": %d, \"original_seq_len\": 4096,"
            "\"rope_factor\": 4, \"beta_fast\": 32, \"beta_slow\": 1, \"vocab_size\": %d,"
            "\"index_n_heads\": 1, \"index_topk\": 4, \"n_routed_experts\": %d,"
            "\"n_shared_experts\": 1, \"swiglu_limit\": 10, \"hc_sinkhorn_iters\": 20,"
            "\"hc_eps\": 1e-6, \"rope_theta\": 1e4, \"compress_rope_theta\": 16e4,"
            "\"compress_ratios\": [",
            HIDDEN, INNER, b->layers, LORA, LORA, VOCAB, EXPERTS);
    for (int l = 0; l < b->layers; l++)
        fprintf(f, "%s0", l ? "," : "");
    fprintf(f, "]}");
    if (fclose(f) != 0) die("config.json");
}

/* One shard per layer and one for the rest, joined by an index, as releases are. */
static void write_checkpoint(struct bench *b) {
    struct shard *s = malloc(sizeof *s);
    if (!s) die("malloc");
    char name[64];
    FILE *index = fopen(next_path(b, "model.safetensors.index.json"), "w");
    if (!index) die("index");
    fprintf(index, "{\"weight_map\":{");
    for (int l = -1; l < b->layers; l++) {
        *s = (struct shard){.header = "{", .n = 1};
        if (l < 0) {
            put(s, "BF16", VOCAB, HIDDEN, "embed.weight");
            put(s, "BF16", VOCAB, HIDDEN, "head.weight");
            put(s, "BF16", 0, HIDDEN, "norm.weight");
            put_hc(s, "hc_head", 4, 1);
        } else {
            put_layer(s, l);
        }
        snprintf(name, sizeof name, "model-%05d.safetensors", l + 1);
        /* The names are those of the header: each follows a quote at depth one. */
        for (const char *p = s->header; (p = strstr(p, "\":{\"dtype\"")); p++) {
            const char *from = p;
            while (from[-1] != '"')
                from--;
            fprintf(index, "%s\"%.*s\":\"%s\"", l < 0 && from == s->header + 2 ? "" : ",",
                    (int)(p - from), from, name);
        }
        write_shard(b, name, s);
    }
    fprintf(index, "}}");
    if (fclose(index) != 0) die("index");
    free(s);
    write_config(b);
}

/* ---- measuring ---- */

/* Bytes of the file that are in the page cache. */
static size_t resident(int fd, size_t size) {
    size_t pages = (size + 4095) / 4096, n = 0;
    unsigned char *in = malloc(pages);
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (!in || map == MAP_FAILED || mincore(map, size, in) != 0) die("mincore");
    for (size_t i = 0; i < pages; i++)
        n += in[i] & 1;
    munmap(map, size);
    free(in);
    return n * 4096;
}

/* Asked for again until it is so: the first call leaves what is still on its way. */
static void drop(const struct bench *b) {
    enum { TRIES = 10 };
    size_t left = 0;
    for (int i = 0; i < b->files; i++) {
        int fd = open(b->path[i], O_RDONLY | O_CLOEXEC);
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0) die(b->path[i]);
        for (int k = 0; k < TRIES; k++) {
            if (fdatasync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
                die("posix_fadvise");
            if (resident(fd, (size_t)st.st_size) == 0) break;
        }
        left += resident(fd, (size_t)st.st_size);
        close(fd);
    }
    if (left) printf("still in the page cache: %.0f MB\n", (double)left / 1e6);
}

/* Wall and processor seconds: on a shared machine the second says more. */
struct spent {
    double wall, cpu;
};

static struct spent now(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (struct spent){(double)td_now_ns() / 1e9,
                          (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                              (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6};
}

static struct spent since(struct spent start) {
    struct spent end = now();
    return (struct spent){end.wall - start.wall, end.cpu - start.cpu};
}

static struct spent read_files(const struct bench *b) {
    struct spent start = now();
    for (int i = 0; i < b->files; i++) {
        int fd = open(b->path[i], O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : 1;
        while (n > 0)
            n = read(fd, b->block, BLOCK);
        if (n < 0) die(b->path[i]);
        close(fd);
    }
    return since(start);
}

static struct spent open_model(const struct bench *b, bool sum) {
    struct td_model *m;
    struct td_error err;
    struct spent start = now();
    uint64_t total = 0;
    if (td_model_open(b->dir, &m, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    for (size_t i = 0; sum && i < m->files->files; i++) {
        const struct td_safetensors *f = &m->files->file[i];
        for (size_t at = 0; at < f->size; at++)
            total += f->map[at];
    }
    volatile uint64_t keep = total; /* the sum is wanted for its reads only */
    (void)keep;
    struct spent s = since(start);
    td_model_close(m);
    return s;
}

static int by_wall(const void *a, const void *b) {
    const struct spent *x = a, *y = b;
    return (x->wall > y->wall) - (x->wall < y->wall);
}

/* Sorts; the one in the middle by wall time. */
static struct spent median(struct spent *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_wall);
    return v[n / 2];
}

static void show(const char *what, struct spent s, double mb) {
    printf("%-22s %6.2f s %6.0f MB/s, processor %5.2f s\n", what, s.wall, mb / s.wall, s.cpu);
}

int main(int argc, char **argv) {
    struct bench *b = &the_bench;
    struct spent plain[MAX_ROUNDS], opened[MAX_ROUNDS], summed[MAX_ROUNDS];
    struct spent warm_plain[MAX_ROUNDS], warm_opened[MAX_ROUNDS];
    long mb = argc > 1 ? strtol(argv[1], NULL, 10) : 2000;
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 3;
    const char *tmp = getenv("TMPDIR");
    double per_layer = 3.0 * (EXPERTS + 1) * HIDDEN * INNER / 1e6;
    b->layers = (int)(((double)mb - 4.0 * VOCAB * HIDDEN / 1e6) / per_layer);
    b->layers = b->layers < 1 ? 1 : b->layers > MAX_FILES - 3 ? MAX_FILES - 3 : b->layers;
    if (rounds < 1 || rounds > MAX_ROUNDS) return 2;
    snprintf(b->dir, sizeof b->dir, "%s/tandem-load-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    b->block = aligned_alloc(4096, BLOCK);
    b->path = calloc(MAX_FILES, sizeof *b->path);
    if (!b->block || !b->path || !mkdtemp(b->dir)) die(b->dir);
    atexit(clean);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    write_checkpoint(b);
    for (int i = 0; i < rounds; i++) {
        /* In turns: on some machines whoever comes first in a round is favoured. */
        for (int k = 0; k < 2; k++) {
            drop(b);
            if ((k + i) % 2)
                opened[i] = open_model(b, false);
            else
                plain[i] = read_files(b);
        }
        drop(b);
        summed[i] = open_model(b, true);
        for (int k = 0; k < 2; k++) {
            if ((k + i) % 2)
                warm_opened[i] = open_model(b, false);
            else
                warm_plain[i] = read_files(b);
        }
        printf("round %d: read %.2f s, open %.2f s, open and sum %.2f s\n", i + 1, plain[i].wall,
               opened[i].wall, summed[i].wall);
    }
    struct spent r = median(plain, (int)rounds), o = median(opened, (int)rounds);
    struct spent wr = median(warm_plain, (int)rounds), wo = median(warm_opened, (int)rounds);
    double size = (double)b->bytes / 1e6;
    printf("%.0f MB in %d files, medians of %ld:\n", size, b->files, rounds);
    show("read", r, size);
    show("open", o, size);
    show("open and sum", median(summed, (int)rounds), size);
    show("read, page cache", wr, size);
    show("open, page cache", wo, size);
    /* median() has sorted them. */
    printf("cold: open runs at %.0f %% of the speed of reading by medians, %.0f %% by best rounds\n",
           100 * r.wall / o.wall, 100 * plain[0].wall / opened[0].wall);
    printf("warm: %.0f %% by medians, %.0f %% by best rounds\n", 100 * wr.wall / wo.wall,
           100 * warm_plain[0].wall / warm_opened[0].wall);
    free(b->block);
    return 0;
}
