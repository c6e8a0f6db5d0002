/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the keys for the device and the arithmetic of a run: device,
 * compute_dtype, compute_bf16_modules. */
#include "device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "job/launch.h"
#include "config/internal.h"
#include "arch/table.h"
#include "ops/gemm.h"
#include "ops/matmul.h"

/* Only NCCL carries the weights between GPUs of several processes. */
static bl_status check_processes(const bl_launch_info *launch)
{
    if (launch->n_processes == 1 || config_has_gpu_processes()) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "a job of %d processes computes on CPUs: this build has no NCCL for GPUs of "
                   "several processes",
                   launch->n_processes);
}

/* Launchers that bind GPUs to tasks show each task only its GPU, in CUDA_VISIBLE_DEVICES. */
static bool is_shown_its_own(const bl_gpu_info *gpu)
{
    return gpu->n_gpus == 1 && getenv("CUDA_VISIBLE_DEVICES");
}

static bl_status check_gpus(const bl_launch_info *launch, const bl_gpu_info *gpu)
{
    if (launch->n_local <= gpu->n_gpus || is_shown_its_own(gpu)) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "CUDA: %d processes on a host with %d GPUs; each needs one",
                   launch->n_local, gpu->n_gpus);
}

bl_status bl_config_find_gpu(bl_gpu_info *gpu, int *index)
{
    bl_launch_info launch;

    *index = 0;
    bl_launch_read(&launch);
    BL_TRY(bl_device_find_cuda(0, gpu));
    BL_TRY(check_processes(&launch));
    BL_TRY(check_gpus(&launch, gpu));
    if (launch.n_local == 1 || is_shown_its_own(gpu)) return BL_OK;
    *index = launch.local_rank;
    return bl_device_find_cuda(*index, gpu);
}

/* A process that may start its host's ranks must not touch CUDA itself. */
static bl_status look_for_gpu(const bl_launch_info *launch, bl_gpu_info *gpu)
{
    int index;

    if (launch->kind == BL_LAUNCH_CHILD) return bl_config_find_gpu(gpu, &index);
    BL_TRY(bl_device_probe_cuda(0, gpu));
    BL_TRY(check_processes(launch));
    return check_gpus(launch, gpu);
}

/* Device auto without a usable GPU: the CPU, unless the machine has a GPU that does not work. */
static bl_status do_without_gpu(bl_gpu_state state, bl_status st)
{
    bl_error error;

    if (!bl_device_has_cuda()) return BL_OK; /* no search, no message */
    bl_error_save(&error, st);
    if (state == BL_GPU_BROKEN)
        return BL_FAIL(st, "device auto: %s; to compute without a GPU, use device cpu", error.text);
    if (state == BL_GPU_ABSENT)
        bl_log_info("device auto: cpu; %s", error.text);
    else
        bl_log_warning("device auto: cpu; %s", error.text);
    return BL_OK;
}

static bl_status choose_device(bl_config_device *device, bl_gpu_info *gpu)
{
    bl_launch_info launch;
    bl_gpu_info first;

    if (*device == BL_CONFIG_DEVICE_CPU) return BL_OK;
    bl_launch_read(&launch);
    bl_status st = look_for_gpu(&launch, gpu);
    if (*device == BL_CONFIG_DEVICE_CUDA)
        return st == BL_OK ? BL_OK : bl_error_prefix(st, "device cuda");
    /* Not one rank on the CPU where the others are on GPUs. */
    if (st != BL_OK && launch.kind == BL_LAUNCH_CHILD && config_has_gpu_processes()) {
        bl_error error;
        bl_error_save(&error, st);
        if (bl_device_find_cuda(0, &first) == BL_OK) return bl_error_restore(&error);
        bl_error_restore(&error);
    }
    *device = st == BL_OK ? BL_CONFIG_DEVICE_CUDA : BL_CONFIG_DEVICE_CPU;
    if (st != BL_OK) return do_without_gpu(gpu->state, st);
    bl_log_info("device auto: cuda, %s", gpu->name);
    return BL_OK;
}

bl_device_kind bl_train_config_device_kind(const bl_train_config *config)
{
    return config->device == BL_CONFIG_DEVICE_CUDA ? BL_DEVICE_CUDA : BL_DEVICE_CPU;
}

bl_dtype bl_train_config_act(const bl_train_config *config)
{
    return config->compute_dtype == BL_COMPUTE_FP32 ? BL_F32 : BL_BF16;
}

/* In fp32 unless bf16 is asked for. */
static bl_status compute_on_cpu(bool has_bf16, bl_compute_dtype *dtype)
{
    if (*dtype == BL_COMPUTE_FP8)
        return BL_FAIL(BL_EUSAGE,
                       "compute_dtype fp8: device cpu computes in fp32 or bf16; use one of these");
    if (*dtype == BL_COMPUTE_BF16 && !has_bf16)
        return BL_FAIL(BL_EUSAGE,
                       "compute_dtype bf16: this processor has no AVX512-BF16; use auto or fp32");
    if (*dtype == BL_COMPUTE_AUTO) *dtype = BL_COMPUTE_FP32;
    return BL_OK;
}

/* FP8 products on a GPU without them: before Hopper an error; after it, where a later version may
 * have them, bf16. */
static bl_status do_without_fp8(const char *gpu, int capability, bl_compute_dtype *dtype)
{
    static const char why[] =
        "compute_dtype fp8: %s has no FP8 products that Ballast uses: they need "
        "compute capability 9.0, it has %d.%d; %s";
    int major = capability / 10, minor = capability % 10;

    if (major < 9) return BL_FAIL(BL_ELIMIT, why, gpu, major, minor, "use bf16");
    bl_log_warning(why, gpu, major, minor, "products are in bf16");
    *dtype = BL_COMPUTE_BF16;
    return BL_OK;
}

bl_status config_choose_dtype(bl_config_device device, const config_arithmetic *has,
                              bl_compute_dtype *dtype)
{
    if (device != BL_CONFIG_DEVICE_CUDA) return compute_on_cpu(has->cpu_bf16, dtype);
    if (*dtype == BL_COMPUTE_AUTO) *dtype = BL_COMPUTE_BF16;
    if (*dtype == BL_COMPUTE_FP32)
        return BL_FAIL(BL_EUSAGE,
                       "compute_dtype fp32: device cuda computes in bf16 or fp8; use auto, bf16 or "
                       "fp8");
    if (*dtype == BL_COMPUTE_FP8 && !bl_matmul_has_fp8(has->capability))
        return do_without_fp8(has->gpu, has->capability, dtype);
    return BL_OK;
}

/* The environment variable BALLAST_CPU_BF16 (ops/gemm.h), for tests: "emulated" computes the bits
 * of AVX512-BF16 without it, slower than fp32; "off" is a processor without it. */
static bool computes_bf16(void)
{
    const char *wish = getenv("BALLAST_CPU_BF16");

    if (wish && strcmp(wish, "off") == 0) return false;
    return bl_cpu_gemm_has_bf16() || (wish && strcmp(wish, "emulated") == 0);
}

bl_status bl_config_choose_device(bl_config_device *device, bl_compute_dtype *dtype,
                                  bl_gpu_info *gpu)
{
    *gpu = (bl_gpu_info){0};
    BL_TRY(choose_device(device, gpu));
    config_arithmetic has = {gpu->name, gpu->capability, computes_bf16()};
    return config_choose_dtype(*device, &has, dtype);
}

/* The matrices that a name selects, bits, in one layer or, *layer -1, in all. */
static bl_status parse_module(const char *name, int64_t *layer, unsigned *matrices)
{
    if (bl_arch_find_layer(name, layer)) {
        *matrices = (1u << BL_LAYER_MATRICES) - 1;
        return BL_OK;
    }
    const bl_projection *projection = bl_arch_find_target(name, layer);
    if (projection) {
        *matrices = 1u << projection->matrix;
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
    unsigned matrices = 0;

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
        unsigned matrices = 0;
        BL_TRY(parse_module(modules->items[i], &layer, &matrices));
        if (layer >= n_layers)
            return BL_FAIL(BL_EUSAGE, "compute_bf16_modules: '%s': the model has layers 0 to %lld",
                           modules->items[i], (long long)n_layers - 1);
        for (int64_t l = 0; l < n_layers; l++)
            if (layer < 0 || layer == l) masks[l] = (uint8_t)(masks[l] | matrices);
    }
    return BL_OK;
}
