/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_choice.c -- chooses the inner loops of bf16 products: by the processor's instructions, the
 * system's permission and the environment variable BALLAST_CPU_BF16. */
#include <stddef.h>
#include <string.h>

#include "base/log.h"
#include "ops/cpu/bf16_kernels.h"

/* NULL: not usable; a warning if the processor has it. */
static const ops_bf16_kernels *try_amx(const ops_bf16_host *host)
{
    static const char instead[] = "AVX512-BF16 is used, at a fraction of its speed";
    if (!host->has_amx) return NULL;
    int refusal = host->request_amx();
    if (refusal) {
        bl_log_warning("bf16 products: the system does not permit AMX (arch_prctl: %s); %s",
                       strerror(refusal), instead);
        return NULL;
    }
    if (ops_bf16_kernels_agree(host->amx, host->avx512)) return host->amx;
    bl_log_warning("bf16 products: AMX gives other sums than AVX512-BF16 for small integers; %s",
                   instead);
    return NULL;
}

const ops_bf16_kernels *ops_bf16_kernels_choose(const ops_bf16_host *host)
{
    const ops_bf16_kernels *best = NULL;
    const char *wish = host->wish ? host->wish : "";

    if (host->has_avx512 && strcmp(wish, ops_bf16_kernels_emulated.name) != 0) {
        if (strcmp(wish, host->avx512->name) != 0) best = try_amx(host);
        if (!best) best = host->avx512;
    }
    if (!best) best = &ops_bf16_kernels_emulated;
    /* "off" is for the configuration, which then does not ask for bf16. */
    if (wish[0] && strcmp(wish, "off") != 0 && strcmp(wish, best->name) != 0)
        bl_log_warning("BALLAST_CPU_BF16=%s: there are no such products on this processor; bf16 "
                       "products are by %s",
                       wish, best->name);
    return best;
}
