/* SPDX-License-Identifier: Apache-2.0 */
/* Event files for TensorBoard: the bytes of that program; in a run, the values of metrics.jsonl;
 * after a resume; and when a run starts over. test_tensorboard_reads has TensorBoard's reader. */
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/report/events.h"

/* By tools/golden/train/make_events.py. */
static void test_bytes(void **state)
{
    static const double BEGIN = 1.75e9;
    static const bl_scalar step[] = {
        {"train/loss", 2.25}, {"train/grad_norm", 0.1}, {"train/learning_rate", 2e-4}};
    const bl_scalar eval[] = {{"eval/loss", NAN}, {"eval/runtime", 0}};
    static const bl_scalar zero[] = {{"train/zero", -1e30}};
    bl_scalar longest[BL_EVENTS_MAX_SCALARS];
    char tags[BL_EVENTS_MAX_SCALARS][BL_EVENTS_MAX_TAG_BYTES + 1];
    const char *path = runs_path("golden");
    bl_events *events;
    size_t n, n_expected;

    (void)state;
    for (int i = 0; i < BL_EVENTS_MAX_SCALARS; i++) {
        strcpy(tags[i], "train/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx0");
        tags[i][BL_EVENTS_MAX_TAG_BYTES - 1] += (char)i;
        assert_int_equal(strlen(tags[i]), BL_EVENTS_MAX_TAG_BYTES);
        longest[i] = (bl_scalar){tags[i], i};
    }
    assert_int_equal(bl_events_open(path, 301, BEGIN, &events), BL_OK);
    assert_int_equal(bl_events_add(events, 301, BEGIN + 0.5, step, BL_COUNT(step)), BL_OK);
    assert_int_equal(bl_events_add(events, INT64_C(1) << 40, BEGIN + 1, eval, 2), BL_OK);
    assert_int_equal(bl_events_add(events, 0, BEGIN, zero, 1), BL_OK);
    assert_int_equal(bl_events_add(events, 7, BEGIN, longest, BL_EVENTS_MAX_SCALARS), BL_OK);
    bl_events_close(events);
    char *ours = runs_read(path, &n),
         *expected = runs_read("tests/golden/train/events.tfevents", &n_expected);
    assert_int_equal(n, n_expected);
    assert_memory_equal(ours, expected, n);
    free(ours);
    free(expected);
    /* A file that is there is not replaced. */
    assert_int_equal(bl_events_open(path, 0, BEGIN, &events), BL_EIO);
    assert_null(events);
}

/* ---- runs ---- */

static void keys(golden_args *args, const char *output)
{
    runs_standard(args, output, 1);
    runs_set(args, "report_to", "tensorboard");
}

static void train(golden_args *args)
{
    assert_int_equal(golden_train(args), BL_OK);
    golden_args_free(args);
}

/* The one name in the folder, or the last of two; the caller frees it. */
static char *last_of(const char *dir, size_t n_expected)
{
    char **names, *path;
    size_t n;

    assert_int_equal(bl_dir_list(dir, &names, &n), BL_OK);
    assert_int_equal(n, n_expected);
    assert_int_equal(bl_path_join(dir, names[n - 1], &path), BL_OK);
    bl_names_free(names, n);
    return path;
}

/* How often the file has `tag`, and the value after its last one. Of a message of a few fields, a
 * tag's bytes are nowhere else. */
static int find_tag(const char *path, const char *tag, float *value)
{
    size_t n, n_tag = strlen(tag);
    char *bytes = runs_read(path, &n);
    int n_found = 0;

    for (char *at = bytes; (at = memmem(at, n - (size_t)(at - bytes), tag, n_tag)); at += n_tag) {
        if (at[-1] != (char)n_tag || at[n_tag] != (2 << 3 | 5))
            continue; /* simple_value, a float */
        memcpy(value, at + n_tag + 1, sizeof *value);
        n_found++;
    }
    free(bytes);
    return n_found;
}

static double logged(const char *output, const char *key)
{
    json_t *metrics = golden_metrics(output), *value = NULL;

    for (size_t i = 0; i < json_array_size(metrics); i++) {
        json_t *found = json_object_get(json_array_get(metrics, i), key);
        if (found) value = found;
    }
    double result = json_number_value(value);
    json_decref(metrics);
    return result;
}

static void test_run_and_resume(void **state)
{
    static const char *const pairs[][2] = {{"train/loss", "loss"},
                                           {"train/grad_norm", "grad_norm"},
                                           {"train/learning_rate", "learning_rate"},
                                           {"train/epoch", "epoch"},
                                           {"eval/loss", "eval_loss"}};
    const char *output = runs_path("events"), *dir = runs_path("events/runs");
    golden_args args = {0};
    float value;

    (void)state;
    keys(&args, output);
    train(&args);
    char *first = last_of(dir, 1);
    for (size_t i = 0; i < BL_COUNT(pairs); i++) {
        assert_true(find_tag(first, pairs[i][0], &value) >= (i < 4 ? 8 : 2));
        assert_true(value == (float)logged(output, pairs[i][1]));
    }
    runs_assert_listed(output);

    /* A further step than step 6's checkpoint was logged: it is void from step 7 on. */
    assert_int_equal(bl_tree_remove(runs_path("events/checkpoints/step-8")), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("events/checkpoints/step-7")), BL_OK);
    keys(&args, output);
    runs_set(&args, "resume_from_checkpoint", "true");
    train(&args);
    char *second = last_of(dir, 2);
    assert_string_not_equal(first, second);
    assert_int_equal(find_tag(second, "train/loss", &value), 2);
    assert_true(value == (float)logged(output, "loss"));
    size_t n;
    char *bytes = runs_read(second, &n);
    /* The second record: wall_time, step 7, session_log {status: START}. */
    const char *start = bytes + 12 + 9 + 2 + 13 + 4 + 12;
    assert_memory_equal(start + 9, "\x10\x07\x3a\x02\x08\x01", 6);
    free(bytes);
    free(second);
    free(first);
}

/* A run that starts over removes what is listed, and nothing else. */
static void test_starts_over(void **state)
{
    const char *output = runs_path("over"), *dir = runs_path("over/runs");
    golden_args args = {0};

    (void)state;
    keys(&args, output);
    train(&args);
    char *old = last_of(dir, 1);
    runs_write(runs_path("over/runs/notes.txt"), "mine");
    keys(&args, output);
    runs_set(&args, "overwrite_output_dir", "true");
    runs_set(&args, "report_to", "none");
    train(&args);
    assert_false(bl_file_exists(old));
    free(old);
    free(last_of(dir, 1));
    assert_true(bl_file_exists(runs_path("over/runs/notes.txt")));
}

/* Elsewhere, by all; and where it cannot be. */
static void test_logging_dir(void **state)
{
    const char *dir = runs_path("logs/a");
    golden_args args = {0};

    (void)state;
    keys(&args, runs_path("elsewhere"));
    runs_set(&args, "report_to", "all");
    runs_set(&args, "logging_dir", "%s", dir);
    train(&args);
    free(last_of(dir, 1));
    assert_false(bl_file_exists(runs_path("elsewhere/runs")));

    runs_write(runs_path("file"), "");
    keys(&args, runs_path("nowhere"));
    runs_set(&args, "logging_dir", "%s", runs_path("file"));
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "logging_dir"));
    golden_args_free(&args);
}

static void test_other_trackers(void **state)
{
    static const char *const cases[][2] = {
        {"wandb", "report_to: wandb is not supported: give tensorboard; `wandb sync "
                  "--sync-tensorboard DIR` uploads its files (docs/tutorial.md)"},
        {"tensorboard,mlflow", "report_to: mlflow is not supported: log metrics.jsonl with "
                               "mlflow.log_metrics, one call per line (docs/tutorial.md)"},
        {"clearml", "report_to: expected tensorboard, all or none, got 'clearml'; metrics.jsonl "
                    "has every step for other trackers (docs/tutorial.md)"},
        {"none,tensorboard", "report_to: none cannot be combined with other names"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        keys(&args, runs_path("others"));
        runs_set(&args, "report_to", "%s", cases[i][0]);
        assert_int_equal(golden_train(&args), BL_EUSAGE);
        assert_string_equal(bl_error_text(), cases[i][1]);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),          cmocka_unit_test(test_run_and_resume),
        cmocka_unit_test(test_starts_over),    cmocka_unit_test(test_logging_dir),
        cmocka_unit_test(test_other_trackers),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
