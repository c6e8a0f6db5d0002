/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- how the tests reach the emulated launchers: the device is a CPU's, so ops would not dispatch to
 * them. */
#ifndef BALLAST_TESTS_EMULATED_DEVICE_H
#define BALLAST_TESTS_EMULATED_DEVICE_H

#include "ops/cuda/ops_cuda.h"

bl_status emulated_device_create(int index, bl_device **out);
/* Of the bytes in the sectors that warps loaded and stored since they were forgotten, the share that they asked for. */
void emulated_forget_accesses(void);
double emulated_share_of_sectors(void);

bl_status ops_cuda_accumulate(bl_stream *stream, const bl_accumulate_args *args);

#endif
