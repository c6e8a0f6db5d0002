/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of a rank on a device made of rates (plan/run_pass_internal.h): after the first pass
 * they take no memory, and what they take is the amount that the owners' functions plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/state.h"
#include "base/sizes.h"
#include "model/batch.h"
#include "model/pass.h"
#include "plan/bound_internal.h"
#include "plan/run_pass_internal.h"
#include "plan/time_case.h"

static void must(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

/* Of tables that every rank has; it leaves out the sums of a step and the scale of clipping. */
enum { SMALL_BYTES = 4096 };

static bl_pass_options pass_options(const bl_time_input *in, const bl_base_layout *layout)
{
    bl_pass_options options = {.kind = in->kind,
                               .act = in->act,
                               .mode = in->mode,
                               .T_max = in->micro_tokens,
                               .max_group = in->group,
                               .max_companions = 1,
                               .ring_depth = in->ring_depth,
                               .save = in->runs->save,
                               .training = true,
                               .offload_activations = in->offload_activations,
                               .lora_r = in->lora->options.r};

    bl_linear_prepared_measure(in->kind, layout, in->model->n_layers, in->mode, NULL,
                               &options.prepared);
    return options;
}

/* As plan/memory.c adds them up. */
static void compare_memory(const time_case *c, const bl_device *device)
{
    const bl_time_input *in = &c->input;
    size_t n_formats = (size_t)(in->model->n_layers * in->model->arch->n_projections);
    bl_format *formats = calloc(n_formats, sizeof *formats);
    bl_placement placement = {
        .ratio = in->offload_ratio, .tier = in->tier, .host_part = in->host_part};
    bl_base_layout layout;
    bl_placed_bytes placed;

    assert_non_null(formats);
    for (size_t i = 0; i < n_formats; i++)
        formats[i] = in->runs->format[i % (size_t)in->model->arch->n_projections];
    must(bl_model_layout(in->model, formats, in->head_dtype, in->kind, in->n_shards, &layout));
    bl_pass_options options = pass_options(in, &layout);
    bl_pass_bytes pass = bl_pass_measure(in->model, &options);
    bl_model_whole_bytes whole =
        bl_model_measure_whole(in->model, &layout, in->kind, in->micro_tokens);
    bl_adapter_bytes adapter = bl_trained_state_measure(in->act, in->lora, in->model->n_layers,
                                                        in->n_ranks, in->ring_depth);
    int64_t tokens = bl_batches_micro_bytes(in->micro_tokens);

    must(bl_placement_measure(&layout, &placement, in->kind, in->ring_depth, &placed));
    int64_t n_device = (int64_t)(placed.device + placed.ring) + whole.scales + whole.vectors +
                       whole.rope_tables + 4 * adapter.shard + adapter.copy + adapter.part +
                       2 * adapter.whole + adapter.ring + pass.inputs + pass.saved + pass.boundary +
                       pass.logits + pass.workspace + pass.feed + pass.companions + tokens;
    int64_t n_host = (int64_t)placed.host + pass.host_inputs + pass.host_saved +
                     pass.host_embeddings + tokens + adapter.staging;
    int64_t took_device = (int64_t)bl_device_peak_bytes(device, BL_SPACE_DEVICE),
            took_host = (int64_t)bl_device_peak_bytes(device, BL_SPACE_HOST);
    /* The bounce buffer of disk pages is part of the reader's bytes. */
    assert_in_range(took_device, n_device, n_device + SMALL_BYTES);
    assert_in_range(took_host, n_host, n_host + (int64_t)placed.reader + SMALL_BYTES);
    bl_base_layout_free(&layout);
    free(formats);
}

/* plan_pass_sink */
static bl_status run(void *user, const plan_round *round, bool is_last)
{
    BL_TRY(plan_rank_run(user, round));
    return is_last ? plan_rank_join(user) : BL_OK;
}

static void measure(const time_case *c)
{
    plan_round round;
    plan_rank *rank;

    must(plan_round_create(&c->input, &round));
    must(plan_rank_create(&c->input, false, NULL, NULL, &rank));
    must(plan_round_each(&round, run, rank));
    int64_t n_allocations = bl_device_allocations(plan_rank_device(rank));
    must(plan_round_each(&round, run, rank));
    assert_int_equal(bl_device_allocations(plan_rank_device(rank)), n_allocations);
    compare_memory(c, plan_rank_device(rank));
    plan_rank_destroy(rank);
    plan_round_free(&round);
}

/* Tiers, micro-batches, the depth of the ring, offloaded activations, one and several ranks. */
static void vary(time_case *c)
{
    static const struct {
        double ratio, host_part;
        bl_tier tier;
        bool offloads_activations;
        int n_micro, depth, n_ranks;
        unsigned save;
    } rows[] = {
        {0, 0, BL_TIER_HOST, false, 1, 2, 8, BL_SAVE_S0},
        {0, 0, BL_TIER_HOST, false, 2, 2, 1, BL_SAVE_S0},
        {0.5, 0, BL_TIER_HOST, false, 3, 1, 2, BL_SAVE_S0},
        {1, 0, BL_TIER_HOST, true, 1, 3, 8, BL_SAVE_S4},
        {0.4, 0, BL_TIER_DISK, false, 1, 2, 8, BL_SAVE_S0},
        {0.8, 0.4, BL_TIER_DISK, true, 4, 2, 8, BL_SAVE_S0},
    };

    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        bl_time_input *in = &c->input;
        in->offload_ratio = rows[i].ratio;
        in->host_part = rows[i].host_part;
        in->tier = rows[i].tier;
        in->offload_activations = rows[i].offloads_activations;
        in->n_micro = in->group = rows[i].n_micro;
        in->ring_depth = rows[i].depth;
        in->n_ranks = in->n_shards = rows[i].n_ranks;
        c->run.save = rows[i].save;
        measure(c);
    }
}

static void a_cpu(void **state)
{
    static const char *const models[] = {"llama3.1-8b", "falcon-40b"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(models); i++) {
        time_case c;
        time_case_init(&c, models[i]);
        c.input.kind = BL_DEVICE_CPU;
        c.input.act = BL_F32;
        c.input.mode = BL_MATMUL_BF16;
        c.input.writes_device = true;
        vary(&c);
    }
}

static void a_gpu(void **state)
{
    time_case c;

    (void)state;
    time_case_init(&c, "llama3.1-8b");
    vary(&c);
    c.input.mode = BL_MATMUL_BF16;
    vary(&c);
}

/* Bounds are at most 10 % below the run, whichever training is first in a round. */
static void bounds_of_several_trainings(void **state)
{
    bl_time_estimate run;
    time_case c;

    (void)state;
    time_case_init(&c, "llama3.1-8b");
    for (int is_last = 0; is_last < 2; is_last++)
        for (int group = 1; group <= 5; group += 4) {
            plan_bounds *bounds;
            double bound_s;
            bl_time_training other = {.lora = &c.lora,
                                      .micro_tokens = is_last ? 4096 : 512,
                                      .document_tokens = 512,
                                      .label_part = 1,
                                      .useful_part = 1,
                                      .n_micro = is_last ? 4 : 1};
            c.input.micro_tokens = is_last ? 512 : 4096;
            c.input.document_tokens = 512;
            c.input.n_micro = is_last ? 1 : 4;
            c.input.others = &other;
            c.input.n_others = 1;
            c.input.group = group;
            must(plan_bounds_create(&bounds));
            must(plan_bound(bounds, &c.input, &bound_s));
            must(bl_time_predict(&c.input, &run));
            print_message("group %d: bound %.3f s, run %.3f s\n", group, bound_s, run.step_s);
            assert_true(bound_s > 0.9 * run.step_s && bound_s < 1.01 * run.step_s);
            plan_bounds_destroy(bounds);
        }
}

/* As many as a command may have (config/runs.c). */
static void most_runs(void **state)
{
    enum { N_OTHERS = 255 };
    static bl_time_training others[N_OTHERS];
    bl_time_estimate run;
    time_case c;

    (void)state;
    time_case_init(&c, "llama3.2-1b");
    for (int i = 0; i < N_OTHERS; i++)
        others[i] = (bl_time_training){.lora = &c.lora,
                                       .micro_tokens = 4096,
                                       .document_tokens = 4096,
                                       .label_part = 1,
                                       .useful_part = 1,
                                       .n_micro = 1};
    c.input.others = others;
    c.input.n_others = N_OTHERS;
    must(bl_time_predict(&c.input, &run));
    assert_true(run.step_s > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_cpu), cmocka_unit_test(a_gpu),
                                       cmocka_unit_test(bounds_of_several_trainings),
                                       cmocka_unit_test(most_runs)};
    return cmocka_run_group_tests_name("run a pass", tests, NULL, NULL);
}
