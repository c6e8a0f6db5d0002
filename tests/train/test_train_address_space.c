/* SPDX-License-Identifier: Apache-2.0 */
/* A training under RLIMIT_AS, from too little for anything to enough: it ends with exit code 4 and
 * one line, or with the result of an undisturbed run, never by a signal or with exit code 1.
 *
 * Below what loading the program takes (the dynamic loader, constructors of libraries) no line of
 * ours runs: there, where `ballast version` fails as well, it only must not seem to have worked.
 *
 *   test_train_address_space [STEPS]      how many limits between the two (25) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/files.h"
#include "runs.h"

enum { EXIT_MEMORY = 4, MIB = 1 << 20, MAX_MIB = 4096 };
static const double LIMIT_S = 120;

static int n_steps = 25;

static bool limit_addresses(const int *mib)
{
    const struct rlimit limit = {(rlim_t)*mib * MIB, (rlim_t)*mib * MIB}, no_core = {0, 0};
    return setrlimit(RLIMIT_AS, &limit) == 0 && setrlimit(RLIMIT_CORE, &no_core) == 0;
}

static void job_args(golden_args *args, const char *output, bool offloads)
{
    runs_standard(args, output, 2);
    runs_set(args, "max_steps", "2");
    runs_set(args, "eval_steps", "2");
    runs_set(args, "threads", "2");
    runs_set(args, "overwrite_output_dir", "true");
    if (!offloads) return;
    runs_set(args, "offload_ratio", "0.7");
    runs_set(args, "offload_tier", "disk");
    runs_set(args, "offload_dir", "%s", runs_path("pages"));
    runs_set(args, "activation_offload", "true");
}

/* 0 MiB: no limit. */
static int train(int mib, bool offloads, const char *output, runs_child *child)
{
    golden_args args = {0};

    *child = (runs_child){.prepare = mib ? limit_addresses : NULL, .arg = &mib};
    job_args(&args, output, offloads);
    runs_start(child, "train", &args);
    int code = runs_wait(child, LIMIT_S);
    golden_args_free(&args);
    return code;
}

/* The least MiB, to one, with which the program can say its version. */
static int loading_mib(void)
{
    int low = 0, high = MAX_MIB; /* low fails, high works */
    const golden_args none = {0};

    while (high - low > 1) {
        int middle = (low + high) / 2;
        runs_child child = {.prepare = limit_addresses, .arg = &middle};
        runs_start(&child, "version", &none);
        *(runs_wait(&child, LIMIT_S) == 0 ? &high : &low) = middle;
    }
    return high;
}

/* The least MiB, to 8, with which a training works. */
static int training_mib(int low, bool offloads)
{
    int high = MAX_MIB;

    while (high - low > 8) {
        int middle = (low + high) / 2;
        runs_child child;
        *(train(middle, offloads, runs_path("search"), &child) == 0 ? &high : &low) = middle;
    }
    return high;
}

static void sweep(bool offloads)
{
    char whole[GOLDEN_PATH_BYTES];
    int n_failed = 0, n_done = 0, low = loading_mib();
    runs_child child;

    assert_int_equal(bl_dir_create(runs_path("pages")), BL_OK);
    strcpy(whole, runs_path("whole-%d", offloads));
    assert_int_equal(train(0, offloads, whole, &child), 0);
    for (int i = 1; i <= 4; i++)
        assert_true(train(low * i / 5, offloads, runs_path("output"), &child) != 0);
    int high = training_mib(low, offloads) + 16;
    /* The last has room: the smallest limit that is enough depends on the threads' timing in the
     * allocator. */
    for (int i = 0; i <= n_steps + 1; i++) {
        int mib = i > n_steps ? MAX_MIB : low + (high - low) * i / n_steps,
            code = train(mib, offloads, runs_path("output"), &child);
        if (code == EXIT_MEMORY) {
            runs_assert_error(&child, "");
            n_failed++;
        } else {
            if (code != 0)
                print_error("%d MiB: exit code %d\n%s\n", mib, code, runs_read(child.log, NULL));
            assert_int_equal(code, 0);
            assert_true(runs_are_same(whole, runs_path("output")));
            n_done++;
        }
    }
    printf("%s: from %d MiB, which load the program, to %d: %d runs ended for want of memory, %d "
           "were done\n",
           offloads ? "offloaded" : "plain", low, high, n_failed, n_done);
    assert_true(n_failed > n_steps / 2 && n_done > 0);
}

static void test_plain(void **state)
{
    (void)state;
    sweep(false);
}

static void test_offloaded(void **state)
{
    (void)state;
    sweep(true);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain),
                                       cmocka_unit_test(test_offloaded)};

    if (argc > 1) n_steps = atoi(argv[1]);
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
