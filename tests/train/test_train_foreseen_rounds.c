/* SPDX-License-Identifier: Apache-2.0 */
/* A plan simulates the operations of rounds: of several runs over one base, of losses of
 * preferences with their references, and of evaluations, apart and in the visits of the next step.
 * The spans are those of the trace, in order. The inputs of the time model are a plan's. */
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/command/model.h"
#include "spans.h"
#include "base/sizes.h"
#include "plan/case.h"
#include "plan/estimate.h"
#include "train/train.h"

#define PAIRS  "tests/golden/preference/tokens/pairs.jsonl"
#define LABELS "tests/golden/preference/tokens/labels.jsonl"

enum { ROW_TOKENS = 24, MOST_RUNS = 3, MOST_KEYS = 10, STEPS = 2, PAIR_ROWS = 13, LABEL_ROWS = 12 };

typedef const char *key_value[2];

typedef struct scene {
    const char *name;
    int ranks, n_runs;
    bool has_preferences; /* of the model and rows of these tests; else a model with a tied head */
    bool is_second;       /* the trace is that of the same command again */
    key_value common[MOST_KEYS]; /* of all runs */
    key_value run[MOST_RUNS][MOST_KEYS];
} scene;

static void set_all(golden_args *args, const key_value *keys)
{
    for (int i = 0; i < MOST_KEYS && keys[i][0]; i++) runs_set(args, keys[i][0], "%s", keys[i][1]);
}

static void set_keys(const scene *s, int run, golden_args *args)
{
    runs_standard(args, runs_path("run-%d", run), s->ranks);
    if (!s->has_preferences) {
        runs_set(args, "model_name_or_path", "%s", runs_path("model"));
        runs_set(args, "train_file", "%s", runs_path("train.jsonl"));
    }
    runs_unset(args, "validation_file");
    runs_unset(args, "eval_strategy");
    runs_unset(args, "eval_steps");
    runs_set(args, "overwrite_output_dir", "true");
    runs_set(args, "base_format", "fp8_row");
    runs_set(args, "max_steps", "%d", STEPS);
    runs_set(args, "save_steps", "0");
    runs_set(args, "activation_checkpointing", "full");
    runs_set(args, "trace", "%s", runs_path("trace.json"));
    set_all(args, s->common);
    set_all(args, s->run[run]);
    for (int i = 0; i < args->n; i += 2)
        if (strcmp(args->text[i + 1], "disk") == 0) {
            runs_set(args, "offload_dir", "%s", runs_path("pages"));
            break;
        }
}

static char *write_file(const scene *s, int run)
{
    golden_args args = {0};
    const char *path = runs_path("run-%d.yaml", run);
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    set_keys(s, run, &args);
    for (int i = 0; i < args.n; i += 2)
        fprintf(file, "%s: %s\n", args.text[i] + 2, args.text[i + 1]);
    assert_int_equal(fclose(file), 0);
    golden_args_free(&args);
    return strdup(path);
}

static void train(const scene *s, char *const *files, spans *out)
{
    bl_train_configs configs;

    if (bl_train_configs_load(s->n_runs, files, &configs) != BL_OK ||
        bl_train_run_all((const bl_train_config *const *)configs.run, configs.n, NULL, NULL) !=
            BL_OK)
        fail_msg("%s: %s", s->name, bl_error_text());
    bl_train_configs_free(&configs);
    spans_read_trace(runs_path("trace.json"), out);
}

/* ---- the plan ---- */

static int64_t count_rows(const bl_train_config *c)
{
    return !c->validation_file                       ? 0
           : strcmp(c->validation_file, PAIRS) == 0  ? PAIR_ROWS
           : strcmp(c->validation_file, LABELS) == 0 ? LABEL_ROWS
                                                     : 64;
}

/* As many as two steps make, with evaluations before, between and after them. */
static void trace(const bl_time_input *in, spans *out)
{
    bool evaluates = in->evaluation.n_micro > 0, is_overlapped = in->evaluation.is_overlapped;
    bl_time_before before = BL_TIME_AFTER_NOTHING;
    bl_status st = BL_OK;

    for (int step = 0; step <= STEPS && st == BL_OK; step++) {
        bool is_last = step == STEPS;
        if (evaluates && (!is_overlapped || is_last)) {
            st = bl_time_trace(in, BL_TIME_EVALUATIONS, before, spans_add_foreseen, out);
            before = BL_TIME_AFTER_EVALUATION;
        }
        if (is_last || st != BL_OK) break;
        st = bl_time_trace(in, is_overlapped ? BL_TIME_ROUND_EVALUATING : BL_TIME_ROUND, before,
                           spans_add_foreseen, out);
        before = BL_TIME_AFTER_STEP;
    }
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static void foresee(const scene *s, char *const *files, spans *out)
{
    bl_plan_case c;
    bl_plan plan;
    bl_plan_time time;

    if (bl_plan_case_open("cpu", ROW_TOKENS, s->n_runs, files, &c) != BL_OK)
        fail_msg("%s: %s", s->name, bl_error_text());
    c.input.n_validation_rows = count_rows(c.config);
    for (int i = 0; i < c.input.n_others; i++)
        c.others[i].n_validation_rows = count_rows(c.others[i].config);
    if (bl_plan_choose(&c.input, &plan) != BL_OK ||
        bl_plan_time_open(&c.input, &plan, &time) != BL_OK)
        fail_msg("%s: %s", s->name, bl_error_text());
    trace(&time.input, out);
    bl_plan_time_close(&time);
    bl_plan_case_close(&c);
}

static void compare(const scene *s)
{
    static spans done, foreseen;
    char *files[MOST_RUNS];

    printf("%s\n", s->name);
    foreseen.n = 0;
    for (int run = 0; run < s->n_runs; run++) files[run] = write_file(s, run);
    for (int i = 0; i < (s->is_second ? 2 : 1); i++) {
        done.n = 0;
        train(s, files, &done);
    }
    foresee(s, files, &foreseen);
    spans_assert_same(&done, &foreseen, 20);
    for (int run = 0; run < s->n_runs; run++) free(files[run]);
}

/* ---- scenes ---- */

#define TWO_ADAPTERS                                                                               \
    {                                                                                              \
        {{"lora_r", "8"}, {"gradient_accumulation_steps", "1"}},                                   \
        {                                                                                          \
            {"lora_r", "4"}, {"gradient_accumulation_steps", "2"},                                 \
            {                                                                                      \
                "lora_target_modules", "[q_proj, down_proj]"                                       \
            }                                                                                      \
        }                                                                                          \
    }

static const scene together[] = {
    {"all in one visit", 1, 2, .common = {{"visit_tokens", "100000"}}, .run = TWO_ADAPTERS},
    {"a micro-batch per visit", 1, 2, .common = {{"visit_tokens", "1"}}, .run = TWO_ADAPTERS},
    {"two per visit, on disk", 2, 2,
     .common = {{"visit_tokens", "50"},
                {"max_seq_length", "64"},
                {"offload_ratio", "1"},
                {"offload_tier", "disk"},
                {"ring_depth", "3"}},
     .run = TWO_ADAPTERS},
    {"host, activations offloaded", 2, 2,
     .common = {{"visit_tokens", "100000"},
                {"offload_ratio", "0.5"},
                {"offload_tier", "host"},
                {"activation_offload", "true"}},
     .run = TWO_ADAPTERS},
};

#define OF_PAIRS                                                                                   \
    {"data_format", "preference"},                                                                 \
    {                                                                                              \
        "train_file", PAIRS                                                                        \
    }

static const scene preferences[] = {
    {"the base as reference", 1, 1, true, .common = {{"visit_tokens", "100000"}},
     .run = {{{"loss_type", "sigmoid"}, OF_PAIRS}}},
    {"an adapter as reference, on disk", 2, 1, true,
     .common = {{"visit_tokens", "100000"}, {"offload_ratio", "1"}, {"offload_tier", "disk"}},
     .run = {{{"loss_type", "sigmoid"},
              OF_PAIRS,
              {"lora_r", "4"},
              {"lora_dropout", "0"},
              {"init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-all-linear"}}}},
    {"kto, a micro-batch per visit", 1, 1, true, .common = {{"visit_tokens", "1"}},
     .run = {{{"loss_type", "kto"},
              {"data_format", "unpaired_preference"},
              {"train_file", LABELS},
              {"per_device_train_batch_size", "2"},
              {"gradient_accumulation_steps", "3"}}}},
    {"kto, its reference computed before", 2, 1, true, .is_second = true,
     .common = {{"visit_tokens", "100000"}},
     .run = {{{"loss_type", "kto"},
              {"data_format", "unpaired_preference"},
              {"train_file", LABELS},
              {"precompute_ref_log_probs", "true"},
              {"per_device_train_batch_size", "2"}}}},
    {"orpo, without a reference, beside likelihood", 2, 2, true,
     .common = {{"visit_tokens", "100000"}},
     .run = {{{"loss_type", "orpo"}, OF_PAIRS}, {{"lora_r", "4"}}}},
};

#define EACH_STEP                                                                                  \
    {"eval_strategy", "steps"},                                                                    \
    {                                                                                              \
        "eval_steps", "1"                                                                          \
    }

static const scene evaluations[] = {
    {"apart", 1, 1,
     .common = {{"visit_tokens", "100000"},
                {"offload_ratio", "1"},
                {"per_device_eval_batch_size", "8"},
                EACH_STEP}},
    {"in visits", 2, 1,
     .common = {{"visit_tokens", "100000"},
                {"offload_ratio", "1"},
                {"per_device_eval_batch_size", "8"},
                {"eval_overlap", "true"},
                EACH_STEP}},
    {"more than a step has room for", 1, 1,
     .common = {{"visit_tokens", "1"},
                {"gradient_accumulation_steps", "2"},
                {"per_device_eval_batch_size", "4"},
                {"eval_overlap", "true"},
                EACH_STEP}},
    {"of two runs", 1, 2,
     .common = {{"visit_tokens", "100000"},
                {"per_device_eval_batch_size", "16"},
                {"eval_overlap", "true"},
                EACH_STEP},
     .run = {{{"lora_r", "8"}}, {{"lora_r", "4"}}}},
    {"of preferences", 1, 1, true,
     .common = {{"visit_tokens", "100000"},
                {"eval_overlap", "true"},
                {"validation_file", PAIRS},
                EACH_STEP},
     .run = {{{"loss_type", "sigmoid"}, OF_PAIRS}}},
    {"of kto, apart", 1, 1, true,
     .common = {{"visit_tokens", "100000"},
                {"per_device_train_batch_size", "2"},
                {"per_device_eval_batch_size", "2"},
                {"validation_file", LABELS},
                EACH_STEP},
     .run = {{{"loss_type", "kto"},
              {"data_format", "unpaired_preference"},
              {"train_file", LABELS}}}},
};

static void runs_together(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(together); i++) compare(&together[i]);
}

static void losses_of_preferences(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(preferences); i++) compare(&preferences[i]);
}

static void evaluations_apart_and_in_visits(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(evaluations); i++) {
        scene s = evaluations[i];
        int last = 0;
        while (s.common[last][0]) last++;
        if (!s.has_preferences) { /* the rows of the training data */
            s.common[last][0] = "validation_file";
            s.common[last][1] = runs_path("train.jsonl");
        }
        compare(&s);
    }
}

static int set_up(void **state)
{
    const bl_bench_model model = {.layers = 5,
                                  .hidden = 64,
                                  .inter = 192,
                                  .vocab = 256,
                                  .rows = 64,
                                  .row_tokens = ROW_TOKENS};
    int failed = runs_set_up(state);
    if (failed) return failed;
    return bl_bench_model_write(&model, runs_path(".")) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_together),
        cmocka_unit_test(losses_of_preferences),
        cmocka_unit_test(evaluations_apart_and_in_visits),
    };
    return cmocka_run_group_tests_name("foreseen rounds", tests, set_up, runs_tear_down);
}
