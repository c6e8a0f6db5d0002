/* SPDX-License-Identifier: Apache-2.0 */
/* Reasons to reject a run that requests a GPU: the machine, the driver, the memory, keys that do
 * not fit; with one line and the right exit code, before a weight is loaded. And the choice of
 * device auto then. The emulated GPU simulates each machine (emulator/README.md). */
#include "cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"

typedef struct machine {
    const char *variable, *value;
} machine;

static const machine machines[] = {
    {"BALLAST_EMULATED_DRIVER", "0"},     {"BALLAST_EMULATED_DRIVER", "12090"},
    {"BALLAST_EMULATED_DEVICES", "0"},    {"BALLAST_EMULATED_ARCH", "80"},
    {"BALLAST_EMULATED_MEMORY_MIB", "8"}, {"OMPI_COMM_WORLD_SIZE", "2"},
    {"BALLAST_EMULATED_ERROR", "802"},    {"BALLAST_EMULATED_ARCH", "75"},
};
enum { NO_DRIVER, OLD_DRIVER, NO_GPU, AMPERE, SMALL, TWO_PROCESSES, NO_FABRIC, TURING, ORDINARY };

static bool pretend(const int *index)
{
    if (*index == ORDINARY) return true;
    return setenv(machines[*index].variable, machines[*index].value, 1) == 0;
}

static int run(runs_child *child, const char *command, int on, const char *keys)
{
    golden_args args = {0};

    if (strcmp(command, "train") == 0) {
        cuda_runs_standard(&args, runs_path("refused"), 1);
    } else {
        golden_args_add(&args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
        golden_args_add(&args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
        golden_args_add(&args, "data_format", "tokens");
        golden_args_add(&args, "device", "cuda");
    }
    cuda_runs_set_all(&args, keys);
    *child = (runs_child){.prepare = pretend, .arg = &on};
    runs_start(child, command, &args);
    int code = runs_wait(child, 300.0);
    golden_args_free(&args);
    return code;
}

static void test_refusals(void **state)
{
    static const struct {
        int machine;
        const char *command, *keys;
        int code;
        const char *error;
    } cases[] = {
        {NO_DRIVER, "train", "", 4, "device cuda: CUDA: this machine has no NVIDIA driver"},
        {NO_DRIVER, "eval", "", 4, "device cuda: CUDA: this machine has no NVIDIA driver"},
        {OLD_DRIVER, "train", "", 4, "serves CUDA 12.9, and this build is of CUDA 13"},
        {NO_GPU, "train", "", 4, "device cuda: CUDA: "},
        {NO_FABRIC, "train", "", 4,
         "device cuda: cudaGetDeviceCount: system not yet initialized (cudaErrorSystemNotReady); "
         "the fabric of the GPUs is not up"},
        {NO_FABRIC, "eval", "", 4, "device cuda: cudaGetDeviceCount: "},
        {TURING, "train", "", 4, "device cuda: CUDA: GPU 0 has compute capability 7.5"},
        {AMPERE, "train", "compute_dtype fp8", 4,
         "compute_dtype fp8: Emulated GPU has no FP8 products that Ballast uses: they need compute "
         "capability 9.0, it has 8.0; use bf16"},
        {AMPERE, "eval", "compute_dtype fp8", 4,
         "compute_dtype fp8: Emulated GPU has no FP8 products"},
        {SMALL, "train", "", 4, "GB of GPU memory, "},
        {SMALL, "train", "", 4, "GB of host memory, "},
        {SMALL, "train", "offload_ratio 0 activation_checkpointing full visit_tokens 1", 4,
         "offload_ratio 1 or activation_offload true"},
        {SMALL, "eval", "offload_ratio 0", 4, "GB of GPU memory, "},
        {ORDINARY, "train", "compute_dtype fp32", 2,
         "device cuda computes in bf16 or fp8; use auto, bf16 or fp8"},
        {ORDINARY, "train", "compute_bf16_modules layers.2", 2, "the model has layers 0 to 1"},
        {ORDINARY, "train", "lora_target_modules q_proj,lm_head", 2,
         "lora_target_modules: device cuda is not supported with LoRA terms of the embedding or"},
        {ORDINARY, "eval", "init_adapter tests/golden/modules/adapters/terms", 2,
         "init_adapter tests/golden/modules/adapters/terms: device cuda is not supported with"},
        {ORDINARY, "eval", "compute_bf16_modules head", 2, "is not a projection"},
    };
    runs_child child;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        int code = run(&child, cases[i].command, cases[i].machine, cases[i].keys);
        if (code != cases[i].code)
            fail_msg("%s %s on machine %d: exit code %d", cases[i].command, cases[i].keys,
                     cases[i].machine, code);
        runs_assert_error(&child, cases[i].error);
        char *log = runs_read(child.log, NULL);
        assert_null(strstr(log, "step 1"));
        free(log);
    }
}

static void assert_says(const runs_child *child, const char *text)
{
    char *log = runs_read(child->log, NULL);
    if (!strstr(log, text)) fail_msg("'%s' is not in: %s", text, log);
    free(log);
}

/* Without a GPU auto computes on the CPU, and says why; with one that does not work it fails. */
static void test_auto(void **state)
{
    runs_child child;

    (void)state;
    assert_int_equal(run(&child, "eval", NO_DRIVER, "device auto"), 0);
    assert_says(&child, "device auto: cpu; CUDA: this machine has no NVIDIA driver");
    assert_int_equal(run(&child, "eval", NO_GPU, "device auto"), 0);
    assert_says(&child, "device auto: cpu; CUDA: GPU 0 is not among this machine's 0");
    assert_int_equal(run(&child, "eval", TURING, "device auto"), 0);
    assert_says(&child, "warning: device auto: cpu; CUDA: GPU 0 has compute capability 7.5");
    assert_int_equal(run(&child, "eval", OLD_DRIVER, "device auto"), 4);
    runs_assert_error(&child, "device auto: CUDA: the NVIDIA driver serves CUDA 12.9");
    assert_int_equal(run(&child, "train", NO_FABRIC, "device auto"), 4);
    runs_assert_error(&child, "is nvidia-fabricmanager running, of the driver's version?; to "
                              "compute without a GPU, use device cpu");
    assert_int_equal(run(&child, "eval", ORDINARY, "device auto"), 0);
    assert_says(&child, "device auto: cuda, Emulated GPU");
    setenv("BALLAST_CPU_BF16", "off", 1);
    assert_int_equal(run(&child, "eval", NO_DRIVER, "device auto compute_dtype bf16"), 2);
    runs_assert_error(&child, "compute_dtype bf16: this processor has no AVX512-BF16");
    unsetenv("BALLAST_CPU_BF16");
}

/* bf16 runs on a GPU of capability 8.0. */
static void test_ampere(void **state)
{
    runs_child child;

    (void)state;
    assert_int_equal(run(&child, "train", AMPERE, "max_steps 1"), 0);
    assert_says(&child, "on Emulated GPU (8.0)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_ampere),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
