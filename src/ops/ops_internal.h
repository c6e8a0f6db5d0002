/* SPDX-License-Identifier: Apache-2.0 */
/* ops_internal.h -- the interface that a kind of device implements: one table, ops_<kind>_table, of
 * functions with the ops' own arguments. ops.c checks what every device checks and calls the entry
 * of the stream's device. Internal to ops/.
 *
 * A new op is a line of list.h, ops_<kind>_<op> for each kind, and its cost. A missing one does not
 * link, one of another prototype does not compile. */
#ifndef BALLAST_OPS_OPS_INTERNAL_H
#define BALLAST_OPS_OPS_INTERNAL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/list.h"
#include "ops/loss_head.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

typedef struct ops_table {
    unsigned acts; /* BL_DTYPE_BIT of each dtype that activations may have */
    /* Bytes of an op's scratch, as the op's header says. */
    size_t (*loss_head_scratch_bytes)(int64_t T, int64_t H, int64_t V);
    size_t (*matmul_weight_scratch_bytes)(const bl_matmul_weight_args *args);
    size_t (*matmul_prepared_bytes)(const bl_matmul_weight_args *args);
    /* NULL: no product quantizes. */
    bl_quantized (*matmul_weight_operand)(const bl_matmul_weight_args *args);
    bl_status (*matmul_weight_is_refused)(bl_stream *stream, const bl_matmul_weight_args *args,
                                          bool *out);
    bl_status (*matmul_end_warm_up)(bl_device *device);
    bl_status (*matmul_spare_multiprocessors)(bl_device *device, int n);
    bl_status (*matmul_count_fallbacks)(bl_device *device, int64_t counts[BL_FALLBACK_COUNT]);
    /* The arguments have passed ops.c's checks. The entry queues the op on the stream and
     * returns. */
#define OPS_MEMBER(op, ...) bl_status (*op)(bl_stream * stream, const bl_##op##_args *args);
    BL_OPS_LIST(OPS_MEMBER)
#undef OPS_MEMBER
} ops_table;

extern const ops_table ops_cpu_table, ops_cuda_table;
/* Of a device that is a model of either kind (device/model.h): without the functions of sizes,
 * which are asked by kind. */
extern const ops_table ops_model_cpu_table, ops_model_cuda_table;

/* ops.c: the checks of these two, also made where no stream queues them. */
bl_status ops_check_adamw(const bl_adamw_args *args);
bl_status ops_check_cast(const bl_cast_args *args);

#ifdef __cplusplus
}
#endif

#endif
