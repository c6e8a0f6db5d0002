/* SPDX-License-Identifier: Apache-2.0 */
/* comm_internal.h -- what a kind of communicator implements. comm.c checks arguments and passes them on; a
 * kind's struct begins with struct bl_comm. */
#ifndef BALLAST_COMM_COMM_INTERNAL_H
#define BALLAST_COMM_COMM_INTERNAL_H

#include "comm/comm.h"

typedef enum bl_comm_element { BL_COMM_F32, BL_COMM_F64, BL_COMM_I64 } bl_comm_element;

typedef struct bl_comm_backend {
    bl_status (*all_gather)(bl_comm *comm, bl_stream *stream, const void *send, void *recv, size_t bytes);
    bl_status (*reduce_scatter_f32)(bl_comm *comm, bl_stream *stream, const float *send, float *recv,
                                    int64_t n);
    bl_status (*all_reduce)(bl_comm *comm, bl_stream *stream, void *values, int64_t n,
                            bl_comm_element element);
    bl_status (*broadcast)(bl_comm *comm, bl_stream *stream, void *buffer, size_t bytes, int root);
    bl_status (*barrier)(bl_comm *comm, bl_stream *stream);
    void (*abort)(bl_comm *comm, const bl_error *error);
    void (*first_error)(bl_comm *comm, bl_error *out);
    bl_status (*split)(bl_comm *comm, int color, bl_comm **out);
    void (*destroy)(bl_comm *comm);
} bl_comm_backend;

struct bl_comm {
    const bl_comm_backend *backend;
    int rank, size;
};

#endif
