/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h -- a kernel's launch, run as PTX beside the C++. For emulator/ only. */
#ifndef BALLAST_EMULATOR_PTX_LAUNCH_H
#define BALLAST_EMULATOR_PTX_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ptx_launch ptx_launch;

/* A grid along x. */
typedef struct ptx_shape {
    unsigned n_blocks, n_threads, n_clustered;
    size_t shared_bytes; /* dynamic */
    bool is_linear;      /* nothing along y and z */
} ptx_shape;

/* NULL: the modules in BALLAST_EMULATED_PTX, *.ptx, have no kernel of this name, or it is not set.
 * The parameters are copied. */
ptx_launch *ptx_launch_create(const void *kernel, const ptx_shape *shape,
                              const void *const *parameters, const size_t *parameter_bytes,
                              size_t n_parameters);

/* Runs the PTX, keeps what it did to the allocations that parameters point into, and puts back what
 * was there. */
void ptx_launch_run(ptx_launch *launch);

/* The C++ has done the same: other bits end the program with a line. Frees the launch. */
void ptx_launch_compare(ptx_launch *launch);

#ifdef __cplusplus
}
#endif

#endif
