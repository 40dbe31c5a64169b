/* `tandem tokenize`: text on stdin to token ids, and back with --decode. Names of added tokens in
 * the text are recognised, as Hugging Face does, so that the two can be compared. */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer.h"
#include "deploy/tool/tool.h"

static void usage(FILE *out) {
    fprintf(out, "usage: tandem tokenize --tokenizer DIR [--decode] < INPUT\n\n"
                 "Writes the token ids of the text on standard input as one line.\n\n"
                 "  --tokenizer DIR  folder with tokenizer.json (a checkpoint)\n"
                 "  --decode         read ids, separated by white space; write the bytes they "
                 "stand for\n"
                 "  --help           this text\n");
}

static td_status read_stdin(char **ret_text, size_t *ret_n, struct td_error *err) {
    char *text = NULL;
    size_t n = 0, cap = 0;
    do {
        if (n == cap) {
            cap = cap ? 2 * cap : 1 << 16;
            char *p = cap > 2 * TD_TEXT_BYTES_MAX ? NULL : realloc(text, cap);
            if (!p) {
                free(text);
                return td_fail(err, TD_NO_MEMORY, "standard input: no memory beyond %zu bytes", n);
            }
            text = p;
        }
        n += fread(text + n, 1, cap - n, stdin);
    } while (!feof(stdin) && !ferror(stdin));
    if (ferror(stdin)) {
        free(text);
        return td_fail(err, TD_IO, "standard input: %s", strerror(errno));
    }
    *ret_text = text;
    *ret_n = n;
    return TD_OK;
}

static td_status encode(const struct td_tokenizer *t, const char *text, size_t n,
                        struct td_error *err) {
    struct td_ids ids = {0};
    td_status st = td_tokenizer_encode_added(t, text, n, &ids, err);
    for (size_t i = 0; st == TD_OK && i < ids.n; i++) {
        printf(i ? " %d" : "%d", ids.ids[i]);
    }
    if (st == TD_OK) putchar('\n');
    td_ids_free(&ids);
    return st;
}

static td_status decode(const struct td_tokenizer *t, const char *text, size_t n,
                        struct td_error *err) {
    static const char white[] = " \t\r\n\v\f";
    for (size_t i = 0, k; i < n; i += k) {
        while (i < n && memchr(white, text[i], sizeof white - 1)) {
            i++;
        }
        for (k = 0; i + k < n && !memchr(white, text[i + k], sizeof white - 1); k++) {
        }
        if (k == 0) break;
        char word[12] = "";
        memcpy(word, text + i, k < sizeof word ? k : sizeof word - 1);
        char *end;
        long id = strtol(word, &end, 10);
        if (*end || word[0] < '0' || word[0] > '9' || id >= td_tokenizer_size(t)) {
            return td_fail(err, TD_INVALID, "input: expected token ids of 0..%d, found '%s'",
                           td_tokenizer_size(t) - 1, word);
        }
        size_t bytes;
        const char *p = td_tokenizer_bytes(t, (int32_t)id, &bytes);
        fwrite(p, 1, bytes, stdout);
    }
    return TD_OK;
}

static td_status tokenize(const char *dir, bool back, struct td_error *err) {
    struct td_tokenizer *t = NULL;
    char *text = NULL;
    size_t n = 0;
    td_status st = td_tokenizer_load(dir, &t, err);
    if (st == TD_OK) st = read_stdin(&text, &n, err);
    if (st == TD_OK) st = back ? decode(t, text, n, err) : encode(t, text, n, err);
    free(text);
    td_tokenizer_destroy(t);
    if (st == TD_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        return td_fail(err, TD_IO, "standard output: %s", strerror(errno));
    }
    return st;
}

int td_cmd_tokenize(int argc, char **argv) {
    static const struct option options[] = {{"tokenizer", required_argument, NULL, 't'},
                                            {"decode", no_argument, NULL, 'd'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    const char *dir = NULL;
    bool back = false;
    optind = 0; /* the program's main has its own argv[0] before this one */
    for (int o; (o = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (o) {
        case 't':
            dir = optarg;
            break;
        case 'd':
            back = true;
            break;
        case 'h':
            usage(stdout);
            return TD_EXIT_OK;
        default:
            usage(stderr);
            return TD_EXIT_USAGE;
        }
    }
    if (!dir || optind < argc) {
        fprintf(stderr, "tandem tokenize: expected --tokenizer DIR and no other argument\n\n");
        usage(stderr);
        return TD_EXIT_USAGE;
    }
    struct td_error err = {0};
    if (tokenize(dir, back, &err) != TD_OK) {
        fprintf(stderr, "tandem tokenize: %s\n", err.text);
        return TD_EXIT_FAILED;
    }
    return TD_EXIT_OK;
}
