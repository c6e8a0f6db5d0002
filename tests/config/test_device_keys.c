/* SPDX-License-Identifier: Apache-2.0 */
/* The keys that say where a run computes and how: device, compute_dtype, compute_bf16_modules. */
#include <sched.h>
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
#include "arch/arch.h"
#include "skip.h"

enum { MAX_WORDS = 24, TEXT_BYTES = 256 };

/* The words of `line`, which blanks separate, and what every training needs. */
static bl_status load(const char *line, bl_train_config **out)
{
    static const char REQUIRED[] = "--model m --output_dir o --train_file t ";
    char copy[2 * TEXT_BYTES], *argv[MAX_WORDS];
    int argc = 0;

    snprintf(copy, sizeof copy, "%s%s", REQUIRED, line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return bl_train_config_load(BL_CONFIG_TRAIN, NULL, argc, argv, out);
}

static void expect_error(const char *line, const char *error)
{
    bl_train_config *config;
    assert_int_equal(load(line, &config), BL_EUSAGE);
    assert_null(config);
    assert_string_equal(bl_error_text(), error);
}

static void test_pairs_that_do_not_fit(void **state)
{
    bl_gpu_info gpu;
    bl_train_config *c;

    (void)state;
    expect_error("--device cpu --compute_dtype fp8",
                 "compute_dtype fp8: device cpu computes in fp32 or bf16; use one of these");
    if (bl_device_find_cuda(0, &gpu) == BL_OK) {
        expect_error("--device cuda --compute_dtype fp32",
                     "compute_dtype fp32: device cuda computes in bf16 or fp8; use auto, bf16 or "
                     "fp8");
        return;
    }
    /* A resource that is missing, not a wrong key. */
    assert_int_equal(load("--device cuda", &c), BL_ELIMIT);
    assert_int_equal(strncmp(bl_error_text(), "device cuda: ", 13), 0);
}

/* As mpirun starts a process. */
static void pretend_to_be(const char *local_rank, const char *n)
{
    setenv("OMPI_COMM_WORLD_SIZE", n, 1);
    setenv("OMPI_COMM_WORLD_RANK", local_rank, 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", n, 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank, 1);
}

static void be_alone(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "CUDA_VISIBLE_DEVICES"};
    for (size_t i = 0; i < BL_COUNT(names); i++) unsetenv(names[i]);
}

/* More processes than GPUs, and each process sees all GPUs: a GPU per process is impossible. */
static void test_each_process_needs_a_gpu(void **state)
{
    char n_text[16], text[TEXT_BYTES];
    bl_gpu_info gpu;
    bl_train_config *c;
    int index, n;

    (void)state;
    unsetenv("CUDA_VISIBLE_DEVICES");
    if (bl_device_find_cuda(0, &gpu) != BL_OK) TEST_SKIP("no GPU");
    n = gpu.n_gpus;
    snprintf(n_text, sizeof n_text, "%d", n + 1);
    pretend_to_be("0", n_text);
    assert_int_equal(load("--device cuda", &c), BL_ELIMIT);
    snprintf(text, sizeof text,
             "device cuda: CUDA: %d processes on a host with %d GPUs; each needs one", n + 1, n);
    assert_string_equal(bl_error_text(), text);
    assert_int_equal(load("--device auto", &c), BL_OK);
    assert_int_equal(c->device, BL_CONFIG_DEVICE_CPU);
    assert_int_equal(c->compute_dtype, BL_COMPUTE_FP32);
    bl_train_config_free(c);

    snprintf(n_text, sizeof n_text, "%d", n);
    for (int i = 0; i < n; i++) {
        char local_rank[16];
        snprintf(local_rank, sizeof local_rank, "%d", i);
        pretend_to_be(local_rank, n_text);
        assert_int_equal(bl_config_find_gpu(&gpu, &index), BL_OK);
        assert_int_equal(index, i);
    }
    be_alone();
}

/* A launcher that gives each task a GPU shows it no other: number 0, whatever the task's place. */
static void test_a_gpu_that_is_shown_alone(void **state)
{
    bl_gpu_info gpu;
    int index = -1;

    (void)state;
    if (bl_device_find_cuda(0, &gpu) != BL_OK) TEST_SKIP("no GPU");
    if (gpu.n_gpus > 1) TEST_SKIP("several GPUs");
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    pretend_to_be("3", "4");
    assert_int_equal(bl_config_find_gpu(&gpu, &index), BL_OK);
    assert_int_equal(index, 0);
    be_alone();
}

static int64_t auto_threads(const char *line)
{
    bl_train_config *c;
    assert_int_equal(load(line, &c), BL_OK);
    int64_t n = c->threads;
    bl_train_config_free(c);
    return n;
}

/* Cores that a task has for itself are not divided by the host's tasks; those that tasks share
 * are. */
static void test_threads_of_a_task(void **state)
{
    cpu_set_t before, after;
    char n_text[16];

    (void)state;
    assert_int_equal(config_cores_of_task(12, 96, 96, 8), 12); /* srun --cpus-per-task=12 */
    assert_int_equal(config_cores_of_task(96, 96, 96, 8), 12); /* mpirun --bind-to none */
    assert_int_equal(config_cores_of_task(12, 96, 12, 8), 1);  /* the same in a small container */
    assert_int_equal(config_cores_of_task(8, 8, 64, 2), 4);    /* taskset -c 0-7 torchrun */
    assert_int_equal(config_cores_of_task(4, 12, 12, 8), 1);   /* sets that overlap */
    assert_int_equal(config_cores_of_task(12, 12, 12, 1), 12);

    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int n = CPU_COUNT(&before);
    snprintf(n_text, sizeof n_text, "%d", n);
    pretend_to_be("0", n_text);
    assert_int_equal(auto_threads("--device cpu"), 1);
    be_alone();
    assert_int_equal(auto_threads("--device cpu --ranks 1"), n);
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_true(CPU_EQUAL(&before, &after));
}

static int64_t quota = -1; /* of a made-up container */
static char told[TEXT_BYTES];

int64_t __wrap_bl_cores_quota(void);
int64_t __wrap_bl_cores_quota(void)
{
    return quota;
}

void __wrap_bl_log_info(const char *format, ...);
void __wrap_bl_log_info(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(told, sizeof told, format, arguments);
    va_end(arguments);
}

/* docker run --cpus: a core binding may be for one rank; the quota is for all processes of the
 * container. */
static void test_threads_in_a_container(void **state)
{
    cpu_set_t set;
    char text[TEXT_BYTES];

    (void)state;
    assert_int_equal(config_cores_within(-1, 64, 8), 64);
    assert_int_equal(config_cores_within(4, 64, 1), 4);
    assert_int_equal(config_cores_within(4, 32, 2), 2);
    assert_int_equal(config_cores_within(48, 12, 8), 6); /* srun --cpus-per-task=12 */
    assert_int_equal(config_cores_within(128, 12, 8), 12);
    assert_int_equal(config_cores_within(4, 8, 8), 1);

    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    int n = CPU_COUNT(&set);
    if (n < 2) TEST_SKIP("one core");
    quota = 1;
    assert_int_equal(auto_threads("--device cpu --ranks 1"), 1);
    snprintf(text, sizeof text, "threads auto: 1 of %d cores: the container's limit", n);
    assert_string_equal(told, text);
    told[0] = '\0';
    assert_int_equal(auto_threads("--device cpu --ranks 1 --threads 2"), 2); /* as asked for */
    quota = n;
    assert_int_equal(auto_threads("--device cpu --ranks 1"), n);
    assert_string_equal(told, ""); /* the quota has no effect */
    quota = -1;
}

/* What a task is bound to is seen, and stays. */
static void test_a_bound_task(void **state)
{
    cpu_set_t before, one, after;
    int first = 0;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    while (!CPU_ISSET(first, &before)) first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    pretend_to_be("0", "2");
    assert_int_equal(auto_threads("--device cpu"), 1);
    be_alone();
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_true(CPU_EQUAL(&one, &after));
}

static void test_names_that_are_none(void **state)
{
    static const char *const bad[] = {"layers.00", "layers.-1",          "layers.",   "down",
                                      "lm_head",   "layers.1.down_proj", "all-linear"};
    char line[TEXT_BYTES], text[TEXT_BYTES];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        snprintf(line, sizeof line, "--compute_bf16_modules q_proj,%s", bad[i]);
        snprintf(text, sizeof text,
                 "compute_bf16_modules: '%s' is not a projection (down_proj), a layer (layers.0) "
                 "or a projection of a layer (layers.0.mlp.down_proj)",
                 bad[i]);
        expect_error(line, text);
    }
}

static void expect_matrices(const char *names, const unsigned expected[3])
{
    bl_train_config *c;
    uint8_t masks[3];
    char line[TEXT_BYTES];

    snprintf(line, sizeof line, "--compute_bf16_modules %s", names);
    assert_int_equal(load(line, &c), BL_OK);
    assert_int_equal(bl_train_config_bf16_matrices(c, 3, masks), BL_OK);
    for (int i = 0; i < 3; i++) assert_int_equal(masks[i], expected[i]);
    bl_train_config_free(c);
}

/* The name of a projection selects the fused matrix that contains it. */
static void test_names_of_matrices(void **state)
{
    enum { ALL = (1 << BL_LAYER_MATRICES) - 1, UP = 1 << BL_GATE_UP, DOWN = 1 << BL_MLP_DOWN };
    bl_train_config *c;
    uint8_t masks[2];

    (void)state;
    expect_matrices("mlp.up_proj,model.layers.2", (const unsigned[]){UP, UP, ALL});
    expect_matrices("layers.1.self_attn.k_proj", (const unsigned[]){0, 1 << BL_QKV, 0});
    expect_matrices("down_proj,gate_proj,up_proj",
                    (const unsigned[]){UP | DOWN, UP | DOWN, UP | DOWN});
    assert_int_equal(load("--compute_bf16_modules layers.2", &c), BL_OK);
    assert_int_equal(bl_train_config_bf16_matrices(c, 2, masks), BL_EUSAGE);
    assert_string_equal(bl_error_text(),
                        "compute_bf16_modules: 'layers.2': the model has layers 0 to 1");
    bl_train_config_free(c);
    assert_int_equal(load("", &c), BL_OK); /* none by default */
    assert_int_equal(c->compute_bf16_modules.n_items, 0);
    bl_train_config_free(c);
}

/* An enum of auto, true and false takes what a bool takes: its words, and no value for true. */
static void test_enum_of_a_bool(void **state)
{
#define FULL "--finetuning_type full --device cpu --compute_dtype bf16 --offload_ratio 1 "
    static const struct {
        const char *line;
        int copy, seed;
    } cases[] = {
        {FULL "--offload_compute_copy", BL_COPY_OFFLOADED, 42},
        {FULL "--offload_compute_copy --seed 7", BL_COPY_OFFLOADED, 7},
        {FULL "--offload_compute_copy on", BL_COPY_OFFLOADED, 42},
        {FULL "--offload_compute_copy no", BL_COPY_ON_DEVICE, 42},
        {FULL "--offload-compute-copy=Off", BL_COPY_ON_DEVICE, 42},
        {"--device cpu --offload_compute_copy auto", BL_COPY_AUTO, 42},
    };
#undef FULL
    bl_train_config *c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        if (load(cases[i].line, &c) != BL_OK) fail_msg("%s: %s", cases[i].line, bl_error_text());
        assert_int_equal(c->offload_compute_copy, cases[i].copy);
        assert_int_equal(c->seed, cases[i].seed);
        bl_train_config_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_enum_of_a_bool),
        cmocka_unit_test(test_pairs_that_do_not_fit),
        cmocka_unit_test(test_each_process_needs_a_gpu),
        cmocka_unit_test(test_a_gpu_that_is_shown_alone),
        cmocka_unit_test(test_threads_of_a_task),
        cmocka_unit_test(test_threads_in_a_container),
        cmocka_unit_test(test_a_bound_task),
        cmocka_unit_test(test_names_that_are_none),
        cmocka_unit_test(test_names_of_matrices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
