/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight with bf16 products on the CPU: losses beside the float64 reference
 * (tools/golden/full/make_golden.py) and PyTorch's mixed precision (make_bf16.py); what must not
 * change a bit; kills, and the model that is written, of fp32 weights. */
#include "full_runs.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "ops/gemm.h"

/* Where the processor lacks the instructions, all is computed by the emulation. */
static void choose_arithmetic(void)
{
    if (bl_cpu_gemm_has_bf16())
        unsetenv("BALLAST_CPU_BF16");
    else
        setenv("BALLAST_CPU_BF16", "emulated", 1);
}

/* ---- losses ---- */

typedef struct deviation {
    double first, mean, worst; /* relative to the reference */
} deviation;

static double number_of(const json_t *entry)
{
    return json_number_value(json_is_object(entry) ? json_object_get(entry, "loss") : entry);
}

static deviation deviation_of(const json_t *losses, const json_t *steps)
{
    deviation d = {0};
    size_t n = json_array_size(steps);

    assert_true(n == FULL_RUNS_STEPS && json_array_size(losses) >= n);
    for (size_t i = 0; i < n; i++) {
        double off =
            fabs(number_of(json_array_get(losses, i)) / number_of(json_array_get(steps, i)) - 1);
        if (i == 0) d.first = off;
        d.mean += off / (double)n;
        d.worst = fmax(d.worst, off);
    }
    return d;
}

/* A bf16 number is off by 2^-9 at most, with random signs. */
static deviation check_losses(const char *name, const json_t *golden, const deviation *fsdp)
{
    const json_t *steps = json_object_get(json_object_get(golden, "expect"), "steps"),
                 *topologies = json_object_get(golden, "topologies");
    char model[GOLDEN_PATH_BYTES];
    golden_args args = {0};

    assert_true(golden_model(golden, model));
    assert_int_equal(bl_tree_remove(runs_path("losses")), BL_OK);
    full_runs_fill(golden, json_array_get(topologies, json_array_size(topologies) - 1), model,
                   runs_path("losses"), &args);
    golden_args_add(&args, "compute_dtype", "bf16");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    json_t *metrics = golden_metrics(runs_path("losses"));
    deviation ours = deviation_of(metrics, steps);
    printf("%-22s first loss off by %.1e, mean %.1e (fsdp %.1e), worst %.1e (%.1e)\n", name,
           ours.first, ours.mean, fsdp->mean, ours.worst, fsdp->worst);
    assert_true(ours.first <= 2e-3);
    assert_true(ours.worst <= 1e-2);
    assert_true(ours.mean > 1e-6); /* not fp32 */
    json_decref(metrics);
    return ours;
}

/* Activations in bf16 on both sides: neither is nearer in every case, so the means over all cases
 * are compared. */
static void losses_are_as_near_to_float64_as_pytorchs(void **state)
{
    json_t *file = json_load_file("tests/golden/full/bf16.json", 0, NULL), *pytorch;
    double ours = 0, theirs = 0, autocast = 0;
    const char *name;

    (void)state;
    choose_arithmetic();
    assert_non_null(file);
    json_t *cases = json_object_get(file, "cases");
    double n = (double)json_object_size(cases);
    json_object_foreach(cases, name, pytorch)
    {
        char path[GOLDEN_PATH_BYTES];
        snprintf(path, sizeof path, "../../full/cases/%s", name);
        json_t *golden = golden_load_case(path);
        const json_t *steps = json_object_get(json_object_get(golden, "expect"), "steps");
        deviation fsdp = deviation_of(json_object_get(pytorch, "fsdp"), steps);
        ours += check_losses(name, golden, &fsdp).mean / n;
        theirs += fsdp.mean / n;
        autocast += deviation_of(json_object_get(pytorch, "autocast"), steps).mean / n;
        json_decref(golden);
    }
    printf("mean deviation: %.2e, PyTorch with bf16 weights %.2e, with autocast %.2e\n", ours,
           theirs, autocast);
    assert_true(n > 0 && ours <= theirs);
    json_decref(file);
}

/* ---- bits ---- */

static const char *const bf16[] = {"compute_dtype", "bf16", NULL};

static void train_with(const char *name, int n_ranks, const char *output, const char *const *more)
{
    char *pages = strdup(runs_path("pages"));
    const char *keys[16] = {bf16[0], bf16[1], "offload_dir", pages};

    for (int i = 0; more && more[i]; i++) keys[i + 4] = more[i];
    full_runs_train(name, n_ranks, output, keys);
    free(pages);
}

static void nothing_else_changes_a_bit(void **state)
{
    static const struct {
        const char *what, *args[9]; /* NULL-terminated */
    } variants[] = {
        {"one micro-batch per visit", {"visit_tokens", "1", "ring_depth", "1"}},
        {"nothing recomputed", {"activation_checkpointing", "none", "threads", "3"}},
        {"all recomputed", {"activation_checkpointing", "full", "ring_depth", "4"}},
        {"activations in host memory", {"activation_offload", "true", "visit_tokens", "1000000"}},
        {"weights, their copy and the state on disk",
         {"optimizer_tier", "disk", "offload_tier", "disk", "offload_ratio", "1",
          "offload_compute_copy", "true"}},
        {"half of the weights and their copy on disk",
         {"offload_tier", "disk", "offload_ratio", "0.5", "offload_compute_copy", "true"}},
    };

    (void)state;
    choose_arithmetic();
    for (size_t c = 0; c < FULL_RUNS_CASES; c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            train_with(full_runs_cases[c], n_ranks, "plain", NULL);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                train_with(full_runs_cases[c], n_ranks, "varied", variants[v].args);
                full_runs_assert_same(FULL_RUNS_STEPS, "plain", "varied", n_ranks,
                                      variants[v].what);
            }
        }
}

/* Killed and resumed: of weights that were not rounded. Ranks that are processes. */
static void kills_and_processes_change_no_bit(void **state)
{
    golden_args args = {0};
    int n_kills = 0, code = -1;

    (void)state;
    choose_arithmetic();
    runs_seed_random();
    full_runs_kill_args(2, "whole", &args);
    runs_set(&args, "compute_dtype", "bf16");
    assert_int_equal(golden_train(&args), BL_OK);
    runs_set(&args, "output_dir", "%s", runs_path("killed"));
    runs_set(&args, "resume_from_checkpoint", "true");
    runs_set(&args, "rank_processes", "true");
    while (code != 0) {
        runs_child child = {0};
        runs_start(&child, "train", &args);
        if (n_kills < 4) {
            runs_sleep_s(0.05 + runs_random_s(0.25));
            n_kills += kill(child.pid, SIGKILL) == 0;
        }
        code = runs_wait(&child, 120);
        assert_true(code == 0 || code == -SIGKILL);
    }
    golden_args_free(&args);
    full_runs_assert_same(FULL_RUNS_STEPS, "whole", "killed", 2, "processes, after kills");
    full_runs_assert_same_file(runs_path("whole/model/model.safetensors"),
                               runs_path("killed/model/model.safetensors"));
}

/* The state has fp32 weights that bf16 does not hold: small steps are not lost. */
static void the_weights_are_not_rounded(void **state)
{
    int64_t n_rounded = 0, n = 0;
    char *bytes;
    size_t n_bytes;

    (void)state;
    choose_arithmetic();
    train_with("../../full/cases/tiny-mha-tied", 1, "weights",
               (const char *[]){"learning_rate", "1e-6", "model_dtype", "f32", NULL});
    bytes = runs_read(runs_path("weights/model/model.safetensors"), &n_bytes);
    for (size_t i = n_bytes / 2 / 4 * 4; i + 4 <= n_bytes; i += 4, n++)
        n_rounded += bytes[i] == 0 && bytes[i + 1] == 0;
    free(bytes);
    assert_true(n > 100 && n_rounded < n / 100);
}

static void a_processor_without_bf16_is_refused(void **state)
{
    golden_args args = {0};

    (void)state;
    setenv("BALLAST_CPU_BF16", "off", 1);
    full_runs_kill_args(1, "refused", &args);
    runs_set(&args, "compute_dtype", "bf16");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "no AVX512-BF16"));
    golden_args_free(&args);
    unsetenv("BALLAST_CPU_BF16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(losses_are_as_near_to_float64_as_pytorchs),
                                       cmocka_unit_test(nothing_else_changes_a_bit),
                                       cmocka_unit_test(kills_and_processes_change_no_bit),
                                       cmocka_unit_test(the_weights_are_not_rounded),
                                       cmocka_unit_test(a_processor_without_bf16_is_refused)};
    return cmocka_run_group_tests_name("full bf16", tests, runs_set_up, runs_tear_down);
}
