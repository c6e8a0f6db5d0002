/* SPDX-License-Identifier: Apache-2.0 */
/* A hundred kills of trainings of every weight whose weights, moments and gradients are on disk, at
 * random moments: while pages are read, updated, written back, saved. Each run is resumed until it
 * ends, and has the bits of one in memory that was left alone. */
#include "full_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_KILLS = 100, PER_RUN = 12, MOST_RUNS = 100 };

static void a_hundred_kills_change_no_bit(void **state)
{
    const char *args[] = {"optimizer_tier",
                          "disk",
                          "offload_tier",
                          "disk",
                          "offload_ratio",
                          "1",
                          "offload_dir",
                          NULL,
                          NULL};
    int n_kills = 0, n_runs = 0;

    (void)state;
    runs_seed_random();
    char *pages = strdup(runs_path("pages"));
    args[7] = pages;
    for (; n_kills < N_KILLS && n_runs < MOST_RUNS; n_runs++)
        n_kills += full_runs_kill(1 + n_runs % 2, PER_RUN, NULL, args);
    printf("%d kills of %d runs\n", n_kills, n_runs);
    free(pages);
    assert_true(n_kills >= N_KILLS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_hundred_kills_change_no_bit)};
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
