/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of bf16 kernels by processor, system and environment; and the one line with the
 * reason why AMX is not used on a processor that has it. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "ops/cpu/amx.h"
#include "ops/cpu/bf16_kernels.h"

static int n_requests, answer, n_begun, n_ended;

static int request(void)
{
    n_requests++;
    return answer;
}

static void begin(void)
{
    n_begun++;
}

static void end(void)
{
    n_ended++;
}

/* Sums of all but the last row. */
static void multiply_fewer_rows(const ops_bf16_block *block)
{
    ops_bf16_block fewer = *block;
    fewer.n_rows--;
    ops_bf16_kernels_emulated.multiply(&fewer);
}

/* Kernels that run anywhere, under the names of the others. */
static ops_bf16_kernels named(const char *name)
{
    ops_bf16_kernels kernels = ops_bf16_kernels_emulated;
    kernels.name = name;
    return kernels;
}

/* The name of the chosen set; stderr into `text`. */
static const char *choose(const ops_bf16_host *host, char *text, size_t text_bytes)
{
    FILE *file = tmpfile();
    int saved = dup(STDERR_FILENO);
    assert_non_null(file);
    assert_true(saved >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    n_requests = n_begun = n_ended = 0;
    const char *name = ops_bf16_kernels_choose(host)->name;
    fflush(stderr);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    rewind(file);
    text[fread(text, 1, text_bytes - 1, file)] = '\0';
    fclose(file);
    assert_int_equal(n_begun, n_ended);
    return name;
}

typedef struct choice {
    bool has_avx512, has_amx;
    int answer;
    const char *wish, *name, *text; /* text NULL: no line */
    int n_requests;
} choice;

static void test_choices(void **state)
{
    const char missing[] = "there are no such products on this processor; bf16 products are by ";
    const choice cases[] = {
        {false, false, 0, NULL, "emulated", NULL, 0},
        {true, false, 0, NULL, "avx512_bf16", NULL, 0},
        {true, true, 0, NULL, "amx_bf16", NULL, 1},
        {true, true, 0, "amx_bf16", "amx_bf16", NULL, 1},
        {true, true, 0, "off", "amx_bf16", NULL, 1},
        {true, true, 0, "avx512_bf16", "avx512_bf16", NULL, 0},
        {true, true, 0, "emulated", "emulated", NULL, 0},
        {true, true, EPERM, NULL, "avx512_bf16",
         "the system does not permit AMX (arch_prctl: Operation not permitted); AVX512-BF16 is "
         "used",
         1},
        {true, true, EPERM, "avx512_bf16", "avx512_bf16", NULL, 0},
        {true, false, 0, "amx_bf16", "avx512_bf16", missing, 0},
        {false, false, 0, "avx512_bf16", "emulated", missing, 0},
        {true, false, 0, "avx2", "avx512_bf16", missing, 0},
    };
    ops_bf16_kernels amx = named("amx_bf16"), avx512 = named("avx512_bf16");
    (void)state;

    amx.begin = begin;
    amx.end = end;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const choice *c = &cases[i];
        char text[512];
        ops_bf16_host host = {c->wish, c->has_avx512, c->has_amx, request, &amx, &avx512};
        answer = c->answer;
        assert_string_equal(choose(&host, text, sizeof text), c->name);
        assert_int_equal(n_requests, c->n_requests);
        if (!c->text) {
            assert_string_equal(text, "");
            continue;
        }
        assert_non_null(strstr(text, c->text));
        assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); /* one line */
    }
}

/* A processor whose sums are wrong. */
static void test_rejecting_other_sums(void **state)
{
    ops_bf16_kernels amx = named("amx_bf16"), avx512 = named("avx512_bf16");
    ops_bf16_host host = {NULL, true, true, request, &amx, &avx512};
    char text[512];
    (void)state;

    amx.multiply = multiply_fewer_rows;
    answer = 0;
    assert_string_equal(choose(&host, text, sizeof text), "avx512_bf16");
    assert_non_null(strstr(text, "AMX gives other sums than AVX512-BF16"));
}

/* Of this machine: a process that was refused does not use the tiles, and a second request has the
 * answer of the first. */
static void test_this_machine(void **state)
{
    int refusal = ops_amx_request();
    bool uses_amx = strcmp(ops_bf16_kernels_best()->name, "amx_bf16") == 0;
    (void)state;

    assert_int_equal(ops_amx_request(), refusal);
    if (!ops_amx_is_there() || refusal) assert_false(uses_amx);
    print_message("AMX: %s, permission: %s; bf16 products: %s\n",
                  ops_amx_is_there() ? "there" : "not there", refusal ? strerror(refusal) : "given",
                  ops_bf16_kernels_best()->name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_rejecting_other_sums),
        cmocka_unit_test(test_this_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
