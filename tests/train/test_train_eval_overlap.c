/* SPDX-License-Identifier: Apache-2.0 */
/* Evaluations in the visits of the next step (eval_overlap): losses, adapters, checkpoints and the
 * end of a run are those of evaluations apart, bit for bit, wherever the base is, of several runs,
 * with losses of preferences, and after a stop; and the visits are saved. */
#include "runs.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "device/timeline.h"

#define MORE  GOLDEN_DIR "/tokens/tiny-more.jsonl"
#define PAIRS "tests/golden/preference/tokens/pairs.jsonl"

enum { N_ROWS = 19, STEPS = 8, N_EVALUATIONS = 4 };
static const double LIMIT_S = 120;

/* 19 validation rows; evaluations before the first step and after steps 3, 6 and 8. */
static void prepare(golden_args *args, const char *output, int ranks, bool overlaps)
{
    runs_standard(args, runs_path("%s", output), ranks);
    runs_set(args, "validation_file", MORE);
    runs_set(args, "per_device_eval_batch_size", "1");
    runs_set(args, "eval_overlap", overlaps ? "true" : "false");
}

static void set_all(golden_args *args, const char *const *pairs)
{
    for (int i = 0; pairs[i]; i += 2) runs_set(args, pairs[i], "%s", pairs[i + 1]);
}

static void train(golden_args *args)
{
    if (golden_train(args) != BL_OK) fail_msg("%s", bl_error_text());
    golden_args_free(args);
}

/* The names of a run's checkpoints. */
static void list_checkpoints(const char *output, char *text, size_t n_bytes)
{
    size_t used = 0;

    text[0] = '\0';
    for (int step = 0; step <= STEPS; step++)
        if (access(runs_path("%s/checkpoints/step-%d", output, step), F_OK) == 0)
            used += (size_t)snprintf(text + used, n_bytes - used, " %d", step);
}

static void assert_alike(const char *one, const char *two)
{
    char of_one[64], of_two[64];

    assert_true(runs_are_same(runs_path("%s", one), runs_path("%s", two)));
    list_checkpoints(one, of_one, sizeof of_one);
    list_checkpoints(two, of_two, sizeof of_two);
    assert_string_equal(of_one, of_two);
}

/* ---- bits ---- */

static const struct {
    const char *name;
    int ranks;
    const char *keys[16];
} cases[] = {
    {"one", 1, {NULL}},
    {"a-micro-batch-per-visit", 1, {"visit_tokens", "1", "gradient_accumulation_steps", "3", NULL}},
    {"large", 1, {"per_device_eval_batch_size", "16", NULL}},
    {"ranks", 2, {"gradient_accumulation_steps", "4", "per_device_eval_batch_size", "2", NULL}},
    {"idle-ranks", 4, {"per_device_eval_batch_size", "8", NULL}},
    {"host", 2, {"offload_ratio", "1", "activation_offload", "true", NULL}},
    {"saves-nothing",
     1,
     {"activation_checkpointing", "full", "gradient_accumulation_steps", "5", NULL}},
    {"best",
     1,
     {"save_strategy", "best", "load_best_model_at_end", "true", "learning_rate", "0.5",
      "eval_steps", "1", "save_total_limit", "2", NULL}},
    {"early",
     2,
     {"early_stopping_patience", "1", "learning_rate", "0.5", "eval_steps", "1", "save_steps", "2",
      NULL}},
    {"epochs", 1, {"eval_strategy", "epoch", "max_steps", "-1", "num_train_epochs", "1", NULL}},
    {"sigmoid",
     2,
     {"loss_type", "sigmoid,sft", "data_format", "preference", "train_file", PAIRS,
      "validation_file", PAIRS, NULL}},
    {"kto",
     1,
     {"loss_type", "kto", "data_format", "unpaired_preference", "train_file",
      "tests/golden/preference/tokens/labels.jsonl", "validation_file",
      "tests/golden/preference/tokens/labels.jsonl", "per_device_train_batch_size", "2",
      "per_device_eval_batch_size", "2", NULL}},
};

static void test_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        for (int overlaps = 0; overlaps < 2; overlaps++) {
            golden_args args = {0};
            prepare(&args, overlaps ? "overlap" : "apart", cases[i].ranks, overlaps);
            runs_set(&args, "overwrite_output_dir", "true");
            set_all(&args, cases[i].keys);
            train(&args);
        }
        printf("%s\n", cases[i].name);
        assert_alike("apart", "overlap");
    }
}

/* ---- visits ---- */

static int count_heads(const char *path)
{
    json_t *trace = json_load_file(path, 0, NULL), *event;
    int n = 0;
    size_t i;

    assert_non_null(trace);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        const char *name = json_string_value(json_object_get(event, "name"));
        n += name && strcmp(name, "head") == 0 &&
             json_integer_value(json_object_get(event, "tid")) == BL_LANE_COMPUTE;
    }
    json_decref(trace);
    return n;
}

/* Passes of a run: two micro-batches per visit, a step is one pass. The model has two layers, so
 * two evaluation micro-batches are in a visit. */
static int count_passes(bool overlaps, const char *eval_batch)
{
    golden_args args = {0};
    const char *trace = runs_path("trace.json");

    prepare(&args, "traced", 1, overlaps);
    runs_set(&args, "overwrite_output_dir", "true");
    runs_set(&args, "per_device_eval_batch_size", "%s", eval_batch);
    runs_set(&args, "visit_tokens", "100000");
    runs_set(&args, "trace", "%s", trace);
    train(&args);
    return count_heads(trace);
}

static void test_visits(void **state)
{
    enum { RIDERS = 2, LEFT = (N_ROWS + 1) / RIDERS };

    (void)state;
    assert_int_equal(count_passes(false, "10"), STEPS + 2 * N_EVALUATIONS);
    /* All are overlapped; after the last step they have a separate visit. */
    assert_int_equal(count_passes(true, "10"), STEPS + 1);
    /* Of 19, two are in the step's pass; the others have passes of two. */
    assert_int_equal(count_passes(true, "1"), STEPS + (N_EVALUATIONS - 1) * (LEFT - 1) + LEFT);
}

/* ---- several runs, stops ---- */

static const char *make_file(const char *name, int run, bool overlaps)
{
    static const char *const keys[3][9] = {
        {"max_steps", "8", NULL},
        {"max_steps", "5", "seed", "7", "eval_steps", "2", "gradient_accumulation_steps", "3",
         NULL},
        {"max_steps", "7", "eval_steps", "1", "learning_rate", "0.001", NULL},
    };
    const char *path = runs_path("%s-%d.yaml", name, run);
    char output[64];
    golden_args args = {0};

    snprintf(output, sizeof output, "%s-%d", name, run);
    prepare(&args, output, 1, overlaps);
    set_all(&args, keys[run]);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < args.n; i += 2)
        fprintf(file, "%s: %s\n", args.text[i] + 2, args.text[i + 1]);
    assert_int_equal(fclose(file), 0);
    golden_args_free(&args);
    return path;
}

static void add_words(golden_args *args, const char *const *words, int n)
{
    for (int i = 0; i < n; i++) {
        args->text[args->n] = strdup(words[i]);
        assert_non_null(args->text[args->n++]);
    }
}

static void start(runs_child *child, const char *const *files, int n, bool resumes)
{
    static const char *const resume[] = {"--resume_from_checkpoint", "true"};
    golden_args args = {0};

    add_words(&args, files, n);
    if (resumes) add_words(&args, resume, 2);
    runs_start(child, "train", &args);
    golden_args_free(&args);
}

/* Of which one has its evaluations apart. */
static void test_together(void **state)
{
    const char *files[3];
    runs_child child = {0};

    (void)state;
    for (int run = 0; run < 3; run++) {
        const char *file = make_file("alone", run, false);
        start(&child, &file, 1, false);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        files[run] = make_file("together", run, run != 1);
    }
    start(&child, files, 3, false);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    for (int run = 0; run < 3; run++)
        assert_true(runs_are_same(runs_path("alone-%d", run), runs_path("together-%d", run)));
}

/* At any point between two checkpoints, a pending evaluation among them. */
static void end_in_the_middle(const char *name, int signal_number, int code)
{
    char whole[32];
    snprintf(whole, sizeof whole, "%s-whole", name);
    const char *file = make_file(whole, 2, true);
    runs_child child = {0};

    start(&child, &file, 1, false);
    assert_int_equal(runs_wait(&child, LIMIT_S), 0);
    for (int step = 1; step < 6; step++) {
        char output[32];
        snprintf(output, sizeof output, "%s%d", name, step);
        file = make_file(output, 2, true);
        const char *checkpoint = runs_path("%s-2/checkpoints/step-%d", output, step);
        start(&child, &file, 1, false);
        while (runs_is_alive(&child) && access(checkpoint, F_OK) != 0) runs_sleep_s(0.0002);
        kill(child.pid, signal_number);
        int ended = runs_wait(&child, LIMIT_S);
        assert_true(ended == code || ended == 0); /* it may have been faster */
        start(&child, &file, 1, true);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        assert_true(runs_are_same(runs_path("%s-2", whole), runs_path("%s-2", output)));
    }
}

static void test_killed(void **state)
{
    (void)state;
    end_in_the_middle("killed", SIGKILL, -SIGKILL);
}

static void test_stopped(void **state)
{
    (void)state;
    end_in_the_middle("stopped", SIGTERM, 75);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),     cmocka_unit_test(test_visits),
        cmocka_unit_test(test_together), cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
