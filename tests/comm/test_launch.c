/* SPDX-License-Identifier: Apache-2.0 */
/* What launchers say in the environment; and a build without MPI, which refuses to run N times the same job.
 * Built with comm/wire/absent.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/launch.h"

static const char *const names[] = {"OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "PMI_SIZE",
                                    "PMI_RANK",
                                    "MPI_LOCALNRANKS",
                                    "MPI_LOCALRANKID",
                                    "SLURM_STEP_NUM_TASKS",
                                    "SLURM_PROCID",
                                    "SLURM_STEP_TASKS_PER_NODE",
                                    "SLURM_LOCALID"};

typedef struct launch_case {
    const char *environment[4][2];
    const char *launcher;
    int rank, n_processes, local_rank, n_local;
} launch_case;

static void set_environment(const launch_case *c)
{
    for (size_t i = 0; i < BL_COUNT(names); i++) unsetenv(names[i]);
    for (size_t i = 0; i < BL_COUNT(c->environment) && c->environment[i][0]; i++)
        setenv(c->environment[i][0], c->environment[i][1], 1);
}

static void test_read(void **state)
{
    static const launch_case cases[] = {
        {{{0}}, NULL, 0, 1, 0, 1},
        {{{"OMPI_COMM_WORLD_SIZE", "8"},
          {"OMPI_COMM_WORLD_RANK", "5"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
         "mpirun",
         5,
         8,
         1,
         4},
        {{{"PMI_SIZE", "3"}, {"PMI_RANK", "2"}}, "mpirun", 2, 3, 0, 1},
        {{{"PMI_SIZE", "4"}, {"PMI_RANK", "3"}, {"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "1"}},
         "mpirun",
         3,
         4,
         1,
         2},
        {{{"SLURM_STEP_NUM_TASKS", "6"},
          {"SLURM_PROCID", "4"},
          {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
          {"SLURM_LOCALID", "1"}},
         "srun",
         4,
         6,
         1,
         3},
        /* hosts with different numbers of tasks: of the first one's */
        {{{"SLURM_STEP_NUM_TASKS", "6"},
          {"SLURM_PROCID", "5"},
          {"SLURM_STEP_TASKS_PER_NODE", "2,4"},
          {"SLURM_LOCALID", "3"}},
         "srun",
         5,
         6,
         3,
         4},
        /* a batch script has tasks, but is no step of its own */
        {{{"SLURM_PROCID", "0"}}, NULL, 0, 1, 0, 1},
        /* mpirun under Slurm: its daemons are the step */
        {{{"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"OMPI_COMM_WORLD_SIZE", "16"},
          {"OMPI_COMM_WORLD_RANK", "9"}},
         "mpirun",
         9,
         16,
         0,
         1},
        {{{"OMPI_COMM_WORLD_SIZE", "many"}, {"OMPI_COMM_WORLD_RANK", "0"}}, NULL, 0, 1, 0, 1},
        {{{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "2"}}, NULL, 0, 1, 0, 1},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_launch_info info;
        set_environment(&cases[i]);
        bl_launch_read(&info);
        assert_int_equal(info.rank, cases[i].rank);
        assert_int_equal(info.n_processes, cases[i].n_processes);
        assert_int_equal(info.local_rank, cases[i].local_rank);
        assert_int_equal(info.n_local, cases[i].n_local);
        if (cases[i].launcher)
            assert_string_equal(info.launcher, cases[i].launcher);
        else
            assert_null(info.launcher);
    }
}

static void test_without_mpi(void **state)
{
    static const launch_case two = {
        {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}}, NULL, 0, 0, 0, 0};
    static const launch_case alone = {
        {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}, NULL, 0, 0, 0, 0};
    bl_launch *launch;

    (void)state;
    set_environment(&two);
    assert_int_equal(bl_launch_open(NULL, &launch), BL_EUSAGE);
    assert_null(launch);
    assert_non_null(strstr(bl_error_text(), "no MPI"));
    assert_non_null(strstr(bl_error_text(), "2 processes"));

    set_environment(&alone);
    assert_int_equal(bl_launch_open(NULL, &launch), BL_OK);
    assert_null(launch);
    assert_int_equal(bl_launch_rank(launch), 0);
    assert_int_equal(bl_launch_size(launch), 1);
    assert_false(bl_launch_should_leave(launch));
    assert_int_equal(bl_launch_close(launch, BL_FAIL(BL_EINPUT, "kept")), BL_EINPUT);
    assert_string_equal(bl_error_text(), "kept");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_read),
                                       cmocka_unit_test(test_without_mpi)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
