/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings in bf16 on the CPU: losses beside the float64 reference and PyTorch's bf16; the same
 * bits whatever the placement, the recomputation, the threads and the interruptions; and the
 * refusal on a processor without AVX512-BF16. */
#include "runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/sizes.h"
#include "ops/gemm.h"

static const char SWITCH[] = "BALLAST_CPU_BF16"; /* config/device.c */

/* Where the processor lacks the instructions, all is computed by the emulation. */
static void choose_arithmetic(void)
{
    if (bl_cpu_gemm_has_bf16())
        unsetenv(SWITCH);
    else
        setenv(SWITCH, "emulated", 1);
}

/* ---- losses ---- */

typedef struct deviation {
    double first, mean, worst; /* relative to the reference */
} deviation;

static deviation deviation_of(const json_t *losses, const char *key, const json_t *steps)
{
    deviation d = {0};
    size_t n = json_array_size(steps);

    assert_true(json_array_size(losses) >= n);
    for (size_t i = 0; i < n; i++) {
        const json_t *loss = json_array_get(losses, i);
        double want = json_number_value(json_object_get(json_array_get(steps, i), "loss")),
               got = json_number_value(key ? json_object_get(loss, key) : loss),
               off = fabs(got / want - 1);
        if (i == 0) d.first = off;
        d.mean += off / (double)n;
        d.worst = fmax(d.worst, off);
    }
    return d;
}

/* A bf16 number is off by 2^-9 at most, with random signs; the reference is tools/golden/train's.
 * */
static void check_losses(const char *name, const json_t *pytorch)
{
    golden_args args = {0};
    json_t *golden = golden_load_case(name);
    const json_t *steps = json_object_get(json_object_get(golden, "expect"), "steps");
    char model[GOLDEN_PATH_BYTES];

    assert_true(golden_model(golden, model));
    golden_config(golden, NULL, &args);
    golden_args_add(&args, "model_name_or_path", "%s", model);
    golden_args_add(&args, "output_dir", "%s", runs_path("losses-%s", name));
    golden_args_add(&args, "compute_dtype", "bf16");
    assert_int_equal(golden_train(&args), BL_OK);
    json_t *metrics = golden_metrics(runs_path("losses-%s", name));
    deviation ours = deviation_of(metrics, "loss", steps),
              theirs = deviation_of(json_object_get(pytorch, "losses"), NULL, steps);
    printf("%s: first loss off by %.2g (PyTorch %.2g), mean %.2g (%.2g), worst %.2g (%.2g)\n", name,
           ours.first, theirs.first, ours.mean, theirs.mean, ours.worst, theirs.worst);
    assert_true(ours.first <= 1e-3);
    assert_true(ours.worst <= 1e-2);
    assert_true(ours.mean > 1e-6); /* not fp32 */
    assert_true(ours.mean <= theirs.mean);
    json_decref(metrics);
    json_decref(golden);
    golden_args_free(&args);
}

static void losses_are_nearer_to_float64_than_pytorchs(void **state)
{
    json_error_t error;
    json_t *file = json_load_file(GOLDEN_DIR "/bf16.json", 0, &error);
    const char *name;
    json_t *pytorch;

    (void)state;
    choose_arithmetic();
    assert_non_null(file);
    json_object_foreach(json_object_get(file, "cases"), name, pytorch) check_losses(name, pytorch);
    json_decref(file);
}

/* ---- bits ---- */

static void train(const char *name, const char *const *keys, size_t n_keys)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("%s", name), 1);
    runs_set(&args, "compute_dtype", "bf16");
    for (size_t i = 0; i + 1 < n_keys && keys[i]; i += 2)
        runs_set(&args, keys[i], "%s", keys[i + 1]);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

static void nothing_but_the_arithmetic_changes_a_bit(void **state)
{
    const char *const ways[][6] = {
        {"offload_ratio", "1", "offload_tier", "host"},
        {"offload_ratio", "0.5", "offload_tier", "disk", "offload_dir", runs_path("pages")},
        {"threads", "2"},
        {"threads", "3", "activation_checkpointing", "full"},
        {"activation_checkpointing", "none", "activation_offload", "true"},
    };

    (void)state;
    choose_arithmetic();
    assert_int_equal(mkdir(runs_path("pages"), 0755), 0);
    train("plain", NULL, 0);
    for (size_t i = 0; i < BL_COUNT(ways); i++) {
        char name[16];
        snprintf(name, sizeof name, "way-%zu", i);
        train(name, ways[i], BL_COUNT(ways[i]));
        if (!runs_are_same(runs_path("plain"), runs_path("%s", name)))
            fail_msg("other bits with %s %s", ways[i][0], ways[i][1]);
    }
}

/* Interrupted where an evaluation is due anyway. */
static void resuming_changes_no_bit(void **state)
{
    const char *const resume[] = {"resume_from_checkpoint", "true"};
    const char *const half[] = {"max_steps", "6", "lr_scheduler_type", "constant_with_warmup"};
    const char *const whole[] = {"lr_scheduler_type", "constant_with_warmup"};
    const char *const rest[] = {resume[0], resume[1], "lr_scheduler_type", "constant_with_warmup"};

    (void)state;
    choose_arithmetic();
    train("whole", whole, BL_COUNT(whole));
    train("half", half, BL_COUNT(half));
    train("half", rest, BL_COUNT(rest));
    assert_true(runs_are_same(runs_path("whole"), runs_path("half")));
}

/* The emulation adds in the order of vdpbf16ps. */
static void emulation_has_the_processors_bits(void **state)
{
    (void)state;
    for (int emulated = 0; emulated < 2; emulated++) {
        runs_child child = {0};
        golden_args args = {0};
        choose_arithmetic();
        if (bl_cpu_gemm_has_bf16()) setenv(SWITCH, emulated ? "emulated" : "avx512_bf16", 1);
        runs_standard(&args, runs_path(emulated ? "emulated" : "native"), 1);
        runs_set(&args, "compute_dtype", "bf16");
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, 300), 0);
        golden_args_free(&args);
    }
    choose_arithmetic();
    assert_true(runs_are_same(runs_path("native"), runs_path("emulated")));
}

/* ---- processors without it ---- */

static void other_processors_refuse(void **state)
{
    runs_child child = {0};
    golden_args args = {0};

    (void)state;
    setenv(SWITCH, "off", 1);
    runs_standard(&args, runs_path("refused"), 1);
    runs_set(&args, "compute_dtype", "bf16");
    runs_start(&child, "train", &args);
    assert_int_equal(runs_wait(&child, 60), 2);
    runs_assert_error(&child, "compute_dtype bf16: this processor has no AVX512-BF16; use auto or "
                              "fp32");
    golden_args_free(&args);
    choose_arithmetic();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_are_nearer_to_float64_than_pytorchs),
        cmocka_unit_test(nothing_but_the_arithmetic_changes_a_bit),
        cmocka_unit_test(resuming_changes_no_bit),
        cmocka_unit_test(emulation_has_the_processors_bits),
        cmocka_unit_test(other_processors_refuse),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
