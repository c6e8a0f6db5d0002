/* SPDX-License-Identifier: Apache-2.0 */
/* The search, which runs few of its options, against a run of all of them. The chosen plan and the
 * fastest one are at most half a percent slower. test_search_runs all [i n]: all presets of models
 * on machines of each kind, or case i of every n; half a minute each, the worst at the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/case.h"
#include "plan/choice_internal.h"

static const double REGRET = 0.005;

static double fastest_of(const bl_plan_choice *c)
{
    return fmax(c->best.time.tokens_per_s, c->second.time.tokens_per_s);
}

/* The larger regret of the two: of the fastest plan, and of the chosen one, which takes less of the
 * host and may be up to 5 % slower than the fastest. */
static double regret_of(const bl_plan_choice *found, const bl_plan_choice *all)
{
    double least = fmin(all->best.time.tokens_per_s, 0.95 * fastest_of(all));
    if (all->n_fit == 0) return 0;
    return fmax(1 - fastest_of(found) / fastest_of(all), 1 - found->best.time.tokens_per_s / least);
}

/* Returns the regret. Nothing fits: neither search finds anything. trainable: NULL: not given. */
static double compare(const char *hardware, const char *model, const char *finetuning,
                      const char *trainable)
{
    char *argv[] = {"--model",         (char *)model, "--finetuning_type",   (char *)finetuning,
                    "--learning_rate", "1e-5",        "--trainable_modules", (char *)trainable};
    int argc = (int)BL_COUNT(argv) - (trainable ? 0 : 2);
    bl_plan_case c;
    bl_plan_choice found, all;

    if (bl_plan_case_open(hardware, 0, argc, argv, &c) != BL_OK) fail_msg("%s", bl_error_text());
    unsigned keys = bl_plan_keys_left_open(c.config);
    if (bl_plan_search(&c.input, keys, BL_PLAN_BY_SPEED, &found) != BL_OK ||
        plan_search_by_runs(&c.input, keys, &all) != BL_OK)
        fail_msg("%s", bl_error_text());
    double regret = regret_of(&found, &all);
    print_message("%s, %s, %s: %.1f of %.1f tokens/s, fastest %.1f of %.1f, regret %.2f %%\n",
                  model, hardware, finetuning, found.best.time.tokens_per_s,
                  all.best.time.tokens_per_s, fastest_of(&found), fastest_of(&all), 100 * regret);
    assert_int_equal(found.n_fit > 0, all.n_fit > 0);
    bl_plan_case_close(&c);
    return regret;
}

static void some(void **state)
{
    (void)state;
    assert_true(compare("1xrtx4090", "llama-3.1-8b", "lora", NULL) <= REGRET);
    assert_true(compare("4xa10", "qwen3-8b", "lora", NULL) <= REGRET);
    assert_true(compare("1xgh200", "llama-3.2-1b", "full", NULL) <= REGRET);
    assert_true(compare("1xa10", "llama-3.2-1b", "full", "model.layers.1[2-5]") <=
                REGRET); /* the others are frozen */
}

static int part = 0, n_parts = 1;

static void every_machine(void **state)
{
    static const char *const machines[] = {
        "8xh100",     "2x8xh100",  "8xh200",    "4xh100-nvl", "1xgh200", "8xa100",   "8xa100-40g",
        "8xv100-32g", "2xrtx5090", "1xrtx4090", "4xl40s",     "4xa10",   "2xrtx3090"};
    static const char *const kinds[] = {"lora", "full"};
    double worst = 0;
    int n = 0;

    (void)state;
    for (size_t m = 0; bl_plan_model_name(m); m++)
        for (size_t i = 0; i < BL_COUNT(machines); i++)
            for (size_t k = 0; k < BL_COUNT(kinds); k++)
                if (n++ % n_parts == part)
                    worst =
                        fmax(worst, compare(machines[i], bl_plan_model_name(m), kinds[k], NULL));
    print_message("worst regret %.2f %%\n", 100 * worst);
    assert_true(worst <= REGRET);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest few[] = {cmocka_unit_test(some)},
                            all[] = {cmocka_unit_test(every_machine)};

    if (argc == 4) {
        part = atoi(argv[2]);
        n_parts = atoi(argv[3]);
    }
    if (argc > 1 && strcmp(argv[1], "all") == 0)
        return cmocka_run_group_tests_name("search by runs, all", all, NULL, NULL);
    return cmocka_run_group_tests_name("search by runs", few, NULL, NULL);
}
