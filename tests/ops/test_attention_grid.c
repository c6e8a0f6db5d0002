/* SPDX-License-Identifier: Apache-2.0 */
/* The grid of the kernel of dk and dv keeps a GPU busy: blocks are given to places in the grid's
 * order, as a GPU does, and the last one to end is compared with the mean. */
#include "ops/cuda/attention_grid.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "base/sizes.h"

enum {
    PLACES = 264, /* 132 multiprocessors with two blocks each: an H100 or H200 */
    TOKENS_MAX = 8192
};
/* What a block does besides its stages (its keys, its sums), in the time of a stage: loads of two
 * tiles more than the two of a stage, and half as many stores. A stage's products take longer than
 * its loads. */
static const double OTHER_STAGES = 0.5;

typedef struct heads {
    const char *model;
    int64_t n_kv, group;
    double most; /* makespan over mean */
} heads;

/* The n places that are free first: free_at is sorted. They are taken until `by` after the last of
 * them is free: a cluster's blocks begin together, and wait for each other at the end. */
static void take_places(double *free_at, int64_t n, double by)
{
    double until = free_at[n - 1] + by;
    int64_t at = n;
    for (; at < PLACES && free_at[at] < until; at++) free_at[at - n] = free_at[at];
    for (int64_t i = 0; i < n; i++) free_at[at - n + i] = until;
}

/* Of one document of T tokens. */
static double makespan_over_mean(const heads *h, int64_t T, int64_t n_pieces)
{
    double free_at[PLACES] = {0}, sum = 0;
    int64_t n_tiles = (T + OPS_ATTENTION_KEYS - 1) / OPS_ATTENTION_KEYS;

    for (int64_t tile = 0; tile < n_tiles; tile++)
        for (int64_t head = 0; head < h->n_kv; head++) {
            int64_t n_stages = h->group * (n_tiles - tile);
            int64_t of_piece = (n_stages + n_pieces - 1) / n_pieces;
            take_places(free_at, n_pieces, (double)of_piece + OTHER_STAGES);
            sum += (double)n_stages + OTHER_STAGES;
        }
    return free_at[PLACES - 1] / (sum / PLACES);
}

static void test_places_are_busy(void **state)
{
    static const heads models[] = {
        {"llama-3.1-405b", 8, 16, 1.1}, {"llama-3.1-70b", 8, 8, 1.1}, {"llama-3.1-8b", 8, 4, 1.2}};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(models); i++) {
        double worst = 0;
        int64_t worst_T = 0;
        for (int64_t T = 1024; T <= TOKENS_MAX; T += 128) {
            int64_t n_items = (T + OPS_ATTENTION_KEYS - 1) / OPS_ATTENTION_KEYS * models[i].n_kv;
            double ratio = makespan_over_mean(&models[i], T, ops_attention_pieces(n_items));
            if (ratio > worst) worst = ratio, worst_T = T;
        }
        printf("%s: %.3f with %lld tokens; 1,024 in whole tiles: %.3f\n", models[i].model, worst,
               (long long)worst_T, makespan_over_mean(&models[i], 1024, 1));
        assert_true(worst <= models[i].most);
    }
}

/* The model itself: 128 blocks for 264 places take as long as the first tile's 16 stages per head;
 * the mean is 8 (16 * 17 / 2) stages over the places. */
static void test_the_model(void **state)
{
    heads one = {"", 8, 1000, 0};
    (void)state;
    double expected = 16.0 / (8 * 136.0 / PLACES), ratio = makespan_over_mean(&one, 1024, 1);
    assert_true(ratio > expected * 0.999 && ratio < expected * 1.001);
}

static void test_pieces(void **state)
{
    (void)state;
    assert_int_equal(ops_attention_pieces(0), OPS_ATTENTION_PIECES_MAX);
    assert_int_equal(ops_attention_pieces(1), OPS_ATTENTION_PIECES_MAX);
    assert_int_equal(ops_attention_pieces(250), 4);
    assert_int_equal(ops_attention_pieces(500), 2);
    assert_int_equal(ops_attention_pieces(999), 2);
    assert_int_equal(ops_attention_pieces(1000), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_model),
        cmocka_unit_test(test_places_are_busy),
        cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
