/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rates.c -- the rates of this host at a run's shapes, measured by the functions of
 * rates.c. */
#include "bench/command/plan_rates.h"

#include "base/sizes.h"
#include "bench/command/rates.h"
#include "plan/measure.h"

static bl_status measure_links(const bl_model_config *model, int n_ranks, int64_t runs,
                               bl_rates *out)
{
    size_t bytes =
        (size_t)bl_round_up(2 * model->intermediate_size * model->hidden_size / n_ranks, 4096);
    bl_device *device = NULL;
    bl_rate rate;

    BL_TRY(bl_device_create_cpu(1, &device));
    bl_status st = bl_rate_device_copy(&device, 1, true, bytes, runs, &rate);
    bl_device_destroy(device);
    BL_TRY(st);
    out->copy_in_bytes_per_s = out->copy_out_bytes_per_s = rate.median;
    if (n_ranks == 1) return BL_OK;
    BL_TRY(bl_rate_all_gather(n_ranks, bytes, runs, &rate));
    out->gather_bytes_per_s = rate.median;
    return BL_OK;
}

bl_status bl_bench_plan_rates(const bl_model_config *model, int64_t lora_r, int64_t tokens,
                              int n_ranks, int threads, int64_t runs, bool in_cpu_time,
                              bl_rates *out)
{
    BL_TRY(bl_plan_measure_rates(&(bl_plan_measure_options){.model = model,
                                                            .act = BL_F32,
                                                            .lora_r = lora_r,
                                                            .tokens = tokens,
                                                            .document_tokens = tokens,
                                                            .n_ranks = n_ranks,
                                                            .threads = threads,
                                                            .runs = runs,
                                                            .queued = 8,
                                                            .seconds = 0.15,
                                                            .in_cpu_time = in_cpu_time},
                                 out));
    return measure_links(model, n_ranks, runs, out);
}
