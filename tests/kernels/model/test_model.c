/* Opening checkpoints: whole ones in every format, and broken ones, each of which must be refused
 * with a sentence that names file, tensor, what was expected and what was found. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "kernels/model/load.h"
#include "kernels/model/model.h"
#include "kernels/model/numbers.h"
#include "tests/kernels/model/maker.h"
#include "tests/kernels/model/refuse.h"

static uint64_t opens(const struct maker *m) {
    struct td_model *model;
    struct td_error err = {0};
    td_status st = td_model_open(m->dir, &model, &err);
    if (st != TD_OK) print_message("%s\n", err.text);
    assert_int_equal(st, TD_OK);
    assert_int_equal(model->bytes, m->bytes);
    uint64_t f = model->fingerprint;
    td_model_close(model);
    return f;
}

static void every_format_opens(void **state) {
    (void)state;
    static const enum td_weight_format linear[] = {TD_W_BF16, TD_W_FP8_BLOCK, TD_W_FP8_BLOCK};
    static const enum td_weight_format expert[] = {TD_W_BF16, TD_W_FP4, TD_W_NVFP4};
    for (int kind = 0; kind < 3; kind++) {
        struct maker m;
        struct td_model *model;
        struct td_error err = {0};
        maker_init(&m, (enum maker_kind)kind);
        maker_write(&m);
        assert_int_equal(td_model_open(m.dir, &model, &err), TD_OK);
        assert_int_equal(model->config.layers, 3);
        assert_int_equal(model->config.kind[0], TD_LAYER_SWA);
        assert_int_equal(model->config.kind[1], TD_LAYER_CSA);
        assert_int_equal(model->config.kind[2], TD_LAYER_HCA);
        assert_true(model->config.compress_rope_theta == 160000.0f);
        assert_true(model->config.quantised == (kind != MAKER_BF16));
        const struct td_layer_weights *l = model->layer;
        for (int i = 0; i < 3; i++) {
            assert_int_equal(l[i].wq_b.format, linear[kind]);
            assert_int_equal(l[i].shared.w2.format, linear[kind]);
            assert_int_equal(l[i].experts[1].w2.format, expert[kind]);
            assert_int_equal(l[i].experts[1].w2.rows, 64);
            assert_int_equal(l[i].experts[1].w2.cols, 32);
            assert_int_equal(l[i].comp.wkv.format, i ? TD_W_BF16 : TD_W_NONE);
            assert_int_equal(l[i].index_wq_b.format, i == 1 ? linear[kind] : TD_W_NONE);
            assert_int_equal(l[i].gate_bias.format, i ? TD_W_F32 : TD_W_NONE);
            assert_true((l[i].tid2eid != NULL) == (i == 0));
        }
        assert_int_equal(l[0].tid2eid[3], 1);
        td_model_close(model);
        maker_finish(&m);
    }
}

static void shards_equal_one_file(void **state) {
    (void)state;
    struct maker m;
    maker_init(&m, MAKER_NVFP4);
    maker_write_shards(&m, NULL, NULL);
    uint64_t sharded = opens(&m);
    maker_write(&m); /* model.safetensors now comes first */
    assert_true(opens(&m) == sharded);
    m.data[maker_find(&m, "norm.weight")->begin + 64] ^= 1;
    maker_write(&m);
    assert_true(opens(&m) != sharded);
    maker_finish(&m);
}

static void draft_tensors_are_ignored(void **state) {
    (void)state;
    struct maker m;
    uint64_t shape[1] = {3};
    maker_init(&m, MAKER_BF16);
    maker_write(&m);
    uint64_t before = opens(&m);
    size_t bytes = m.bytes;
    maker_add(&m, "mtp.0.whatever", "F16", 1, shape, 6);
    maker_write(&m);
    m.bytes = bytes; /* not counted either */
    assert_true(opens(&m) == before);
    maker_finish(&m);
}

static void misaligned_tensors_are_copied(void **state) {
    (void)state;
    struct maker m;
    struct td_model *a, *b;
    struct td_error err;
    maker_init(&m, MAKER_BF16);
    maker_write(&m);
    assert_int_equal(td_model_open(m.dir, &a, &err), TD_OK);
    char *h = maker_header(&m, 0, m.n);
    size_t n = strlen(h), odd = n + 1 + n % 2; /* data area at an odd address */
    char *padded = malloc(odd + 1);
    snprintf(padded, odd + 1, "%-*s", (int)odd, h);
    char path[160];
    snprintf(path, sizeof path, "%s/model.safetensors", m.dir);
    unlink(path); /* `a` keeps the old file mapped */
    maker_write_file(&m, "model.safetensors", padded, odd, -1, m.data, m.bytes);
    assert_int_equal(td_model_open(m.dir, &b, &err), TD_OK);
    assert_int_equal((uintptr_t)b->layer[0].tid2eid % 8, 0);
    assert_int_equal((uintptr_t)b->norm.data % 2, 0);
    float x[64], y[64];
    for (uint32_t r = 0; r < 8; r++) {
        td_weight_row(&a->embed, r, x);
        td_weight_row(&b->embed, r, y);
        assert_memory_equal(x, y, sizeof x);
        assert_true(a->layer[0].tid2eid[r] == b->layer[0].tid2eid[r]);
    }
    assert_true(a->fingerprint == b->fingerprint);
    td_model_close(a);
    td_model_close(b);
    free(h);
    free(padded);
    maker_finish(&m);
}

static void tensors_must_fit_the_configuration(void **state) {
    (void)state;
    struct maker m;
    uint64_t shape[2] = {2, 64};
    maker_init(&m, MAKER_FP8FP4);
    struct maker_tensor *t = maker_find(&m, "layers.1.attn.wkv.weight"), keep = *t;
    t->shape[0] = 256;
    t->shape[1] = 128;
    maker_write(&m);
    REFUSED(&m, "model.safetensors", "layers.1.attn.wkv.weight", "expected shape [512, 64]",
            "found [256, 128]");
    *t = keep;
    t->shape[0] = 256; /* half the rows, and half the bytes */
    t->end -= (t->end - t->begin) / 2;
    maker_write(&m);
    REFUSED(&m, "layers.1.attn.wkv.weight", "expected shape [512, 64]", "found [256, 64]");
    *t = keep;
    t->dtype = "F8_E5M2";
    maker_write(&m);
    REFUSED(&m, "layers.1.attn.wkv.weight", "expected BF16, F32, F8_E4M3, I8 or U8",
            "found F8_E5M2");
    *t = keep;
    t = maker_find(&m, "layers.0.hc_ffn_fn");
    t->dtype = "BF16";
    t->end -= (t->end - t->begin) / 2;
    maker_write(&m);
    REFUSED(&m, "layers.0.hc_ffn_fn", "expected F32", "found BF16");
    t->dtype = "F32";
    t->end += t->end - t->begin;
    t = maker_find(&m, "layers.2.ffn.experts.1.w3.scale");
    t->dtype = "I8";
    maker_write(&m);
    REFUSED(&m, "layers.2.ffn.experts.1.w3.scale", "expected F8_E8M0", "found I8");
    t->dtype = "F8_E8M0";
    m.data[t->begin + 5] = 255;
    maker_write(&m);
    REFUSED(&m, "layers.2.ffn.experts.1.w3.scale", "expected scales that are numbers", "255");
    m.data[t->begin + 5] = 100;
    t = maker_find(&m, "layers.0.ffn.gate.tid2eid");
    m.data[t->begin + 8] = 2;
    maker_write(&m);
    REFUSED(&m, "layers.0.ffn.gate.tid2eid", "expected values from 0 to 1", "found 2 at [1, 0]");
    memset(m.data + t->begin + 8, 0xff, 8);
    maker_write(&m);
    REFUSED(&m, "layers.0.ffn.gate.tid2eid", "found -1 at [1, 0]");
    memset(m.data + t->begin + 8, 0, 8);
    maker_add(&m, "layers.0.attn.q_bias", "BF16", 2, shape, 256);
    maker_write(&m);
    REFUSED(&m, "layers.0.attn.q_bias", "expected no such name", "found BF16");
    maker_remove(&m, "layers.0.attn.q_bias");
    maker_remove(&m, "layers.2.attn.wq_a.scale");
    maker_write(&m);
    REFUSED(&m, "layers.2.attn.wq_a.scale", "expected by config.json", "found nothing");
    maker_finish(&m);
}

static void e4m3_weights_must_be_numbers(void **state) {
    (void)state;
    struct maker m;
    maker_init(&m, MAKER_FP8FP4);
    struct maker_tensor *t = maker_find(&m, "layers.1.attn.wo_a.weight");
    size_t last = t->end - t->begin - 1;
    m.data[t->begin + last] = 0xff;
    maker_write(&m);
    char found[64];
    snprintf(found, sizeof found, "found the NaN code 255 at byte %zu", last);
    REFUSED(&m, "layers.1.attn.wo_a.weight", "expected weights that are numbers", found);
    m.data[t->begin + last] = 0xfe; /* -448: the largest that is one */
    maker_write(&m);
    opens(&m);
    m.data[t->begin] = 0x7f;
    maker_write(&m);
    REFUSED(&m, "layers.1.attn.wo_a.weight", "found the NaN code 127 at byte 0");
    maker_finish(&m);
}

struct seen {
    size_t calls, done, total;
    bool backwards;
};

static void note(void *arg, size_t done, size_t total) {
    struct seen *s = arg;
    s->backwards |= s->calls ? done <= s->done || total != s->total : done != 0;
    s->calls++;
    s->done = done;
    s->total = total;
}

/* Drafts are not read, and so not counted; the shards are in one total. */
static void reading_is_shown(void **state) {
    (void)state;
    struct maker m;
    struct td_model *model;
    struct td_error err;
    struct seen s = {0};
    uint64_t shape[1] = {1 << 20};
    maker_init(&m, MAKER_FP8FP4);
    size_t bytes = m.bytes;
    maker_add(&m, "mtp.0.head.weight", "U8", 1, shape, 1 << 20);
    maker_write_shards(&m, NULL, NULL);
    const struct td_load_watch watch = {note, &s};
    assert_int_equal(td_model_open_watched(m.dir, &watch, &model, &err), TD_OK);
    assert_int_equal(model->bytes, bytes);
    td_model_close(model);
    assert_true(s.calls >= 3);
    assert_false(s.backwards);
    assert_int_equal(s.done, bytes);
    assert_int_equal(s.total, bytes);
    maker_finish(&m);
}

static void reading_stops_at_its_limit(void **state) {
    (void)state;
    struct maker m;
    struct td_model_files f;
    struct td_error err;
    maker_init(&m, MAKER_BF16);
    maker_write_shards(&m, NULL, NULL);
    assert_int_equal(td_files_open(&f, m.dir, &err), TD_OK);
    const size_t limits[] = {0, 1, 5000, m.bytes - 1, m.bytes, m.bytes + 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        size_t want = limits[i] < m.bytes ? limits[i] : m.bytes;
        struct seen s = {0};
        const struct td_load_watch watch = {note, &s};
        assert_int_equal(td_files_read_through(&f, 3, 1, limits[i], &watch, &err), TD_OK);
        assert_int_equal(s.done, want);
        assert_int_equal(s.total, want);
        assert_false(s.backwards);
    }
    td_files_finish(&f);
    assert_true(td_load_limit() > m.bytes);
    maker_finish(&m);
}

static void nvfp4_factors_must_be_positive_numbers(void **state) {
    (void)state;
    static const float bad[] = {0.0f, -1.0f, NAN, INFINITY};
    struct maker m;
    maker_init(&m, MAKER_NVFP4);
    struct maker_tensor *t = maker_find(&m, "layers.0.ffn.experts.0.w1.weight_scale_2");
    for (size_t i = 0; i < 4; i++) {
        memcpy(m.data + t->begin, &bad[i], 4);
        maker_write(&m);
        REFUSED(&m, "layers.0.ffn.experts.0.w1.weight_scale_2", "expected a positive number");
    }
    memcpy(m.data + t->begin, &(float){1}, 4);
    t = maker_find(&m, "layers.0.ffn.experts.0.w1.weight_scale");
    m.data[t->begin] = 0x7f;
    maker_write(&m);
    REFUSED(&m, "layers.0.ffn.experts.0.w1.weight_scale", "NaN code 127");
    maker_finish(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_opens),
        cmocka_unit_test(shards_equal_one_file),
        cmocka_unit_test(draft_tensors_are_ignored),
        cmocka_unit_test(misaligned_tensors_are_copied),
        cmocka_unit_test(tensors_must_fit_the_configuration),
        cmocka_unit_test(e4m3_weights_must_be_numbers),
        cmocka_unit_test(reading_is_shown),
        cmocka_unit_test(reading_stops_at_its_limit),
        cmocka_unit_test(nvfp4_factors_must_be_positive_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
