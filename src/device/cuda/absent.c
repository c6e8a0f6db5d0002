/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA has no GPUs, and says how to get them. */
#include "device/device.h"

bool bl_device_has_cuda(void)
{
    return false;
}

static bl_status refuse(void)
{
    return BL_FAIL(BL_ELIMIT,
                   "this build of Ballast has no CUDA (cmake --preset cuda makes one that has)");
}

bl_status bl_device_find_cuda(int index, bl_gpu_info *out)
{
    (void)index;
    *out = (bl_gpu_info){.state = BL_GPU_ABSENT};
    return refuse();
}

bl_status bl_device_measure_cuda(int index, size_t *free_bytes, size_t *total_bytes)
{
    (void)index;
    *free_bytes = *total_bytes = 0;
    return refuse();
}

bl_status bl_device_create_cuda(int index, bl_device **out)
{
    (void)index;
    *out = NULL;
    return refuse();
}

bl_status bl_stream_wrap_cuda(bl_device *device, void *handle, bl_stream **out)
{
    (void)device, (void)handle;
    *out = NULL;
    return refuse();
}
