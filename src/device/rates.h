/* SPDX-License-Identifier: Apache-2.0 */
/* rates.h -- a machine as one rank sees it: how much it computes, moves and reads per second. The
 * costs of ops (ops/cost.h) and predicted times (plan/time.h) are computed from it. */
#ifndef BALLAST_DEVICE_RATES_H
#define BALLAST_DEVICE_RATES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What one rank reaches while all others do the same work. Names end in the unit: per second,
 * seconds (_s), or cores. 0: there is none, and it must not be needed; for latencies, none. */
typedef struct bl_rates {
    double gemm_flops_per_s;     /* products with frozen matrices: bf16 on a GPU, fp32 on a CPU */
    double fp8_gemm_flops_per_s; /* the same with FP8 operands */
    double fp8_fast_gemm_flops_per_s; /* with fast sums; 0: as with full ones */
    double lora_flops_per_s;          /* products with LoRA's factors; 0: as gemm */
    double head_flops_per_s;          /* products with the head; 0: as gemm */
    double attention_forward_flops_per_s, attention_backward_flops_per_s;
    double memory_bytes_per_s; /* of the device: bytes read plus bytes written */
    double decode_weights_per_s;
    double optimizer_bytes_per_s; /* 0: as memory_bytes_per_s */
    double launch_s;              /* the shortest time of an operation */

    double gather_bytes_per_s, gather_latency_s; /* received from ranks of the host */
    double network_bytes_per_s;                  /* of the whole host: into it from other hosts */
    double network_latency_s;
    double copy_in_bytes_per_s, copy_out_bytes_per_s; /* host memory to device memory, and back */
    double copy_both_bytes_per_s; /* each direction while both are in use; 0: as each alone */
    double host_memory_bytes_per_s;
    double disk_bytes_per_s;       /* read */
    double disk_write_bytes_per_s; /* 0: as reads */

    double cores, compute_cores; /* the rank's share of the host's; those that compute uses */
    double copy_cores;           /* used by a copy in progress, by a gather, by a read */
    double pace_bytes_per_s;     /* of pages, where a test paces them (offload/pager.h); 0: not */
    double step_overhead_s;      /* a step's work on the host, while compute stalls */
    double peak_flops_per_s; /* of one rank, for mfu: of products as gemm_flops_per_s has them */
    double fp8_peak_flops_per_s; /* the same, FP8 */
} bl_rates;

/* Of micro-batches of T tokens in device memory: the sum of squares of documents' lengths / the sum
 * of lengths, and the part of tokens with labels (0..1). */
typedef struct bl_token_statistics {
    int64_t T;
    double document_tokens, label_part;
} bl_token_statistics;

#ifdef __cplusplus
}
#endif

#endif
