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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights_are_slopes)};
    return cmocka_run_group_tests_name("losses", tests, NULL, NULL);
}
