/* SPDX-License-Identifier: Apache-2.0 */
/* Several runs over one base: each has the bits that it has alone, whatever the others do, on
 * threads and processes and with the base in any tier; one that fails leaves the others; all are
 * stopped, killed and resumed together; sweeps and their names; and what does not fit together.
 * Losses of preferences and others share a base. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "runs.h"

enum { N_RUNS = 3, FIRST_PREFERENCE = 2, N_ALL = 6 };
static const double LIMIT_S = 120;

#define PAIRS  "tests/golden/preference/tokens/pairs.jsonl"
#define LABELS "tests/golden/preference/tokens/labels.jsonl"

/* Keys in which the runs differ; lengths of steps, rows and adapters among them. From
 * FIRST_PREFERENCE on: one without, the others with losses of preferences. */
static const char *const differences[N_ALL][9][2] = {
    {{"max_steps", "8"}, {"lora_r", "8"}, {"seed", "42"}},
    {{"max_steps", "5"},
     {"lora_r", "4"},
     {"gradient_accumulation_steps", "3"},
     {"per_device_train_batch_size", "2"},
     {"lora_target_modules", "[q_proj, down_proj]"},
     {"learning_rate", "0.01"}},
    {{"max_steps", "6"},
     {"lora_dropout", "0"},
     {"seed", "7"},
     {"train_on_inputs", "true"},
     {"eval_steps", "2"},
     {"gradient_accumulation_steps", "1"}},
    {{"loss_type", "[sigmoid, sft]"},
     {"loss_weights", "[1, 0.3]"},
     {"data_format", "preference"},
     {"train_file", PAIRS},
     {"validation_file", PAIRS},
     {"max_steps", "6"}},
    {{"loss_type", "kto"},
     {"data_format", "unpaired_preference"},
     {"train_file", LABELS},
     {"validation_file", LABELS},
     {"init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-all-linear"},
     {"lora_r", "4"},
     {"lora_dropout", "0"},
     {"per_device_train_batch_size", "2"},
     {"gradient_accumulation_steps", "3"}},
    {{"loss_type", "orpo"},
     {"data_format", "preference"},
     {"train_file", PAIRS},
     {"validation_file", PAIRS},
     {"lora_target_modules", "[q_proj, v_proj]"},
     {"max_steps", "5"},
     {"beta", "0.3"}},
};

static void set_differences(golden_args *args, int run)
{
    for (size_t i = 0; i < BL_COUNT(differences[run]); i++)
        if (differences[run][i][0])
            runs_set(args, differences[run][i][0], "%s", differences[run][i][1]);
}

/* The arguments as a file. */
static void write_config(const golden_args *args, const char *path)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < args->n; i += 2)
        fprintf(file, "%s: %s\n", args->text[i] + 2, args->text[i + 1]);
    assert_int_equal(fclose(file), 0);
}

/* Configuration `run` of the case, which writes to NAME-PLACE-RUN; the file's path. */
static const char *make_config(const char *name, const char *place, int run, int ranks)
{
    golden_args args = {0};
    const char *path = runs_path("%s-%s-%d.yaml", name, place, run);

    runs_standard(&args, runs_path("%s-%s-%d", name, place, run), ranks);
    set_differences(&args, run);
    write_config(&args, path);
    golden_args_free(&args);
    return path;
}

static void add_word(golden_args *args, const char *word)
{
    args->text[args->n] = strdup(word);
    assert_non_null(args->text[args->n++]);
}

/* `ballast train FILES` with the keys. */
static void start(runs_child *child, const char *const *files, int n_files, const char *const *keys,
                  size_t n_keys)
{
    golden_args args = {0};

    for (int i = 0; i < n_files; i++) add_word(&args, files[i]);
    for (size_t i = 0; i < n_keys; i++) add_word(&args, keys[i]);
    runs_start(child, "train", &args);
    golden_args_free(&args);
}

static int train(const char *const *files, int n_files, const char *const *keys, size_t n_keys)
{
    runs_child child = {0};
    start(&child, files, n_files, keys, n_keys);
    int code = runs_wait(&child, LIMIT_S);
    if (code != 0) {
        char *log = runs_read(child.log, NULL);
        printf("%s", log);
        free(log);
    }
    return code;
}

/* ---- the bits that each has alone ---- */

typedef struct placed_case {
    const char *name;
    int ranks;
    const char *keys[8];
    size_t n_keys;
} placed_case;

static void train_apart(const placed_case *c, int first, int end)
{
    for (int run = first; run < end; run++) {
        const char *file = make_config(c->name, "alone", run, c->ranks);
        assert_int_equal(train(&file, 1, c->keys, c->n_keys), 0);
    }
}

static void train_alone(const placed_case *c)
{
    train_apart(c, 0, N_RUNS);
}

static void assert_same(const char *name, int run)
{
    assert_true(
        runs_are_same(runs_path("%s-alone-%d", name, run), runs_path("%s-together-%d", name, run)));
}

/* The last one first. */
static void compare_runs(const placed_case *c, int first, int end)
{
    const char *files[N_ALL];

    train_apart(c, first, end);
    for (int run = first; run < end; run++)
        files[end - 1 - run] = make_config(c->name, "together", run, c->ranks);
    assert_int_equal(train(files, end - first, c->keys, c->n_keys), 0);
    for (int run = first; run < end; run++) assert_same(c->name, run);
}

static void test_bits(void **state)
{
    static const placed_case cases[] = {
        {"memory", 1, {NULL}, 0},
        {"threads", 2, {"--rank_processes", "false", "--visit_tokens", "512"}, 4},
        {"host", 1, {"--offload_ratio", "1", "--activation_checkpointing", "full"}, 4},
        {"processes", 2, {"--rank_processes", "true"}, 2},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) compare_runs(&cases[i], 0, N_RUNS);
}

/* Losses of preferences, with the base and with an adapter as reference, beside others. */
static void test_preferences(void **state)
{
    static const placed_case cases[] = {
        {"preferences", 1, {"--visit_tokens", "1"}, 2},
        {"preferences-threads", 2, {"--rank_processes", "false", "--visit_tokens", "256"}, 4},
        {"preferences-host",
         1,
         {"--offload_ratio", "1", "--activation_checkpointing", "full", "--visit_tokens", "1000"},
         6},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) compare_runs(&cases[i], FIRST_PREFERENCE, N_ALL);
}

/* On page files, which the runs share. */
static void test_disk(void **state)
{
    const char *files[N_RUNS], *dir = runs_path("pages");
    const char *keys[] = {"--offload_ratio", "1", "--offload_tier", "disk",
                          "--offload_dir",   dir, "--verify_base",  "always"};
    placed_case c = {.name = "disk", .ranks = 1, .n_keys = BL_COUNT(keys)};

    (void)state;
    memcpy(c.keys, keys, sizeof keys);
    train_alone(&c);
    for (int run = 0; run < N_RUNS; run++) files[run] = make_config("disk", "together", run, 1);
    assert_int_equal(train(files, N_RUNS, keys, BL_COUNT(keys)), 0);
    for (int run = 0; run < N_RUNS; run++) assert_same("disk", run);
}

/* ---- failures, stops ---- */

/* AdamW with epsilon 0 divides the first gradient of A, which is 0, by 0: step 2 is not finite. */
static void test_failure(void **state)
{
    const char *files[N_RUNS];
    golden_args bad = {0};
    runs_child child = {0};
    placed_case c = {.name = "failure", .ranks = 2};

    (void)state;
    train_alone(&c);
    for (int run = 0; run < N_RUNS; run++) files[run] = make_config("failure", "together", run, 2);
    runs_standard(&bad, runs_path("failure-together-1"), 2);
    runs_set(&bad, "adam_epsilon", "0");
    write_config(&bad, files[1]);
    golden_args_free(&bad);
    start(&child, files, N_RUNS, NULL, 0);
    assert_int_equal(runs_wait(&child, LIMIT_S), 6);
    runs_assert_error(&child, "step 2: loss ");
    assert_same("failure", 0);
    assert_same("failure", 2);
    assert_int_equal(access(runs_path("failure-together-1/adapter_model.safetensors"), F_OK), -1);
    assert_int_equal(runs_logged_steps(runs_path("failure-together-1")), 1);
    char *log = runs_read(child.log, NULL);
    assert_non_null(
        strstr(log, "failure-together-1: this run ends here, the others go on: step 2"));
    assert_non_null(strstr(log, "failure-together-1  failed"));
    free(log);
}

/* Killed once a run is done and others are not, or asked to stop: resumed, all end as alone. */
static void end_in_the_middle(const char *name, int signal_number, int code)
{
    static const char *const resume[] = {"--resume_from_checkpoint", "true"};
    const char *files[N_RUNS];
    runs_child child = {0};
    placed_case c = {.name = name, .ranks = 1};

    train_alone(&c);
    for (int run = 0; run < N_RUNS; run++) files[run] = make_config(name, "together", run, 1);
    const char *third = runs_path("%s-together-1/checkpoints/step-3", name);
    start(&child, files, N_RUNS, NULL, 0);
    while (runs_is_alive(&child) && access(third, F_OK) != 0) runs_sleep_s(0.0005);
    kill(child.pid, signal_number);
    int ended = runs_wait(&child, LIMIT_S);
    assert_true(ended == code || ended == 0); /* it may have been faster */
    for (int tries = 0; tries < 2; tries++)   /* the second time there is nothing left to do */
        assert_int_equal(train(files, N_RUNS, resume, BL_COUNT(resume)), 0);
    for (int run = 0; run < N_RUNS; run++) assert_same(name, run);
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

/* ---- sweeps ---- */

static void test_sweep(void **state)
{
    static const char *const line[] = {"--seed", "5"};
    static const char *const names[] = {
        "learning_rate-0.005_lora_r-2", "learning_rate-0.005_lora_r-4",
        "learning_rate-1e-2_lora_r-2", "learning_rate-1e-2_lora_r-4"};
    golden_args args = {0};
    const char *file = runs_path("sweep.yaml");

    (void)state;
    runs_standard(&args, runs_path("sweep"), 1);
    runs_set(&args, "learning_rate", "[0.005, 1e-2]");
    runs_set(&args, "lora_r", "[2, 4]");
    runs_set(&args, "seed", "[1, 2, 3]"); /* the line's value is the only one */
    runs_set(&args, "max_steps", "[3]");
    write_config(&args, file);
    assert_int_equal(train(&file, 1, line, BL_COUNT(line)), 0);
    golden_args_free(&args);

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        golden_args alone = {0};
        runs_child child = {0};
        runs_standard(&alone, runs_path("sweep-alone-%zu", i), 1);
        runs_set(&alone, "learning_rate", "%s", i < 2 ? "0.005" : "0.01");
        runs_set(&alone, "lora_r", "%s", i % 2 ? "4" : "2");
        runs_set(&alone, "seed", "5");
        runs_set(&alone, "max_steps", "3");
        runs_start(&child, "train", &alone);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        golden_args_free(&alone);
        assert_true(
            runs_are_same(runs_path("sweep-alone-%zu", i), runs_path("sweep/%s", names[i])));
    }
}

/* ---- what does not fit together ---- */

static void assert_refused(const char *key, const char *value, const char *text)
{
    const char *files[2];
    golden_args args = {0};
    runs_child child = {0};

    for (int run = 0; run < 2; run++) files[run] = make_config("refused", "together", run, 1);
    runs_standard(&args, runs_path("refused-together-1"), 1);
    runs_set(&args, key, "%s", value);
    write_config(&args, files[1]);
    golden_args_free(&args);
    start(&child, files, 2, NULL, 0);
    assert_int_equal(runs_wait(&child, LIMIT_S), 2);
    runs_assert_error(&child, text);
    assert_int_equal(access(runs_path("refused-together-0"), F_OK), -1);
}

static void test_refusals(void **state)
{
    (void)state;
    assert_refused("ranks", "2", "ranks: 1 for ");
    assert_refused("max_seq_length", "32", "max_seq_length: 64 for ");
    assert_refused("base_format", "stored", "base_format: auto for ");
    assert_refused("output_dir", runs_path("refused-together-0"),
                   "output_dir: two runs write to the same place");
    assert_refused("init_adapter", runs_path("refused-together-0"), "init_adapter: ");
    assert_refused("modules_to_save", "norm", "modules_to_save: a run that replaces modules");
    assert_refused("train_file", "[a.jsonl, b.jsonl]", "train_file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),   cmocka_unit_test(test_preferences),
        cmocka_unit_test(test_disk),   cmocka_unit_test(test_failure),
        cmocka_unit_test(test_killed), cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_sweep),  cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
