/* The metrics page: histograms add up, every sample has its type, names cannot break a label. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/metrics.h"

static char *page(const struct td_metrics *m, const struct td_metrics_gauges *g) {
    struct td_json_out w = {0};
    td_metrics_write(&w, m, g);
    assert_false(w.failed);
    char *text = strndup(w.p, w.n);
    td_json_out_free(&w);
    assert_non_null(text);
    return text;
}

static double value(const char *text, const char *name) {
    char line[200];
    snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(text, line);
    if (!at) print_message("no %s in\n%s\n", name, text);
    assert_non_null(at);
    return strtod(at + strlen(line), NULL);
}

static void test_histogram(void **state) {
    (void)state;
    struct td_metrics m = {0};
    struct td_metrics_gauges g = {0};
    static const double v[] = {0, 0.001, 0.0011, 0.7, 1, 299, 1e6, -1};
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        td_histogram_add(&m.ttft, v[i]);
    char *text = page(&m, &g);
#define N "tandem_time_to_first_token_seconds"
    assert_true(value(text, N "_bucket{le=\"0.001\"}") == 3); /* 0, the bound itself, -1 as 0 */
    assert_true(value(text, N "_bucket{le=\"0.0025\"}") == 4);
    assert_true(value(text, N "_bucket{le=\"1\"}") == 6);
    assert_true(value(text, N "_bucket{le=\"300\"}") == 7);
    assert_true(value(text, N "_bucket{le=\"+Inf\"}") == 8);
    assert_true(value(text, N "_count") == 8);
    assert_true(value(text, N "_sum") > 1000300 && value(text, N "_sum") < 1000301);
#undef N
    free(text);
}

static void test_phases(void **state) {
    (void)state;
    struct td_metrics m = {0};
    struct td_metrics_gauges g = {0};
    td_histogram_add(&m.phase[TD_PHASE_QUEUE], 0.25);
    td_histogram_add(&m.phase[TD_PHASE_QUEUE], 0.5);
    td_histogram_add(&m.phase[TD_PHASE_DECODE], 4);
    char *text = page(&m, &g);
#define N "tandem_request_phase_seconds"
    assert_true(value(text, N "_bucket{phase=\"queue\",le=\"0.25\"}") == 1);
    assert_true(value(text, N "_bucket{phase=\"queue\",le=\"+Inf\"}") == 2);
    assert_true(value(text, N "_sum{phase=\"queue\"}") == 0.75);
    assert_true(value(text, N "_count{phase=\"queue\"}") == 2);
    assert_true(value(text, N "_sum{phase=\"decode\"}") == 4);
    assert_true(value(text, N "_count{phase=\"transfer\"}") == 0);
#undef N
    free(text);
}

static void test_counters(void **state) {
    (void)state;
    struct td_metrics m = {.prompt_tokens = 5, .completion_tokens = 1ull << 60, .worker_losses = 2};
    struct td_metrics_gauges g = {.ready = true, .in_flight = 7, .queued = 3, .connections = 9};
    for (int i = 0; i < TD_OUTCOMES; i++)
        m.requests[i] = 10u + (unsigned)i;
    char *text = page(&m, &g);
    assert_true(value(text, "tandem_requests_total{outcome=\"stop\"}") == 10);
    assert_true(value(text, "tandem_requests_total{outcome=\"failed\"}") == 10 + TD_OUTCOME_FAILED);
    assert_non_null(strstr(text, "\ntandem_completion_tokens_total 1152921504606846976\n"));
    assert_true(value(text, "tandem_ready") == 1 && value(text, "tandem_requests_in_flight") == 7);
    assert_true(value(text, "tandem_requests_queued") == 3);
    free(text);
}

static void test_workers(void **state) {
    (void)state;
    struct td_metrics m = {0};
    struct td_metrics_worker w[] = {
        {.name = "decode@0", .role = "decode", .running = 4, .bytes_moved = 99},
        {.name = "e\"v\\i\nl", .role = "prefill", .running = 5},
    };
    struct td_metrics_gauges g = {.workers = w, .n_workers = 2};
    char *text = page(&m, &g);
    assert_true(value(text, "tandem_worker_running{worker=\"decode@0\",role=\"decode\"}") == 4);
    assert_true(
        value(text, "tandem_worker_handoff_bytes_total{worker=\"decode@0\",role=\"decode\"}") ==
        99);
    assert_true(value(text, "tandem_worker_running{worker=\"e\\\"v\\\\i l\",role=\"prefill\"}") ==
                5);
    free(text);
}

/* HELP and TYPE come once, before the samples; every line is a comment or a sample with a value. */
static void test_format(void **state) {
    (void)state;
    struct td_metrics m = {0};
    struct td_metrics_worker w = {.name = "prefill@0", .role = "prefill"};
    struct td_metrics_gauges g = {.workers = &w, .n_workers = 1};
    char *text = page(&m, &g), *rest = NULL;
    char family[100] = "";
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (strncmp(line, "# HELP ", 7) == 0) {
            snprintf(family, sizeof family, "%.*s", (int)strcspn(line + 7, " "), line + 7);
            continue;
        }
        if (strncmp(line, "# TYPE ", 7) == 0) {
            assert_int_equal(strncmp(line + 7, family, strlen(family)), 0);
            continue;
        }
        assert_int_equal(strncmp(line, family, strlen(family)), 0);
        char *end, *number = strrchr(line, ' ');
        assert_non_null(number);
        (void)strtod(number, &end);
        assert_true(*end == 0 && end > number + 1);
    }
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_histogram), cmocka_unit_test(test_phases),
        cmocka_unit_test(test_counters),  cmocka_unit_test(test_workers),
        cmocka_unit_test(test_format),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
