/* SPDX-License-Identifier: Apache-2.0 */
/* A build without MPI: one host. */
#include "comm/wire/wire.h"

bl_status bl_wire_open(int rank, int n_processes, bl_wire_report report, bl_wire **out)
{
    (void)rank, (void)report;
    *out = NULL;
    return BL_FAIL(
        BL_EUSAGE,
        "this build has no MPI and serves one host, but %d processes were started: start it by "
        "itself with ranks: %d, or build with -DBALLAST_MPI=on",
        n_processes, n_processes);
}

/* Nobody has a wire to pass to the others. */

bl_status bl_wire_close(bl_wire *wire)
{
    (void)wire;
    return BL_OK;
}

int bl_wire_rank(const bl_wire *wire)
{
    (void)wire;
    return 0;
}

int bl_wire_size(const bl_wire *wire)
{
    (void)wire;
    return 1;
}

void bl_wire_set_deadline(bl_wire *wire, double deadline_s)
{
    (void)wire, (void)deadline_s;
}

void bl_wire_abort(bl_wire *wire, const bl_error *error)
{
    (void)wire, (void)error;
}

void bl_wire_first_error(bl_wire *wire, bl_error *out)
{
    (void)wire;
    *out = (bl_error){.status = BL_OK};
}

bl_status bl_comm_create_wire(bl_wire *wire, bl_comm **out)
{
    (void)wire;
    *out = NULL;
    return BL_FAIL(BL_EINTERNAL, "no wire");
}
