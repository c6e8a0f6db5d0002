/* SPDX-License-Identifier: Apache-2.0 */
/* A build without NCCL's header, or without CUDA. */
#include "comm/nccl/nccl.h"

bool bl_comm_has_nccl(void)
{
    return false;
}

int bl_nccl_multiprocessors(const bl_comm *comm)
{
    (void)comm;
    return 0;
}

void bl_nccl_limit_deadline(bl_comm *comm, double most_s)
{
    (void)comm, (void)most_s;
}

bl_status bl_comm_create_nccl(bl_comm *host_world, bl_device *device,
                              const bl_nccl_options *options, bl_comm **out)
{
    (void)host_world, (void)device, (void)options;
    *out = NULL;
    return BL_FAIL(BL_ELIMIT, "this build has no NCCL, which several GPUs need");
}
