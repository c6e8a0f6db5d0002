/* SPDX-License-Identifier: Apache-2.0 */
/* call.h -- the description of a collective (kind, sizes, label), to compare between ranks and for
 * errors. */
#ifndef BALLAST_COMM_CALL_H
#define BALLAST_COMM_CALL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bl_comm_element { BL_COMM_F32, BL_COMM_F64, BL_COMM_I64 } bl_comm_element;

typedef enum bl_comm_kind {
    BL_COMM_ALL_GATHER,
    BL_COMM_REDUCE_SCATTER,
    BL_COMM_ALL_REDUCE,
    BL_COMM_BROADCAST,
    BL_COMM_BARRIER,
    BL_COMM_SPLIT,
    BL_COMM_TRUST_ORDER
} bl_comm_kind;

/* bl_comm_set_label's: "layer 17", or "". */
enum { BL_COMM_LABEL_BYTES = 48 };
typedef struct bl_comm_label {
    char text[BL_COMM_LABEL_BYTES];
} bl_comm_label;

/* A collective of a rank. All ranks must agree on everything except the number. */
typedef struct bl_comm_call {
    bl_comm_kind kind;
    int detail; /* element type or root */
    size_t bytes;
    bl_comm_label label;
    /* Its place among the calls of its rank, whose thread makes those of all communicators in one
     * order. Not compared; set by the wire only. */
    uint64_t number;
} bl_comm_call;

/* "all_gather of layer 17" or "all_gather"; returns `text`. */
enum { BL_COMM_CALL_TEXT_BYTES = 80 };
const char *bl_comm_call_name(const bl_comm_call *call, char text[BL_COMM_CALL_TEXT_BYTES]);

/* BL_EINTERNAL, naming both, when two ranks (numbered as in the job) call different collectives. */
bl_status bl_comm_verify_calls(int rank_a, const bl_comm_call *a, int rank_b,
                               const bl_comm_call *b);

#ifdef __cplusplus
}
#endif

#endif
