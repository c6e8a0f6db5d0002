/* SPDX-License-Identifier: Apache-2.0 */
/* A build without MPI. */
#include "comm/wire/wire.h"

bl_status bl_wire_open_mpi(int rank, int n_processes, bl_wire_report report, bl_wire **out)
{
    (void)rank, (void)report;
    *out = NULL;
    return BL_FAIL(
        BL_EUSAGE,
        "this build has no MPI and serves one host, but %d processes were started: start it by "
        "itself with ranks: %d, or build with -DBALLAST_MPI=on",
        n_processes, n_processes);
}
