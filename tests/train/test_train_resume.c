/* SPDX-License-Identifier: Apache-2.0 */
/* A run's output files depend only on its configuration, wherever it was interrupted: the same
 * adapter, byte for byte, and the same metrics except the times. */
#include "resume_runs.h"
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint.h"

static const int rank_counts[] = {1, 4};

static void test_same_seed_same_run(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) {
        golden_args args = {0};
        const char *again = runs_path("again"), *other = runs_path("other");

        runs_standard(&args, again, rank_counts[i]);
        runs_set(&args, "overwrite_output_dir", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(whole_run(rank_counts[i]), again));

        runs_set(&args, "output_dir", "%s", other);
        runs_set(&args, "seed", "43");
        assert_int_equal(golden_train(&args), BL_OK);
        assert_false(runs_are_same(again, other));
        golden_args_free(&args);
    }
}

/* Dropout and the order of the rows do count, or the tests here would prove little. */
static void test_randomness_is_on(void **state)
{
    static const char *const changes[][2] = {{"lora_dropout", "0"}, {"shuffle", "false"}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(changes); i++) {
        golden_args args = {0};
        const char *output = runs_path("plain-%zu", i);
        runs_standard(&args, output, 1);
        runs_set(&args, changes[i][0], "%s", changes[i][1]);
        assert_int_equal(golden_train(&args), BL_OK);
        assert_false(runs_are_same(whole_run(1), output));
        golden_args_free(&args);
    }
}

static void test_interrupted_after_any_step(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++)
        for (int64_t step = 1; step <= STEPS; step++) {
            const char *whole = whole_run(rank_counts[i]),
                       *output = crashed_run(whole, step, "crashed");
            assert_int_equal(resume(output, rank_counts[i], NULL, NULL), BL_OK);
            if (!runs_are_same(whole, output))
                fail_msg("%d ranks, interrupted after step %d", rank_counts[i], (int)step);
        }
}

/* A run resumes from a given path although its directory has newer checkpoints; and in another
 * output directory, which has no log yet. */
static void test_resume_from_a_path(void **state)
{
    const char *whole = whole_run(4), *output = crashed_run(whole, STEPS, "from-path");

    (void)state;
    assert_int_equal(
        resume(output, 4, "resume_from_checkpoint", runs_path("from-path/checkpoints/step-3")),
        BL_OK);
    assert_true(runs_are_same(whole, output));

    const char *fork = runs_path("fork");
    assert_int_equal(
        resume(fork, 4, "resume_from_checkpoint", runs_path("from-path/checkpoints/step-3")),
        BL_OK);
    assert_int_equal(runs_logged_steps(fork), STEPS - 3);
    runs_copy(runs_path("from-path/metrics.jsonl"), runs_path("fork/metrics.jsonl"));
    assert_true(runs_are_same(whole, fork));

    assert_int_equal(resume(output, 4, "resume_from_checkpoint", runs_path("absent/step-3")),
                     BL_ECHECKPOINT);
    assert_error_has("absent/step-3");
}

/* Newer checkpoints of an abandoned continuation hold more of the log than there is: they are good
 * all the same. */
static void test_a_lost_log_loses_no_checkpoint(void **state)
{
    const char *whole = whole_run(1), *output = crashed_run(whole, 5, "no-log");

    (void)state;
    assert_int_equal(bl_tree_remove(runs_path("no-log/metrics.jsonl")), BL_OK);
    assert_int_equal(resume(output, 1, NULL, NULL), BL_OK);
    assert_int_equal(runs_logged_steps(output), STEPS - 5);
    runs_copy(runs_path("whole-1/metrics.jsonl"), runs_path("no-log/metrics.jsonl"));
    assert_true(runs_are_same(whole, output));
}

static void test_nothing_to_resume(void **state)
{
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    runs_standard(&args, runs_path("nothing"), 1);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "no checkpoint to resume: starting at step 0"));
    free(log);
    assert_true(runs_are_same(whole_run(1), runs_path("nothing")));
    golden_args_free(&args);
}

static void test_a_run_is_not_overwritten(void **state)
{
    golden_args args = {0};
    const char *output = crashed_run(whole_run(1), 2, "kept");

    (void)state;
    runs_standard(&args, output, 1);
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_error_has("holds a run already");
    assert_true(bl_file_exists(runs_path("kept/checkpoints/step-2")));
    runs_set(&args, "overwrite_output_dir", "true");
    assert_int_equal(golden_train(&args), BL_OK);
    assert_true(runs_are_same(whole_run(1), output));
    golden_args_free(&args);
}

static void test_a_damaged_checkpoint(void **state)
{
    const char *output = crashed_run(whole_run(1), 5, "damaged");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    runs_flip_bit(runs_path("damaged/checkpoints/step-5/state-00000-of-00001.safetensors"), -100);
    runs_standard(&args, output, 1);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "step-5/state-00000-of-00001.safetensors: checksum mismatch"));
    assert_non_null(strstr(log, "step-4 after step 4"));
    free(log);
    assert_true(runs_are_same(whole_run(1), output));
    golden_args_free(&args);
}

/* Keeps two checkpoints, and ends after n_steps; its stderr, the caller's. */
static char *resume_with_limit(const char *output, const char *from, int n_steps, const char *limit)
{
    golden_args args = {0};
    runs_child child = {0};

    runs_standard(&args, output, 1);
    runs_set(&args, "resume_from_checkpoint", "%s", from);
    runs_set(&args, "save_total_limit", "%s", limit);
    if (n_steps < STEPS) {
        runs_set(&args, "max_steps", "%d", n_steps);
        runs_set(&args, "allow_resume_mismatch", "true");
    }
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    golden_args_free(&args);
    return runs_read(child.log, NULL);
}

/* A save below the damaged newest checkpoint is one like any other. */
static void test_a_damaged_checkpoint_and_a_limit(void **state)
{
    const char *output = crashed_run(whole_run(1), STEPS, "damaged-limit"),
               *checkpoints = runs_path("damaged-limit/checkpoints");

    (void)state;
    runs_flip_bit(runs_path("damaged-limit/checkpoints/step-8/state-00000-of-00001.safetensors"),
                  -100);
    assert_int_equal(bl_tree_remove(runs_path("damaged-limit/checkpoints/step-7")), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("damaged-limit/checkpoints/step-6")), BL_OK);
    free(resume_with_limit(output, "true", STEPS, "2"));
    assert_true(runs_are_same(whole_run(1), output));
    assert_int_equal(
        bl_checkpoint_verify(runs_path("damaged-limit/checkpoints/step-8"), NULL, NULL), BL_OK);
    assert_false(bl_file_exists(runs_path("%s/step-6", checkpoints)));
}

/* Started before the highest step, a run keeps the checkpoints that it saves; it logs the fate of
 * the others. */
static void test_an_older_checkpoint_and_a_limit(void **state)
{
    static const int64_t kept[] = {5, 4};
    int64_t *steps;
    size_t n_steps;

    (void)state;
    for (int with_limit = 0; with_limit < 2; with_limit++) {
        const char *output = crashed_run(whole_run(1), STEPS, "branch");
        char *log = resume_with_limit(output, runs_path("branch/checkpoints/step-3"), 5,
                                      with_limit ? "2" : "0");
        assert_non_null(strstr(log, "step 3, step-4 to step-8"));
        assert_non_null(
            strstr(log, with_limit ? "the next save removes" : "takes the highest step"));
        free(log);
        assert_int_equal(bl_checkpoint_list(runs_path("branch/checkpoints"), &steps, &n_steps),
                         BL_OK);
        assert_int_equal(n_steps, with_limit ? 2 : STEPS);
        if (with_limit) assert_memory_equal(steps, kept, sizeof kept);
        free(steps);
    }
}

/* When all are damaged, starting over would delete files that a user may want to inspect. */
static void test_only_damaged_checkpoints(void **state)
{
    const char *output = crashed_run(whole_run(1), 2, "all-damaged");

    (void)state;
    for (int step = 1; step <= 2; step++)
        runs_flip_bit(
            runs_path("all-damaged/checkpoints/step-%d/state-00000-of-00001.safetensors", step),
            -100);
    assert_int_equal(resume(output, 1, NULL, NULL), BL_ECHECKPOINT);
    assert_error_has("all-damaged/checkpoints");
    assert_true(bl_file_exists(runs_path("all-damaged/checkpoints/step-2/manifest.json")));
}

static void test_a_finished_run(void **state)
{
    const char *output = runs_path("finished"),
               *adapter = runs_path("finished/adapter_model.safetensors");

    (void)state;
    runs_copy(whole_run(4), output);
    char *readme = runs_read(runs_path("finished/README.md"), NULL);
    assert_null(strstr(readme, "0.0000"));
    assert_int_equal(bl_tree_remove(adapter), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("finished/README.md")), BL_OK);
    assert_int_equal(resume(output, 4, NULL, NULL), BL_OK);
    assert_true(runs_are_same(whole_run(4), output));
    char *again = runs_read(runs_path("finished/README.md"),
                            NULL); /* the same except the directory's name, which comes after */
    assert_non_null(strstr(readme, "| | validation loss"));
    strstr(readme, "## Use")[0] = '\0';
    strstr(again, "## Use")[0] = '\0';
    assert_string_equal(readme, again);
    free(readme);
    free(again);
}

/* vLLM takes certain ranks only. */
static void test_readme_names_a_rank_that_vllm_takes(void **state)
{
    golden_args args = {0};

    (void)state;
    runs_standard(&args, runs_path("rank-12"), 1);
    runs_set(&args, "max_steps", "1");
    runs_set(&args, "lora_r", "12");
    assert_int_equal(golden_train(&args), BL_OK);
    char *readme = runs_read(runs_path("rank-12/README.md"), NULL);
    assert_non_null(strstr(readme, "--max-lora-rank 16 "));
    assert_non_null(strstr(readme, "--enable-lora --lora-paths tuned="));
    free(readme);
    golden_args_free(&args);
}

/* Without validation the README has the first and the last step's loss: of the whole run, not of
 * the resumed part. */
static void test_readme_of_a_resumed_run(void **state)
{
    const char *output = runs_path("no-validation");
    golden_args args = {0};
    json_t *metrics;
    char expected[128];

    (void)state;
    runs_standard(&args, output, 1);
    runs_unset(&args, "validation_file");
    runs_set(&args, "eval_strategy", "no");
    runs_set(&args, "save_steps", "3");
    assert_int_equal(golden_train(&args), BL_OK);
    metrics = golden_metrics(output);
    snprintf(expected, sizeof expected, "| first step | %.4f |\n| last step | %.4f |\n",
             json_number_value(json_object_get(json_array_get(metrics, 0), "loss")),
             json_number_value(json_object_get(json_array_get(metrics, STEPS - 1), "loss")));
    for (int step = STEPS; step >= 3; step -= STEPS - 3) {
        runs_set(&args, "resume_from_checkpoint", "%s",
                 runs_path("no-validation/checkpoints/step-%d", step));
        assert_int_equal(golden_train(&args), BL_OK);
        char *readme = runs_read(runs_path("no-validation/README.md"), NULL);
        if (!strstr(readme, expected))
            fail_msg("resumed after step %d: '%s' is not in %s", step, expected, readme);
        free(readme);
    }
    json_decref(metrics);
    golden_args_free(&args);
}

/* eval_loss after `step` steps. */
static double evaluation(const json_t *metrics, int64_t step)
{
    size_t i;
    json_t *line;

    json_array_foreach((json_t *)metrics, i, line)
    {
        json_t *loss = json_object_get(line, "eval_loss");
        if (loss && json_integer_value(json_object_get(line, "step")) == step)
            return json_number_value(loss);
    }
    fail_msg("no evaluation after step %d", (int)step);
    return 0;
}

/* Whether both directories hold the same adapter, byte for byte. */
static void assert_same_adapter(const char *a, const char *b)
{
    static const char *const names[] = {"adapter_model.safetensors", "adapter_config.json"};

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        size_t n_a, n_b;
        char *in_a = runs_read(runs_path("%s/%s", a, names[i]), &n_a),
             *in_b = runs_read(runs_path("%s/%s", b, names[i]), &n_b);
        assert_int_equal(n_a, n_b);
        assert_memory_equal(in_a, in_b, n_a);
        free(in_a);
        free(in_b);
    }
}

/* Each checkpoint has the adapter of its step; three ranks share a factor. */
static void test_a_checkpoint_is_an_adapter(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        golden_args args = {0};
        char name[32];
        snprintf(name, sizeof name, "adapters-%d", ranks);
        runs_standard(&args, runs_path("%s", name), ranks);
        if (ranks == 2) runs_set(&args, "adapter_dtype", "bf16");
        assert_int_equal(golden_train(&args), BL_OK);
        char last[64];
        snprintf(last, sizeof last, "%s/checkpoints/step-8", name);
        assert_same_adapter(name, last);
        /* The evaluation after step 6, of the adapter of step 6. */
        json_t *metrics = golden_metrics(runs_path("%s", name));
        runs_set(&args, "init_adapter", "%s", runs_path("%s/checkpoints/step-6", name));
        runs_set(&args, "output_dir", "%s", runs_path("%s-continued", name));
        runs_set(&args, "max_steps", "1");
        assert_int_equal(golden_train(&args), BL_OK);
        json_t *continued = golden_metrics(runs_path("%s-continued", name));
        double of_run = evaluation(metrics, 6), of_adapter = evaluation(continued, 0);
        if (ranks == 2) /* rounded: a bf16's 2^-9 of each weight */
            assert_true(of_run != of_adapter && fabs(of_run / of_adapter - 1) < 0.01);
        else
            assert_true(of_run == of_adapter);
        json_decref(metrics);
        json_decref(continued);
        golden_args_free(&args);
    }
}

/* The adapter of one run is the start of another; the keys that it fixes may be repeated, not
 * contradicted. */
static void test_init_adapter(void **state)
{
    const char *whole = whole_run(1);
    golden_args args = {0};

    (void)state;
    runs_standard(&args, runs_path("continued"), 1);
    runs_set(&args, "init_adapter", "%s", whole);
    runs_set(&args, "max_steps", "1");
    runs_set(&args, "lora_r", "8");
    assert_int_equal(golden_train(&args), BL_OK);
    json_t *metrics = golden_metrics(whole), *continued = golden_metrics(runs_path("continued"));
    const json_t *last = json_array_get(metrics, json_array_size(metrics) - 1),
                 *first = json_array_get(continued, 0);
    assert_non_null(json_object_get(last, "eval_loss"));
    assert_true(json_equal((json_t *)json_object_get(last, "eval_loss"),
                           (json_t *)json_object_get(first, "eval_loss")));
    json_decref(metrics);
    json_decref(continued);

    static const char *const conflicts[][2] = {{"lora_r", "4"},
                                               {"lora_alpha", "16"},
                                               {"use_rslora", "true"},
                                               {"lora_target_modules", "q_proj"}};
    runs_set(&args, "output_dir", "%s", runs_path("conflict"));
    for (size_t i = 0; i < BL_COUNT(conflicts); i++) {
        golden_args conflicting = {0};
        runs_standard(&conflicting, runs_path("conflict"), 1);
        runs_set(&conflicting, "init_adapter", "%s", whole);
        runs_set(&conflicting, conflicts[i][0], "%s", conflicts[i][1]);
        assert_int_equal(golden_train(&conflicting), BL_EUSAGE);
        assert_error_has(conflicts[i][0]);
        golden_args_free(&conflicting);
    }
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_seed_same_run),
        cmocka_unit_test(test_randomness_is_on),
        cmocka_unit_test(test_interrupted_after_any_step),
        cmocka_unit_test(test_resume_from_a_path),
        cmocka_unit_test(test_a_lost_log_loses_no_checkpoint),
        cmocka_unit_test(test_nothing_to_resume),
        cmocka_unit_test(test_a_run_is_not_overwritten),
        cmocka_unit_test(test_a_damaged_checkpoint),
        cmocka_unit_test(test_a_damaged_checkpoint_and_a_limit),
        cmocka_unit_test(test_an_older_checkpoint_and_a_limit),
        cmocka_unit_test(test_only_damaged_checkpoints),
        cmocka_unit_test(test_a_finished_run),
        cmocka_unit_test(test_readme_names_a_rank_that_vllm_takes),
        cmocka_unit_test(test_readme_of_a_resumed_run),
        cmocka_unit_test(test_a_checkpoint_is_an_adapter),
        cmocka_unit_test(test_init_adapter),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
