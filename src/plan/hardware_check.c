/* SPDX-License-Identifier: Apache-2.0 */
/* hardware_check.c -- which figures a machine can have: the range of each, and rates below
 * peaks. */
#include <math.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "plan/hardware.h"

/* By the end of the key. The longest that matches counts. A layer of 405B takes a month at the
 * lowest rate: a slower one is a typing error, and its times are longer than the simulation's clock
 * resolves. */
static const struct {
    const char *end;
    double least, most;
} ranges[] = {{"flops_per_s", 1e6, 1e18},
              {"_per_s", 1e3, 1e18},
              {"_bytes", 1e6, 1e18},
              {"_s", 1e-9, 10},
              {"_watts", 1e-3, 1e7}};

bl_status bl_hardware_check_figure(const char *key, double value)
{
    size_t i = 0;

    while (i < BL_COUNT(ranges) && !bl_text_ends_with(key, ranges[i].end)) i++;
    if (i == BL_COUNT(ranges)) return BL_FAIL(BL_EINTERNAL, "%s: a figure without a range", key);
    if (value == 0 || (isfinite(value) && value >= ranges[i].least && value <= ranges[i].most))
        return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: expected %g to %g, or 0 for none, got %g", key, ranges[i].least,
                   ranges[i].most, value);
}

bl_status bl_hardware_check_peaks(const bl_hardware *h)
{
    const struct {
        const char *rate, *peak;
        double rate_flops_per_s, peak_flops_per_s;
    } pairs[] = {
        {"bf16_gemm_flops_per_s", "bf16_peak_flops_per_s", h->bf16_gemm_flops_per_s.value,
         h->bf16_peak_flops_per_s.value},
        {"fp8_gemm_flops_per_s", "fp8_peak_flops_per_s", h->fp8_gemm_flops_per_s.value,
         h->fp8_peak_flops_per_s.value},
        {"fp8_fast_gemm_flops_per_s", "fp8_peak_flops_per_s", h->fp8_fast_gemm_flops_per_s.value,
         h->fp8_peak_flops_per_s.value},
        {"attention_forward_flops_per_s", "bf16_peak_flops_per_s",
         h->attention_forward_flops_per_s.value, h->bf16_peak_flops_per_s.value},
        {"attention_backward_flops_per_s", "bf16_peak_flops_per_s",
         h->attention_backward_flops_per_s.value, h->bf16_peak_flops_per_s.value},
    };

    for (size_t i = 0; i < BL_COUNT(pairs); i++)
        if (pairs[i].peak_flops_per_s > 0 && pairs[i].rate_flops_per_s > pairs[i].peak_flops_per_s)
            return BL_FAIL(BL_EUSAGE, "%s %g is above %s %g", pairs[i].rate,
                           pairs[i].rate_flops_per_s, pairs[i].peak, pairs[i].peak_flops_per_s);
    return BL_OK;
}
