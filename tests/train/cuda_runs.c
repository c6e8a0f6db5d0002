/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_runs.c -- the standard run with device: cuda, where a GPU or the emulator is present. */
#include "cuda_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "device/device.h"
#include "skip.h"
#ifdef BALLAST_CUDA_EMULATED
#include "emulator/emulated.h"
#endif

bool cuda_runs_have_gpu(void)
{
    bl_gpu_info gpu;
    if (bl_device_find_cuda(0, &gpu) == BL_OK) return true;
    printf("skip: no GPU: %s\n", bl_error_text());
    return false;
}

void cuda_runs_take_gpus(int n_gpus)
{
#ifdef BALLAST_CUDA_EMULATED
    char text[16];
    bool are_there = emulated_cuda_have_devices(n_gpus);

    snprintf(text, sizeof text, "%d", n_gpus);
    if (are_there) setenv("BALLAST_EMULATED_DEVICES", text, 1);
#else
    bl_gpu_info gpu;

    assert_int_equal(bl_device_find_cuda(0, &gpu), BL_OK);
    bool are_there = gpu.n_gpus >= n_gpus;
#endif
    if (!are_there) TEST_SKIP("the machine has fewer than %d GPUs", n_gpus);
}

void cuda_runs_give_back_gpus(void)
{
    unsetenv("BALLAST_EMULATED_DEVICES");
}

static bool are_strict(void)
{
    const char *mode = getenv("BALLAST_EMULATED");
    return mode && strcmp(mode, "strict") == 0;
}

bool cuda_runs_are_slow(void)
{
#ifdef __SANITIZE_THREAD__
    return true;
#else
    return are_strict();
#endif
}

void cuda_runs_standard(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "device", "cuda");
    runs_set(args, "max_steps", "%d", are_strict() ? 1 : CUDA_STEPS);
    runs_set(args, "warmup_steps", "0");
    runs_set(args, "save_steps", "0");
    runs_unset(args, "validation_file");
    runs_set(args, "eval_strategy", "no");
    runs_unset(args, "eval_steps");
    runs_set(args, "overwrite_output_dir", "true");
}

void cuda_runs_set_all(golden_args *args, const char *keys)
{
    char copy[1024], value[GOLDEN_PATH_BYTES], *rest;

    snprintf(copy, sizeof copy, "%s", keys);
    for (char *key = strtok_r(copy, " ", &rest); key; key = strtok_r(NULL, " ", &rest)) {
        const char *text = strtok_r(NULL, " ", &rest), *place;
        assert_non_null(text);
        place = strstr(text, "%s");
        if (place)
            snprintf(value, sizeof value, "%.*s%s%s", (int)(place - text), text, runs_path("."),
                     place + 2);
        else
            snprintf(value, sizeof value, "%s", text);
        runs_set(args, key, "%s", value);
    }
}

void cuda_runs_train(const char *name, int ranks, const char *keys)
{
    golden_args args = {0};

    cuda_runs_standard(&args, runs_path("%s", name), ranks);
    cuda_runs_set_all(&args, keys);
    if (golden_train(&args) != BL_OK) fail_msg("%s: %s", name, bl_error_text());
    golden_args_free(&args);
}
