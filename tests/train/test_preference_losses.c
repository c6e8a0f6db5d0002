/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of preference losses against differences of the losses; the mismatched answers of kto.
 * The values of the losses are compared with float64 by test_train_preference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "base/sizes.h"
#include "train/preference/losses.h"

enum { A = BL_MARK_ANSWER, P = BL_MARK_PROMPT, G = BL_MARK_BEGINS, D = BL_MARK_DESIRABLE };

/* Two pairs: answers of 3 and 2 tokens behind prompts, and of 1 (2 with its first) and 4. */
enum { N_TOKENS = 17 };
static const int32_t ends[] = {0, 5, 9, 11, 17};
static const uint8_t marks[N_TOKENS] = {P, A, A, A, 0, D, A, A, 0, G | A, 0, P, P, A, A, A, A};
static const float policy[N_TOKENS] = {-1.5f, -2.1f, -0.4f, -3.2f, 0,     -0.7f, -1.1f, -2.6f, 0,
                                       -0.9f, 0,     -1.3f, -0.2f, -2.2f, -1.7f, -0.6f, -3.1f},
                   reference[N_TOKENS] = {-1,    -1.9f, -0.9f, -2.2f, 0,  -1,    -1.6f, -2.4f, 0,
                                          -1.4f, 0,     -1,    -1,    -2, -1.1f, -0.8f, -3};

static double loss_of(const bl_losses *l, const float *logp, float *weights)
{
    bl_preference_micro m = {.n_documents = 4,
                             .ends = ends,
                             .marks = marks,
                             .policy = logp,
                             .reference = l->has_reference ? reference : NULL,
                             .kl = l->is_unpaired ? 0.3 : 0,
                             .weights = weights};
    bl_preference_sums sums = {0};

    bl_preference_weigh(l, &m, &sums);
    assert_true(sums.n_micro == 1 && sums.n_rows == (l->is_unpaired ? 4 : 2));
    return sums.loss_by_micro;
}

/* Float32 log-probabilities: a step of 2^-6 is exact, the curvature's part of the central
 * difference is below 1e-4 of a slope of at most 1. */
static void test_weights_are_slopes(void **state)
{
    (void)state;
    for (int loss = BL_LOSS_SIGMOID; loss < BL_N_LOSSES; loss++) {
        bl_losses l = {.n_terms = 1,
                       .beta = 0.7,
                       .label_smoothing = 0.1,
                       .ld_alpha = 0.4,
                       .simpo_gamma = 0.5,
                       .desirable_weight = 1.2,
                       .undesirable_weight = 0.8,
                       .is_preference = true,
                       .is_unpaired = loss == BL_LOSS_KTO,
                       .has_reference = loss != BL_LOSS_ORPO && loss != BL_LOSS_SIMPO};
        float weights[N_TOKENS];
        l.term[0].loss = (bl_loss)loss;
        l.term[0].weight = 1.5;
        loss_of(&l, policy, weights);
        for (int t = 0; t < N_TOKENS; t++) {
            static const double STEP = 0x1p-6;
            float moved[N_TOKENS];
            memcpy(moved, policy, sizeof moved);
            moved[t] = policy[t] + (float)STEP;
            double up = loss_of(&l, moved, NULL);
            moved[t] = policy[t] - (float)STEP;
            double slope = (up - loss_of(&l, moved, NULL)) / (2 * STEP);
            bool counts = marks[t] & A || (loss == BL_LOSS_ORPO && marks[t] & P && t < 5);
            if (!(fabs((double)weights[t] + slope) < 1e-4) || (!counts && weights[t] != 0))
                fail_msg("%s: token %d: weight %g, slope %g", bl_loss_name((bl_loss)loss), t,
                         (double)weights[t], slope);
        }
    }
}

/* ORPO's odds at both ends of a probability: one pair of answers of a token, beta 0.7. The values
 * are mpmath's, of 60 digits, of the equation in losses.h. A logp of 0 stands for one above -2^-25:
 * the weights are the limits, the chosen one's -beta e^m_d / (1 - e^m_d). */
static void test_odds_of_certain_answers(void **state)
{
    (void)state;
    static const struct {
        float m_c, m_d;
        double value, by_chosen, by_rejected;
    } cases[] = {
        {-0x1p-24f, -1.5f, 1.1983623863641613e-8, -0.20105185029393205, 1.5425523229675927e-8},
        {-0x1p-20f, -3.0f, 3.497791682862153e-8, -0.036677020689102851, 3.6810608222985803e-8},
        {-0x1.a36e2ep-14f, -0x1p-12f, 0.24029951867790016, -2034.0499285819535, 833.20687529520199},
        {-1.5f, -0x1p-20f, 10.577322664543422, -0.90105159494378909, 734003.34894807716},
        {-0x1p-20f, -0x1p-21f, 0.769028713329698, -489335.73888894758, 978671.24444448765},
        {-60.0f, -1.5f, 41.126737721247815, -0.7, 0.90105184175220771},
        {-1.5f, -60.0f, 2.1341213471744673e-26, -2.7470771005632237e-26, 2.1341213471744673e-26},
        {-200.0f, -210.0f, 3.1779229451805251e-5, -3.1778508091704074e-5, 3.1778508091704074e-5},
        {-900.0f, -2.0f, 628.70178942050816, -0.7, 0.8095623499247659},
        {-2.0f, -900.0f, 0, 0, 0},
        {0, -1.5f, 0, -0.20105184175220776, 0},
        {0, 0, 0.7 * 0.693147180559945309417, -0.35 * 0x1p25, 0.35 * 0x1p25},
    };
    static const int32_t pair_ends[] = {0, 2, 4};
    static const uint8_t pair_marks[] = {A, 0, A, 0};
    bl_losses l = {.n_terms = 1, .beta = 0.7, .ld_alpha = 1, .is_preference = true};

    l.term[0].loss = BL_LOSS_ORPO;
    l.term[0].weight = 1;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        float logp[4] = {cases[i].m_c, 0, cases[i].m_d, 0}, weights[4];
        bl_preference_micro m = {.n_documents = 2,
                                 .ends = pair_ends,
                                 .marks = pair_marks,
                                 .policy = logp,
                                 .weights = weights};
        bl_preference_sums sums = {0};
        bl_preference_weigh(&l, &m, &sums);
        /* nll, -m_c, has the slope -1. Weights are floats, 2^-24; with m_c 0, the loss of a logp of
         * -2^-25 is at most 2^-25 beta / (1 - e^m_d) from its limit, 3e-8. */
        double expected[] = {cases[i].value - (double)cases[i].m_c, 1 - cases[i].by_chosen,
                             -cases[i].by_rejected},
               got[] = {sums.loss_by_micro, (double)weights[0], (double)weights[2]};
        for (int k = 0; k < 3; k++)
            if (!(fabs(got[k] - expected[k]) <= 1.5e-7 * fabs(expected[k]) + 5e-8))
                fail_msg("case %zu: %d: %.17g, expected %.17g", i, k, got[k], expected[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights_are_slopes),
                                       cmocka_unit_test(test_odds_of_certain_answers)};
    return cmocka_run_group_tests_name("losses", tests, NULL, NULL);
}
