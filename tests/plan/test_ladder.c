/* SPDX-License-Identifier: Apache-2.0 */
/* test_ladder.c -- the classical strategies against figures that others have published. What
 * differs is listed in bench/results/predictions.md, with its reason. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/ladder_report.h"
#include "plan/plan.h"

static const double GB = 1e9, TIB = 1099511627776.0;

static bl_model_config model_of(const char *name)
{
    bl_model_config config;
    assert_int_equal(bl_model_config_preset(name, &config), BL_OK);
    return config;
}

/* Published with as many digits as `step` has: the figure is within half a step. */
static void assert_rounds_to(const char *what, double value, double published, double step)
{
    if (value < published - step / 2 || value > published + step / 2)
        fail_msg("%s: %.4f, published %.4f", what, value, published);
}

/* Llama 3.1 405B, 8 devices, LoRA r 64: model states of a device. The unit of ZeRO-2's figure is
 * 2^40. */
static void test_405b(void **state)
{
    static const struct {
        size_t rung;
        double published, unit, step;
    } figures[] = {{0, 6.5, 1e12, 0.1},
                   {1, 2.2, 1e12, 0.1},
                   {2, 1.4, 0, 0.1},
                   {3, 0.8, 1e12, 0.1},
                   {6, 825, 1e9, 1}};
    bl_model_config model = model_of("llama3.1-405b");
    bl_strategy_job job = {
        .model = &model, .n_devices = 8, .length = 1024, .batch = 1, .lora_r = 64};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(figures); i++) {
        bl_strategy_memory m;
        double unit = figures[i].unit > 0 ? figures[i].unit : TIB;
        const bl_ladder_rung *rung = &bl_ladder[figures[i].rung];
        bl_strategy_count(&rung->strategy, &job, &m);
        assert_rounds_to(rung->name, (double)bl_strategy_states(&m) / unit, figures[i].published,
                         figures[i].step);
    }
}

/* 417 GB is published for the base alone (bench/results/predictions.md); LoRA's state adds 2 %. */
static void test_405b_in_fp8(void **state)
{
    bl_model_config model = model_of("llama3.1-405b");
    bl_strategy_job job = {
        .model = &model, .n_devices = 8, .length = 1024, .batch = 1, .lora_r = 64};
    bl_strategy_memory m;
    (void)state;

    bl_strategy_count(&bl_ladder[7].strategy, &job, &m);
    assert_rounds_to("FP8", (double)bl_strategy_states(&m) / GB, 417, 2 * 0.02 * 417);
    int64_t with_all = bl_strategy_states(&m);
    bl_strategy_count(&bl_ladder[8].strategy, &job, &m);
    assert_int_equal(m.host, 0);
    int64_t sharded = bl_strategy_states(&m);
    bl_strategy_count(&bl_ladder[9].strategy, &job,
                      &m); /* the base is in the host's memory, once */
    assert_int_equal(sharded - bl_strategy_states(&m), m.host);
    assert_in_range((with_all - sharded) - 7 * m.host, 0, 8); /* 7/8 of it went */
}

/* Llama 2 7B as 7.0 G parameters, 8 devices, 256 tokens: states and activations. */
static void test_7b(void **state)
{
    static const double published[] = {39.98, 27.73, 15.48};
    bl_model_config model = model_of("llama2-7b");
    bl_strategy_job job = {
        .model = &model, .n_params = 7e9, .n_devices = 8, .length = 256, .batch = 1};
    (void)state;

    for (int stage = 1; stage <= 3; stage++) {
        bl_strategy s = {.zero_stage = stage};
        bl_strategy_memory m;
        bl_strategy_count(&s, &job, &m);
        assert_rounds_to("7B", (double)(bl_strategy_states(&m) + m.activations) / GB,
                         published[stage - 1], 0.01);
        assert_rounds_to("activations", (double)m.activations / GB, 1.48, 0.01);
    }
}

/* The model of Llama 2 x context on 8 V100 of 32 GB. Recomputation and whether weights are sharded,
 * cell by cell; the two cells that differ from the published ones are marked. */
static void test_family(void **state)
{
    static const char *const names[] = {"llama2-7b", "llama2-13b", "llama2-70b"};
    /* 256, 512, 1024, 2048, 4096 tokens: 1 ZeRO-1, 3 ZeRO-3, + 10 with recomputation, 0 does not
     * fit. */
    static const int expected[][5] = {{1, 1, 1, 11, 11 /* published: 13 */},
                                      {1, 11, 11, 11, 13},
                                      {3, 13, 13, 13, 0 /* published: 13 */}};
    bl_hardware v100;
    (void)state;

    assert_int_equal(bl_hardware_preset("8xv100-32g", &v100), BL_OK);
    for (size_t i = 0; i < BL_COUNT(names); i++)
        for (int k = 0; k < 5; k++) {
            bl_model_config model = model_of(names[i]);
            bl_strategy_job job = {.model = &model,
                                   .n_devices = v100.n_devices,
                                   .length = 256 << k,
                                   .batch = 1,
                                   .lora_r = 8};
            bl_strategy s;
            bool fits = bl_strategy_choose(&job, &v100, &s);
            int found = fits ? s.zero_stage + 10 * s.checkpointing : 0;
            if (found != expected[i][k])
                fail_msg("%s, %d tokens: %d, not %d", names[i], 256 << k, found, expected[i][k]);
        }
}

/* What recomputes is slower, what shards more is slower, and both take less. */
static void test_order(void **state)
{
    bl_model_config model = model_of("llama2-13b");
    bl_strategy_job job = {
        .model = &model, .n_devices = 8, .length = 2048, .batch = 1, .lora_r = 8};
    bl_strategy_memory m[2];
    bl_hardware v100;
    (void)state;

    assert_int_equal(bl_hardware_preset("8xv100-32g", &v100), BL_OK);
    for (int stage = 1; stage <= 3; stage++) {
        bl_strategy s[2] = {{.zero_stage = stage, .lora = true},
                            {.zero_stage = stage, .lora = true, .checkpointing = true}};
        for (int i = 0; i < 2; i++) bl_strategy_count(&s[i], &job, &m[i]);
        assert_true(bl_strategy_total(&m[1]) < bl_strategy_total(&m[0]));
        assert_true(bl_strategy_step_s(&s[1], &job, &v100) >
                    bl_strategy_step_s(&s[0], &job, &v100));
        if (stage == 1) continue;
        bl_strategy before = s[0];
        before.zero_stage--;
        bl_strategy_count(&before, &job, &m[1]);
        assert_true(bl_strategy_states(&m[0]) < bl_strategy_states(&m[1]));
        assert_true(bl_strategy_step_s(&s[0], &job, &v100) >=
                    bl_strategy_step_s(&before, &job, &v100) - 1e-12);
    }
}

/* Hosts of one GPU: gathers use the network only; one host gathers nothing. */
static void test_hosts_of_one_gpu(void **state)
{
    bl_model_config model = model_of("llama3.1-8b");
    bl_strategy_job job = {.model = &model, .n_devices = 1, .length = 1024, .batch = 1};
    bl_strategy zero3 = {.zero_stage = 3};
    bl_hardware one, four;
    (void)state;

    assert_int_equal(bl_hardware_preset("1xgh200", &one), BL_OK);
    assert_int_equal(bl_hardware_preset("4x1xgh200", &four), BL_OK);
    one.network_bytes_per_s.value = 0;
    double alone_s = bl_strategy_step_s(&zero3, &job, &one);
    assert_true(alone_s > 0 && alone_s < 10);
    job.n_devices = 4;
    double gathers_s = bl_strategy_step_s(&zero3, &job, &four) - alone_s;
    four.network_bytes_per_s.value /= 2;
    assert_float_equal(bl_strategy_step_s(&zero3, &job, &four) - alone_s, 2 * gathers_s,
                       1e-9 * gathers_s);
    assert_true(gathers_s > 0);
}

/* ---- as runs of Ballast ---- */

static bl_ladder_case open_ladder(const char *model, const char *hardware, bl_plan_case *c)
{
    char *argv[] = {"--model", (char *)(uintptr_t)model, "--lora_r", "64"};

    if (bl_plan_case_open(hardware, 1024, BL_COUNT(argv), argv, c) != BL_OK)
        fail_msg("%s", bl_error_text());
    return (bl_ladder_case){.hardware = &c->hardware,
                            .model_name = c->model.name,
                            .model = &c->model.config,
                            .length = 1024,
                            .lora_r = 64,
                            .model_path = model,
                            .machine = {.name = hardware}};
}

/* The words after the rung's line, without line ends that are continued. */
static int read_keys(const char *text, const char *rung, char *copy, size_t n_bytes, char **argv)
{
    char line[64], *rest = copy;
    int argc = 0;

    snprintf(line, sizeof line, "\n\n%-24s  ", rung);
    const char *at = strstr(text, line);
    assert_non_null(at);
    at = strchr(at + 2, '\n') + 1;
    const char *end = strstr(at, "\n\n");
    assert_true(end == NULL || (size_t)(end - at) < n_bytes);
    snprintf(copy, n_bytes, "%.*s", end ? (int)(end - at) : (int)strlen(at), at);
    for (char *word; (word = strtok_r(rest, " \\\n", &rest));) argv[argc++] = word;
    return argc;
}

/* A plan with the printed keys of a rung has the printed memory. */
static void test_keys(void **state)
{
    enum { MAX_WORDS = 48, N_UNSUPPORTED = 3 };
    bl_plan_case c;
    bl_ladder_case ladder = open_ladder("llama-3.1-70b", "8xh100", &c);
    static char text[1 << 15];
    json_t *document;
    (void)state;

    FILE *out = fmemopen(text, sizeof text, "w");
    assert_int_equal(bl_ladder_print(&ladder, out), BL_OK);
    fclose(out);
    assert_int_equal(bl_ladder_describe(&ladder, &document), BL_OK);
    json_t *rungs = json_object_get(document, "ladder");
    for (size_t i = 0; i < bl_ladder_length; i++) {
        const json_t *run = json_object_get(json_array_get(rungs, i), "ballast");
        char copy[BL_LADDER_KEYS_BYTES + 64], *argv[MAX_WORDS] = {"--model", "llama-3.1-70b"};
        bl_plan_case again;
        bl_plan plan;
        if (i < N_UNSUPPORTED) {
            assert_non_null(
                strstr(json_string_value(json_object_get(run, "unsupported")), "ZeRO-3"));
            continue;
        }
        int argc = 2 + read_keys(text, bl_ladder[i].name, copy, sizeof copy, argv + 2);
        assert_int_equal(bl_plan_case_open("8xh100", 0, argc, argv, &again), BL_OK);
        assert_int_equal(bl_plan_choose(&again.input, &plan), BL_OK);
        assert_int_equal(plan.memory.device,
                         json_integer_value(json_object_get(run, "device_bytes")));
        assert_int_equal(plan.memory.total * 8,
                         json_integer_value(json_object_get(run, "host_bytes")));
        bl_plan_case_close(&again);
    }
    json_decref(document);
    bl_plan_case_close(&c);
}

/* Each rung takes less GPU memory than the one before it, within each of the two ladders. On one
 * GPU all rungs have keys. An FP8 checkpoint has no full fine-tuning. */
static void test_runs(void **state)
{
    bl_plan_case c;
    bl_ladder_case ladder = open_ladder("llama-3.1-70b", "8xh100", &c);
    bl_ladder_run run, before = {.device_bytes = INT64_MAX};
    (void)state;

    for (size_t i = 3; i < bl_ladder_length; i++) {
        assert_int_equal(bl_ladder_plan(&ladder, i, &run), BL_OK);
        if (bl_ladder[i].strategy.lora != bl_ladder[i - 1].strategy.lora)
            before.device_bytes = INT64_MAX;
        assert_true(run.device_bytes < before.device_bytes);
        before = run;
    }
    bl_plan_case_close(&c);
    ladder = open_ladder("llama-3.2-1b", "1xh100", &c);
    for (size_t i = 0; i < bl_ladder_length; i++) {
        assert_int_equal(bl_ladder_plan(&ladder, i, &run), BL_OK);
        assert_true(run.reason[0] == '\0' && run.fits);
    }
    bl_plan_case_close(&c);
    ladder = open_ladder("llama-3.1-405b-fp8", "8xh100", &c);
    assert_int_equal(bl_ladder_plan(&ladder, 3, &run), BL_OK);
    assert_non_null(strstr(run.reason, "FP8"));
    bl_plan_case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_405b),  cmocka_unit_test(test_405b_in_fp8),
        cmocka_unit_test(test_7b),    cmocka_unit_test(test_family),
        cmocka_unit_test(test_order), cmocka_unit_test(test_hosts_of_one_gpu),
        cmocka_unit_test(test_keys),  cmocka_unit_test(test_runs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
