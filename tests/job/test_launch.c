/* SPDX-License-Identifier: Apache-2.0 */
/* The variables of launchers; a build without MPI, which refuses to run the same job N times; and a
 * process that leaves. Built with job/tcp/mpi_absent.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "job/launch.h"
#include "job/internal.h"

static const bl_launch_options no_options = {.leave = NULL};

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
                                    "SLURM_LOCALID",
                                    "WORLD_SIZE",
                                    "RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "MASTER_ADDR",
                                    "GROUP_RANK",
                                    "TORCHELASTIC_RUN_ID",
                                    "SLURM_NTASKS",
                                    "PMIX_RANK",
                                    "MV2_COMM_WORLD_SIZE",
                                    "PET_NNODES",
                                    "MASTER_PORT"};

typedef struct launch_case {
    const char *environment[12][2];
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
        /* a batch script has tasks, but is not a step */
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
        {{{"WORLD_SIZE", "16"},
          {"RANK", "11"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "3"},
          {"MASTER_ADDR", "a"}},
         "torchrun",
         11,
         16,
         3,
         8},
        /* torchrun under Slurm: its agents are the step */
        {{{"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"WORLD_SIZE", "4"},
          {"RANK", "3"},
          {"MASTER_ADDR", "a"}},
         "torchrun",
         3,
         4,
         0,
         1},
        /* srun --mpi=pmi2: a host has several, whatever PMI does not say */
        {{{"PMI_SIZE", "16"},
          {"PMI_RANK", "11"},
          {"SLURM_STEP_NUM_TASKS", "16"},
          {"SLURM_PROCID", "11"},
          {"SLURM_STEP_TASKS_PER_NODE", "8(x2)"},
          {"SLURM_LOCALID", "3"}},
         "srun",
         11,
         16,
         3,
         8},
        /* mpirun of MPICH, whose daemons are tasks of srun --mpi=pmi2 */
        {{{"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"PMI_SIZE", "16"},
          {"PMI_RANK", "9"},
          {"MPI_LOCALNRANKS", "8"},
          {"MPI_LOCALRANKID", "1"}},
         "mpirun",
         9,
         16,
         1,
         8},
        /* torchrun as a task of srun --mpi=pmi2; and another launcher with its variables */
        {{{"PMI_SIZE", "2"},
          {"PMI_RANK", "1"},
          {"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
          {"SLURM_LOCALID", "0"},
          {"WORLD_SIZE", "16"},
          {"RANK", "11"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "3"},
          {"MASTER_ADDR", "a"},
          {"TORCHELASTIC_RUN_ID", "7"}},
         "torchrun",
         11,
         16,
         3,
         8},
        {{{"PMI_SIZE", "2"},
          {"PMI_RANK", "1"},
          {"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"WORLD_SIZE", "16"},
          {"RANK", "11"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "3"},
          {"MASTER_ADDR", "a"}},
         "torchrun",
         11,
         16,
         3,
         8},
        /* mpirun -N 1 torchrun, of Open MPI and of MPICH */
        {{{"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_RANK", "1"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
          {"WORLD_SIZE", "16"},
          {"RANK", "11"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "3"},
          {"MASTER_ADDR", "a"},
          {"TORCHELASTIC_RUN_ID", "7"}},
         "torchrun",
         11,
         16,
         3,
         8},
        {{{"PMI_SIZE", "2"},
          {"PMI_RANK", "1"},
          {"MPI_LOCALNRANKS", "1"},
          {"MPI_LOCALRANKID", "0"},
          {"WORLD_SIZE", "16"},
          {"RANK", "11"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "3"},
          {"MASTER_ADDR", "a"},
          {"TORCHELASTIC_RUN_ID", "7"}},
         "torchrun",
         11,
         16,
         3,
         8},
        /* a shell of torch's user, of salloc, and of salloc with an interactive step */
        {{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}}, NULL, 0, 1, 0, 1},
        {{{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}, NULL, 0, 1, 0, 1},
        {{{"SLURM_STEP_NUM_TASKS", "1"},
          {"SLURM_PROCID", "0"},
          {"SLURM_STEP_TASKS_PER_NODE", "1"},
          {"SLURM_LOCALID", "0"},
          {"PMIX_RANK", "0"}},
         "srun",
         0,
         1,
         0,
         1},
        /* one process needs neither an address nor a rank */
        {{{"WORLD_SIZE", "1"}, {"RANK", "0"}}, NULL, 0, 1, 0, 1},
        {{{"WORLD_SIZE", "1"}, {"PET_NNODES", "1:1"}}, NULL, 0, 1, 0, 1},
        /* a batch script prepares WORLD_SIZE for a Python program, and srun starts this one */
        {{{"WORLD_SIZE", "6"},
          {"MASTER_ADDR", "a"},
          {"SLURM_STEP_NUM_TASKS", "6"},
          {"SLURM_PROCID", "4"},
          {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
          {"SLURM_LOCALID", "1"}},
         "srun",
         4,
         6,
         1,
         3},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_launch_info info;
        set_environment(&cases[i]);
        bl_launch_read(&info);
        assert_int_equal(job_environment_check(&info), BL_OK);
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

typedef struct refusal_case {
    const char *environment[8][2];
    const char *names; /* what the error names */
} refusal_case;

/* One process of several does not train alone because a variable is wrong or missing. */
static void test_refusals(void **state)
{
#define TORCHRUN                                                                                   \
    {"MASTER_ADDR", "a"},                                                                          \
    {                                                                                              \
        "MASTER_PORT", "29500"                                                                     \
    }
    static const refusal_case cases[] = {
        {{TORCHRUN, {"WORLD_SIZE", "2"}}, "WORLD_SIZE is '2', but RANK is not set"},
        {{TORCHRUN, {"RANK", "0"}}, "RANK is '0', but WORLD_SIZE is not set"},
        {{TORCHRUN, {"LOCAL_RANK", "0"}}, "LOCAL_RANK is '0', but WORLD_SIZE"},
        {{TORCHRUN, {"GROUP_RANK", "1"}}, "GROUP_RANK is '1', but WORLD_SIZE"},
        {{TORCHRUN, {"TORCHELASTIC_RUN_ID", "none"}}, "TORCHELASTIC_RUN_ID is 'none'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "2"}}, "RANK is '2', but WORLD_SIZE is '2'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "-1"}}, "RANK is '-1'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "abc"}}, "RANK is 'abc'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "1 "}}, "RANK is '1 '"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", " 1"}}, "RANK is ' 1'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "+1"}}, "RANK is '+1'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "0x1"}}, "RANK is '0x1'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", ""}}, "RANK is ''"},
        {{TORCHRUN, {"WORLD_SIZE", "0"}, {"RANK", "0"}}, "WORLD_SIZE is '0'"},
        {{TORCHRUN, {"WORLD_SIZE", "2147483648"}, {"RANK", "0"}}, "WORLD_SIZE is '2147483648'"},
        {{TORCHRUN, {"WORLD_SIZE", "4294967298"}, {"RANK", "1"}}, "WORLD_SIZE is '4294967298'"},
        {{TORCHRUN, {"WORLD_SIZE", "18446744073709551618"}, {"RANK", "1"}}, "WORLD_SIZE is '1844"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "1"}, {"LOCAL_RANK", "0"}},
         "LOCAL_WORLD_SIZE is not set"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}},
         "LOCAL_RANK is not set"},
        {{TORCHRUN,
          {"WORLD_SIZE", "2"},
          {"RANK", "1"},
          {"LOCAL_WORLD_SIZE", "1"},
          {"LOCAL_RANK", "3"}},
         "LOCAL_RANK is '3', but LOCAL_WORLD_SIZE is '1'"},
        {{TORCHRUN,
          {"WORLD_SIZE", "2"},
          {"RANK", "1"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"LOCAL_RANK", "0"}},
         "LOCAL_WORLD_SIZE is '8', but WORLD_SIZE is '2'"},
        {{TORCHRUN, {"WORLD_SIZE", "2"}, {"RANK", "1"}, {"GROUP_RANK", "x"}}, "GROUP_RANK is 'x'"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "1"}}, "MASTER_ADDR is not set"},
        {{{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_ADDR", ""}}, "MASTER_ADDR is not set"},
        {{{"OMPI_COMM_WORLD_RANK", "1"}}, "OMPI_COMM_WORLD_SIZE is not set"},
        {{{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK is not set"},
        {{{"OMPI_COMM_WORLD_SIZE", "many"}, {"OMPI_COMM_WORLD_RANK", "0"}}, "SIZE is 'many'"},
        {{{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "2"}}, "RANK is '2'"},
        {{{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}, "OMPI_COMM_WORLD_LOCAL_RANK is '0'"},
        {{{"PMI_RANK", "1"}}, "PMI_SIZE is not set"},
        {{{"PMI_SIZE", "2"}, {"PMI_RANK", "2"}}, "PMI_RANK is '2'"},
        {{{"MPI_LOCALRANKID", "0"}}, "MPI_LOCALRANKID is '0'"},
        {{{"PMIX_RANK", "1"}}, "PMIX_RANK is '1'"},
        {{{"PMIX_RANK", "0"}}, "PMIX_RANK is '0'"},
        {{{"MV2_COMM_WORLD_SIZE", "2"}}, "MV2_COMM_WORLD_SIZE is '2'"},
        {{{"PET_NNODES", "1:2"}}, "PET_NNODES is '1:2'"},
        {{{"SLURM_PROCID", "1"}}, "SLURM_STEP_NUM_TASKS is not set"},
        {{{"SLURM_PROCID", "x"}}, "SLURM_PROCID is 'x'"},
        {{{"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_PROCID is not set"},
        {{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "3"}}, "SLURM_PROCID is '3'"},
        {{{"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_PROCID", "1"},
          {"SLURM_STEP_TASKS_PER_NODE", "2;"},
          {"SLURM_LOCALID", "1"}},
         "SLURM_STEP_TASKS_PER_NODE is '2;'"},
        /* a malformed variable, with any launcher */
        {{{"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_RANK", "1"},
          TORCHRUN,
          {"WORLD_SIZE", "16"},
          {"RANK", "x"}},
         "RANK is 'x'"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        launch_case c = {.launcher = NULL};
        bl_launch_info info;
        memcpy(c.environment, cases[i].environment, sizeof cases[i].environment);
        set_environment(&c);
        pid_t pid = fork(); /* begin changes the process */
        assert_true(pid >= 0);
        if (pid == 0)
            _exit(bl_launch_begin(&info) != BL_EUSAGE ? 1
                                                      : !strstr(bl_error_text(), cases[i].names));
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (status != 0) fail_msg("%s: status %x", cases[i].names, (unsigned)status);
    }
    set_environment(&(launch_case){.launcher = NULL});
}

static void test_without_mpi(void **state)
{
    static const launch_case first = {
        {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}}, NULL, 0, 0, 0, 0};
    static const launch_case second = {{{"OMPI_COMM_WORLD_SIZE", "2"},
                                        {"OMPI_COMM_WORLD_RANK", "1"},
                                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
                                       NULL,
                                       0,
                                       0,
                                       0,
                                       0};
    static const launch_case alone = {
        {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}, NULL, 0, 0, 0, 0};
    bl_launch *launch;

    (void)state;
    set_environment(&first);
    assert_int_equal(bl_launch_open(&no_options, &launch), BL_EUSAGE);
    assert_null(launch);
    assert_non_null(strstr(bl_error_text(), "no MPI"));
    assert_non_null(strstr(bl_error_text(), "2 processes"));
    set_environment(&second); /* once */
    assert_int_equal(bl_launch_open(&no_options, &launch), BL_EUSAGE);
    assert_string_equal(bl_error_text(), "");

    set_environment(&alone);
    assert_int_equal(bl_launch_open(&no_options, &launch), BL_OK);
    assert_null(launch);
    assert_int_equal(bl_launch_rank(launch), 0);
    assert_int_equal(bl_launch_size(launch), 1);
    assert_false(bl_launch_should_leave(launch));
    assert_int_equal(bl_launch_close(launch, BL_FAIL(BL_EINPUT, "kept")), BL_EINPUT);
    assert_string_equal(bl_error_text(), "kept");
}

/* ---- a process that leaves while its threads run ---- */

enum { N_LOOKS = 20, CODE_UNCHANGED = 1, CODE_SLOW };

static atomic_int n_looks;

/* A main thread that waits for its ranks, a rank that fails and a guard, in one. */
static void *look_for_ever(void *argument)
{
    bl_launch *launch = argument;
    bl_comm *comm;
    bl_error error;

    if (bl_launch_create_comm(launch, 0, &comm) != BL_OK) return NULL;
    for (;;) {
        (void)bl_launch_should_leave(launch);
        bl_comm_first_error(comm, &error);
        if (error.status != BL_OK) {
            bl_comm_abort(comm, &error);
            atomic_fetch_add(&n_looks, 1);
        }
        usleep(1000);
    }
}

static void leave_late(bl_status st)
{
    double end_s = bl_now_s() + 60;
    int n = atomic_load(&n_looks);

    while (atomic_load(&n_looks) < n + N_LOOKS && bl_now_s() < end_s) usleep(1000);
    _exit(atomic_load(&n_looks) < n + N_LOOKS ? CODE_SLOW
          : st == BL_ECANCELED                ? 0
                                              : CODE_UNCHANGED);
}

/* A child of bl_launch_run_ranks, alone. */
static void be_child_that_leaves(int control_fd)
{
    int no_socket = -1;
    bl_launch_child child = {.parent = getppid(),
                             .n_ranks = 1,
                             .n_on_host = 1,
                             .sockets = &no_socket,
                             .control_fd = control_fd,
                             .line_fd = -1,
                             .bulk_fd = -1,
                             .memory_fd = -1};
    bl_launch *launch;
    pthread_t thread;

    mallopt(M_PERTURB, 0x5a); /* overwrites freed memory */
    if (putenv(job_child_format(&child)) != 0) _exit(126);
    if (bl_launch_open(&(bl_launch_options){.leave = leave_late}, &launch) != BL_OK) _exit(126);
    if (pthread_create(&thread, NULL, look_for_ever, launch) != 0) _exit(126);
    (void)BL_FAIL(BL_ECANCELED, "canceled");
    bl_launch_leave(launch);
}

static void test_leaving_beside_threads(void **state)
{
    int control[2], status;

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        be_child_that_leaves(control[1]);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    close(control[0]);
    close(control[1]);
}

/* A library's exit handlers may wait without a limit. */
static void hang(void)
{
    pause();
}

static void leave_with(bl_status st)
{
    _exit(40 + bl_status_exit_code(st));
}

static void test_exit_has_a_limit(void **state)
{
    int status;

    (void)state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (atexit(hang) != 0) _exit(126);
        bl_log_set_silent(true);
        bl_launch_limit_exit(leave_with, BL_ENUMERIC, 0.3);
        exit(6);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 46);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_read), cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_without_mpi),
                                       cmocka_unit_test(test_leaving_beside_threads),
                                       cmocka_unit_test(test_exit_has_a_limit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
