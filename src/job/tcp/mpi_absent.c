/* SPDX-License-Identifier: Apache-2.0 */
/* A build without MPI. */
#include "job/tcp/tcp.h"

bl_status job_mpi_check(const bl_launch_info *info)
{
    return BL_FAIL(
        BL_EUSAGE,
        "this build has no MPI and serves one host, but %d processes were started: start it by "
        "itself with ranks: %d, or build with -DBALLAST_MPI=on",
        info->n_processes, info->n_processes);
}

bl_status job_mpi_gather(const bl_launch_info *info, const void *own, void *all, size_t n_bytes,
                         double limit_s)
{
    (void)own, (void)all, (void)n_bytes, (void)limit_s;
    return job_mpi_check(info);
}
