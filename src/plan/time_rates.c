/* SPDX-License-Identifier: Apache-2.0 */
/* time_rates.c -- a machine's figures as the rates of one rank. */
#include <math.h>

#include "base/sizes.h"
#include "plan/time.h"

/* Fraction of the datasheet's bytes per second that kernels reach which only read and write
 * (docs/internals/plan.md). */
static const double MEMORY_EFFICIENCY = 0.82;

bl_rates bl_time_rates_of(const bl_hardware *h, int n_ranks_on_host, int threads, bl_dtype act)
{
    double n = n_ranks_on_host;
    bl_rates r = {
        .gemm_flops_per_s = h->bf16_gemm_flops_per_s.value,
        .fp8_gemm_flops_per_s = h->fp8_gemm_flops_per_s.value,
        .fp8_fast_gemm_flops_per_s = h->fp8_fast_gemm_flops_per_s.value,
        .attention_forward_flops_per_s = h->attention_forward_flops_per_s.value,
        .attention_backward_flops_per_s = h->attention_backward_flops_per_s.value,
        .memory_bytes_per_s = h->device_memory_bytes_per_s.value,
        .decode_weights_per_s = h->fp8_decode_weights_per_s.value,
        .launch_s = h->launch_s.value,
        .gather_bytes_per_s = h->gather_bytes_per_s.value,
        .gather_latency_s = h->gather_latency_s.value,
        .network_bytes_per_s = h->network_bytes_per_s.value,
        .network_latency_s = h->network_latency_s.value,
        .copy_in_bytes_per_s = h->copy_in_bytes_per_s.value,
        .copy_out_bytes_per_s = h->copy_out_bytes_per_s.value,
        .copy_both_bytes_per_s = h->copy_both_bytes_per_s.value,
        .host_memory_bytes_per_s = h->host_memory_bytes_per_s.value / n,
        .disk_bytes_per_s = h->disk_read_bytes_per_s.value / n,
        .disk_write_bytes_per_s = h->disk_write_bytes_per_s.value / n,
        .peak_flops_per_s = h->bf16_peak_flops_per_s.value,
        .fp8_peak_flops_per_s = h->fp8_peak_flops_per_s.value,
    };
    r.memory_bytes_per_s *= MEMORY_EFFICIENCY;
    if (h->kind == BL_DEVICE_CUDA) return r;
    /* Cores are shared: a rank computes with its threads' part of what all of them reach. */
    double part = fmin(1.0 / n, (double)threads / bl_max_i64(h->n_cores, 1));
    double products =
        act == BL_BF16 ? h->bf16_gemm_flops_per_s.value : h->f32_gemm_flops_per_s.value;
    r.gemm_flops_per_s = r.peak_flops_per_s = products * part;
    /* The figures are fp32's; attention consists of products. */
    double faster =
        h->f32_gemm_flops_per_s.value > 0 ? products / h->f32_gemm_flops_per_s.value : 1;
    r.attention_forward_flops_per_s *= part * faster;
    r.attention_backward_flops_per_s *= part * faster;
    if (r.attention_forward_flops_per_s <= 0) r.attention_forward_flops_per_s = r.gemm_flops_per_s;
    if (r.attention_backward_flops_per_s <= 0)
        r.attention_backward_flops_per_s = r.gemm_flops_per_s;
    r.memory_bytes_per_s = 2 * h->copy_in_bytes_per_s.value / n; /* a copy reads and writes */
    r.cores = h->n_cores / n;
    r.compute_cores = fmin(threads, r.cores); /* more threads than cores are in the rates already */
    r.copy_cores = 1;
    return r;
}
