/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head_plan.h -- the layout of the scratch of CUDA's loss head. Arithmetic only: no GPU is
 * asked. Internal to ops/. */
#ifndef BALLAST_OPS_CUDA_LOSS_HEAD_PLAN_H
#define BALLAST_OPS_CUDA_LOSS_HEAD_PLAN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    OPS_LOSS_HEAD_TOKENS =
        1024,                 /* at a time: 525 MB of logits at V = 128,256; more gains no speed */
    OPS_LOSS_HEAD_ROWS = 1024 /* of a head that is not bf16, decoded at a time */
};

typedef struct ops_loss_head_layout {
    int64_t chunk, ld; /* tokens of a chunk; floats of a row of logits */
    /* Offsets in bytes; logits (chunk, ld) fp32 at 0; dx (chunk, H) fp32; logp (chunk) fp64;
     * decoded (rows, H) bf16; gemm: BL_MATMUL_SCRATCH_BYTES. */
    size_t dx, logp, decoded, gemm, total;
} ops_loss_head_layout;

ops_loss_head_layout ops_loss_head_plan(int64_t T, int64_t H, int64_t V);

size_t ops_cuda_loss_head_scratch_bytes(int64_t T, int64_t H, int64_t V);

#ifdef __cplusplus
}
#endif

#endif
