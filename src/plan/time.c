/* SPDX-License-Identifier: Apache-2.0 */
/* time.c -- predictions of the program's passes (run_step.c): the rates that they need, and what
 * follows from their times. */
#include "plan/time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/run_pass_internal.h"

const char *bl_time_phase_name(bl_time_phase phase)
{
    static const char *const names[BL_TIME_PHASES] = {"forward", "head", "backward", "optimizer"};
    return names[phase];
}

bl_lane bl_time_bound(const bl_time_estimate *e)
{
    int longest = 0;
    for (int p = 1; p < BL_TIME_PHASES; p++)
        if (e->part[p].seconds > e->part[longest].seconds) longest = p;
    return e->part[longest].bound;
}

/* ---- rates ---- */

static bl_status need(double rate, const char *what, const char *figure)
{
    if (rate > 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "the hardware's %s is not known: give %s among the figures of its hardware.json "
                   "(docs/plan.md)",
                   what, figure);
}

static bl_status check_rates(const bl_time_input *in)
{
    const bl_rates *r = &in->rates;
    bool is_cuda = in->kind == BL_DEVICE_CUDA;
    bl_time_products products;

    BL_TRY(need(r->gemm_flops_per_s, "rate of products",
                is_cuda || in->act == BL_BF16 ? "bf16_gemm_flops_per_s" : "f32_gemm_flops_per_s"));
    BL_TRY(need(r->attention_forward_flops_per_s, "rate of attention",
                "attention_forward_flops_per_s"));
    BL_TRY(need(r->attention_backward_flops_per_s, "rate of attention",
                "attention_backward_flops_per_s"));
    if (is_cuda)
        BL_TRY(need(r->memory_bytes_per_s, "device memory's rate", "device_memory_bytes_per_s"));
    if (is_cuda)
        BL_TRY(
            need(r->decode_weights_per_s, "rate of dequantizing FP8", "fp8_decode_weights_per_s"));
    bl_time_count_products(in, &products);
    if (products.n_fp8 > 0)
        BL_TRY(need(r->fp8_gemm_flops_per_s, "rate of FP8 products", "fp8_gemm_flops_per_s"));
    if (in->n_ranks > in->n_hosts)
        BL_TRY(need(r->gather_bytes_per_s, "rate of gathers", "gather_bytes_per_s"));
    if (in->n_hosts > 1)
        BL_TRY(need(r->network_bytes_per_s, "network's rate", "network_bytes_per_s"));
    bool has_state =
        in->is_trained && in->optimizer_ratio > 0 && in->optimizer_tier != BL_TIER_DEVICE;
    /* A GPU's host updates weights with their state; arrays on the GPU are copied out and back. */
    bool has_update = has_state || (in->is_trained && is_cuda && in->offload_ratio > 0);
    if (in->offload_ratio > 0 || in->offload_activations || has_state)
        BL_TRY(need(r->copy_in_bytes_per_s, "rate of copies to the device", "copy_in_bytes_per_s"));
    if ((in->offload_ratio > 0 && in->tier == BL_TIER_DISK) ||
        (has_state && in->optimizer_tier == BL_TIER_DISK))
        BL_TRY(need(r->disk_bytes_per_s, "disk's rate", "disk_read_bytes_per_s"));
    if (in->offload_activations || has_update)
        BL_TRY(need(r->copy_out_bytes_per_s, "rate of copies from the device",
                    "copy_out_bytes_per_s"));
    return BL_OK;
}

/* ---- results ---- */

static bl_lane bound_of(const bl_time_part *part)
{
    bl_lane most = BL_LANE_COMPUTE;

    for (int lane = 0; lane < BL_N_LANES; lane++)
        if (part->wait_s[lane] > part->wait_s[most]) most = (bl_lane)lane;
    return part->wait_s[most] > 0.05 * part->seconds ? most : BL_LANE_COMPUTE;
}

/* Tokens and floating-point operations of all trainings. */
static void count_work(const bl_time_input *in, double *tokens, double *flops)
{
    *tokens = *flops = 0;
    for (int i = 0; i <= in->n_others; i++) {
        bl_time_input t = plan_training_of(in, i);
        *tokens += (double)t.n_ranks * t.n_micro * (double)t.micro_tokens * t.useful_part;
        *flops += plan_model_flops(&t);
    }
}

static void finish(const bl_time_input *in, bl_time_estimate *out)
{
    double tokens;

    for (int p = 0; p < BL_TIME_PHASES; p++) {
        out->part[p].bound = bound_of(&out->part[p]);
        out->step_s += out->part[p].seconds;
    }
    count_work(in, &tokens, &out->model_flops);
    out->tokens_per_s = tokens / out->step_s;
    bl_time_count_products(in, &out->products);
    double peak =
        out->products.n_fp8 > 0 ? in->rates.fp8_peak_flops_per_s : in->rates.peak_flops_per_s;
    if (peak > 0) out->mfu = out->model_flops / (out->step_s * peak * (double)in->n_ranks);
}

bl_status bl_time_predict(const bl_time_input *in, bl_time_estimate *out)
{
    *out = (bl_time_estimate){.step_s = 0};
    BL_TRY(check_rates(in));
    BL_TRY(plan_run_predict(in, out));
    finish(in, out);
    return BL_OK;
}

bl_status bl_time_predict_evaluation(const bl_time_input *in, int training,
                                     bl_time_evaluation_estimate *out)
{
    *out = (bl_time_evaluation_estimate){.seconds = 0};
    BL_TRY(check_rates(in));
    return plan_run_evaluation(in, training, out);
}

bl_status bl_time_trace(const bl_time_input *in, bl_time_passes passes, bl_time_before before,
                        bl_span_sink sink, void *user)
{
    BL_TRY(check_rates(in));
    return plan_run_trace(in, passes, before, sink, user);
}
