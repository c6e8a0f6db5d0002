/* SPDX-License-Identifier: Apache-2.0 */
/* The keys that say where a run computes and how: device, compute_dtype, compute_bf16_modules. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "config/config.h"
#include "device/device.h"
#include "llama/projection.h"

enum { MAX_WORDS = 16, TEXT_BYTES = 256 };

/* The words of `line`, which blanks separate, and what every training needs. */
static bl_status load(const char *line, bl_train_config **out)
{
    static const char REQUIRED[] = "--model m --output_dir o --train_file t ";
    char copy[2 * TEXT_BYTES], *argv[MAX_WORDS];
    int argc = 0;

    snprintf(copy, sizeof copy, "%s%s", REQUIRED, line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return bl_train_config_load(BL_CONFIG_TRAIN, NULL, argc, argv, out);
}

static void expect_error(const char *line, const char *error)
{
    bl_train_config *config;
    assert_int_equal(load(line, &config), BL_EUSAGE);
    assert_null(config);
    assert_string_equal(bl_error_text(), error);
}

static void test_pairs_that_do_not_fit(void **state)
{
    bl_gpu_info gpu;
    bl_train_config *c;

    (void)state;
    expect_error("--device cpu --compute_dtype bf16",
                 "compute_dtype bf16: device cpu computes in fp32; use auto or fp32");
    expect_error("--device cpu --compute_dtype fp8",
                 "compute_dtype fp8: device cpu computes in fp32; use auto or fp32");
    if (bl_device_find_cuda(0, &gpu) == BL_OK) {
        expect_error("--device cuda --compute_dtype fp32",
                     "compute_dtype fp32: device cuda computes in bf16 or fp8; use auto, bf16 or "
                     "fp8");
        return;
    }
    /* A resource that is missing, not a wrong key. */
    assert_int_equal(load("--device cuda", &c), BL_ELIMIT);
    assert_int_equal(strncmp(bl_error_text(), "device cuda: ", 13), 0);
}

/* Processes that mpirun has started. */
static void test_several_processes_compute_on_cpus(void **state)
{
    static const char *const variables[][2] = {{"OMPI_COMM_WORLD_SIZE", "2"},
                                               {"OMPI_COMM_WORLD_RANK", "0"},
                                               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                               {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
    bl_train_config *c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(variables); i++) setenv(variables[i][0], variables[i][1], 1);
    expect_error("--device cuda",
                 "device cuda: a job of 2 processes computes on CPUs: between GPUs of several "
                 "processes nothing carries the weights yet; start one process");
    assert_int_equal(load("--device auto", &c), BL_OK);
    assert_int_equal(c->device, BL_CONFIG_DEVICE_CPU);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_FP32);
    bl_train_config_free(c);
    for (size_t i = 0; i < BL_COUNT(variables); i++) unsetenv(variables[i][0]);
}

static void test_names_that_are_none(void **state)
{
    static const char *const bad[] = {"layers.00", "layers.-1",          "layers.",   "down",
                                      "lm_head",   "layers.1.down_proj", "all-linear"};
    char line[TEXT_BYTES], text[TEXT_BYTES];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        snprintf(line, sizeof line, "--compute_bf16_modules q_proj,%s", bad[i]);
        snprintf(text, sizeof text,
                 "compute_bf16_modules: '%s' is not a projection (down_proj), a layer (layers.0) "
                 "or a projection of a layer (layers.0.mlp.down_proj)",
                 bad[i]);
        expect_error(line, text);
    }
}

static void expect_matrices(const char *names, const unsigned expected[3])
{
    bl_train_config *c;
    uint8_t masks[3];
    char line[TEXT_BYTES];

    snprintf(line, sizeof line, "--compute_bf16_modules %s", names);
    assert_int_equal(load(line, &c), BL_OK);
    assert_int_equal(bl_train_config_bf16_matrices(c, 3, masks), BL_OK);
    for (int i = 0; i < 3; i++) assert_int_equal(masks[i], expected[i]);
    bl_train_config_free(c);
}

/* A projection stands for the fused matrix that it is part of. */
static void test_names_of_matrices(void **state)
{
    enum { ALL = (1 << BL_LAYER_MATRICES) - 1, UP = 1 << BL_GATE_UP, DOWN = 1 << BL_MLP_DOWN };
    bl_train_config *c;
    uint8_t masks[2];

    (void)state;
    expect_matrices("mlp.up_proj,model.layers.2", (const unsigned[]){UP, UP, ALL});
    expect_matrices("layers.1.self_attn.k_proj", (const unsigned[]){0, 1 << BL_QKV, 0});
    expect_matrices("down_proj,gate_proj,up_proj",
                    (const unsigned[]){UP | DOWN, UP | DOWN, UP | DOWN});
    assert_int_equal(load("--compute_bf16_modules layers.2", &c), BL_OK);
    assert_int_equal(bl_train_config_bf16_matrices(c, 2, masks), BL_EUSAGE);
    assert_string_equal(bl_error_text(),
                        "compute_bf16_modules: 'layers.2': the model has layers 0 to 1");
    bl_train_config_free(c);
    assert_int_equal(load("", &c), BL_OK); /* none by default */
    assert_int_equal(c->compute_bf16_modules.n_items, 0);
    bl_train_config_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pairs_that_do_not_fit),
        cmocka_unit_test(test_several_processes_compute_on_cpus),
        cmocka_unit_test(test_names_that_are_none),
        cmocka_unit_test(test_names_of_matrices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
