/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the keys that say where a run computes and in which arithmetic: device, compute_dtype,
 * compute_bf16_modules. */
#include "device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "comm/launch.h"
#include "config/internal.h"
#include "llama/projection.h"
#include "store/peft.h"

enum { CAPABILITY_FP8 = 90 };

_Static_assert((int)BL_PEFT_Q == (int)BL_Q && (int)BL_PEFT_DOWN == (int)BL_DOWN,
               "both lists are in the order of PEFT's modules");

/* The GPU of this process's ranks. */
static bl_status find_gpu(bl_gpu_info *gpu)
{
    bl_launch_info launch;

    bl_launch_read(&launch);
    if (launch.n_processes > 1)
        return BL_FAIL(BL_EUSAGE,
                       "a job of %d processes computes on CPUs: between GPUs of several processes "
                       "nothing carries the weights yet; start one process",
                       launch.n_processes);
    return bl_device_find_cuda(0, gpu);
}

static bl_status choose_device(bl_config_device *device, bl_gpu_info *gpu)
{
    if (*device == BL_CONFIG_DEVICE_CPU) return BL_OK;
    bl_status st = find_gpu(gpu);
    if (*device == BL_CONFIG_DEVICE_CUDA)
        return st == BL_OK ? BL_OK : bl_error_prefix(st, "device cuda");
    *device = st == BL_OK ? BL_CONFIG_DEVICE_CUDA : BL_CONFIG_DEVICE_CPU;
    if (st == BL_OK)
        bl_log_info("device auto: cuda, %s", gpu->name);
    else if (bl_device_has_cuda()) /* where nothing was looked for, nothing is said */
        bl_log_info("device auto: cpu; %s", bl_error_text());
    return BL_OK;
}

bl_status bl_config_choose_device(bl_config_device *device, bl_compute_dtype *dtype)
{
    bl_gpu_info gpu = {0};

    BL_TRY(choose_device(device, &gpu));
    bool is_cuda = *device == BL_CONFIG_DEVICE_CUDA;
    if (*dtype == BL_COMPUTE_AUTO) *dtype = is_cuda ? BL_COMPUTE_BF16 : BL_COMPUTE_FP32;
    if (!is_cuda && *dtype != BL_COMPUTE_FP32)
        return BL_FAIL(BL_EUSAGE, "compute_dtype %s: device cpu computes in fp32; use auto or fp32",
                       *dtype == BL_COMPUTE_BF16 ? "bf16" : "fp8");
    if (is_cuda && *dtype == BL_COMPUTE_FP32)
        return BL_FAIL(BL_EUSAGE,
                       "compute_dtype fp32: device cuda computes in bf16 or fp8; use auto, bf16 or "
                       "fp8");
    if (*dtype == BL_COMPUTE_FP8 && gpu.capability < CAPABILITY_FP8)
        return BL_FAIL(BL_ELIMIT,
                       "compute_dtype fp8: needs a GPU of compute capability 9.0, %s has %d.%d; "
                       "use bf16",
                       gpu.name, gpu.capability / 10, gpu.capability % 10);
    return BL_OK;
}

/* N of "layers.N" or "model.layers.N"; -1: it is neither. */
static int64_t parse_layer(const char *name)
{
    static const char *const heads[] = {"model.layers.", "layers."};
    char canonical[24];

    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        size_t n_head = strlen(heads[i]);
        if (strncmp(name, heads[i], n_head) != 0) continue;
        long long layer = strtoll(name + n_head, NULL, 10);
        snprintf(canonical, sizeof canonical, "%lld", layer);
        return layer >= 0 && strcmp(name + n_head, canonical) == 0 ? layer : -1;
    }
    return -1;
}

/* The matrices that a name selects, bits, in one layer or, *layer -1, in all. */
static bl_status parse_module(const char *name, int64_t *layer, unsigned *matrices)
{
    bl_peft_module module;

    if ((*layer = parse_layer(name)) >= 0) {
        *matrices = (1u << BL_LAYER_MATRICES) - 1;
        return BL_OK;
    }
    if (bl_peft_target_parse(name, &module, layer)) {
        *matrices = 1u << bl_projection_get((bl_projection)module)->matrix;
        return BL_OK;
    }
    return BL_FAIL(BL_EUSAGE,
                   "compute_bf16_modules: '%s' is not a projection (down_proj), a layer "
                   "(layers.0) or a projection of a layer (layers.0.mlp.down_proj)",
                   name);
}

bl_status config_check_modules(const bl_string_list *modules)
{
    int64_t layer;
    unsigned matrices;

    for (int64_t i = 0; i < modules->n_items; i++)
        BL_TRY(parse_module(modules->items[i], &layer, &matrices));
    return BL_OK;
}

bl_status bl_train_config_bf16_matrices(const bl_train_config *c, int64_t n_layers, uint8_t *masks)
{
    const bl_string_list *modules = &c->compute_bf16_modules;

    memset(masks, 0, (size_t)n_layers * sizeof *masks);
    for (int64_t i = 0; i < modules->n_items; i++) {
        int64_t layer;
        unsigned matrices;
        BL_TRY(parse_module(modules->items[i], &layer, &matrices));
        if (layer >= n_layers)
            return BL_FAIL(BL_EUSAGE, "compute_bf16_modules: '%s': the model has layers 0 to %lld",
                           modules->items[i], (long long)n_layers - 1);
        for (int64_t l = 0; l < n_layers; l++)
            if (layer < 0 || layer == l) masks[l] = (uint8_t)(masks[l] | matrices);
    }
    return BL_OK;
}
