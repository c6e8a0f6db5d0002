/* SPDX-License-Identifier: Apache-2.0 */
/* cost.h -- what each op costs: floating-point operations and bytes, computed from its arguments.
 * The one owner of these; docs/internals/plan.md has them as formulas.
 *
 * An op is one kernel or several in a row. A kernel takes max(FLOPs / rate, bytes / memory's rate,
 * launch_s). Pointers in the arguments are not followed, except `prepared` of a product with a
 * frozen matrix: as in the product itself, `made` is read and set. */
#ifndef BALLAST_OPS_COST_H
#define BALLAST_OPS_COST_H

#include <stdbool.h>

#include "device/rates.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/list.h"
#include "ops/loss_head.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The rate at which a kernel computes; bytes move at memory_bytes_per_s, or at the rate named. */
typedef enum bl_cost_rate {
    BL_COST_MEMORY, /* no FLOPs that count */
    BL_COST_GEMM,
    BL_COST_FP8_GEMM,
    BL_COST_FP8_FAST_GEMM,
    BL_COST_LORA,
    BL_COST_HEAD,
    BL_COST_ATTENTION_FORWARD,
    BL_COST_ATTENTION_BACKWARD,
    BL_COST_PREPARE,  /* bytes at decode_weights_per_s for three bytes, nothing else */
    BL_COST_OPTIMIZER /* bytes at optimizer_bytes_per_s */
} bl_cost_rate;

typedef struct bl_cost_kernel {
    bl_cost_rate rate;
    double flops, bytes; /* bytes: read and written, of device memory */
} bl_cost_kernel;

enum { BL_COST_KERNELS = 5 };
typedef struct bl_cost {
    int n;
    bl_cost_kernel kernel[BL_COST_KERNELS];
} bl_cost;

/* Costs also depend on these, which arguments do not show: the kind of device; of the data in
 * device memory, the sum of squares of documents' lengths / the sum of lengths, and the part of
 * tokens with labels (0..1). */
typedef struct bl_cost_setting {
    bl_device_kind kind;
    double document_tokens, label_part;
    const bl_token_statistics *data; /* [n_data]: of micro-batches of these tokens; NULL: none */
    int n_data;
} bl_cost_setting;

#define BL_COST_DECLARE(op, ...)                                                                   \
    bl_cost bl_cost_##op(const bl_cost_setting *setting, const bl_##op##_args *args);
BL_OPS_LIST(BL_COST_DECLARE)
#undef BL_COST_DECLARE

/* Of a kernel that nothing slows down. The rates that it needs must not be 0; memory_bytes_per_s 0:
 * memory does not limit it. */
double bl_cost_seconds(const bl_cost_kernel *kernel, const bl_rates *rates);

#ifdef __cplusplus
}
#endif

#endif
