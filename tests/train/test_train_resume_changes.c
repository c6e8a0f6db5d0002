/* SPDX-License-Identifier: Apache-2.0 */
/* Resuming with another configuration, number of ranks, model, machine or build: it ends with an
 * error, or with a warning. */
#include "resume_runs.h"
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "store/checkpoint.h"
#include "store/safetensors.h"
#include "skip.h"

static void test_another_rank_count(void **state)
{
    const char *output = crashed_run(whole_run(4), 4, "other-ranks");
    golden_args args = {0};
    runs_child child = {0};

    (void)state;
    assert_int_equal(resume(output, 2, NULL, NULL), BL_ECHECKPOINT);
    assert_error_has("ranks: 4 -> 2");
    assert_error_has("not bit-identical");

    runs_standard(&args, output, 2);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "allow_resume_mismatch", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 0);
    char *log = runs_read(child.log, NULL);
    assert_non_null(strstr(log, "not bit-identical: ranks: 4 -> 2"));
    free(log);
    assert_int_equal(runs_logged_steps(output), STEPS);
    golden_args_free(&args);
}

/* The whole state moves: 4 ranks x 1 resume as 2 ranks x 2, except for rounding. And the sequences
 * of a step keep their places, micro-batch by micro-batch and rank by rank within one, or each
 * would get another's dropout. */
static void test_another_rank_count_keeps_the_course(void **state)
{
    const char *whole = whole_run(4);
    json_t *expected = golden_metrics(whole);
    static const struct {
        int ranks;
        const char *per_device, *accumulation;
    } ways[] = {{2, "2", "2"}, {1, "4", "2"}, {1, "1", "8"}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(ways); i++) {
        const char *output = crashed_run(whole, 4, "regrouped");
        golden_args args = {0};
        runs_standard(&args, output, ways[i].ranks);
        runs_set(&args, "per_device_train_batch_size", "%s", ways[i].per_device);
        runs_set(&args, "gradient_accumulation_steps", "%s", ways[i].accumulation);
        runs_set(&args, "resume_from_checkpoint", "true");
        runs_set(&args, "allow_resume_mismatch", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        golden_args_free(&args);
        json_t *metrics = golden_metrics(output), *steps = json_array(), *line;
        size_t k;
        json_array_foreach(expected, k, line) if (json_object_get(line, "loss"))
            json_array_append(steps, line);
        /* float32 sums in another order; golden.h's runs drift by 2e-5 in 20 steps */
        assert_true(golden_compare_losses(metrics, steps, STEPS, 1e-4) <= 1e-4);
        json_decref(steps);
        json_decref(metrics);
    }
    json_decref(expected);
}

static void flip_last_bit_of(const char *weights, const char *tensor)
{
    bl_safetensors *file;

    assert_int_equal(bl_safetensors_open(weights, &file), BL_OK);
    const bl_stored_tensor *t = bl_safetensors_find(file, tensor);
    assert_non_null(t);
    int64_t at = t->offset_bytes + t->n_bytes - 2; /* the low byte of a bf16 */
    bl_safetensors_close(file);
    runs_flip_bit(weights, at);
}

static void test_differences_are_listed(void **state)
{
    const char *output = crashed_run(whole_run(1), 4, "changed");

    (void)state;
    assert_int_equal(resume(output, 1, "learning_rate", "0.004"), BL_ECHECKPOINT);
    assert_error_has("learning_rate: 0.005 -> 0.004");
    assert_int_equal(resume(output, 1, "lora_r", "4"), BL_ECHECKPOINT);
    assert_error_has("lora_r: 8 -> 4 (its weights have other sizes: it cannot be resumed)");
    assert_int_equal(resume(output, 1, "train_file", GOLDEN_DIR "/tokens/tiny.jsonl"),
                     BL_ECHECKPOINT);
    assert_error_has("the training data differ");

    const char *model = runs_path("other-model");
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", model);
    assert_int_equal(resume(output, 1, "model_name_or_path", model),
                     BL_OK); /* elsewhere, but the same */
    output = crashed_run(whole_run(1), 4, "changed");
    flip_last_bit_of(runs_path("other-model/model.safetensors"),
                     "model.layers.1.mlp.up_proj.weight");
    assert_int_equal(resume(output, 1, "model_name_or_path", model), BL_ECHECKPOINT);
    assert_error_has("the model's tensors differ");

    golden_args args = {0};
    runs_standard(&args, output, 1);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "learning_rate", "0.004");
    runs_set(&args, "weight_decay", "0.1");
    runs_set(&args, "train_file", GOLDEN_DIR "/tokens/tiny.jsonl");
    assert_int_equal(golden_train(&args), BL_ECHECKPOINT);
    assert_error_has(
        "learning_rate: 0.005 -> 0.004; weight_decay: 0 -> 0.1; the training data differ");
    golden_args_free(&args);
}

static bool same_adapters(const char *name_a, const char *name_b)
{
    size_t n_a, n_b;
    char *a = runs_read(runs_path("%s/adapter_model.safetensors", name_a), &n_a),
         *b = runs_read(runs_path("%s/adapter_model.safetensors", name_b), &n_b);
    bool same = n_a == n_b && memcmp(a, b, n_a) == 0;
    free(a);
    free(b);
    return same;
}

/* More steps at a rate that does not depend on their number, and other validation data: the bits of
 * one run. */
static void test_what_changes_no_bit(void **state)
{
    static const char *const names[] = {"even-whole", "even-half"};

    (void)state;
    for (int i = 0; i < 2; i++) {
        golden_args args = {0};
        runs_standard(&args, runs_path("%s", names[i]), 1);
        runs_set(&args, "lr_scheduler_type", "constant_with_warmup");
        if (i == 0) assert_int_equal(golden_train(&args), BL_OK);
        if (i == 1) {
            runs_set(&args, "max_steps", "4");
            runs_unset(&args, "validation_file");
            runs_set(&args, "eval_strategy", "no");
            assert_int_equal(golden_train(&args), BL_OK);
            runs_set(&args, "max_steps", "%d", STEPS);
            runs_set(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
            runs_set(&args, "resume_from_checkpoint", "true");
            assert_int_equal(golden_train(&args), BL_OK);
        }
        golden_args_free(&args);
    }
    assert_true(same_adapters(names[0], names[1]));
    char *readme = runs_read(runs_path("even-half/README.md"), NULL);
    assert_non_null(strstr(readme, "| base + adapter | "));
    assert_null(strstr(readme, "| base | ")); /* never measured on these data */
    free(readme);
}

/* Each difference has the name by which it is allowed; others stay errors. */
static void test_differences_are_allowed_by_name(void **state)
{
    static const struct {
        const char *allowed, *error;
        bl_status status;
    } cases[] = {{"false", "[weight_decay, max_steps]", BL_ECHECKPOINT},
                 {"weight_decay", "(allow_resume_mismatch: [max_steps]", BL_ECHECKPOINT},
                 {"weight_decays", "weight_decays is not a key", BL_EUSAGE},
                 {"max_steps,weight_decay", "", BL_OK},
                 {"true", "", BL_OK}};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *output = crashed_run(whole_run(1), 4, "allowed");
        golden_args args = {0};
        runs_standard(&args, output, 1);
        runs_set(&args, "resume_from_checkpoint", "true");
        runs_set(&args, "weight_decay", "0.1");
        runs_set(&args, "max_steps", "6");
        runs_set(&args, "allow_resume_mismatch", "%s", cases[i].allowed);
        assert_int_equal(golden_train(&args), cases[i].status);
        if (cases[i].status != BL_OK) assert_error_has(cases[i].error);
        golden_args_free(&args);
    }
}

/* A checkpoint of other modules is rejected, also with allow_resume_mismatch and with equal sizes.
 * Other words for the same modules can be allowed. */
static void test_the_state_is_of_the_same_modules(void **state)
{
    static const struct {
        const char *targets[2], *modules[2];
        bl_status status;
    } cases[] = {
        {{"q_proj", "o_proj"}, {NULL, NULL}, BL_ECHECKPOINT},
        {{"q_proj,lm_head", "q_proj,embed_tokens"}, {NULL, NULL}, BL_ECHECKPOINT},
        {{"q_proj,lm_head", "q_proj"}, {NULL, NULL}, BL_ECHECKPOINT},
        {{"q_proj", "q_proj"}, {"input_layernorm", "post_attention_layernorm"}, BL_ECHECKPOINT},
        {{"q_proj", "q_proj"}, {"model.norm", NULL}, BL_ECHECKPOINT},
        {{"q_proj", "self_attn.q_proj"}, {"model.norm", "l.norm"}, BL_OK},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (int after = 0; after < 2; after++) {
            golden_args args = {0};
            golden_args_add(&args, "device", "cpu");
            golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-mha-tied");
            golden_args_add(&args, "train_file", GOLDEN_DIR "/tokens/tiny-more.jsonl");
            golden_args_add(&args, "data_format", "tokens");
            golden_args_add(&args, "max_seq_length", "64");
            golden_args_add(&args, "base_format", "stored");
            golden_args_add(&args, "output_dir", "%s", runs_path("modules-%zu", i));
            golden_args_add(&args, "max_steps", after ? "3" : "2");
            golden_args_add(&args, "lora_target_modules", "%s", cases[i].targets[after]);
            if (cases[i].modules[after])
                golden_args_add(&args, "modules_to_save", "%s", cases[i].modules[after]);
            if (after) golden_args_add(&args, "resume_from_checkpoint", "true");
            if (after) golden_args_add(&args, "allow_resume_mismatch", "true");
            bl_status st = golden_train(&args);
            if (st != (after ? cases[i].status : BL_OK))
                fail_msg("case %zu: status %d: %s", i, (int)st, st ? bl_error_text() : "");
            if (st != BL_OK) assert_error_has("weights and moments of other modules than lora_");
            golden_args_free(&args);
        }
}

/* A whole checkpoint that lacks a key of its state, or has an unknown one in its configuration. */
static void test_a_checkpoint_of_another_version(void **state)
{
    const char *output = crashed_run(whole_run(1), 2, "version");

    (void)state;
    for (int64_t step = 3; step <= 4; step++) {
        bl_checkpoint *checkpoint;
        json_t *run = NULL;
        assert_int_equal(bl_checkpoint_verify(runs_path("version/checkpoints/step-2"), NULL, &run),
                         BL_OK);
        if (step == 3) assert_int_equal(json_object_del(run, "metrics_bytes"), 0);
        assert_int_equal(
            bl_checkpoint_begin(runs_path("version/checkpoints"), step, 100, &checkpoint), BL_OK);
        runs_write(runs_path("version/checkpoints/step-%d.tmp/config.yaml", (int)step),
                   "key_of_tomorrow: 1\n");
        assert_int_equal(bl_checkpoint_add_file(checkpoint, "config.yaml"), BL_OK);
        assert_int_equal(bl_checkpoint_commit(checkpoint, run), BL_OK);
        json_decref(run);
        assert_int_equal(resume(output, 1, NULL, NULL), BL_ECHECKPOINT);
        assert_error_has(step == 3 ? "metrics_bytes" : "key_of_tomorrow");
    }
}

/* The warning on the log of a run that resumes step 2 of `from`; "" when there is none. The
 * caller's. */
static char *resume_elsewhere(const char *from, const char *name)
{
    static const char mark[] = "warning: not bit-identical: ";
    runs_child child = {0};
    golden_args args = {0};

    runs_copy(from, runs_path("%s", name));
    runs_standard(&args, runs_path("%s", name), 1);
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 120), 0);
    golden_args_free(&args);
    char *log = runs_read(child.log, NULL), *line = strstr(log, mark);
    assert_non_null(strstr(log, "resuming "));
    memmove(log, line ? line + strlen(mark) : "", line ? strlen(line + strlen(mark)) + 1 : 1);
    log[strcspn(log, "\n")] = '\0';
    return log;
}

/* A machine without fused multiply-adds rounds products differently: resuming there works and says
 * so. */
static void test_another_machine(void **state)
{
    char text[BL_CPU_GEMM_TEXT_BYTES], made_with[2 * BL_CPU_GEMM_TEXT_BYTES],
        here[2 * BL_CPU_GEMM_TEXT_BYTES];
    char whole[GOLDEN_PATH_BYTES];

    (void)state;
    strcpy(whole, crashed_run(whole_run(1), 2, "moving"));
    bl_cpu_gemm_describe(text);
    char *log = resume_elsewhere(whole, "stays");
    assert_string_equal(log, "");
    free(log);
    if (!runs_has_other_products(text)) TEST_SKIP("%s: there are no other products here", text);
    setenv("BALLAST_CPU_F32", "portable", 1);
    log = resume_elsewhere(whole, "moves");
    unsetenv("BALLAST_CPU_F32");
    snprintf(made_with, sizeof made_with, " was made with %s, this machine has ", text);
    snprintf(here, sizeof here, "this machine has ballast fp32 no fma");
    if (!strstr(log, made_with) || !strstr(log, here))
        fail_msg("'%s' and '%s' are not in: %s", made_with, here, log);
    free(log);
}

/* Step 2 of the run, made by `build`; NULL: by one that did not say. */
static void make_step_by(const char *name, const char *build)
{
    static const char *const files[] = {"config.yaml", "state-00000-of-00001.safetensors"};
    const char *dir = runs_path("%s/checkpoints", name);
    bl_checkpoint *checkpoint;
    json_t *run;

    assert_int_equal(bl_checkpoint_verify(runs_path("%s/checkpoints/step-2", name), NULL, &run),
                     BL_OK);
    assert_int_equal(build ? json_object_set_new(run, "build", json_string(build))
                           : json_object_del(run, "build"),
                     0);
    assert_int_equal(bl_checkpoint_begin(dir, 2, 100, &checkpoint), BL_OK);
    for (size_t i = 0; i < BL_COUNT(files); i++) {
        runs_copy(runs_path("%s/checkpoints/step-2/%s", name, files[i]),
                  runs_path("%s/checkpoints/step-2.tmp/%s", name, files[i]));
        assert_int_equal(bl_checkpoint_add_file(checkpoint, files[i]), BL_OK);
    }
    assert_int_equal(bl_checkpoint_commit(checkpoint, run), BL_OK);
    json_decref(run);
}

/* Resuming works and says so; resuming by the same build says nothing. */
static void test_another_build(void **state)
{
    static const char *const builds[] = {NULL, "0123456789abcdef"};

    (void)state;
    for (size_t i = 0; i <= BL_COUNT(builds); i++) {
        golden_args args = {0};
        runs_child child = {0};
        crashed_run(whole_run(1), 2, "built");
        if (i < BL_COUNT(builds)) make_step_by("built", builds[i]);
        runs_standard(&args, runs_path("built"), 1);
        runs_set(&args, "resume_from_checkpoint", "true");
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, 120), 0);
        char *log = runs_read(child.log, NULL),
             *warning = strstr(log, "warning: maybe not bit-identical: ");
        assert_int_equal(warning != NULL, i < BL_COUNT(builds));
        if (warning)
            assert_non_null(strstr(warning, builds[i] ? "step-2 was made by build 0123456789abcdef"
                                                      : "made by an earlier build"));
        free(log);
        golden_args_free(&args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_another_rank_count),
        cmocka_unit_test(test_another_rank_count_keeps_the_course),
        cmocka_unit_test(test_differences_are_listed),
        cmocka_unit_test(test_what_changes_no_bit),
        cmocka_unit_test(test_differences_are_allowed_by_name),
        cmocka_unit_test(test_the_state_is_of_the_same_modules),
        cmocka_unit_test(test_a_checkpoint_of_another_version),
        cmocka_unit_test(test_another_machine),
        cmocka_unit_test(test_another_build),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
