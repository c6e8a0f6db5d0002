/* SPDX-License-Identifier: Apache-2.0 */
/* Whole trainings against a float64 reference made with PyTorch, transformers and PEFT
 * (tools/golden/train/README.md).
 *
 * Limits, as the project promises them: first loss 2e-6, first gradients 1e-4 of each tensor's
 * norm, losses of up to 20 steps 1e-4. float32 arithmetic reaches 2.8e-7, 1e-5 and 2e-5 on such
 * runs (24 small runs against float64). The final adapter is compared relative to how far training
 * moved it: AdamW divides by sqrt(v), so a gradient's relative error of 1e-4 may move by as
 * much. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "golden.h"

static const double FIRST_LOSS = 2e-6, GRADIENT = 1e-4, LOSSES = 1e-4, ADAPTER = 1e-3;

/* What must not change a bit: each is run on every case that has topologies to choose from, and on
 * the first of the others. */
typedef struct variant {
    const char *name;
    const char *args[8]; /* key, value, ... NULL */
} variant;

typedef struct run {
    char output[GOLDEN_PATH_BYTES], gradients[GOLDEN_PATH_BYTES + 32],
        adapter[GOLDEN_PATH_BYTES + 32], pages[GOLDEN_PATH_BYTES + 32];
} run;

static void name_run(run *r)
{
    snprintf(r->output, sizeof r->output, "/tmp/ballast-test-golden-%d", (int)getpid());
    snprintf(r->gradients, sizeof r->gradients, "%s.gradients.safetensors", r->output);
    snprintf(r->pages, sizeof r->pages, "%s.pages", r->output);
    snprintf(r->adapter, sizeof r->adapter, "%s/adapter_model.safetensors", r->output);
}

static void remove_run(const run *r)
{
    assert_int_equal(bl_tree_remove(r->output), BL_OK);
    assert_int_equal(bl_tree_remove(r->gradients), BL_OK);
    assert_int_equal(bl_tree_remove(r->pages), BL_OK);
}

static void train_case(const json_t *golden, const json_t *topology, const char *model,
                       const run *r, const char *const *extra)
{
    golden_args args = {0};
    golden_config(golden, topology, &args);
    golden_args_add(&args, "model_name_or_path", "%s", model);
    golden_args_add(&args, "output_dir", "%s", r->output);
    golden_args_add(&args, "dump_gradients", "%s", r->gradients);
    golden_args_add(&args, "save_steps", "0");
    golden_args_add(&args, "logging_steps", "1000");
    golden_args_add(&args, "max_seq_length", "512");
    golden_args_add(&args, "threads", "1");
    for (int i = 0; extra && extra[i]; i += 2) golden_args_add(&args, extra[i], "%s", extra[i + 1]);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

static void compare_validation(const json_t *metrics, const json_t *validation)
{
    const char *step;
    json_t *expected;
    json_object_foreach(json_object_get(validation, "steps"), step, expected)
    {
        size_t i;
        json_t *row;
        double loss = 0.0;
        json_array_foreach((json_t *)metrics, i, row) if (json_integer_value(json_object_get(
                                                              row, "step")) == atoll(step) &&
                                                          json_object_get(row, "eval_loss")) loss =
            json_number_value(json_object_get(row, "eval_loss"));
        double target = json_number_value(expected);
        if (!(loss > 0.0 && loss / target - 1.0 < LOSSES && 1.0 - loss / target < LOSSES))
            fail_msg("validation loss after step %s: %.12g, expected %.12g", step, loss, target);
    }
}

static void compare_case(const json_t *golden, const run *r)
{
    const json_t *expect = json_object_get(golden, "expect"),
                 *steps = json_object_get(expect, "steps");
    json_t *metrics = golden_metrics(r->output);
    double change = json_number_value(json_object_get(expect, "adapter_change_norm"));
    double first = golden_compare_losses(metrics, steps, 1, FIRST_LOSS);
    double losses = golden_compare_losses(metrics, steps, json_array_size(steps), LOSSES);
    double gradients =
        golden_compare_tensors(r->gradients, json_object_get(expect, "gradients"), 0.0, GRADIENT);
    double adapter = golden_compare_tensors(r->adapter, json_object_get(expect, "final_adapter"),
                                            change, ADAPTER);

    printf("%-24s first loss %.1e  losses %.1e  gradients %.1e  adapter %.1e\n",
           json_string_value(json_object_get(golden, "name")), first, losses, gradients, adapter);
    assert_true(first <= FIRST_LOSS);
    assert_true(losses <= LOSSES);
    assert_true(gradients <= GRADIENT);
    assert_true(adapter <= ADAPTER);
    if (json_object_get(expect, "validation"))
        compare_validation(metrics, json_object_get(expect, "validation"));
    json_decref(metrics);
}

/* Every case, every topology, against the reference. */
static void check_cases(const char *index_path)
{
    json_t *index = json_load_file(index_path, 0, NULL);
    const char *only = getenv("BALLAST_GOLDEN_CASE");
    size_t i, k;
    json_t *name, *topology;
    run r;

    assert_non_null(index);
    name_run(&r);
    json_array_foreach(json_object_get(index, "cases"), i, name)
    {
        if (only && strcmp(only, json_string_value(name)) != 0) continue;
        json_t *golden = golden_load_case(json_string_value(name));
        char model[GOLDEN_PATH_BYTES];
        if (golden_model(golden, model))
            json_array_foreach(json_object_get(golden, "topologies"), k, topology)
            {
                remove_run(&r);
                train_case(golden, topology, model, &r, NULL);
                compare_case(golden, &r);
            }
        json_decref(golden);
    }
    remove_run(&r);
    json_decref(index);
}

static void test_cases(void **state)
{
    (void)state;
    check_cases(GOLDEN_DIR "/index.json");
}

/* Other families (tools/golden/families): names are relative to tests/golden/train. */
static void test_families(void **state)
{
    (void)state;
    check_cases("tests/golden/families/index.json");
    check_cases("tests/golden/mixtures/index.json");
}

/* FP8 checkpoints as today's libraries write them (tools/golden/fp8). */
static void test_fp8(void **state)
{
    (void)state;
    check_cases("tests/golden/fp8/index.json");
}

/* Checkpoints in 4 bits (tools/golden/bits4). */
static void test_bits4(void **state)
{
    (void)state;
    check_cases("tests/golden/bits4/index.json");
}

/* PEFT's modules_to_save (tools/golden/modules). */
static void test_modules(void **state)
{
    (void)state;
    check_cases("tests/golden/modules/index.json");
}

static void read_adapter(const run *r, void **bytes, size_t *n)
{
    assert_int_equal(bl_file_read_all(r->adapter, 1 << 26, bytes, n), BL_OK);
}

/* Models that train all variants: a plain one, a tied table, two formats in a fused matrix, trained
 * tables, LoRA terms of tables. Starting runs takes most of the time, so each other model trains
 * every third variant, and any three neighbors train all of them; with AddressSanitizer this holds
 * for all models. All models train with everything kept and with nothing kept. */
#ifdef __SANITIZE_ADDRESS__
enum { WITH_ALL_VARIANTS = 0 };
#else
enum { WITH_ALL_VARIANTS = 5 };
#endif

static bool is_for_all_models(const variant *v)
{
    return strcmp(v->name, "keep everything") == 0 || strcmp(v->name, "keep nothing") == 0;
}

/* Bits: with the topology fixed, none of these changes the adapter. */
static void test_same_bits(void **state)
{
    enum { MOST_STEPS = 8 };
    run r;
    name_run(&r);
    const variant variants[] = {
        {"plain", {NULL}},
        {"visit one micro-batch at a time", {"visit_tokens", "1", NULL}},
        {"visit all together", {"visit_tokens", "1000000", NULL}},
        {"keep everything", {"activation_checkpointing", "none", NULL}},
        {"keep most", {"activation_checkpointing", "mlp", NULL}},
        {"keep some", {"activation_checkpointing", "selective", NULL}},
        {"keep some in a layer",
         {"activation_checkpointing", "selective", "activation_checkpointing_layers", "1", NULL}},
        {"keep nothing", {"activation_checkpointing", "full", NULL}},
        {"three threads", {"threads", "3", NULL}},
        {"deep ring", {"ring_depth", "4", NULL}},
        {"shallow ring", {"ring_depth", "1", NULL}},
        {"resident base", {"shard_size", "1", NULL}},
        {"shards of two", {"shard_size", "2", NULL}},
        {"base in host memory", {"offload_ratio", "1", "offload_tier", "host", NULL}},
        {"base on disk",
         {"offload_ratio", "1", "offload_tier", "disk", "offload_dir", r.pages, NULL}},
    };
    static const char *const names[] = {"tiny-ranks",
                                        "../../families/cases/qwen3-tied",
                                        "../../fp8/cases/mixed",
                                        "../../modules/cases/tied-tables",
                                        "../../modules/cases/terms",
                                        "tiny-llama3-rope",
                                        "../../families/cases/mistral-window",
                                        "../../fp8/cases/static-tower",
                                        "../../families/cases/granite",
                                        "../../families/cases/falcon-180b",
                                        "../../fp8/cases/ct-mxfp8",
                                        "../../modules/cases/head-and-norms"};

    (void)state;
    for (size_t n = 0; n < BL_COUNT(names); n++) {
        json_t *golden = golden_load_case(names[n]), *config = json_object_get(golden, "config");
        char model[GOLDEN_PATH_BYTES];
        void *expected = NULL, *bytes;
        size_t n_expected = 0, n_bytes;
        assert_true(golden_model(golden, model));
        if (json_integer_value(json_object_get(config, "max_steps")) > MOST_STEPS)
            json_object_set_new(config, "max_steps", json_integer(MOST_STEPS));
        json_t *topology = json_pack("{s:i, s:i, s:i}", "ranks", 4, "per_device_train_batch_size",
                                     1, "gradient_accumulation_steps", 2);
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            if (expected && (int)n >= WITH_ALL_VARIANTS && v % 3 != n % 3 &&
                !is_for_all_models(&variants[v]))
                continue;
            remove_run(&r);
            train_case(golden, topology, model, &r, expected ? variants[v].args : NULL);
            if (!expected) {
                read_adapter(&r, &expected, &n_expected);
                continue;
            }
            read_adapter(&r, &bytes, &n_bytes);
            if (n_bytes != n_expected || memcmp(bytes, expected, n_bytes) != 0)
                fail_msg("%s: other bits: %s", names[n], variants[v].name);
            free(bytes);
        }
        free(expected);
        json_decref(topology);
        json_decref(golden);
    }
    remove_run(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),   cmocka_unit_test(test_families),
        cmocka_unit_test(test_fp8),     cmocka_unit_test(test_bits4),
        cmocka_unit_test(test_modules), cmocka_unit_test(test_same_bits)};
    return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
