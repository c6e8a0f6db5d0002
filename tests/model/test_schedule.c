/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a pass, without a device: written out for a small model, and its rules for many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "model/schedule_internal.h"

/* ---- written out ---- */

typedef struct listing {
    char text[4096];
    size_t used;
} listing;

static bl_status list_action(void *user, const bl_action *action)
{
    static const char *const names[BL_N_ACTIONS] = {[BL_ACTION_VISIT] = "\n",
                                                    [BL_ACTION_UPDATE] = "w",
                                                    [BL_ACTION_OPEN_GRADIENTS] = "[",
                                                    [BL_ACTION_CLOSE_GRADIENTS] = "]",
                                                    [BL_ACTION_PREFETCH_LORA] = "pl",
                                                    [BL_ACTION_PREFETCH_BASE] = "p",
                                                    [BL_ACTION_BEGIN] = "(",
                                                    [BL_ACTION_ACQUIRE_LORA] = "al",
                                                    [BL_ACTION_ACQUIRE_EMBEDDING] = "ae",
                                                    [BL_ACTION_EMBED_BACKWARD] = "Eb",
                                                    [BL_ACTION_ACQUIRE_HEAD] = "a",
                                                    [BL_ACTION_RESERVE_INPUT] = "ri",
                                                    [BL_ACTION_RESERVE_SAVED] = "rs",
                                                    [BL_ACTION_TAKE_INPUT] = "ti",
                                                    [BL_ACTION_TAKE_SAVED] = "ts",
                                                    [BL_ACTION_EMBED] = "E",
                                                    [BL_ACTION_FORWARD] = "F",
                                                    [BL_ACTION_HEAD] = "H",
                                                    [BL_ACTION_BACKWARD] = "B",
                                                    [BL_ACTION_PREFETCH_GROUP] = "pg",
                                                    [BL_ACTION_FORWARD_GROUP] = "Fg",
                                                    [BL_ACTION_BACKWARD_BEGIN] = "Bb",
                                                    [BL_ACTION_BACKWARD_GROUP] = "Bg",
                                                    [BL_ACTION_RELEASE_GROUP] = "-g",
                                                    [BL_ACTION_PUT_INPUT] = "ui",
                                                    [BL_ACTION_PUT_SAVED] = "us",
                                                    [BL_ACTION_DROP_INPUT] = "di",
                                                    [BL_ACTION_DROP_SAVED] = "ds",
                                                    [BL_ACTION_RELEASE_BASE] = "-",
                                                    [BL_ACTION_RELEASE_LORA] = "-l",
                                                    [BL_ACTION_END] = ")"};
    listing *l = user;
    const char *name = names[action->kind];
    char group[8] = "";
    if (strchr(name, 'g')) snprintf(group, sizeof group, ".%d", (int)action->group);
    int n = snprintf(l->text + l->used, sizeof l->text - l->used, "%s%lld%s%s ", name,
                     (long long)action->unit, group, action->micro > 0 ? "'" : "");
    assert_in_range(n, 1, (int)(sizeof l->text - l->used) - 1);
    l->used += (size_t)n;
    return BL_OK;
}

static void assert_listing(const bl_schedule *schedule, const char *expected)
{
    listing l = {.used = 0};
    assert_int_equal(bl_schedule_run(schedule, list_action, &l), BL_OK);
    assert_string_equal(l.text, expected);
}

static void training_in_words(void **state)
{
    (void)state;
    assert_listing(
        &(bl_schedule){.n_layers = 2, .n_micro = 2, .ring_depth = 2, .has_backward = true},
        "ri0 E0 E0' ui0 "
        "\n0 pl0 p0 pl1 p1 (0 al0 ri1 rs0 F0 F0' ui1 us0 -0 -l0 )0 "
        "\n1 pl1 p1 p2 (1 al1 ri2 rs1 F1 F1' ui2 us1 -1 -l1 )1 "
        "\n2 p2 (2 ti2 a2 H2 H2' di2 -2 )2 "
        "\n1 pl1 p1 pl0 p0 (1 al1 ti1 ts1 B1 B1' di1 ds1 -1 -l1 )1 "
        "\n0 pl0 p0 p0 (0 al0 ti0 ts0 B0 B0' di0 ds0 -l0 )0 ");
}

static void a_tied_head_in_words(void **state)
{
    (void)state;
    assert_listing(&(bl_schedule){.n_layers = 2,
                                  .n_micro = 1,
                                  .ring_depth = 2,
                                  .has_backward = true,
                                  .head_is_tied = true},
                   "ri0 E0 ui0 "
                   "\n0 pl0 p0 pl1 p1 (0 al0 ri1 rs0 F0 ui1 us0 -0 -l0 )0 "
                   "\n1 pl1 p1 (1 al1 ri2 rs1 F1 ui2 us1 )1 "
                   "\n2 pl1 p1 (2 ti2 H2 di2 -2 )2 "
                   "\n1 pl1 p1 pl0 p0 (1 al1 ti1 ts1 B1 di1 ds1 -1 -l1 )1 "
                   "\n0 pl0 p0 p0 (0 al0 ti0 ts0 B0 di0 ds0 -l0 )0 ");
}

/* Each group is gathered once per visit, and released before the one after the next begins. */
static void experts_in_words(void **state)
{
    (void)state;
    bl_schedule schedule = {
        .n_layers = 1, .n_micro = 2, .ring_depth = 2, .n_groups = 2, .has_backward = true};
    assert_listing(
        &schedule,
        "ri0 E0 E0' ui0 "
        "\n0 pl0 p0 p1 pg0.0 pg0.1 (0 al0 ri1 rs0 F0 F0' "
        "pg0.0 pg0.1 Fg0.0 Fg0.0' -g0.0 pg0.1 Fg0.1 Fg0.1' -g0.1 ui1 us0 -0 -l0 )0 "
        "\n1 p1 (1 ti1 a1 H1 H1' di1 -1 )1 "
        "\n0 pl0 p0 p0 pg0.0 pg0.1 (0 al0 ti0 ts0 Bb0 Bb0' "
        "pg0.0 pg0.1 Bg0.0 Bg0.0' -g0.0 pg0.1 pg0.0 Bg0.1 Bg0.1' -g0.1 B0 B0' di0 ds0 -l0 )0 ");
    /* Gradients of experts: backward micro-batch by micro-batch. One group stays like its layer. */
    schedule.is_one_by_one = true;
    schedule.n_groups = 1;
    schedule.head_is_tied = true;
    schedule.ring_depth = 1;
    assert_listing(&schedule,
                   "ri0 E0 E0' ui0 "
                   "\n0 pl0 p0 pg0.0 (0 al0 ri1 rs0 F0 F0' pg0.0 Fg0.0 Fg0.0' ui1 us0 )0 "
                   "\n1 (1 ti1 H1 H1' di1 -1 )1 "
                   "\n0 pl0 p0 pg0.0 (0 al0 ti0 ts0 Bb0 pg0.0 Bg0.0 B0 "
                   "Bb0' pg0.0 Bg0.0' B0' di0 ds0 -l0 )0 ");
}

/* Nothing is kept or prefetched for the next pass, whose weights are others. What waits is updated
 * just before the unit's first prefetch; gradients are open around a visit's micro-batches. */
static void trained_weights_in_words(void **state)
{
    (void)state;
    assert_listing(&(bl_schedule){.n_layers = 2,
                                  .n_micro = 2,
                                  .ring_depth = 2,
                                  .has_backward = true,
                                  .is_trained = true,
                                  .embedding = 3,
                                  .embedding_has_gradient = true},
                   "ri0 w3 ae3 E0 E0' -3 ui0 "
                   "\n0 w0 w1 pl0 p0 pl1 p1 (0 al0 ri1 rs0 F0 F0' ui1 us0 -0 -l0 )0 "
                   "\n1 w2 pl1 p1 p2 (1 al1 ri2 rs1 F1 F1' ui2 us1 -1 -l1 )1 "
                   "\n2 p2 (2 ti2 a2 [2 H2 H2' ]2 di2 -2 )2 "
                   "\n1 pl1 p1 pl0 p0 (1 al1 ti1 ts1 [1 B1 B1' ]1 di1 ds1 -1 -l1 )1 "
                   "\n0 pl0 p0 (0 al0 ti0 ts0 [0 B0 B0' ]0 [3 Eb3 Eb3' ]3 di0 ds0 -0 -l0 )0 ");
    assert_listing(
        &(bl_schedule){
            .n_layers = 1, .n_micro = 1, .ring_depth = 4, .is_trained = true, .embedding = 1},
        "ri0 w1 ae1 E0 -1 ui0 "
        "\n0 w0 pl0 p0 p1 (0 al0 ri1 F0 ui1 -0 -l0 )0 "
        "\n1 p1 (1 a1 H1 -1 )1 ");
}

/* Backward ends at layer 1; or at the head, where no layer has trained weights. */
static void frozen_layers_in_words(void **state)
{
    (void)state;
    assert_listing(&(bl_schedule){.n_layers = 2,
                                  .n_micro = 1,
                                  .ring_depth = 1,
                                  .has_backward = true,
                                  .is_trained = true,
                                  .embedding = 3,
                                  .first = 1},
                   "ri0 w3 ae3 E0 -3 ui0 "
                   "\n0 w0 pl0 p0 (0 al0 ri1 rs0 F0 ui1 us0 -0 -l0 )0 "
                   "\n1 w1 pl1 p1 (1 al1 ri2 rs1 F1 ui2 us1 -1 -l1 )1 "
                   "\n2 w2 p2 (2 ti2 a2 [2 H2 ]2 di2 -2 )2 "
                   "\n1 pl1 p1 (1 al1 ti1 ts1 [1 B1 ]1 di1 ds1 -1 -l1 )1 ");
    assert_listing(&(bl_schedule){.n_layers = 1,
                                  .n_micro = 1,
                                  .ring_depth = 2,
                                  .has_backward = true,
                                  .is_trained = true,
                                  .embedding = 2,
                                  .first = 1},
                   "ri0 w2 ae2 E0 -2 ui0 "
                   "\n0 w0 w1 pl0 p0 p1 (0 al0 ri1 rs0 F0 ui1 us0 -0 -l0 )0 "
                   "\n1 p1 (1 ti1 a1 [1 H1 ]1 di1 -1 )1 ");
}

static void evaluation_in_words(void **state)
{
    (void)state;
    assert_listing(&(bl_schedule){.n_layers = 2, .n_micro = 1, .ring_depth = 3},
                   "ri0 E0 ui0 "
                   "\n0 pl0 p0 pl1 p1 p2 (0 al0 ri1 F0 ui1 -0 -l0 )0 "
                   "\n1 pl1 p1 p2 (1 al1 ri2 F1 ui2 -1 -l1 )1 "
                   "\n2 p2 (2 a2 H2 -2 )2 ");
}

/* ---- rules ---- */

/* A ring as the base and the adapter have it: prefetch fills, acquire needs, release empties. */
typedef struct rules {
    const bl_schedule *schedule;
    bool base[64], lora[64]; /* [unit]: held */
    bool head_is_coming;     /* prefetched by the visit under way: nothing may follow */
    int64_t n_visits, n_computed, top_inputs, top_saved;
    bool is_open;
} rules;

static int64_t n_held(const bool *held)
{
    int64_t n = 0;
    for (int i = 0; i < 64; i++) n += held[i];
    return n;
}

static void check_stacks(rules *r, bl_action_kind kind, int64_t entry)
{
    switch (kind) {
    case BL_ACTION_RESERVE_INPUT:
        assert_int_equal(entry, r->top_inputs);
        break;
    case BL_ACTION_PUT_INPUT:
        assert_int_equal(entry, r->top_inputs++);
        break;
    case BL_ACTION_TAKE_INPUT:
        assert_int_equal(entry, r->top_inputs - 1);
        break;
    case BL_ACTION_DROP_INPUT:
        assert_int_equal(entry, --r->top_inputs);
        break;
    case BL_ACTION_RESERVE_SAVED:
        assert_int_equal(entry, r->top_saved);
        break;
    case BL_ACTION_PUT_SAVED:
        assert_int_equal(entry, r->top_saved++);
        break;
    case BL_ACTION_TAKE_SAVED:
        assert_int_equal(entry, r->top_saved - 1);
        break;
    case BL_ACTION_DROP_SAVED:
        assert_int_equal(entry, --r->top_saved);
        break;
    default:
        break;
    }
}

static bl_status check_action(void *user, const bl_action *action)
{
    rules *r = user;
    const bl_schedule *s = r->schedule;
    int64_t unit = action->unit;

    switch (action->kind) {
    case BL_ACTION_VISIT:
        assert_int_equal(action->visit, r->n_visits++);
        r->head_is_coming = false;
        break;
    case BL_ACTION_PREFETCH_BASE:
        assert_false(r->head_is_coming);
        if (n_held(r->base) < s->ring_depth) r->base[unit] = true;
        r->head_is_coming = unit == s->n_layers;
        break;
    case BL_ACTION_PREFETCH_LORA:
        r->lora[unit] = true;
        break;
    case BL_ACTION_ACQUIRE_LORA:
        assert_true(r->lora[unit] && r->base[unit]);
        break;
    case BL_ACTION_FORWARD:
    case BL_ACTION_BACKWARD:
        assert_true(r->is_open && r->base[unit] && r->lora[unit]);
        r->n_computed++;
        break;
    case BL_ACTION_HEAD:
        assert_true(r->is_open);
        break;
    case BL_ACTION_RELEASE_BASE:
        r->base[unit] = false;
        break;
    case BL_ACTION_RELEASE_LORA:
        r->lora[unit] = false;
        break;
    case BL_ACTION_BEGIN:
        r->is_open = true;
        break;
    case BL_ACTION_END:
        r->is_open = false;
        break;
    default:
        check_stacks(r, action->kind, unit);
    }
    return BL_OK;
}

static void check_rules(const bl_schedule *s)
{
    rules r = {.schedule = s};
    int64_t per_layer = s->has_backward ? 2 : 1;

    for (int pass = 0; pass < 2; pass++) { /* the second uses the first one's prefetches */
        r.n_visits = r.n_computed = r.top_inputs = r.top_saved = 0;
        assert_int_equal(bl_schedule_run(s, check_action, &r), BL_OK);
        assert_int_equal(r.n_visits, bl_schedule_n_visits(s));
        assert_int_equal(r.n_computed, per_layer * s->n_layers * s->n_micro);
        assert_int_equal(n_held(r.lora), 0);
        assert_int_equal(r.top_saved, 0);
        assert_int_equal(r.top_inputs, s->has_backward ? 0 : s->n_layers + 1);
    }
}

static void every_pass_keeps_the_rules(void **state)
{
    (void)state;
    for (int i = 0; i < 7 * 5 * 2 * 2; i++)
        check_rules(&(bl_schedule){.n_layers = 1 + i % 7,
                                   .n_micro = 1 + i % 3,
                                   .ring_depth = 1 + i / 7 % 5,
                                   .has_backward = i / 35 % 2,
                                   .head_is_tied = i / 70});
}

static bl_status stop_at_head(void *user, const bl_action *action)
{
    ++*(int *)user;
    return action->kind == BL_ACTION_ACQUIRE_HEAD ? BL_FAIL(BL_ESTOPPED, "enough") : BL_OK;
}

static void a_failing_action_ends_the_pass(void **state)
{
    const bl_schedule s = {.n_layers = 1, .n_micro = 1, .ring_depth = 1, .has_backward = true};
    int n = 0;

    (void)state;
    assert_int_equal(bl_schedule_run(&s, stop_at_head, &n), BL_ESTOPPED);
    assert_int_equal(n, 3 + 13 + 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_in_words),
        cmocka_unit_test(a_tied_head_in_words),
        cmocka_unit_test(experts_in_words),
        cmocka_unit_test(trained_weights_in_words),
        cmocka_unit_test(frozen_layers_in_words),
        cmocka_unit_test(evaluation_in_words),
        cmocka_unit_test(every_pass_keeps_the_rules),
        cmocka_unit_test(a_failing_action_ends_the_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
