/* SPDX-License-Identifier: Apache-2.0 */
/* Host code leaves device memory alone: with guarded devices (device/guard.h) a training, its
 * checkpoints, a resumed one, an evaluation and a generation run to their ends, with base and
 * activations in any tier, and give the bits of devices that are not guarded. A touch would end the
 * test by SIGSEGV. */
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "device/guard.h"
#include "model/generate.h"
#include "trained/peft.h"
#include "store/safetensors.h"
#include "train/train.h"

enum { STEPS = 2, SAVED = 1 };

/* Arguments of a training under test. */
static void training_args(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "overwrite_output_dir", "true");
    runs_set(args, "max_steps", "%d", STEPS);
    runs_set(args, "save_steps", "%d", SAVED);
    runs_set(args, "eval_steps", "2");
    runs_set(args, "verify_base", "always");
    runs_set(args, "dump_gradients", "%s.gradients", output);
}

static void assert_same_file(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *left = runs_read(a, &n_a), *right = runs_read(b, &n_b);
    if (n_a != n_b || memcmp(left, right, n_a) != 0) fail_msg("%s and %s differ", a, b);
    free(left);
    free(right);
}

static void assert_same_runs(const char *a, const char *b, int ranks)
{
    char left[GOLDEN_PATH_BYTES + 96], right[GOLDEN_PATH_BYTES + 96];

    assert_true(runs_are_same(a, b));
    for (int rank = 0; rank < ranks; rank++) {
        static const char format[] = "%s/checkpoints/step-%d/state-%05d-of-%05d.safetensors";
        snprintf(left, sizeof left, format, a, STEPS, rank, ranks);
        snprintf(right, sizeof right, format, b, STEPS, rank, ranks);
        assert_same_file(left, right);
    }
}

static bl_status train_guarded(const golden_args *args)
{
    bl_device_guard_memory(true);
    bl_status st = golden_train(args);
    bl_device_guard_memory(false);
    return st;
}

/* ---- training ---- */

typedef struct guarded_case {
    int ranks;
    const char *tier; /* NULL: all in device memory */
    double ratio;
    bool offloads_activations;
    /* One more key; such a run is compared with a plain run with the same key. NULL, NULL, "":
     * none. */
    const char *key, *value, *name;
} guarded_case;

/* Without guard and offload. */
static const char *plain_run(const guarded_case *c)
{
    const char *output = runs_path("plain-%d%s", c->ranks, c->name);
    golden_args args = {0};

    if (bl_file_exists(output)) return output;
    training_args(&args, output, c->ranks);
    if (c->key) runs_set(&args, c->key, "%s", c->value);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    return output;
}

static void assert_guarded_run(const guarded_case *c)
{
    const char *plain = plain_run(c), *output = runs_path("guarded"),
               *pages = runs_path("pages-%d%s", c->ranks, c->name);
    char plain_gradients[GOLDEN_PATH_BYTES + 16];
    golden_args args = {0};

    training_args(&args, output, c->ranks);
    if (c->key) runs_set(&args, c->key, "%s", c->value);
    if (c->tier) {
        runs_set(&args, "offload_tier", "%s", c->tier);
        runs_set(&args, "offload_ratio", "%g", c->ratio);
        assert_int_equal(bl_dir_create(pages), BL_OK);
        if (strcmp(c->tier, "disk") == 0) runs_set(&args, "offload_dir", "%s", pages);
    }
    if (c->offloads_activations) runs_set(&args, "activation_offload", "true");
    assert_int_equal(train_guarded(&args), BL_OK);
    golden_args_free(&args);
    assert_same_runs(plain, output, c->ranks);
    snprintf(plain_gradients, sizeof plain_gradients, "%s.gradients", plain);
    assert_same_file(plain_gradients, runs_path("guarded.gradients"));
}

static void test_training(void **state)
{
    static const guarded_case cases[] = {
        {1, NULL, 0, true, NULL, NULL, ""},
        {2, NULL, 0, false, NULL, NULL, ""},
        {1, "host", 0.5, false, NULL, NULL, ""},
        {2, "host", 1, true, NULL, NULL, ""},
        {1, "disk", 1, false, NULL, NULL, ""}, /* writes page files; the next finds them */
        {1, "disk", 0.5, true, NULL, NULL, ""},
        {2, "disk", 1, true, NULL, NULL, ""},
        {2, NULL, 0, false, "base_format", "fp8_block", "-block"},
        {1, "disk", 0.5, false, "base_format", "stored", "-stored"},
        {1, "disk", 1, false, "model_name_or_path", GOLDEN_DIR "/models/tiny-fp8-fbgemm", "-fp8"},
        {2, NULL, 0, false, "init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-mlp", "-mlp"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) assert_guarded_run(&cases[i]);
}

/* The plain run's first checkpoint, gone on with by a guarded one. */
static void test_resume(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        const guarded_case c = {.ranks = ranks, .name = ""};
        const char *output = runs_path("resumed");
        golden_args args = {0};
        runs_copy(plain_run(&c), output);
        assert_int_equal(bl_tree_remove(runs_path("resumed/checkpoints/step-%d", STEPS)), BL_OK);
        training_args(&args, output, ranks);
        runs_unset(&args, "overwrite_output_dir");
        runs_set(&args, "resume_from_checkpoint", "true");
        assert_int_equal(train_guarded(&args), BL_OK);
        assert_same_runs(plain_run(&c), output, ranks);
        golden_args_free(&args);
    }
}

/* Shards that are cut anew, with padding in other places. */
static void test_resume_with_other_ranks(void **state)
{
    static const guarded_case c = {.ranks = 2, .name = ""};
    char *outputs[2];

    (void)state;
    for (int guarded = 0; guarded < 2; guarded++) {
        golden_args args = {0};
        outputs[guarded] = strdup(runs_path("recut-%d", guarded));
        assert_non_null(outputs[guarded]);
        runs_copy(plain_run(&c), outputs[guarded]);
        assert_int_equal(bl_tree_remove(runs_path("recut-%d/checkpoints/step-%d", guarded, STEPS)),
                         BL_OK);
        training_args(&args, outputs[guarded], 3);
        runs_unset(&args, "overwrite_output_dir");
        runs_set(&args, "resume_from_checkpoint", "true");
        runs_set(&args, "allow_resume_mismatch", "true");
        assert_int_equal(guarded ? train_guarded(&args) : golden_train(&args), BL_OK);
        golden_args_free(&args);
    }
    assert_same_runs(outputs[0], outputs[1], 3);
    free(outputs[0]);
    free(outputs[1]);
}

/* The search for the first bad tensor looks at activations, in device memory or offloaded. */
static void test_a_loss_that_is_not_finite(void **state)
{
    const char *model = runs_overflowing_model();

    (void)state;
    for (int offload = 0; offload < 2; offload++) {
        golden_args args = {0};
        training_args(&args, runs_path("not-finite"), 1);
        runs_set(&args, "model_name_or_path", "%s", model);
        runs_unset(&args, "validation_file");
        runs_set(&args, "eval_strategy", "no");
        if (offload) runs_set(&args, "activation_offload", "true");
        assert_int_equal(train_guarded(&args), BL_ENUMERIC);
        assert_non_null(strstr(bl_error_text(), "the output of layer 0, micro-batch 0"));
        golden_args_free(&args);
    }
}

/* ---- evaluation ---- */

static bl_eval_result evaluate(int ranks)
{
    bl_train_config *config = NULL;
    bl_eval_result result;
    golden_args args = {0};

    golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
    golden_args_add(&args, "init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-all-linear");
    golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
    golden_args_add(&args, "data_format", "tokens");
    golden_args_add(&args, "max_seq_length", "64");
    golden_args_add(&args, "ranks", "%d", ranks);
    golden_args_add(&args, "threads", "1");
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, NULL, args.n, args.text, &config), BL_OK);
    assert_int_equal(bl_eval_run(config, NULL, &result), BL_OK);
    bl_train_config_free(config);
    golden_args_free(&args);
    return result;
}

static void test_evaluation(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        bl_eval_result plain = evaluate(ranks);
        bl_device_guard_memory(true);
        bl_eval_result guarded = evaluate(ranks);
        bl_device_guard_memory(false);
        assert_true(plain.loss == guarded.loss && plain.loss > 0);
        assert_int_equal(plain.label_tokens, guarded.label_tokens);
    }
}

/* ---- generation ---- */

typedef struct generation {
    bl_model *model;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    bl_model_weights *weights;
    bl_base *base;
    bl_lora_layout lora;
    bl_tensor lora_weights;
    bl_generator *generator;
} generation;

static void ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static void close_generation(generation *g)
{
    bl_generator_destroy(g->generator);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->lora_weights.data);
    bl_base_destroy(g->base);
    bl_model_weights_free(g->weights);
    bl_stream_destroy(g->stream);
    bl_device_destroy(g->device);
    bl_comm_destroy(g->comm);
    bl_model_close(g->model);
}

/* The lowest id of equals. */
static int32_t most_likely(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

/* The logits after each token of a prompt and of its greedy continuation; the caller's. */
static float *generate(const char *model, const char *adapter, int64_t n_tokens, int64_t *n_floats)
{
    const int32_t prompt[] = {1, 17, 42, 5, 33};
    enum { N_PROMPT = sizeof prompt / sizeof prompt[0] };
    generation g = {0};
    const float *logits;

    ok(bl_model_open(model, BL_BASE_AUTO, N_PROMPT + n_tokens, &g.model));
    ok(bl_comm_create_local(1, 0.0, &g.comm));
    ok(bl_device_create_cpu(2, &g.device));
    ok(bl_stream_create(g.device, "compute", &g.stream));
    ok(bl_model_weights_load(g.model, g.device, g.comm, g.stream, NULL, &g.weights));
    ok(bl_base_create_resident(&g.weights->layout, g.weights->shards, &g.base));
    ok(bl_lora_read_all(adapter, &g.model->config, g.device, &g.lora, &g.lora_weights));
    ok(bl_generator_create(g.device, g.stream, g.weights, g.base, &g.lora, g.lora_weights,
                           N_PROMPT + n_tokens, &g.generator));
    int64_t vocab = g.model->config.vocab_size;
    *n_floats = (n_tokens + 1) * vocab;
    float *all = malloc((size_t)*n_floats * sizeof *all);
    assert_non_null(all);
    ok(bl_generator_extend(g.generator, prompt, N_PROMPT, &logits));
    for (int64_t i = 0;; i++) {
        memcpy(all + i * vocab, logits, (size_t)vocab * sizeof *all);
        if (i == n_tokens) break;
        int32_t id = most_likely(logits, vocab);
        ok(bl_generator_extend(g.generator, &id, 1, &logits));
    }
    close_generation(&g);
    return all;
}

static void test_generation(void **state)
{
    static const char *const pairs[][2] = {
        {GOLDEN_DIR "/models/tiny-gqa", GOLDEN_DIR "/adapters/tiny-gqa-all-linear"},
        {GOLDEN_DIR "/models/tiny-mha-tied", GOLDEN_DIR "/adapters/tiny-mha-tied-all-linear"},
        {GOLDEN_DIR "/models/tiny-llama3-rope", GOLDEN_DIR "/adapters/tiny-llama3-rope-all-linear"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(pairs); i++) {
        int64_t n_plain, n_guarded;
        float *plain = generate(pairs[i][0], pairs[i][1], 6, &n_plain);
        bl_device_guard_memory(true);
        float *guarded = generate(pairs[i][0], pairs[i][1], 6, &n_guarded);
        bl_device_guard_memory(false);
        assert_int_equal(n_plain, n_guarded);
        assert_memory_equal(plain, guarded, (size_t)n_plain * sizeof *plain);
        free(plain);
        free(guarded);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_training),
                                       cmocka_unit_test(test_resume),
                                       cmocka_unit_test(test_resume_with_other_ranks),
                                       cmocka_unit_test(test_a_loss_that_is_not_finite),
                                       cmocka_unit_test(test_evaluation),
                                       cmocka_unit_test(test_generation)};
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
