/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight (finetuning_type full) against float64 references made with PyTorch and
 * transformers (tools/golden/full), on 1, 2 and 4 ranks; what must not change a bit; checkpoints,
 * kills, and the model that is written. */
#include "full_runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "config/config.h"

static const double LOSSES = 1e-5;

enum { STEPS = FULL_RUNS_STEPS };

/* ---- against the reference ---- */

static void every_weight_follows_the_reference(void **state)
{
    (void)state;
    full_runs_check("tests/golden/full/index.json");
}

/* ---- bits ---- */

static void nothing_else_changes_a_bit(void **state)
{
    static const struct {
        const char *what, *args[10]; /* with a NULL behind them */
    } variants[] = {
        {"one micro-batch per visit", {"visit_tokens", "1"}},
        {"all micro-batches per visit", {"visit_tokens", "1000000"}},
        {"nothing recomputed", {"activation_checkpointing", "none"}},
        {"all recomputed", {"activation_checkpointing", "full"}},
        {"activations in host memory", {"activation_offload", "true"}},
        {"three threads", {"threads", "3"}},
        {"a ring of one", {"ring_depth", "1"}},
        {"a ring of four", {"ring_depth", "4"}},
        {"evaluations in the same visits",
         {"validation_file", "tests/golden/families/tokens/rows.jsonl", "eval_strategy", "steps",
          "eval_steps", "2", "eval_overlap", "true"}},
    };

    (void)state;
    for (size_t c = 0; c < FULL_RUNS_CASES; c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            full_runs_train(full_runs_cases[c], n_ranks, "plain", NULL);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                full_runs_train(full_runs_cases[c], n_ranks, "varied", variants[v].args);
                full_runs_assert_same(FULL_RUNS_STEPS, "plain", "varied", n_ranks,
                                      variants[v].what);
            }
        }
}

/* ---- checkpoints ---- */

static void kills_change_no_bit(void **state)
{
    (void)state;
    runs_seed_random();
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) full_runs_kill(n_ranks, 12, NULL, NULL);
}

/* The rows of any number of ranks: the losses go on as if nothing had been. */
static void another_number_of_ranks_resumes(void **state)
{
    json_t *golden = golden_load_case("../../full/cases/tiny-gqa");
    const json_t *expect = json_object_get(golden, "expect");
    static const int orders[][2] = {{4, 1}, {1, 4}, {2, 4}, {4, 2}};
    char model[GOLDEN_PATH_BYTES];

    (void)state;
    assert_true(golden_model(golden, model));
    for (size_t i = 0; i < BL_COUNT(orders); i++) {
        const char *output = runs_path("resharded");
        assert_int_equal(bl_tree_remove(output), BL_OK);
        for (int part = 0; part < 2; part++) {
            int n_ranks = orders[i][part];
            json_t *topology =
                json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size", 1,
                          "gradient_accumulation_steps", 4 / n_ranks);
            golden_args args = {0};
            full_runs_fill(golden, topology, model, output, &args);
            if (part == 0) runs_set(&args, "max_steps", "7");
            if (part == 1) runs_set(&args, "resume_from_checkpoint", "true");
            if (part == 1) runs_set(&args, "allow_resume_mismatch", "true");
            assert_int_equal(golden_train(&args), BL_OK);
            golden_args_free(&args);
            json_decref(topology);
        }
        json_t *metrics = golden_metrics(output);
        assert_true(golden_compare_losses(metrics, json_object_get(expect, "steps"), STEPS,
                                          LOSSES) <= LOSSES);
        json_decref(metrics);
    }
    json_decref(golden);
}

/* ---- the model ---- */

static double loss_of_model(const char *model, const char *validation)
{
    char *line[] = {"--model",           (char *)(uintptr_t)model,
                    "--base_format",     "stored",
                    "--device",          "cpu",
                    "--data_format",     "tokens",
                    "--validation_file", (char *)(uintptr_t)validation};
    bl_train_config *config;
    bl_eval_result result;

    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, NULL, BL_COUNT(line), line, &config),
                     BL_OK);
    assert_int_equal(bl_eval_run(config, NULL, &result), BL_OK);
    bl_train_config_free(config);
    return result.loss;
}

/* The written model, evaluated from its files, has the loss of the trained weights: rounded to the
 * dtype of a bf16 checkpoint nearly (each weight by at most 2^-9 of it; measured 8e-5), else to 12
 * digits of the log. */
static void the_model_is_written_and_read(void **state)
{
    static const struct {
        const char *name, *dtype;
        double limit;
    } cases[] = {{"../../full/cases/tiny-mha-tied", "stored", 1e-11}, /* F32 */
                 {"../../full/cases/tiny-gqa", "stored", 1e-3},
                 {"../../full/cases/tiny-gqa", "f32", 1e-11}};
    const char *validation = GOLDEN_DIR "/tokens/tiny-validation.jsonl";

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *args[] = {"validation_file", validation,     "eval_strategy",
                              "steps",           "eval_steps",   "10",
                              "model_dtype",     cases[i].dtype, NULL};
        full_runs_train(cases[i].name, 2, "written", args);
        double trained = golden_last_eval_loss(runs_path("written")),
               written = loss_of_model(runs_path("written/model"), validation);
        printf("loss %.12g as trained, %.12g as written (%s)\n", trained, written, cases[i].dtype);
        assert_true(trained > 0 && fabs(written / trained - 1) < cases[i].limit);
        if (cases[i].limit > 1e-6) assert_true(written != trained);
        assert_true(bl_file_exists(runs_path("written/model/config.json")));
        assert_true(bl_file_exists(runs_path("written/model/README.md")));
        assert_false(bl_file_exists(runs_path("written/adapter_model.safetensors")));
        runs_assert_listed(runs_path("written"));
    }
}

/* The model of the evaluation with the lowest loss, not of the last step. */
static void the_best_model_is_written(void **state)
{
    const char *validation = GOLDEN_DIR "/tokens/tiny-validation.jsonl",
               *args[] = {"validation_file",
                          validation,
                          "eval_strategy",
                          "steps",
                          "eval_steps",
                          "2",
                          "model_dtype",
                          "f32",
                          "load_best_model_at_end",
                          "true",
                          "learning_rate",
                          "0.03",
                          NULL};
    double lowest = INFINITY;
    json_t *row;
    size_t i;

    (void)state;
    full_runs_train("../../full/cases/tiny-gqa", 2, "best", args);
    json_t *metrics = golden_metrics(runs_path("best"));
    json_array_foreach(metrics, i, row)
    {
        const json_t *value = json_object_get(row, "eval_loss");
        if (value && json_integer_value(json_object_get(row, "step")) > 0)
            lowest = fmin(lowest, json_number_value(value));
    }
    json_decref(metrics);
    double written = loss_of_model(runs_path("best/model"), validation);
    assert_true(lowest < golden_last_eval_loss(runs_path("best"))); /* else this shows nothing */
    assert_true(fabs(written / lowest - 1) < 1e-11);
}

/* ---- processes ---- */

/* Ranks that are processes have the bits of ranks that are threads. */
static void processes_have_the_bits_of_threads(void **state)
{
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    full_runs_kill_args(2, "threads", &args);
    runs_set(&args, "save_steps", "0");
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "output_dir", "%s", runs_path("processes"));
    runs_set(&args, "rank_processes", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 120), 0);
    golden_args_free(&args);
    full_runs_assert_same(FULL_RUNS_STEPS, "threads", "processes", 2, "processes");
    full_runs_assert_same_file(runs_path("threads/model/model.safetensors"),
                               runs_path("processes/model/model.safetensors"));
}

/* ---- rejected configurations ---- */

static void unsupported_keys_are_refused(void **state)
{
    static const struct {
        const char *key, *value, *text;
    } cases[] = {
        {"init_adapter", "tests/golden/train/adapters/tiny-gqa-mlp", "init_adapter is not supp"},
        {"adapter_dtype", "bf16", "adapter_dtype is not supported"},
        {"lora_r", "4", "lora_r is not supported: it is LoRA's; leave it out"},
        {"lora_target_modules", "q_proj", "lora_target_modules is not supported"},
        {"use_rslora", "true", "use_rslora is not supported"},
        {"base_format", "fp8_row", "base_format is not supported: the weights are trained in fp32"},
        {"base_format", "stored", "base_format is not supported"},
        {"compute_dtype", "fp8", "fp8"},
        {"offload_tier", "disk", "offload_tier disk needs offload_dir"},
        {"optimizer_tier", "disk", "optimizer_tier disk needs offload_dir"},
        {"verify_base", "save", "verify_base is not supported"},
        {"shard_size", "1", "shard_size 1 is not supported"},
        {"loss_type", "sigmoid", "loss_type sigmoid is not supported"},
    };
    static const bl_config_machine gpus = {
        .has_gpus = true, .n_ranks = 1, .n_cores = 8, .n_ranks_on_host = 1, .capability = 90};
    char *on_gpu[] = {"--finetuning_type", "full", "--compute_dtype", "fp8"};
    bl_train_configs configs;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        full_runs_kill_args(2, "refused", &args);
        runs_set(&args, cases[i].key, "%s", cases[i].value);
        bl_status st = golden_train(&args);
        golden_args_free(&args);
        if (st == BL_OK || !strstr(bl_error_text(), cases[i].text))
            fail_msg("%s %s: %s", cases[i].key, cases[i].value, bl_error_text());
    }
    assert_false(bl_file_exists(runs_path("refused")));
    char *of_lora[] = {"--model_dtype", "f32", "--device", "cuda"};
    assert_int_equal(bl_train_configs_load_for(&gpus, BL_COUNT(of_lora), of_lora, &configs),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "finetuning_type lora writes an adapter"));
    assert_int_equal(bl_train_configs_load_for(&gpus, BL_COUNT(on_gpu), on_gpu, &configs),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "compute_dtype fp8 is not supported"));
}

/* Two runs would train one base. */
static void a_run_is_alone(void **state)
{
    char *files[] = {(char *)(uintptr_t)runs_path("a.yaml"),
                     (char *)(uintptr_t)runs_path("b.yaml")};
    bl_train_configs configs;

    (void)state;
    for (int i = 0; i < 2; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "model_name_or_path: m\ntrain_file: t\noutput_dir: o-%d\ndevice: cpu\n"
                 "learning_rate: 1e-5\nfinetuning_type: %s\n",
                 i, i ? "full" : "lora");
        runs_write(files[i], text);
    }
    assert_int_equal(bl_train_configs_load(2, files, &configs), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "cannot share its base with other runs"));
}

/* A checkpoint in FP8 has no weights to train; and the run's output is not its input. */
static void unsuitable_models_are_refused(void **state)
{
    golden_args args = {0};

    (void)state;
    full_runs_kill_args(1, "fp8", &args);
    runs_set(&args, "model_name_or_path", "%s", GOLDEN_DIR "/models/tiny-fp8-ct-channel");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "stored in FP8"));
    golden_args_free(&args);
    full_runs_kill_args(1, "own", &args);
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "model_name_or_path", "%s", runs_path("own/model"));
    runs_set(&args, "overwrite_output_dir", "true");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "where output_dir's run removes files"));
    golden_args_free(&args);
    assert_true(bl_file_exists(runs_path("own/model/model.safetensors")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_weight_follows_the_reference),
                                       cmocka_unit_test(nothing_else_changes_a_bit),
                                       cmocka_unit_test(another_number_of_ranks_resumes),
                                       cmocka_unit_test(kills_change_no_bit),
                                       cmocka_unit_test(the_model_is_written_and_read),
                                       cmocka_unit_test(the_best_model_is_written),
                                       cmocka_unit_test(processes_have_the_bits_of_threads),
                                       cmocka_unit_test(unsupported_keys_are_refused),
                                       cmocka_unit_test(a_run_is_alone),
                                       cmocka_unit_test(unsuitable_models_are_refused)};
    return cmocka_run_group_tests_name("full", tests, runs_set_up, runs_tear_down);
}
