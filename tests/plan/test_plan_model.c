/* SPDX-License-Identifier: Apache-2.0 */
/* test_plan_model.c -- models by name have the sizes that their makers publish; the outline of a
 * model directory equals that of the opened model; a described machine resolves a configuration. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "config/config.h"
#include "arch/llama.h"
#include "plan/model.h"
#include "skip.h"

/* Parameters as the makers' model cards and configurations give them, 10^9. */
static void test_names(void **state)
{
    static const struct {
        const char *name;
        double billions;
    } known[] = {
        {"llama-2-7b", 6.738},          {"llama-2-13b", 13.016},
        {"llama-2-70b", 68.977},        {"llama-3.1-8b", 8.030},
        {"llama-3.1-70b", 70.554},      {"llama-3.1-405b", 405.853},
        {"llama-3.2-1b", 1.236},        {"Llama-3.1-405B", 405.853},
        {"llama3.1-405b", 405.853},     {"llama-3.1-405b-fp8", 405.853},
        {"mistral-large-123b", 122.61}, {"Qwen2.5-72B", 72.706},
        {"qwen3-32b", 32.762},
    };
    bl_plan_model m;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(known); i++) {
        assert_int_equal(bl_plan_model_open(known[i].name, BL_BASE_AUTO, &m), BL_OK);
        double billions = (double)bl_model_config_n_params(&m.config) * 1e-9;
        if (fabs(billions - known[i].billions) > 0.0006 * known[i].billions)
            fail_msg("%s: %.4f, published %.4f", known[i].name, billions, known[i].billions);
        bl_plan_model_close(&m);
    }
    for (size_t i = 0; bl_plan_model_name(i); i++) {
        assert_int_equal(bl_plan_model_open(bl_plan_model_name(i), BL_BASE_AUTO, &m), BL_OK);
        assert_true(m.config.n_heads % m.config.n_kv_heads == 0 && m.stored.n_bytes > 0);
        bl_plan_model_close(&m);
    }
    assert_int_equal(bl_plan_model_open("lama-3.1-405b", BL_BASE_AUTO, &m), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "did you mean llama-3.1-405b?"));
    assert_int_equal(bl_plan_model_open("gpt", BL_BASE_AUTO, &m), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "llama-3.2-1b"));
}

static int64_t count(const bl_plan_model *m, bl_format format)
{
    int64_t n = 0;
    for (int64_t i = 0; i < m->config.n_layers * BL_PROJECTIONS; i++) n += m->formats[i] == format;
    return n;
}

/* The published FP8 405B: gate, up and down of layers 1..124. */
static void test_published_fp8(void **state)
{
    bl_plan_model m;

    (void)state;
    assert_int_equal(bl_plan_model_open("llama-3.1-405b-fp8", BL_BASE_STORED, &m), BL_OK);
    assert_int_equal(count(&m, BL_FORMAT_FP8_ROW), 124 * 3);
    assert_int_equal(count(&m, BL_FORMAT_BF16), 126 * 7 - 124 * 3);
    assert_int_equal(m.formats[BL_GATE], BL_FORMAT_BF16);
    assert_int_equal(m.formats[1 * BL_PROJECTIONS + BL_GATE], BL_FORMAT_FP8_ROW);
    assert_int_equal(m.formats[1 * BL_PROJECTIONS + BL_O], BL_FORMAT_BF16);
    bl_plan_model_close(&m);
    assert_int_equal(bl_plan_model_open("llama-3.1-405b-fp8", BL_BASE_AUTO, &m), BL_OK);
    assert_int_equal(count(&m, BL_FORMAT_FP8_ROW), 126 * 7);
    bl_plan_model_close(&m);
    assert_int_equal(bl_plan_model_open("llama-3.1-405b-fp8", BL_BASE_FP8_BLOCK, &m), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "quantized again"));
}

static void test_folder(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    char dir[512];
    bl_plan_model m;
    bl_model *whole;

    (void)state;
    assert_int_equal(bl_plan_model_open("/nowhere/model", BL_BASE_AUTO, &m), BL_EINPUT);
    if (!data) TEST_SKIP("BALLAST_TEST_DATA is not set");
    snprintf(dir, sizeof dir, "%s/models/stories260K-bf16", data);
    assert_int_equal(bl_plan_model_open(dir, BL_BASE_FP8_BLOCK, &m), BL_OK);
    assert_int_equal(bl_model_open(dir, BL_BASE_FP8_BLOCK, 64, &whole), BL_OK);
    assert_memory_equal(&m.config, &whole->config, sizeof m.config);
    assert_memory_equal(m.formats, whole->formats,
                        (size_t)m.config.n_layers * BL_PROJECTIONS * sizeof *m.formats);
    bl_model_stored_size stored = bl_model_measure_stored(whole);
    assert_int_equal(m.stored.n_bytes, stored.n_bytes);
    assert_int_equal(m.stored.row_bytes, stored.row_bytes);
    assert_int_equal(m.stored.is_in_blocks, true);
    assert_int_equal(m.embedding_dtype, whole->embedding_dtype);
    bl_model_close(whole);
    bl_plan_model_close(&m);
}

/* FP8 checkpoints: what each kind is held as, and the memory to quantize some again. */
static void test_fp8_folders(void **state)
{
    static const struct {
        const char *name;
        bl_base_format choice;
        int64_t n_row, n_block, n_bf16, n_f32, decoded_row_bytes;
    } cases[] = {
        {"static", BL_BASE_AUTO, 14, 0, 0, 0, 0},
        {"e8m0-128", BL_BASE_STORED, 0, 14, 0, 0, 0},
        {"e8m0-16x8", BL_BASE_AUTO, 0, 0, 14, 0, 0},
        {"blocks-48x20", BL_BASE_AUTO, 0, 0, 0, 14, 0},
        {"blocks-48x20", BL_BASE_FP8_BLOCK, 0, 14, 0, 0, 136 * 4},
        {"ct-mxfp8", BL_BASE_STORED, 2, 0, 12, 0, 0},
        {"ct-mxfp8", BL_BASE_FP8_ROW, 14, 0, 0, 0, 160 * 4},
        {"mixed", BL_BASE_STORED, 8, 3, 3, 0, 0},
        {"mixed", BL_BASE_AUTO, 11, 3, 0, 0, 0},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char dir[512];
        bl_plan_model m;
        snprintf(dir, sizeof dir, "tests/golden/fp8/models/%s", cases[i].name);
        assert_int_equal(bl_plan_model_open(dir, cases[i].choice, &m), BL_OK);
        assert_int_equal(count(&m, BL_FORMAT_FP8_ROW), cases[i].n_row);
        assert_int_equal(count(&m, BL_FORMAT_FP8_BLOCK), cases[i].n_block);
        assert_int_equal(count(&m, BL_FORMAT_BF16), cases[i].n_bf16);
        assert_int_equal(count(&m, BL_FORMAT_F32), cases[i].n_f32);
        assert_int_equal(m.stored.decoded_row_bytes, cases[i].decoded_row_bytes);
        bl_plan_model_close(&m);
    }
}

/* A loader holds the scales of one weight whole, in fp32, and its zero points. */
static void test_scales(void **state)
{
    static const struct {
        const char *name;
        int64_t scale_bytes;
    } cases[] = {{"bits4/models/int4-g32", 96 * 2 * 4},
                 {"bits4/models/int4-g128-zero", 128 * 1 * 2 * 4},
                 {"bits4/models/nf4", 96 * 1 * 4},
                 {"train/models/tiny-gqa", 0}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char dir[512];
        bl_plan_model m;
        snprintf(dir, sizeof dir, "tests/golden/%s", cases[i].name);
        assert_int_equal(bl_plan_model_open(dir, BL_BASE_AUTO, &m), BL_OK);
        assert_int_equal(m.stored.scale_bytes, cases[i].scale_bytes);
        int64_t all = bl_model_load_bytes(&m.stored, 1);
        m.stored.scale_bytes = 0;
        assert_int_equal(all - bl_model_load_bytes(&m.stored, 1), cases[i].scale_bytes);
        bl_plan_model_close(&m);
    }
}

static bl_status load(const bl_config_machine *machine, const char *key, const char *value,
                      bl_train_config **out)
{
    char *args[] = {(char *)key, (char *)value};
    bl_train_configs configs;

    bl_status st = bl_train_configs_load_for(machine, key ? 2 : 0, args, &configs);
    *out = st == BL_OK ? configs.run[0] : NULL;
    free(configs.run);
    return st;
}

static void test_described_machine(void **state)
{
    const bl_config_machine gpus = {true, 16, 112, 8, "GPU", 90, false},
                            cpu = {false, 2, 8, 2, NULL, 0, false},
                            bf16_cpu = {false, 2, 8, 2, NULL, 0, true};
    bl_train_config *c;

    (void)state;
    assert_int_equal(load(&gpus, NULL, NULL, &c), BL_OK);
    assert_int_equal(c->device, BL_CONFIG_DEVICE_CUDA);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_BF16);
    assert_int_equal(c->ranks, 16);
    assert_int_equal(c->shard_size, 16);
    assert_int_equal(c->threads, 14);
    bl_train_config_free(c);
    assert_int_equal(load(&cpu, "--ranks", "4", &c), BL_OK);
    assert_int_equal(c->device, BL_CONFIG_DEVICE_CPU);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_FP32);
    assert_int_equal(c->ranks, 4);
    assert_int_equal(c->threads, 4);
    bl_train_config_free(c);
    assert_int_equal(load(&gpus, "--compute_dtype", "fp8", &c), BL_OK);
    bl_train_config_free(c);
    assert_int_equal(load(&gpus, "--device", "cpu", &c), BL_EUSAGE);
    assert_int_equal(load(&cpu, "--device", "cuda", &c), BL_EUSAGE);
    assert_int_equal(load(&cpu, "--compute_dtype", "bf16", &c), BL_EUSAGE);
    assert_int_equal(load(&bf16_cpu, NULL, NULL, &c), BL_OK);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_FP32);
    bl_train_config_free(c);
    assert_int_equal(load(&bf16_cpu, "--compute_dtype", "bf16", &c), BL_OK);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_BF16);
    bl_train_config_free(c);
    assert_int_equal(load(&cpu, "--compute_dtype", "fp8", &c), BL_EUSAGE);
    assert_int_equal(load(&gpus, "--compute_dtype", "fp32", &c), BL_EUSAGE);
    assert_int_equal(load(&gpus, "--shard_size", "3", &c), BL_EUSAGE);
}

/* FP8 products as a training decides them, which asks the same function: below Hopper it ends,
 * later it is bf16. */
static void test_fp8_by_capability(void **state)
{
    bl_config_machine gpus = {true, 8, 112, 8, "NVIDIA A100", 80, false};
    bl_train_config *c;

    (void)state;
    assert_int_equal(load(&gpus, "--compute_dtype", "fp8", &c), BL_ELIMIT);
    assert_string_equal(
        bl_error_text(),
        "compute_dtype fp8: NVIDIA A100 has no FP8 products that Ballast uses: they "
        "need compute capability 9.0, it has 8.0; use bf16");
    gpus.capability = 89;
    assert_int_equal(load(&gpus, "--compute_dtype", "fp8", &c), BL_ELIMIT);
    for (int capability = 90; capability <= 120; capability += 10) {
        gpus.capability = capability;
        assert_int_equal(load(&gpus, "--compute_dtype", "fp8", &c), BL_OK);
        assert_int_equal(c->compute_dtype, capability == 90 ? BL_COMPUTE_FP8 : BL_COMPUTE_BF16);
        bl_train_config_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_published_fp8),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_fp8_folders),
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_described_machine),
        cmocka_unit_test(test_fp8_by_capability),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
