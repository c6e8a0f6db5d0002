/* SPDX-License-Identifier: Apache-2.0 */
/* plan_for.c -- the machine of --plan_for, and the line that compares it with what is needed. */
#include "bench/command/plan_for.h"

#include <stdio.h>
#include <string.h>

#include "plan/memory.h"

const double bl_bench_start_s = 10;

bl_status bl_bench_plan_gpu(const char *name, bl_hardware *out, int64_t *gpu_available)
{
    BL_TRY(strcmp(name, "here") == 0 ? bl_hardware_find(out) : bl_hardware_preset(name, out));
    if (out->kind != BL_DEVICE_CUDA) return BL_FAIL(BL_EUSAGE, "--plan_for %s: not a GPU", name);
    *gpu_available = (int64_t)out->device_memory_bytes.value - bl_plan_gpu_reserve_bytes(1);
    return BL_OK;
}

static bl_status lack(const char *bench, const char *what, int64_t needed, int64_t available)
{
    return BL_FAIL(BL_ENOMEM, "bench %s: %.1f GB of %s memory are needed, %.1f GB are available",
                   bench, 1e-9 * (double)needed, what, 1e-9 * (double)available);
}

bl_status bl_bench_plan_end(const char *bench, const char *plan_for, const bl_bench_needs *n)
{
    bool has_host = n->host_available > 0, fits_gpu = n->gpu <= n->gpu_available,
         fits_host = !has_host || n->host <= n->host_available;

    printf("\"plan_for\":\"%s\",\"gpu_gb\":%.1f,\"gpu_available_gb\":%.1f,", plan_for,
           1e-9 * (double)n->gpu, 1e-9 * (double)n->gpu_available);
    if (has_host)
        printf("\"host_gb\":%.1f,\"host_available_gb\":%.1f,", 1e-9 * (double)n->host,
               1e-9 * (double)n->host_available);
    printf("\"seconds\":%.0f,\"fits\":%s}\n", n->seconds, fits_gpu && fits_host ? "true" : "false");
    fflush(stdout);
    if (!fits_gpu) return lack(bench, "GPU", n->gpu, n->gpu_available);
    return fits_host ? BL_OK : lack(bench, "host", n->host, n->host_available);
}
