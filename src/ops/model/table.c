/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- the ops of a model device (device/model.h): each queues the work that its cost
 * (ops/cost.h) takes at the device's rates. Sizes of scratch are those of the kind that the device
 * models. */
#include "device/model.h"
#include "ops/cost.h"
#include "ops/cpu/ops_cpu.h"
#include "ops/cuda/ops_cuda.h"

static bl_cost_setting setting_of(bl_stream *stream)
{
    const bl_model_device_options *o = bl_device_model(bl_stream_device(stream));
    return (bl_cost_setting){o->kind, o->document_tokens, o->label_part, o->data, o->n_data};
}

static bl_status queue(bl_stream *stream, const char *op, const bl_cost *cost, double cores)
{
    const bl_model_device_options *o = bl_device_model(bl_stream_device(stream));

    for (int i = 0; i < cost->n; i++) {
        bl_work work = {.seconds = bl_cost_seconds(&cost->kernel[i], &o->rates)};
        work.use[BL_RESOURCE_CORES] = cores;
        if (o->kind == BL_DEVICE_CUDA && work.seconds > 0)
            work.use[BL_RESOURCE_DEVICE_MEMORY] = cost->kernel[i].bytes / work.seconds;
        if (o->on_kernel)
            o->on_kernel(o->on_kernel_user, stream,
                         &(bl_model_kernel){op, (int)cost->kernel[i].rate, cost->kernel[i].flops,
                                            cost->kernel[i].bytes, work.seconds});
        BL_TRY(bl_model_stream_work(stream, &work));
    }
    return BL_OK;
}

#define QUEUE(op, ...)                                                                             \
    static bl_status queue_##op(bl_stream *stream, const bl_##op##_args *args)                     \
    {                                                                                              \
        bl_cost_setting setting = setting_of(stream);                                              \
        bl_cost cost = bl_cost_##op(&setting, args);                                               \
        return queue(stream, #op, &cost,                                                           \
                     bl_device_model(bl_stream_device(stream))->rates.compute_cores);              \
    }
BL_OPS_LIST(QUEUE)

static bl_status is_refused(bl_stream *stream, const bl_matmul_weight_args *args, bool *out)
{
    (void)stream, (void)args;
    *out = false;
    return BL_OK;
}

static bl_status end_warm_up(bl_device *device)
{
    (void)device;
    return BL_OK;
}

static bl_status spare_multiprocessors(bl_device *device, int n)
{
    (void)device, (void)n;
    return BL_OK;
}

static bl_status count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT])
{
    (void)device;
    for (int i = 0; i < BL_FALLBACK_COUNT; i++) counts[i] = 0;
    return BL_OK;
}

#define ENTRY(op, ...) .op = queue_##op,
const ops_table ops_model_cpu_table = {.acts = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16),
                                       .matmul_weight_is_refused = is_refused,
                                       .matmul_end_warm_up = end_warm_up,
                                       .matmul_spare_multiprocessors = spare_multiprocessors,
                                       .matmul_count_fallbacks = count_fallbacks,
                                       BL_OPS_LIST(ENTRY)},
                ops_model_cuda_table = {.acts = BL_DTYPE_BIT(BL_BF16),
                                        .matmul_weight_is_refused = is_refused,
                                        .matmul_end_warm_up = end_warm_up,
                                        .matmul_spare_multiprocessors = spare_multiprocessors,
                                        .matmul_count_fallbacks = count_fallbacks,
                                        BL_OPS_LIST(ENTRY)};
