/* SPDX-License-Identifier: Apache-2.0 */
/* Which steps get a checkpoint, which step's adapter is the result, and which evaluation ends a
 * run: save_strategy, load_best_model_at_end, early_stopping_patience. */
#include "runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "store/checkpoint.h"
#include "train/rank/trainer.h"

/* The checkpoints of a run, newest first, are exactly these. */
static void assert_steps(const char *output, const int64_t *expected, size_t n_expected)
{
    int64_t *steps;
    size_t n;

    assert_int_equal(bl_checkpoint_list(runs_path("%s/checkpoints", output), &steps, &n), BL_OK);
    assert_int_equal(n, n_expected);
    assert_memory_equal(steps, expected, n * sizeof *steps);
    free(steps);
}

/* Two epochs of three steps: 19 rows, four ranks of two. */
static void test_save_strategy(void **state)
{
    static const struct {
        const char *strategy;
        size_t n;
        int64_t steps[3];
    } cases[] = {{"no", 1, {6}}, {"epoch", 2, {6, 3}}, {"steps", 2, {6, 4}}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        runs_standard(&args, runs_path("%s", cases[i].strategy), 4);
        runs_set(&args, "save_strategy", "%s", cases[i].strategy);
        runs_set(&args, "save_steps", "4");
        runs_set(&args, "num_train_epochs", "2");
        runs_unset(&args, "max_steps");
        assert_int_equal(golden_train(&args), BL_OK);
        assert_steps(cases[i].strategy, cases[i].steps, cases[i].n);
        golden_args_free(&args);
    }
}

/* As transformers' Trainer and EarlyStoppingCallback: tools/golden/train/make_best.py. */
static void test_as_transformers(void **state)
{
    json_t *golden, *item;
    size_t index;

    (void)state;
    assert_int_equal(bl_json_load(GOLDEN_DIR "/best.json", 1 << 20, &golden), BL_OK);
    json_array_foreach(json_object_get(golden, "cases"), index, item)
    {
        const json_t *losses = json_object_get(item, "losses");
        bl_train_config config = {
            .early_stopping_patience = json_integer_value(json_object_get(item, "patience")),
            .early_stopping_threshold = json_number_value(json_object_get(item, "threshold"))};
        bl_trainer trainer = {.config = &config, .best = {.step = -1}};
        int64_t step = 0;
        while (step < (int64_t)json_array_size(losses) && !bl_trainer_stops_early(&trainer)) {
            double loss = json_number_value(json_array_get(losses, (size_t)step++));
            bl_trainer_note_loss(&trainer, step, loss);
        }
        if (step != json_integer_value(json_object_get(item, "evaluations")) ||
            trainer.best.step != json_integer_value(json_object_get(item, "step")) ||
            trainer.best.loss != json_number_value(json_object_get(item, "loss")) ||
            trainer.best.n_stale != json_integer_value(json_object_get(item, "stale")))
            fail_msg("case %zu: %lld evaluations, best %lld, %lld stale", index, (long long)step,
                     (long long)trainer.best.step, (long long)trainer.best.n_stale);
    }
    assert_int_equal(index, 48);
    json_decref(golden);
}

enum { N_STEPS = 14 };

/* A run that overfits: five rows, an evaluation after each step. */
static void overfitting(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "train_file", "%s", GOLDEN_DIR "/tokens/tiny-weights.jsonl");
    runs_set(args, "learning_rate", "0.05");
    runs_set(args, "lr_scheduler_type", "constant");
    runs_unset(args, "warmup_steps");
    runs_set(args, "max_steps", "%d", N_STEPS);
    runs_set(args, "eval_steps", "1");
    runs_set(args, "save_steps", "5");
    runs_set(args, "eval_stored_base", "false");
}

/* The last evaluation of a log. */
static json_t *last_evaluation(const char *output)
{
    json_t *metrics = golden_metrics(output),
           *last = json_incref(json_array_get(metrics, json_array_size(metrics) - 1));
    json_decref(metrics);
    assert_non_null(json_object_get(last, "eval_loss"));
    return last;
}

static int64_t integer_of(const json_t *line, const char *key)
{
    return json_integer_value(json_object_get(line, key));
}

static void assert_same_file(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *in_a = runs_read(a, &n_a), *in_b = runs_read(b, &n_b);

    assert_int_equal(n_a, n_b);
    assert_memory_equal(in_a, in_b, n_a);
    free(in_a);
    free(in_b);
}

static void assert_readme_has(const char *output, const char *text)
{
    char *readme = runs_read(runs_path("%s/README.md", output), NULL);
    if (!strstr(readme, text)) fail_msg("'%s' is not in %s", text, readme);
    free(readme);
}

/* The result is the best step's adapter, the checkpoint of that step remains, and neither where the
 * run was interrupted nor a limit changes anything. */
static void test_load_best(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        golden_args args = {0};
        char whole[32], name[32];
        snprintf(whole, sizeof whole, "best-%d", ranks);
        overfitting(&args, runs_path("%s", whole), ranks);
        runs_set(&args, "load_best_model_at_end", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        json_t *last = last_evaluation(runs_path("%s", whole));
        int64_t best = integer_of(last, "best_step");
        assert_true(best > 4 && best < N_STEPS - 1);
        assert_true(json_number_value(json_object_get(last, "best_eval_loss")) <
                    json_number_value(json_object_get(last, "eval_loss")));
        json_decref(last);
        assert_same_file(
            runs_path("%s/adapter_model.safetensors", whole),
            runs_path("%s/checkpoints/step-%d/adapter_model.safetensors", whole, (int)best));
        char text[128];
        snprintf(text, sizeof text,
                 "14 steps, %d sequences a step, r 8, alpha 8, on q_proj, k_proj, v_proj, o_proj, "
                 "gate_proj",
                 2 * ranks);
        assert_readme_has(whole, text);
        snprintf(text, sizeof text,
                 " The adapter is that of step %d, which had the lowest validation loss.\n",
                 (int)best);
        assert_readme_has(whole, text);

        /* Interrupted before, at and after the best step; from then on two checkpoints are kept. */
        for (int64_t at = best - 1; at <= best + 1; at++) {
            snprintf(name, sizeof name, "best-%d-%d", ranks, (int)at);
            runs_set(&args, "output_dir", "%s", runs_path("%s", name));
            runs_set(&args, "max_steps", "%d", (int)at);
            assert_int_equal(golden_train(&args), BL_OK);
            runs_set(&args, "max_steps", "%d", N_STEPS);
            runs_set(&args, "save_total_limit", "2");
            runs_set(&args, "resume_from_checkpoint", "true");
            assert_int_equal(golden_train(&args), BL_OK);
            runs_set(&args, "resume_from_checkpoint", "false");
            assert_true(runs_are_same(runs_path("%s", whole), runs_path("%s", name)));
            assert_steps(name, (const int64_t[]){N_STEPS, best}, 2);
        }
        golden_args_free(&args);
    }
}

/* A stop and a resume do not change the step at which a run ends; a finished one stays so. */
static void test_early_stopping(void **state)
{
    golden_args args = {0};
    const char *whole = runs_path("early"), *resumed = runs_path("early-resumed");

    (void)state;
    overfitting(&args, whole, 1);
    runs_set(&args, "early_stopping_patience", "3");
    assert_int_equal(golden_train(&args), BL_OK);
    json_t *last = last_evaluation(whole);
    int64_t end = integer_of(last, "step"), best = integer_of(last, "best_step");
    json_decref(last);
    assert_true(end < N_STEPS && end == best + 3);
    assert_readme_has("early", " Early stopping ended the run, planned for 14 steps.\n");
    assert_same_file(runs_path("early/adapter_model.safetensors"),
                     runs_path("early/checkpoints/step-%d/adapter_model.safetensors", (int)end));

    /* Between the best step and the end: the count goes on. */
    runs_set(&args, "output_dir", "%s", resumed);
    runs_set(&args, "max_steps", "%d", (int)best + 2);
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "max_steps", "%d", N_STEPS);
    runs_set(&args, "resume_from_checkpoint", "true");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(whole, resumed));
    }
    /* More patience continues it. */
    runs_set(&args, "early_stopping_patience", "4");
    assert_int_equal(golden_train(&args), BL_OK);
    assert_true(runs_logged_steps(resumed) > end);
    golden_args_free(&args);
}

/* A checkpoint that was made before its evaluation is written again when its loss is the lowest:
 * the next resume finds it. */
static void test_an_evaluation_after_the_save(void **state)
{
    golden_args args = {0};
    json_t *saved;

    (void)state;
    overfitting(&args, runs_path("late"), 1);
    runs_set(&args, "eval_steps", "100");
    runs_set(&args, "save_steps", "7");
    assert_int_equal(golden_train(&args), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("late/checkpoints/step-14")), BL_OK);
    runs_set(&args, "eval_steps", "1");
    runs_set(&args, "load_best_model_at_end", "true");
    runs_set(&args, "resume_from_checkpoint", "true");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(golden_train(&args), BL_OK);
        assert_same_file(runs_path("late/adapter_model.safetensors"),
                         runs_path("late/checkpoints/step-7/adapter_model.safetensors"));
        assert_int_equal(bl_checkpoint_verify(runs_path("late/checkpoints/step-7"), NULL, &saved),
                         BL_OK);
        assert_int_equal(integer_of(saved, "best_step"), 7);
        json_decref(saved);
    }
    golden_args_free(&args);
}

/* The best step's checkpoint is missing: a warning, and the best of the rest. In another
 * output_dir, the resumed step itself is copied there if it is the best. */
static void test_a_lost_best(void **state)
{
    golden_args args = {0};
    runs_child child = {0};
    json_t *line;

    (void)state;
    overfitting(&args, runs_path("lost"), 1);
    runs_set(&args, "load_best_model_at_end", "true");
    assert_int_equal(golden_train(&args), BL_OK);
    line = last_evaluation(runs_path("lost"));
    int best = (int)integer_of(line, "best_step");
    json_decref(line);

    runs_set(&args, "resume_from_checkpoint", "%s", runs_path("lost/checkpoints/step-%d", best));
    runs_set(&args, "output_dir", "%s", runs_path("fork"));
    assert_int_equal(golden_train(&args), BL_OK);
    assert_same_file(runs_path("lost/adapter_model.safetensors"),
                     runs_path("fork/adapter_model.safetensors"));

    assert_int_equal(bl_tree_remove(runs_path("lost/checkpoints/step-%d", best)), BL_OK);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "output_dir", "%s", runs_path("lost"));
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "the checkpoint of the lowest validation loss so far, is missing"));
    free(log);
    assert_same_file(runs_path("lost/adapter_model.safetensors"),
                     runs_path("lost/checkpoints/step-14/adapter_model.safetensors"));
    golden_args_free(&args);
}

/* A bit of the best step's checkpoint flips while the run goes on; false: the run was through
 * before. */
static bool damage_best(runs_child *child, const golden_args *args, const char *output, int best)
{
    assert_int_equal(bl_tree_remove(output), BL_OK);
    runs_start(child, "train", args);
    while (runs_is_alive(child) && runs_logged_steps(output) <= best) runs_sleep_s(0.001);
    if (!runs_stop(child)) return false;
    bool is_in_time = runs_logged_steps(output) < N_STEPS;
    if (is_in_time)
        runs_flip_in_files(runs_path("damaged/checkpoints/step-%d", best), ".safetensors", -1);
    kill(child->pid, SIGCONT);
    return is_in_time;
}

/* The run ends with exit 5, names the checkpoint, and writes no adapter; its last checkpoint is
 * whole. A resume warns, and takes the best of the rest. */
static void test_a_best_damaged_during_the_run(void **state)
{
    enum { EXIT_CHECKPOINT = 5, MAX_TRIES = 30 };
    const char *output = runs_path("damaged"),
               *adapter = runs_path("damaged/adapter_model.safetensors");
    golden_args args = {0};
    runs_child child = {0};
    json_t *saved;
    bool is_damaged = false;
    char text[128];

    (void)state;
    overfitting(&args, output, 1);
    runs_set(&args, "load_best_model_at_end", "true");
    assert_int_equal(golden_train(&args), BL_OK);
    json_t *line = last_evaluation(output);
    int best = (int)integer_of(line, "best_step");
    json_decref(line);
    for (int i = 0; i < MAX_TRIES && !is_damaged; i++) {
        is_damaged = damage_best(&child, &args, output, best);
        int code = runs_wait(&child, 600);
        assert_int_equal(code, is_damaged ? EXIT_CHECKPOINT : 0);
    }
    assert_true(is_damaged);
    snprintf(text, sizeof text, "/checkpoints/step-%d/", best);
    runs_assert_error(&child, "load_best_model_at_end: ");
    runs_assert_error(&child, text);
    runs_assert_error(&child, "--resume_from_checkpoint true takes the best of the rest");
    assert_false(bl_file_exists(adapter));
    assert_int_equal(bl_checkpoint_verify(runs_path("damaged/checkpoints/step-14"), NULL, &saved),
                     BL_OK);
    json_decref(saved);

    runs_set(&args, "resume_from_checkpoint", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 600), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(
        strstr(log, "the checkpoint of the lowest validation loss so far, is missing or damaged"));
    free(log);
    assert_same_file(adapter, runs_path("damaged/checkpoints/step-14/adapter_model.safetensors"));
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_save_strategy),
        cmocka_unit_test(test_as_transformers),
        cmocka_unit_test(test_load_best),
        cmocka_unit_test(test_early_stopping),
        cmocka_unit_test(test_an_evaluation_after_the_save),
        cmocka_unit_test(test_a_lost_best),
        cmocka_unit_test(test_a_best_damaged_during_the_run),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
