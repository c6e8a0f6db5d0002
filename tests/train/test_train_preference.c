/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings with preference losses: against float64 (tools/golden/preference), at the first step of
 * a new adapter, over places, ranks and interruptions.
 *
 * Limits: the losses of 20 steps 1e-5, relative; the other limits are those of test_train_golden.
 * Rewards are differences of log-probabilities, which are sums of up to 24 float32 values of about
 * 4: 24 x 4 x 2^-23 is 1.1e-5. */
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/preference.h"

#define CASES "tests/golden/preference"

static const double FIRST_LOSS = 2e-6, GRADIENT = 1e-4, LOSSES = 1e-5, ADAPTER = 1e-3,
                    METRICS = 1e-5;

static void prepare(const json_t *golden, const json_t *topology, const char *output,
                    golden_args *args)
{
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    golden_config(golden, topology, args);
    golden_args_add(args, "model_name_or_path", "%s", model);
    golden_args_add(args, "output_dir", "%s", runs_path("%s", output));
    golden_args_add(args, "overwrite_output_dir", "true");
    golden_args_add(args, "save_steps", "0");
    golden_args_add(args, "logging_steps", "1000");
    golden_args_add(args, "threads", "1");
}

static void train(const golden_args *args)
{
    assert_int_equal(golden_train(args), BL_OK);
}

/* ---- against float64 ---- */

static double compare_metrics(const json_t *metrics, const json_t *steps)
{
    double worst = 0;

    for (size_t i = 0; i < json_array_size(steps); i++) {
        const json_t *expected = json_array_get(steps, i), *line = json_array_get(metrics, i);
        int n_there = 0;
        for (int k = 0; k < BL_PREFERENCE_N_METRICS; k++) {
            const char *name = bl_preference_metric_name(k);
            const json_t *value = json_object_get(line, name), *e = json_object_get(expected, name);
            if (!value != !e) fail_msg("step %zu: %s", i + 1, name);
            if (!e) continue;
            double scale = fmax(1, fabs(json_number_value(e))),
                   error = fabs(json_number_value(value) - json_number_value(e)) / scale;
            if (!(error <= METRICS))
                printf("step %zu: %s %.9g, expected %.9g\n", i + 1, name, json_number_value(value),
                       json_number_value(e));
            if (!(error <= worst)) worst = error;
            n_there++;
        }
        assert_true(n_there >= 3);
    }
    return worst;
}

static void check_case(const json_t *golden, const json_t *topology)
{
    const json_t *expect = json_object_get(golden, "expect"),
                 *steps = json_object_get(expect, "steps");
    const char *gradients_path = runs_path("gradients.safetensors");
    golden_args args = {0};

    prepare(golden, topology, "golden", &args);
    golden_args_add(&args, "dump_gradients", "%s", gradients_path);
    train(&args);
    golden_args_free(&args);
    json_t *metrics = golden_metrics(runs_path("golden"));
    double change = json_number_value(json_object_get(expect, "adapter_change_norm")),
           first = golden_compare_losses(metrics, steps, 1, FIRST_LOSS),
           losses = golden_compare_losses(metrics, steps, json_array_size(steps), LOSSES),
           gradients = golden_compare_tensors(gradients_path, json_object_get(expect, "gradients"),
                                              0.0, GRADIENT),
           adapter =
               golden_compare_tensors(runs_path("golden/adapter_model.safetensors"),
                                      json_object_get(expect, "final_adapter"), change, ADAPTER),
           of_metrics = compare_metrics(metrics, steps);
    printf("%-24s first loss %.1e  losses %.1e  gradients %.1e  adapter %.1e  metrics %.1e\n",
           json_string_value(json_object_get(golden, "name")), first, losses, gradients, adapter,
           of_metrics);
    assert_true(first <= FIRST_LOSS && losses <= LOSSES && gradients <= GRADIENT &&
                adapter <= ADAPTER && of_metrics <= METRICS);
    json_decref(metrics);
    assert_int_equal(bl_tree_remove(gradients_path), BL_OK);
}

static void test_golden(void **state)
{
    json_t *index = json_load_file(CASES "/index.json", 0, NULL), *name, *topology;
    const char *only = getenv("BALLAST_GOLDEN_CASE");
    size_t i, k;

    (void)state;
    assert_non_null(index);
    json_array_foreach(json_object_get(index, "cases"), i, name)
    {
        if (only && !strstr(json_string_value(name), only)) continue;
        json_t *golden = golden_load_case(json_string_value(name));
        json_array_foreach(json_object_get(golden, "topologies"), k, topology)
            check_case(golden, topology);
        json_decref(golden);
    }
    json_decref(index);
}

/* ---- the reference is the policy before the first step ---- */

/* A case without its adapter: a new one, with dropout. */
static json_t *new_adapter_case(const char *name)
{
    char path[GOLDEN_PATH_BYTES];

    snprintf(path, sizeof path, "../../preference/cases/%s", name);
    json_t *golden = golden_load_case(path), *config = json_object_get(golden, "config");
    json_object_del(config, "init_adapter");
    return golden;
}

static double value_of(const json_t *metrics, size_t line, const char *key)
{
    const json_t *value = json_object_get(json_array_get(metrics, line), key);
    assert_non_null(value);
    return json_number_value(value);
}

static json_t *topology_of(int ranks, int per_device, int accumulation)
{
    return json_pack("{s:i, s:i, s:i}", "ranks", ranks, "per_device_train_batch_size", per_device,
                     "gradient_accumulation_steps", accumulation);
}

/* ln 2 to the last bit, whatever number of pairs it is summed over. */
static void test_first_loss(void **state)
{
    static const int ranks[] = {1, 2, 4, 8};
    json_t *golden = new_adapter_case("sigmoid");

    (void)state;
    for (size_t i = 0; i < BL_COUNT(ranks); i++)
        for (int continued = 0; continued < 2; continued++) {
            json_t *topology = topology_of(ranks[i], 3, 1);
            golden_args args = {0};
            prepare(golden, topology, "first", &args);
            golden_args_add(&args, "max_steps", "2");
            golden_args_add(&args, "validation_file", "%s", CASES "/tokens/pairs.jsonl");
            golden_args_add(&args, "per_device_eval_batch_size", "1");
            if (continued)
                golden_args_add(&args, "init_adapter", GOLDEN_DIR "/adapters/tiny-gqa-all-linear");
            else
                golden_args_add(&args, "lora_dropout", "0.2");
            train(&args);
            json_t *metrics = golden_metrics(runs_path("first"));
            assert_true(value_of(metrics, 0, "eval_loss") == log(2));
            assert_true(value_of(metrics, 0, "eval_rewards/margins") == 0);
            assert_true(value_of(metrics, 1, "loss") == log(2));
            assert_true(value_of(metrics, 1, "rewards/chosen") == 0);
            assert_true(value_of(metrics, 1, "rewards/rejected") == 0);
            assert_true(value_of(metrics, 2, "loss") != log(2));
            json_decref(metrics);
            json_decref(topology);
            golden_args_free(&args);
        }
    json_decref(golden);
}

static void assert_same_adapter(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *bytes_a = runs_read(runs_path("%s/adapter_model.safetensors", a), &n_a),
         *bytes_b = runs_read(runs_path("%s/adapter_model.safetensors", b), &n_b);

    if (n_a != n_b || memcmp(bytes_a, bytes_b, n_a) != 0) fail_msg("%s and %s differ", a, b);
    free(bytes_a);
    free(bytes_b);
}

/* The base alone and an adapter that does nothing are the same reference. */
static void test_references_agree(void **state)
{
    json_t *golden = new_adapter_case("sigmoid-sft"), *topology = topology_of(2, 2, 2);
    golden_args args = {0};

    (void)state;
    prepare(golden, topology, "untrained", &args);
    golden_args_add(&args, "max_steps", "1");
    golden_args_add(&args, "learning_rate", "0");
    train(&args);
    golden_args_free(&args);
    for (int continued = 0; continued < 2; continued++) {
        args = (golden_args){0};
        prepare(golden, topology, continued ? "continued" : "new", &args);
        golden_args_add(&args, "max_steps", "4");
        if (continued) golden_args_add(&args, "init_adapter", "%s", runs_path("untrained"));
        train(&args);
        golden_args_free(&args);
    }
    assert_same_adapter("new", "continued");
    json_decref(topology);
    json_decref(golden);
}

/* ---- bits ---- */

static const struct {
    const char *name, *args[8]; /* key, value, ... NULL */
} variants[] = {
    {"plain", {NULL}},
    {"one-micro-batch", {"visit_tokens", "1", NULL}},
    {"all-micro-batches", {"visit_tokens", "1000000", NULL}},
    {"save-everything", {"activation_checkpointing", "none", NULL}},
    {"save-nothing", {"activation_checkpointing", "full", "activation_offload", "true", NULL}},
    {"threads", {"threads", "3", "ring_depth", "1", NULL}},
    {"resident", {"shard_size", "1", NULL}},
    {"host", {"offload_ratio", "1", "offload_tier", "host", NULL}},
    {"disk", {"offload_ratio", "1", "offload_tier", "disk", NULL}},
};

static void test_same_bits(void **state)
{
    static const char *const names[] = {"sigmoid", "orpo", "kto-ranks"};

    (void)state;
    for (size_t n = 0; n < BL_COUNT(names); n++) {
        char path[GOLDEN_PATH_BYTES];
        snprintf(path, sizeof path, "../../preference/cases/%s", names[n]);
        json_t *golden = golden_load_case(path), *topology = topology_of(2, 2, 2);
        for (size_t v = 0; v < BL_COUNT(variants); v++) {
            golden_args args = {0};
            prepare(golden, topology, v ? "variant" : "plain", &args);
            golden_args_add(&args, "max_steps", "5");
            if (!strcmp(variants[v].name, "disk"))
                golden_args_add(&args, "offload_dir", "%s", runs_path("pages"));
            for (int i = 0; variants[v].args[i]; i += 2)
                golden_args_add(&args, variants[v].args[i], "%s", variants[v].args[i + 1]);
            train(&args);
            if (v) assert_same_adapter("plain", "variant");
            golden_args_free(&args);
        }
        json_decref(topology);
        json_decref(golden);
    }
}

/* A new and a continued adapter: its reference is read again. */
static void test_resume(void **state)
{
    json_t *topology = topology_of(2, 2, 1);

    (void)state;
    for (int continued = 0; continued < 2; continued++) {
        json_t *golden = continued ? golden_load_case("../../preference/cases/sigmoid")
                                   : new_adapter_case("kto-ranks");
        golden_args args = {0};
        prepare(golden, topology, "whole", &args);
        golden_args_add(&args, "max_steps", "6");
        golden_args_add(&args, "shuffle", "true");
        golden_args_add(&args, "save_steps", "3");
        train(&args);
        runs_set(&args, "output_dir", "%s", runs_path("resumed"));
        runs_unset(&args, "overwrite_output_dir");
        golden_args_add(&args, "resume_from_checkpoint", "%s",
                        runs_path("whole/checkpoints/step-3"));
        train(&args);
        assert_same_adapter("whole", "resumed");
        golden_args_free(&args);
        assert_int_equal(bl_tree_remove(runs_path("resumed")), BL_OK);
        assert_int_equal(bl_tree_remove(runs_path("whole")), BL_OK);
        json_decref(golden);
    }
    json_decref(topology);
}

/* ---- rejected ---- */

static void test_refusals(void **state)
{
    static const struct {
        const char *args[8], *reason;
    } cases[] = {
        {{"loss_type", "sigmoyd", NULL}, "did you mean sigmoid?"},
        {{"loss_type", "nll,sft", NULL}, "nll cannot be combined"},
        {{"loss_type", "sigmoid,simpo", NULL}, "orpo and simpo have no reference"},
        {{"loss_type", "orpo,simpo", NULL}, "orpo and simpo cannot be combined"},
        {{"loss_type", "hinge,hinge", NULL}, "named twice"},
        {{"loss_type", "sigmoid,sft", "loss_weights", "1", NULL}, "1 numbers for 2 losses"},
        {{"loss_weights", "one", NULL}, "expected numbers"},
        {{"loss_type", "robust", "label_smoothing", "0.5", NULL}, "needs less than 0.5"},
        {{"label_smoothing", "0.1", NULL}, "no effect with loss_type sigmoid"},
        {{"simpo_gamma", "1", NULL}, "no effect with loss_type sigmoid"},
        {{"packing", "pack", NULL}, "packing pack is not of preferences"},
        {{"train_on_inputs", "true", NULL}, "train_on_inputs true"},
        {{"loss_type", "kto", "per_device_train_batch_size", "1", NULL}, "at least 2 rows"},
        {{"loss_type", "kto", NULL}, "no known data format"},
        {{"loss_type", "nll", "beta", "0.1", NULL}, "rows of preferences need a loss"},
        {{"data_format", "tokens", NULL}, "has the keys of this row: chosen, rejected"},
    };
    json_t *golden = new_adapter_case("sigmoid"), *topology = topology_of(1, 2, 1);

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        prepare(golden, topology, "refused", &args);
        for (int k = 0; cases[i].args[k]; k += 2)
            golden_args_add(&args, cases[i].args[k], "%s", cases[i].args[k + 1]);
        assert_true(golden_train(&args) != BL_OK);
        if (!strstr(bl_error_text(), cases[i].reason))
            fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), cases[i].reason);
        golden_args_free(&args);
    }
    json_decref(topology);
    json_decref(golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),           cmocka_unit_test(test_first_loss),
        cmocka_unit_test(test_references_agree), cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_resume),           cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests_name("preference", tests, runs_set_up, runs_tear_down);
}
