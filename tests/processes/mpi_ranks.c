/* SPDX-License-Identifier: Apache-2.0 */
/* One process of a job under mpirun that runs a case of rank_cases.h. */
#include "base/log.h"
#include "job/internal.h"
#include "rank_cases.h"

static bl_status run_case(bl_launch *launch, const char *name)
{
    const rank_case *which = rank_case_find(name);

    if (!which) return BL_FAIL(BL_EUSAGE, "no case %s", name);
    return rank_case_run(which, launch->wire);
}

int main(int argc, char **argv)
{
    bl_launch *launch = NULL;
    bl_launch_info info;
    bl_status st = bl_launch_begin(&info);

    bl_log_set_silent(false);
    if (st == BL_OK) st = bl_launch_open(&(bl_launch_options){.leave = NULL}, &launch);

    if (st == BL_OK && (!launch || argc != 2))
        st = BL_FAIL(BL_EUSAGE, "run it as: mpirun -n N mpi_ranks CASE");
    else if (st == BL_OK)
        st = bl_launch_close(launch, run_case(launch, argv[1]));
    if (st != BL_OK && bl_error_text()[0]) bl_log_error(bl_error_text());
    return bl_status_exit_code(st);
}
