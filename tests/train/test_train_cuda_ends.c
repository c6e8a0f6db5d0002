/* SPDX-License-Identifier: Apache-2.0 */
/* How trainings on a GPU end and resume, the files that they leave, and other uses of an adapter
 * there: a killed and a stopped run that are resumed, a loss that is not finite, a damaged page, a
 * trace; evaluation; generation. */
#include "cuda_runs.h"
#include "generate_runs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/train.h"

static void ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static void assert_error_has(const char *text)
{
    if (!strstr(bl_error_text(), text)) fail_msg("'%s' is not in: %s", text, bl_error_text());
}

/* ---- interrupted ---- */

static const char long_run[] = "max_steps 4 save_steps 1 activation_offload true offload_ratio 0.5 "
                               "activation_checkpointing selective";

/* A run that ends by `signal_number` once it has a checkpoint. */
static void interrupt(const char *output, int ranks, int signal_number)
{
    golden_args args = {0};
    runs_child child = {0};
    char manifest[GOLDEN_PATH_BYTES + 64];

    snprintf(manifest, sizeof manifest, "%s/checkpoints/step-1/manifest.json", output);
    cuda_runs_standard(&args, output, ranks);
    cuda_runs_set_all(&args, long_run);
    runs_start(&child, "train", &args);
    while (!bl_file_exists(manifest) && runs_is_alive(&child)) runs_sleep_s(0.01);
    kill(child.pid, signal_number);
    int code = runs_wait(&child, 300.0);
    assert_true(signal_number == SIGKILL ? code == -SIGKILL || code == 0 : code == 75 || code == 0);
    golden_args_free(&args);
}

static void test_resumed(void **state)
{
    static const int signals[] = {SIGKILL, SIGTERM};

    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        cuda_runs_train("whole", ranks, long_run);
        for (size_t i = 0; i < BL_COUNT(signals); i++) {
            golden_args args = {0};
            const char *output = runs_path("cut");
            assert_int_equal(bl_tree_remove(output), BL_OK);
            interrupt(output, ranks, signals[i]);
            cuda_runs_standard(&args, output, ranks);
            cuda_runs_set_all(&args, long_run);
            runs_unset(&args, "overwrite_output_dir");
            runs_set(&args, "resume_from_checkpoint", "true");
            ok(golden_train(&args));
            assert_true(runs_are_same(runs_path("whole"), output));
            golden_args_free(&args);
        }
    }
}

/* The CPU's checkpoint is another run's. */
static void test_resumed_elsewhere(void **state)
{
    golden_args args = {0};

    (void)state;
    cuda_runs_standard(&args, runs_path("moved"), 1);
    runs_set(&args, "device", "cpu");
    ok(golden_train(&args));
    runs_unset(&args, "overwrite_output_dir");
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "device", "cuda");
    assert_int_equal(golden_train(&args), BL_ECHECKPOINT);
    assert_error_has("device: cpu -> cuda");
    assert_error_has("compute_dtype: fp32 -> bf16");
    golden_args_free(&args);
}

/* ---- errors found ---- */

static void test_a_loss_that_is_not_finite(void **state)
{
    const char *model = runs_overflowing_model();

    (void)state;
    for (int offload = 0; offload < 2; offload++) {
        golden_args args = {0};
        cuda_runs_standard(&args, runs_path("not-finite"), 1);
        runs_set(&args, "visit_tokens", "1000"); /* both micro-batches in a group */
        runs_set(&args, "model_name_or_path", "%s", model);
        if (offload) runs_set(&args, "activation_offload", "true");
        assert_int_equal(golden_train(&args), BL_ENUMERIC);
        assert_error_has("the output of layer 0, micro-batch 0");
        golden_args_free(&args);
    }
}

static void test_a_damaged_page(void **state)
{
    static const char keys[] = "offload_ratio 1 offload_tier disk offload_dir %s/pages";
    golden_args args = {0};

    (void)state;
    cuda_runs_train("paged", 1, keys);
    runs_flip_in_files(runs_path("pages"), ".pages", 100);
    cuda_runs_standard(&args, runs_path("damaged"), 1);
    cuda_runs_set_all(&args, keys);
    assert_int_equal(golden_train(&args), BL_EINPUT);
    assert_error_has("checksum");
    assert_error_has("model.layers.0.self_attn.q_proj+k_proj+v_proj");
    ok(golden_train(&args)); /* which writes it anew */
    assert_true(runs_are_same(runs_path("paged"), runs_path("damaged")));
    golden_args_free(&args);
}

/* Spans of every lane that this run uses, each with a duration. */
static void test_a_trace(void **state)
{
    int n_spans[BL_N_LANES] = {0};
    json_t *event;
    size_t i;

    (void)state;
    cuda_runs_train("traced", 2, "offload_ratio 1 activation_offload true trace %s/trace.json");
    json_t *trace = json_load_file(runs_path("trace.json"), 0, NULL);
    assert_non_null(trace);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        const char *kind = json_string_value(json_object_get(event, "ph"));
        json_int_t lane = json_integer_value(json_object_get(event, "tid"));
        if (!kind || strcmp(kind, "X") != 0) continue;
        assert_true(json_number_value(json_object_get(event, "dur")) >= 0);
        assert_in_range(lane, 0, BL_N_LANES - 1);
        n_spans[lane]++;
    }
    json_decref(trace);
    assert_true(n_spans[BL_LANE_COMPUTE] > 0 && n_spans[BL_LANE_GATHER] > 0);
    assert_true(n_spans[BL_LANE_COPY] > 0 && n_spans[BL_LANE_ACTIVATIONS] > 0);
    assert_true(n_spans[BL_LANE_LORA] > 0 && n_spans[BL_LANE_DISK] == 0);
}

/* ---- evaluation ---- */

static double evaluate(const char *keys)
{
    bl_train_config *config = NULL;
    bl_eval_result result;
    golden_args args = {0};

    golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
    golden_args_add(&args, "init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-all-linear");
    golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
    golden_args_add(&args, "data_format", "tokens");
    golden_args_add(&args, "max_seq_length", "64");
    golden_args_add(&args, "threads", "1");
    cuda_runs_set_all(&args, keys);
    ok(bl_train_config_load(BL_CONFIG_EVAL, NULL, args.n, args.text, &config));
    ok(bl_eval_run(config, NULL, &result));
    bl_train_config_free(config);
    golden_args_free(&args);
    return result.loss;
}

static void test_evaluation(void **state)
{
    double cpu = evaluate("device cpu"), one = evaluate("device cuda"),
           two = evaluate("device cuda ranks 2 offload_ratio 1"),
           fp8 = evaluate("device cuda compute_dtype fp8");

    (void)state;
    assert_true(fabs(one - cpu) < 0.005 * cpu && one != cpu);
    assert_true(fabs(two - one) < 1e-6 * one);
    assert_true(fabs(fp8 - one) < 0.005 * one);
    assert_true(evaluate("device cuda") == one);
}

/* ---- generation ---- */

static void test_generation(void **state)
{
    (void)state;
    generate_runs_check(GOLDEN_DIR "/models/tiny-gqa", GOLDEN_DIR "/adapters/tiny-gqa-all-linear");
    generate_runs_check(GOLDEN_DIR "/models/tiny-mha-tied",
                        GOLDEN_DIR "/adapters/tiny-mha-tied-all-linear");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_evaluation),
        cmocka_unit_test(test_generation),
        cmocka_unit_test(test_a_loss_that_is_not_finite),
        cmocka_unit_test(test_a_damaged_page),
        cmocka_unit_test(test_a_trace),
        cmocka_unit_test(test_resumed),
        cmocka_unit_test(test_resumed_elsewhere),
    };
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
