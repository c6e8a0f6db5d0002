/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that runs out in a product: the library neither crashes nor ends the process. It allocates
 * its permanent memory in bl_cpu_gemm_prepare; afterwards no product makes code, and one without
 * memory returns an error. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "ops/gemm.h"
#include "skip.h"

enum { SIDE = 320, THREADS = 3 };

/* Bytes of this process's mappings that can be executed and are no file's. */
static size_t code_bytes(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    size_t n = 0;

    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        unsigned long begin, end;
        char access[8], name[256] = "";
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &begin, &end, access, name) >= 3 &&
            access[2] == 'x' && !name[0])
            n += end - begin;
    }
    fclose(file);
    return n;
}

static void test_no_code_after_prepare(void **state)
{
    static const int64_t sizes[] = {1, 2, 3, 8, 16, 17, 48, 64, 100, 256, SIDE};
    static const float betas[] = {0, 1, 0.5f};
    bl_pool *pool;
    float *block = calloc(3 * SIDE * SIDE, sizeof *block);

    (void)state;
    assert_non_null(block);
    assert_int_equal(bl_pool_create(1, &pool), BL_OK);
    assert_int_equal(bl_cpu_gemm_prepare(), BL_OK);
    size_t before = code_bytes();
    if (strcmp(bl_cpu_gemm_library(), "onednn") == 0) assert_true(before > 0);
    for (int kind = 0; kind < 12; kind++)
        for (size_t i = 0; i < BL_COUNT(sizes); i++)
            for (size_t j = 0; j < BL_COUNT(sizes); j++)
                for (size_t k = 0; k < BL_COUNT(sizes); k++)
                    assert_int_equal(bl_cpu_gemm_f32(pool, kind & 1, kind & 2, sizes[i], sizes[j],
                                                     sizes[k], 1, block, SIDE, block + SIDE * SIDE,
                                                     SIDE, betas[kind / 4], block + 2 * SIDE * SIDE,
                                                     SIDE),
                                     BL_OK);
    assert_int_equal(code_bytes(), before);
    bl_pool_destroy(pool);
    free(block);
}

/* Runs `child` in a new process; returns its exit code, or minus the signal. */
static int run_apart(int (*child)(void))
{
    int status;

    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) _exit(child());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* No further address for this process. */
static void limit_addresses(void)
{
    const struct rlimit none = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_AS, &none);
}

static int prepare_without_addresses(void)
{
    limit_addresses();
    bl_status st = bl_cpu_gemm_prepare();
    return st == BL_ENOMEM && strncmp(bl_error_text(), "out of memory: ", 15) == 0 ? 0 : 10;
}

/* Takes what malloc has left, of every size. */
static void take_all_memory(void)
{
    limit_addresses();
    for (size_t n = (size_t)1 << 24; n >= 16; n -= n > 2048 ? n / 2 : 16)
        while (malloc(n)) continue;
}

static float blocks[3 * SIDE * SIDE];

static bl_status multiply(bl_pool *pool)
{
    return bl_cpu_gemm_f32(pool, false, false, SIDE, SIDE, SIDE, 1, blocks, SIDE,
                           blocks + SIDE * SIDE, SIDE, 0, blocks + 2 * SIDE * SIDE, SIDE);
}

/* The workers have made no product yet: libgomp does not know them. */
static int multiply_without_memory(void)
{
    bl_pool *pool;

    if (bl_pool_create(THREADS, &pool) != BL_OK || bl_cpu_gemm_prepare() != BL_OK) return 10;
    take_all_memory();
    for (int i = 0; i < 100; i++) {
        bl_status st = multiply(pool);
        if (st == BL_ENOMEM && strncmp(bl_error_text(), "out of memory: ", 15) != 0) return 11;
        if (st != BL_OK && st != BL_ENOMEM) return 12;
    }
    return 0;
}

/* Without a call of bl_cpu_gemm_prepare. */
static int multiply_first_without_memory(void)
{
    bl_pool *pool;

    if (bl_pool_create(THREADS, &pool) != BL_OK) return 10;
    take_all_memory();
    return multiply(pool) == BL_ENOMEM ? 0 : 11;
}

static void test_memory_that_ends(void **state)
{
    (void)state;
    if (strcmp(bl_cpu_gemm_library(), "onednn") != 0)
        TEST_SKIP("OpenBLAS ends a process that is out of memory");
    assert_int_equal(run_apart(prepare_without_addresses), 0);
    assert_int_equal(run_apart(multiply_without_memory), 0);
    assert_int_equal(run_apart(multiply_first_without_memory), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_that_ends), /* first: this process has not made any product */
        cmocka_unit_test(test_no_code_after_prepare),
    };
    char text[BL_CPU_GEMM_TEXT_BYTES];

    bl_cpu_gemm_describe(text);
    print_message("%s\n", text);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
