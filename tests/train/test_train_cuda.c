/* SPDX-License-Identifier: Apache-2.0 */
/* A training on a GPU gives the same bits wherever base and activations are, whatever is saved and
 * however micro-batches are grouped, and as often as it runs; and it takes the GPU memory that was
 * predicted.
 *
 * On the emulated GPU (emulator/) this shows the program's order of work; with
 * BALLAST_EMULATED=strict, as test_train_cuda_strict, also that host code leaves device memory
 * alone: the cases are fewer then. */
#include "cuda_runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "skip.h"
#include "train/train.h"

typedef struct same_case {
    const char *plain; /* the name of the run it must equal */
    int ranks;
    const char *keys;
    bool in_strict;
} same_case;

/* Whose shapes have FP8 products. */
#define DEMO "model_name_or_path demo/base "
/* Blocks of 128 x 128 and bf16; two ranks' shards end inside of blocks. */
#define BLOCKS "model_name_or_path " GOLDEN_DIR "/models/tiny-fp8-ct-block base_format stored "
/* Rows of preferences: each has two answers; the reference goes through the layers with them. */
#define PAIRS                                                                                      \
    "train_file tests/golden/preference/tokens/pairs.jsonl data_format auto max_seq_length 24 "    \
    "per_device_train_batch_size 2 "
#define DPO PAIRS "loss_type sigmoid "
#define LABELS                                                                                     \
    "train_file tests/golden/preference/tokens/labels.jsonl data_format auto "                     \
    "per_device_train_batch_size 2 loss_type kto "
#define DISK "offload_tier disk offload_dir %s/pages-"

/* Each plain run, and what of it changes no bit. */
static const struct {
    const char *name;
    int ranks;
    const char *keys;
} plain_runs[] = {
    {"one", 1, "activation_checkpointing none"},
    {"two", 2, "activation_checkpointing none"},
    {"demo", 1, DEMO "base_format fp8_row"},
    {"fp8", 1, DEMO "base_format fp8_row compute_dtype fp8"},
    {"fast", 1,
     DEMO "base_format fp8_row compute_dtype fp8 fp8_fast_accumulation forward "
          "activation_checkpointing none"},
    {"block", 2, DEMO "compute_dtype fp8 base_format fp8_block"},
    {"stored", 1, "base_format stored"},
    {"blocks", 2, BLOCKS "shard_size 1"},
    {"tied", 1, "model_name_or_path " GOLDEN_DIR "/models/tiny-mha-tied"},
    {"packed", 1, "packing pack per_device_train_batch_size 2"},
    {"dpo", 2, DPO},
    {"orpo", 1, PAIRS "loss_type orpo"},
    {"kto", 2, LABELS},
};

static const same_case same[] = {
    {"one", 1, "activation_checkpointing none", false}, /* the same once more */
    {"one", 1, "activation_checkpointing full", false},
    {"one", 1, "activation_checkpointing selective", false},
    {"one", 1,
     "activation_checkpointing mlp activation_checkpointing_layers 1 activation_offload true",
     false},
    {"one", 1, "offload_ratio 0.5", false},
    {"one", 1, "offload_ratio 1 ring_depth 3", true},
    {"one", 1, "offload_ratio 1 verify_base always " DISK "one", false},
    {"one", 1, "offload_ratio 1 io_engine pread " DISK "one", false}, /* the page files are there */
    {"one", 1, "offload_ratio 0.5 " DISK "one", false},
    {"one", 1, "activation_offload true activation_checkpointing none", false},
    {"one", 1, "activation_offload true activation_checkpointing full", true},
    {"one", 1, "visit_tokens 1", false},
    {"one", 1, "visit_tokens 1000 threads 3", false},
    {"two", 2, "shard_size 1", false},
    {"two", 2, "offload_ratio 0.5 visit_tokens 1 activation_offload true", false},
    {"two", 2, "offload_ratio 1 activation_checkpointing full " DISK "two", true},
    {"fp8", 1,
     DEMO "base_format fp8_row compute_dtype fp8 visit_tokens 1 activation_checkpointing full "
          "offload_ratio 1",
     false},
    {"fast", 1, /* recomputed in the same way */
     DEMO "base_format fp8_row compute_dtype fp8 fp8_fast_accumulation forward "
          "activation_checkpointing full",
     false},
    {"block", 2, DEMO "compute_dtype fp8 base_format fp8_block visit_tokens 1 shard_size 1", false},
    {"stored", 1, "base_format stored offload_ratio 1 visit_tokens 1", false},
    {"blocks", 2, BLOCKS "shard_size 2", true},
    {"blocks", 2, BLOCKS "shard_size 2 offload_ratio 1 " DISK "blocks", false},
    {"tied", 1,
     "model_name_or_path " GOLDEN_DIR "/models/tiny-mha-tied offload_ratio 1 visit_tokens 1",
     false},
    {"packed", 1, "packing pack per_device_train_batch_size 2 activation_checkpointing full",
     false},
    {"dpo", 2, DPO "visit_tokens 1 offload_ratio 1", true},
    {"dpo", 2, DPO "activation_offload true shard_size 1 " DISK "dpo offload_ratio 1", false},
    {"orpo", 1, PAIRS "loss_type orpo visit_tokens 1 activation_checkpointing full", false},
    {"kto", 2, LABELS "visit_tokens 1 offload_ratio 0.5", false},
    {"dpo", 2, DPO "precompute_ref_log_probs true visit_tokens 1 offload_ratio 0.5", true},
    {"kto", 2, LABELS "precompute_ref_log_probs true", false},
};

static void make_plain(const char *name)
{
    if (bl_file_exists(runs_path("%s/README.md", name))) return;
    for (size_t i = 0; i < BL_COUNT(plain_runs); i++)
        if (strcmp(plain_runs[i].name, name) == 0)
            cuda_runs_train(name, plain_runs[i].ranks, plain_runs[i].keys);
}

static void test_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(same); i++) {
        const same_case *c = &same[i];
        if (cuda_runs_are_slow() && !c->in_strict) continue;
        make_plain(c->plain);
        cuda_runs_train("variant", c->ranks, c->keys);
        if (!runs_are_same(runs_path("%s", c->plain), runs_path("variant")))
            fail_msg("not as %s: %s", c->plain, c->keys);
    }
}

/* What must change bits does: the comparison above is of something. */
static void test_other_bits(void **state)
{
    static const char *const others[] = {"seed 43", "lora_dropout 0", "base_format fp8_block"};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    make_plain("one");
    for (size_t i = 0; i < BL_COUNT(others); i++) {
        cuda_runs_train("variant", 1, others[i]);
        assert_false(runs_are_same(runs_path("one"), runs_path("variant")));
    }
}

static bool has_same_adapter(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *left = runs_read(runs_path("%s/adapter_model.safetensors", a), &n_a),
         *right = runs_read(runs_path("%s/adapter_model.safetensors", b), &n_b);
    bool is_same = n_a == n_b && memcmp(left, right, n_a) == 0;

    free(left);
    free(right);
    return is_same;
}

/* Where every product that fp8 asks for is one in FP8; an exception is another run; with every
 * matrix an exception, all is bf16. */
static void test_exceptions_from_fp8(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    make_plain("demo");
    make_plain("fp8");
    char *metrics = runs_read(runs_path("fp8/metrics.jsonl"), NULL);
    assert_non_null(strstr(metrics, "\"bf16_fallbacks\":0}"));
    free(metrics);
    assert_false(has_same_adapter("fp8", "demo"));
    make_plain("fast");
    assert_false(has_same_adapter("fast", "fp8"));
    cuda_runs_train("variant", 1,
                    DEMO "base_format fp8_row compute_dtype fp8 fp8_fast_accumulation all");
    assert_false(has_same_adapter("variant", "fast"));
    cuda_runs_train("variant", 1,
                    DEMO "base_format fp8_row compute_dtype fp8 compute_bf16_modules o_proj");
    assert_false(has_same_adapter("variant", "fp8"));
    assert_false(has_same_adapter("variant", "demo"));
    cuda_runs_train("variant", 1,
                    DEMO "base_format fp8_row compute_dtype fp8 compute_bf16_modules "
                         "layers.0,layers.1,layers.2,layers.3");
    assert_true(has_same_adapter("variant", "demo"));
}

/* Policy and reference are the same bits before the first step: dropout of a B that is 0 is 0. */
static void test_first_preference_loss(void **state)
{
    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (int ranks = 1; ranks <= 2; ranks++) {
        cuda_runs_train("first", ranks, DPO "max_steps 1 per_device_train_batch_size 3");
        json_t *metrics = golden_metrics(runs_path("first"));
        double loss = json_number_value(json_object_get(json_array_get(metrics, 0), "loss"));
        if (loss != log(2)) fail_msg("%d ranks: %.17g", ranks, loss);
        json_decref(metrics);
    }
}

/* Several runs over one base, one of them with a loss of preferences and one with evaluations in
 * the visits of its steps: each as alone, with evaluations apart. */
static void test_together(void **state)
{
    enum { N = 3 };
    static const char *const keys[N] = {
        "max_seq_length 64 ",
        DPO "max_seq_length 64 lora_r 4 ",
        "seed 7 lora_target_modules q_proj validation_file " GOLDEN_DIR
        "/tokens/tiny-validation.jsonl eval_strategy steps eval_steps 1 "
        "per_device_eval_batch_size 1 ",
    };
    static const char *const alone[N] = {"alone0", "alone1", "alone2"};
    bl_train_config *configs[N] = {NULL};

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (int run = 0; run < N; run++) {
        golden_args args = {0};
        cuda_runs_train(alone[run], 2, keys[run]);
        cuda_runs_standard(&args, runs_path("together%d", run), 2);
        cuda_runs_set_all(&args, keys[run]);
        runs_set(&args, "eval_overlap", "true");
        assert_int_equal(
            bl_train_config_load(BL_CONFIG_TRAIN, NULL, args.n, args.text, &configs[run]), BL_OK);
        golden_args_free(&args);
    }
    if (bl_train_run_all((const bl_train_config *const *)configs, N, NULL, NULL) != BL_OK)
        fail_msg("%s", bl_error_text());
    for (int run = 0; run < N; run++) {
        assert_true(runs_are_same(runs_path("alone%d", run), runs_path("together%d", run)));
        bl_train_config_free(configs[run]);
    }
}

/* ---- memory ---- */

/* The last line of a run's log: GPU memory, GB. */
static void measure(const char *keys, int ranks, double *measured, double *predicted)
{
    golden_args args = {0};
    runs_child child = {0};

    cuda_runs_standard(&args, runs_path("memory"), ranks);
    cuda_runs_set_all(&args, keys);
    runs_set(&args, "max_steps", "1");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 300.0), 0);
    char *log = runs_read(child.log, NULL), *line = strstr(log, "GPU memory measured: ");
    assert_non_null(line);
    assert_int_equal(
        sscanf(line, "GPU memory measured: peak %lf GB, predicted %lf GB", measured, predicted), 2);
    free(log);
    golden_args_free(&args);
}

/* Except counters and sums, less than 16 KiB per rank. The smallest row of this model's ledger, the
 * scales, has 10 KiB: a missing row of more than 16 KiB is found. */
static void test_memory_is_as_predicted(void **state)
{
    static const struct {
        int ranks;
        const char *keys;
    } cases[] = {
        {1, "activation_checkpointing none"},
        {1, "offload_ratio 0.5 activation_checkpointing full lora_dropout 0"},
        {1, "offload_ratio 1 activation_offload true compute_dtype fp8 " DISK "memory"},
        {2, "gradient_accumulation_steps 3 visit_tokens 1 base_format stored ring_depth 3"},
        {1, "model_name_or_path " GOLDEN_DIR "/models/tiny-mha-tied lora_target_modules q_proj"},
        {1, DPO "init_adapter " GOLDEN_DIR "/adapters/tiny-gqa-all-linear"},
        {2, LABELS},
        {1, DPO "precompute_ref_log_probs true init_adapter " GOLDEN_DIR
                "/adapters/tiny-gqa-all-linear"},
        {2, LABELS "precompute_ref_log_probs true"},
    };
    double measured, predicted;

    (void)state;
    if (cuda_runs_are_slow()) TEST_SKIP("slow: fewer cases");
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        measure(cases[i].keys, cases[i].ranks, &measured, &predicted);
        double more_kib = (measured - predicted) * (1e9 / 1024.0);
        if (more_kib < -1.0 || more_kib > 16.0 * cases[i].ranks)
            fail_msg("%s: measured %.6f GB, predicted %.6f", cases[i].keys, measured, predicted);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_other_bits),
        cmocka_unit_test(test_exceptions_from_fp8),
        cmocka_unit_test(test_first_preference_loss),
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_memory_is_as_predicted),
    };
    if (!cuda_runs_have_gpu()) return CUDA_SKIPPED;
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
