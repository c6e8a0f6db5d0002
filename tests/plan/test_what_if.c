/* SPDX-License-Identifier: Apache-2.0 */
/* Plans with one thing otherwise. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "plan/what_if.h"

static char *model[] = {"--model_name_or_path", "llama-3.1-405b", "--offload_ratio", "1"};
static const bl_what_if_case job = {.machine = {.name = "8xh100"}, .argc = 4, .argv = model};

static bl_what_if run(const char *spec)
{
    bl_what_if w;
    if (bl_what_if_run(&job, spec, &w) != BL_OK) fail_msg("%s: %s", spec, bl_error_text());
    return w;
}

static void a_figure_of_the_machine(void **state)
{
    (void)state;
    bl_what_if w = run("copy_in_bytes_per_s=2e9,10e9,50e9");
    assert_string_equal(w.key, "copy_in_bytes_per_s");
    assert_string_equal(w.title, "llama-3.1-405b on 8xh100");
    assert_int_equal(w.n_rows, 3);
    assert_string_equal(w.rows[1].value, "10e9");
    for (int i = 0; i < 3; i++) assert_true(w.rows[i].fits);
    assert_true(w.rows[0].time.tokens_per_s < w.rows[1].time.tokens_per_s);
    assert_true(w.rows[1].time.tokens_per_s < w.rows[2].time.tokens_per_s);
}

static void a_key_takes_the_place_of_a_given_one(void **state)
{
    (void)state;
    bl_what_if w = run("offload_ratio=0.25,1");
    assert_true(w.rows[0].device_bytes > w.rows[1].device_bytes + 30e9);
}

static void machines_and_rows(void **state)
{
    (void)state;
    bl_what_if w = run("hardware=8xh100,2x8xh100");
    assert_true(w.rows[1].time.tokens_per_s > 1.5 * w.rows[0].time.tokens_per_s);
    assert_string_equal(w.title, "llama-3.1-405b");
    w = run("tokens=512,4096");
    assert_true(w.rows[0].time.tokens_per_s != w.rows[1].time.tokens_per_s);
}

static void what_does_not_fit_is_said(void **state)
{
    char *text = NULL;
    size_t n_bytes;
    (void)state;
    bl_what_if w = run("device_memory_bytes=10e9,80e9");
    assert_false(w.rows[0].fits);
    assert_true(w.rows[1].fits);
    FILE *out = open_memstream(&text, &n_bytes);
    bl_what_if_print(&w, out);
    fclose(out);
    assert_non_null(strstr(text, "10e9                 does not fit: "));
    for (const char *at = text; *at; at += strcspn(at, "\n") + 1)
        assert_in_range(strcspn(at, "\n"), 1, 100);
    free(text);
}

static void a_picture_and_a_document(void **state)
{
    char path[] = "/tmp/ballast-what-if-XXXXXX", *text = NULL;
    size_t n_bytes;
    json_t *document;
    (void)state;
    bl_what_if w = run("ring_depth=2,3");
    close(mkstemp(path));
    assert_int_equal(bl_what_if_draw(&w, path), BL_OK);
    assert_int_equal(bl_file_read_all(path, 1 << 20, (void **)&text, &n_bytes), BL_OK);
    assert_memory_equal(text + n_bytes - 7, "</svg>\n", 7);
    free(text);
    unlink(path);
    assert_int_equal(bl_what_if_describe(&w, &document), BL_OK);
    assert_int_equal(json_array_size(json_object_get(document, "rows")), 2);
    json_decref(document);
}

/* At the slowest rates that are accepted, which nothing is expected to wait for, time still
 * passes. */
static void the_slowest_rates_end(void **state)
{
    static const char *const specs[] = {
        "copy_in_bytes_per_s=1000",     "copy_out_bytes_per_s=1000",
        "copy_both_bytes_per_s=1000",   "gather_bytes_per_s=1000",
        "host_memory_bytes_per_s=1000", "device_memory_bytes_per_s=1000",
        "bf16_gemm_flops_per_s=1e6"};
    static char *words[] = {"--model_name_or_path",
                            "llama-3.1-405b",
                            "--offload_ratio",
                            "1",
                            "--activation_offload",
                            "true",
                            "--ring_depth",
                            "2",
                            "--per_device_train_batch_size",
                            "1",
                            "--gradient_accumulation_steps",
                            "1"};
    bl_what_if_case slow = {.machine = {.name = "8xh100"}, .argc = 12, .argv = words};
    bl_what_if w;
    (void)state;
    for (size_t i = 0; i < BL_COUNT(specs); i++) {
        if (bl_what_if_run(&slow, specs[i], &w) != BL_OK)
            fail_msg("%s: %s", specs[i], bl_error_text());
        assert_true(w.rows[0].time.tokens_per_s > 0 && w.rows[0].time.tokens_per_s < 1000);
    }
}

static void what_is_wrong_is_named(void **state)
{
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"ranks", "--what_if: expected KEY=a,b,c, got 'ranks'"},
        {"ranks=1,,2", "--what_if ranks: expected values between commas, got '1,,2'"},
        {"tokens=x", "--what_if tokens=x: expected a number of 1 to 1048576, got 'x'"},
        {"tokens=1e300", "--what_if tokens=1e300: expected a number of 1 to 1048576, got '1e300'"},
        {"copy_in_bytes_per_s=1e-300",
         "--what_if copy_in_bytes_per_s=1e-300: copy_in_bytes_per_s: expected 1000 to 1e+18, or 0 "
         "for none, got 1e-300"},
        {"copy_out_bytes_per_s=1e-300",
         "--what_if copy_out_bytes_per_s=1e-300: copy_out_bytes_per_s: expected 1000 to 1e+18, or "
         "0 for none, got 1e-300"},
        {"bf16_gemm_flops_per_s=2e15",
         "--what_if bf16_gemm_flops_per_s=2e15: bf16_gemm_flops_per_s 2e+15 is above "
         "bf16_peak_flops_per_s 9.894e+14"},
    };
    bl_what_if w;
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_what_if_run(&job, cases[i].spec, &w), BL_EUSAGE);
        assert_string_equal(bl_error_text(), cases[i].text);
    }
    assert_int_equal(bl_what_if_run(&job, "no_such_key=1", &w), BL_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_figure_of_the_machine),
        cmocka_unit_test(a_key_takes_the_place_of_a_given_one),
        cmocka_unit_test(machines_and_rows),
        cmocka_unit_test(what_does_not_fit_is_said),
        cmocka_unit_test(a_picture_and_a_document),
        cmocka_unit_test(the_slowest_rates_end),
        cmocka_unit_test(what_is_wrong_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
