/* SPDX-License-Identifier: Apache-2.0 */
/* Whether ranks are threads or processes on hosts with several GPUs, by the process's launcher, in
 * builds with NCCL and without. No GPU is queried: the linker replaces bl_comm_has_nccl and
 * bl_log_warning by the functions named __wrap_ below. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "config/config.h"
#include "config/internal.h"
#include "device/device.h"
#include "options/options.h"
#include "skip.h"

static bool has_nccl;
static int n_warnings;
static char warning[256];

bool __wrap_bl_comm_has_nccl(void);
bool __wrap_bl_comm_has_nccl(void)
{
    return has_nccl;
}

void __wrap_bl_log_warning(const char *format, ...) BL_PRINTF(1, 2);
void __wrap_bl_log_warning(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(warning, sizeof warning, format, arguments);
    va_end(arguments);
    n_warnings++;
}

static const char *const variables[] = {
    "OMPI_COMM_WORLD_SIZE",       "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "WORLD_SIZE",           "RANK",
    "LOCAL_WORLD_SIZE",           "LOCAL_RANK",           "MASTER_ADDR"};

static int be_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(variables); i++) unsetenv(variables[i]);
    return 0;
}

/* The first of n_local tasks on its host, of n. */
static void be_a_task_of_mpirun(const char *n, const char *n_local)
{
    setenv("OMPI_COMM_WORLD_SIZE", n, 1);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", n_local, 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0", 1);
}

static void be_a_task_of_torchrun(const char *n, const char *n_local)
{
    setenv("WORLD_SIZE", n, 1);
    setenv("RANK", "0", 1);
    setenv("MASTER_ADDR", "a", 1);
    if (n_local) setenv("LOCAL_WORLD_SIZE", n_local, 1); /* PyTorchJob sets none */
    if (n_local) setenv("LOCAL_RANK", "0", 1);
}

static bl_status place(int64_t ranks, bl_rank_processes processes, int n_gpus, bl_train_config *c)
{
    *c = (bl_train_config){
        .device = BL_CONFIG_DEVICE_CUDA, .ranks = ranks, .rank_processes = processes, .threads = 1};
    n_warnings = 0;
    warning[0] = '\0';
    return config_place_ranks(c, n_gpus);
}

/* ---- one command ---- */

static void test_one_command_takes_all(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = true;
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 8);
    assert_int_equal(bl_train_config_starts_ranks(&c), 8);
    assert_int_equal(n_warnings, 0);
}

static void test_a_build_without_nccl_says_so(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = false;
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 1);
    assert_int_equal(bl_train_config_starts_ranks(&c), 0);
    assert_int_equal(n_warnings, 1);
    assert_string_equal(warning, "this build has no NCCL: of 8 GPUs one is used (docs/install.md)");

    assert_int_equal(place(8, BL_RANK_PROCESSES_AUTO, 8, &c), BL_EUSAGE);
    assert_string_equal(
        bl_error_text(),
        "ranks: 8 on 8 GPUs: this build has no NCCL (docs/install.md); with rank_processes "
        "false they are threads that share one GPU");
    assert_int_equal(place(8, BL_RANK_PROCESSES_TRUE, 8, &c), BL_EUSAGE);
    assert_int_equal(n_warnings, 0);
}

/* Threads on one GPU need no NCCL: where there is one, and where they are asked for. */
static void test_threads_share_a_gpu_without_nccl(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = false;
    assert_int_equal(place(4, BL_RANK_PROCESSES_AUTO, 1, &c), BL_OK);
    assert_int_equal(c.ranks, 4);
    assert_int_equal(place(4, BL_RANK_PROCESSES_FALSE, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 4);
    assert_int_equal(bl_train_config_starts_ranks(&c), 0);
    assert_int_equal(n_warnings, 0);
    assert_int_equal(place(1, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(n_warnings, 0);
}

/* GPUs that are there and cannot be used are worth a warning. */
static void test_processes_without_nccl(void **state)
{
    bl_config_device device = BL_CONFIG_DEVICE_AUTO;
    bl_compute_dtype dtype = BL_COMPUTE_AUTO;
    bl_gpu_info gpu;

    (void)state;
    if (bl_device_find_cuda(0, &gpu) != BL_OK) TEST_SKIP("no GPU");
    has_nccl = false;
    n_warnings = 0;
    be_a_task_of_mpirun("2", "1");
    assert_int_equal(bl_config_choose_device(&device, &dtype, &gpu), BL_OK);
    assert_int_equal(device, BL_CONFIG_DEVICE_CPU);
    assert_int_equal(n_warnings, 1);
    assert_non_null(strstr(warning, "this build has no NCCL for GPUs of several processes"));
    device = BL_CONFIG_DEVICE_CUDA;
    assert_int_equal(bl_config_choose_device(&device, &dtype, &gpu), BL_EUSAGE);
}

/* ---- tasks of a launcher ---- */

static void test_a_task_per_gpu(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = true;
    be_a_task_of_mpirun("16", "8");
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 16);
    assert_int_equal(n_warnings, 0);
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 1, &c), BL_OK); /* its own */
    assert_int_equal(n_warnings, 0);
}

static void test_a_task_per_host_starts_ranks(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = true;
    be_a_task_of_mpirun("2", "1");
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 16);
    assert_int_equal(bl_train_config_starts_ranks(&c), 8);
    assert_int_equal(n_warnings, 0);
}

static void test_idle_gpus_are_told(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = true;
    be_a_task_of_torchrun("2", NULL);
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(c.ranks, 2);
    assert_int_equal(n_warnings, 1);
    assert_string_equal(warning,
                        "torchrun started 1 process on a host with 8 GPUs; the others are idle");
    be_alone(NULL);
    be_a_task_of_mpirun("8", "4");
    assert_int_equal(place(BL_OPTION_AUTO, BL_RANK_PROCESSES_AUTO, 8, &c), BL_OK);
    assert_int_equal(n_warnings, 1);
    assert_string_equal(warning,
                        "mpirun started 4 processes on a host with 8 GPUs; the others are idle");
}

/* torchrun's processes start no ranks, so one per host would not do. */
static void test_other_numbers_of_ranks(void **state)
{
    bl_train_config c;

    (void)state;
    has_nccl = true;
    be_a_task_of_torchrun("2", "1");
    assert_int_equal(place(16, BL_RANK_PROCESSES_AUTO, 8, &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(),
                        "ranks: 16, but 2 processes were started, 1 on this host: start one per "
                        "rank (torchrun --nproc_per_node)");
    be_alone(NULL);
    be_a_task_of_mpirun("4", "2");
    assert_int_equal(place(16, BL_RANK_PROCESSES_AUTO, 8, &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(),
                        "ranks: 16, but 4 processes were started, 2 on this host: start one per "
                        "rank, or one per host");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, be_alone, be_alone)
    const struct CMUnitTest tests[] = {
        TEST(test_one_command_takes_all),
        TEST(test_a_build_without_nccl_says_so),
        TEST(test_threads_share_a_gpu_without_nccl),
        TEST(test_processes_without_nccl),
        TEST(test_a_task_per_gpu),
        TEST(test_a_task_per_host_starts_ranks),
        TEST(test_idle_gpus_are_told),
        TEST(test_other_numbers_of_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
