/* SPDX-License-Identifier: Apache-2.0 */
/* bench linear on a GPU, on the fakes of tests/device and tests/linear: every line is there with
 * its fields, and the hashes are those of the layer's results, whatever the algorithm. FP8 differs
 * from bf16 by at most 5 %, the bound of test_linear_cuda.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bench/command/bench.h"
#include "bench/command/linear_cuda.h"
#include "emulator/emulated.h"

enum { N_LINES = 4, LINE_BYTES = 2048 };

typedef struct lines {
    char line[N_LINES][LINE_BYTES];
} lines;

/* bench.c has the program's, and all measurements with it. */
bl_bench_times bl_bench_summarize(double *seconds, int64_t n)
{
    double best_s = seconds[0];
    for (int64_t i = 1; i < n; i++) best_s = seconds[i] < best_s ? seconds[i] : best_s;
    return (bl_bench_times){.best_s = best_s, .median_s = best_s};
}

/* The output of one case. */
static void run(bl_format format, lines *out)
{
    bl_linear_case shape = {.model = "small",
                            .matrix = "qkv",
                            .format = format,
                            .T = 24,
                            .runs = 2,
                            .micro_batches = 3,
                            .time_algorithms = true,
                            .linear = {.n_parts = 2}};
    bl_device *device;
    bl_stream *stream;
    char *text;
    size_t bytes;
    FILE *standard_output = stdout;

    shape.linear.weight = (bl_weight){.rows = 160, .cols = 128};
    shape.linear.part[0] = (bl_lora_part){.r = 8, .rows = 96, .scale = 2};
    shape.linear.part[1] = (bl_lora_part){.r = 3, .row_begin = 96, .rows = 64, .scale = 2};
    assert_int_equal(bl_device_create_cuda(0, &device), BL_OK);
    assert_int_equal(bl_stream_create(device, "test", &stream), BL_OK);
    assert_non_null(stdout = open_memstream(&text, &bytes));
    bl_status st = bl_bench_linear_cuda(device, stream, &shape);
    fclose(stdout);
    stdout = standard_output;
    if (st != BL_OK) fail_msg("%s", bl_error_text());
    char *at = text;
    for (int i = 0; i < N_LINES; i++) {
        char *end = strchr(at, '\n');
        assert_non_null(end);
        snprintf(out->line[i], LINE_BYTES, "%.*s", (int)(end - at), at);
        at = end + 1;
    }
    assert_int_equal(*at, '\0');
    free(text);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
}

/* The text of a field; "" where there is none. */
static const char *value(const char *line, const char *key, char *out)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(line, quoted);
    *out = '\0';
    if (at) sscanf(at + strlen(quoted), "%63[^,}]", out);
    return out;
}

static void check_bits(const lines *l)
{
    char bits[64], timed[64];
    for (int i = 0; i < N_LINES; i++) {
        assert_string_equal(value(l->line[i], "bits", bits),
                            value(l->line[i], "timed_bits", timed));
        assert_int_equal(strlen(bits), 18);
        assert_string_equal(bits, value(l->line[i], "visit_bits", timed));
        for (int k = 0; k < i; k++) assert_string_not_equal(bits, value(l->line[k], "bits", timed));
    }
}

static void test_lines(void **state)
{
    static const char *const modes[N_LINES] = {"\"bf16\"", "\"bf16\"", "\"fp8\"", "\"fp8\""};
    static const char *const passes[N_LINES] = {"\"forward\"", "\"backward\"", "\"forward\"",
                                                "\"backward\""};
    lines l, again;
    char text[64];
    (void)state;

    for (bl_format format = BL_FORMAT_FP8_ROW; format <= BL_FORMAT_FP8_BLOCK; format++) {
        run(format, &l);
        for (int i = 0; i < N_LINES; i++) {
            bool is_fp8 = i >= 2;
            assert_string_equal(value(l.line[i], "mode", text), modes[i]);
            assert_string_equal(value(l.line[i], "pass", text), passes[i]);
            assert_true(atof(value(l.line[i], "seconds", text)) > 0);
            assert_true(atof(value(l.line[i], "percent_of_gemm", text)) > 0);
            assert_int_equal(atoi(value(l.line[i], "micro_batches", text)), 3);
            assert_true(atof(value(l.line[i], "visit_seconds", text)) > 0);
            assert_true(atof(value(l.line[i], "visit_percent_of_gemm", text)) > 0);
            assert_true(atof(value(l.line[i], "timed_percent_of_gemm", text)) > 0);
            assert_int_equal(atof(value(l.line[i], "percent_of_fp8_gemm", text)) > 0, is_fp8);
            assert_int_equal(atof(value(l.line[i], "times_bf16", text)) > 0, is_fp8);
            double difference = atof(value(l.line[i], "difference_from_bf16", text));
            assert_true(is_fp8 ? difference > 0.01 && difference < 0.05 : difference == 0);
            assert_true(!is_fp8 ||
                        strstr("\"full\" \"fast\"", value(l.line[i], "fp8_gemm_sums", text)));
        }
        check_bits(&l);
        run(format, &again);
        for (int i = 0; i < N_LINES; i++) {
            char bits[64];
            assert_string_equal(value(l.line[i], "bits", bits), value(again.line[i], "bits", text));
        }
    }
}

static void test_no_fp8(void **state)
{
    lines l;
    char text[64];
    (void)state;

    emulated_cublaslt_refuse_fp8(true);
    run(BL_FORMAT_FP8_ROW, &l);
    emulated_cublaslt_refuse_fp8(false);
    for (int i = 2; i < N_LINES; i++) {
        assert_string_equal(value(l.line[i], "fp8_gemm_sums", text), "\"none\"");
        assert_true(atof(value(l.line[i], "fp8_gemm_seconds", text)) == 0);
        assert_true(atof(value(l.line[i], "percent_of_fp8_gemm", text)) == 0);
        assert_true(atof(value(l.line[i], "difference_from_bf16", text)) == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lines), cmocka_unit_test(test_no_fp8)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
