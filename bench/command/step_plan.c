/* SPDX-License-Identifier: Apache-2.0 */
/* The memory and the time that a rank of `ballast bench step` needs, by the functions that a
 * training's plan uses. scripts/gpu-check asks this before each of its steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "bench/command/plan_for.h"
#include "bench/command/step_internal.h"
#include "plan/case.h"
#include "plan/plan.h"
#include "plan/search.h"

/* Weights that are made up and copied, assumed. */
static const double MADE_BYTES_PER_S = 10e9;

/* One rank of the job in this process, alone on its GPU: the other ranks are copies on the
 * device. */
static bl_status open_case(const step_options *o, int rank, int n_ranks, bl_plan_case *out)
{
    bl_bench_arguments *a = calloc(1, sizeof *a);
    char *words[2 * BL_BENCH_MAX_KEYS], machine[BL_HARDWARE_NAME_BYTES];
    bool is_here = strcmp(o->plan_for, "here") == 0;

    if (!a) return BL_FAIL(BL_ENOMEM, "out of memory: the keys of a training");
    bl_bench_add(a, "model_name_or_path", "%s", o->model);
    bl_bench_step_add_keys(o, n_ranks, a);
    int n_words = bl_bench_words(a, words);
    snprintf(machine, sizeof machine, "%dx%s", n_ranks, o->plan_for);
    bl_status st = bl_plan_case_open(is_here ? NULL : machine, o->tokens, n_words, words, out);
    if (st == BL_OK && out->hardware.kind != BL_DEVICE_CUDA)
        st = BL_FAIL(BL_EUSAGE, "--plan_for %s: not a GPU", o->plan_for);
    if (st == BL_OK && o->layers > 0) out->model.config.n_layers = o->layers;
    out->input.topology =
        (bl_topology){.n_ranks = n_ranks, .first_here = rank, .n_here = 1, .n_on_host = 1};
    out->input.available_bytes = -1;
    free(a);
    return st;
}

/* Of the base, host memory holds the distinct layers alone. */
static int64_t host_bytes(const step_options *o, int64_t n_layers, const bl_memory_ledger *m)
{
    int64_t base = m->item[BL_MEMORY_BASE].host;

    if (o->distinct_layers == 0 || o->distinct_layers >= n_layers) return m->total;
    return m->total - base + base / n_layers * o->distinct_layers;
}

static bl_status choose(const step_options *o, bl_plan_case *c, bl_plan *plan, bl_bench_needs *out)
{
    int64_t n_layers = c->model.config.n_layers;

    BL_TRY(bl_plan_choose(&c->input, plan));
    const bl_memory_ledger *m = &plan->memory;
    out->gpu = bl_memory_gpu_bytes(m, 1);
    out->gpu_available = bl_plan_gpu_available_bytes(&c->input);
    out->host = host_bytes(o, n_layers, m);
    out->host_available =
        o->plan_host_gb > 0 ? (int64_t)(o->plan_host_gb * 1e9) : bl_memory_available_bytes();
    int64_t made =
        m->item[BL_MEMORY_BASE].device + out->host - m->total + m->item[BL_MEMORY_BASE].host;
    out->seconds = bl_bench_start_s + (double)made / MADE_BYTES_PER_S;
    return BL_OK;
}

/* A step as the plan of a training predicts it, on the link that is simulated. */
static bl_status predict(const step_options *o, bl_plan_case *c, const bl_plan *plan,
                         bl_time_estimate *out)
{
    if (o->link_gb_per_s > 0) c->hardware.gather_bytes_per_s.value = 1e9 * o->link_gb_per_s;
    return bl_plan_estimate(&c->input, plan, out);
}

static void print(const step_options *o, const bl_plan_case *c, const bl_plan *plan,
                  const bl_time_estimate *time)
{
    int64_t n_layers = c->model.config.n_layers;
    bool all = o->distinct_layers == 0 || o->distinct_layers >= n_layers;

    bl_bench_step_print_case(o, &(step_case){.device = "cuda",
                                             .n_layers = n_layers,
                                             .n_distinct = all ? n_layers : o->distinct_layers,
                                             .visit_micro = plan->pass.max_group});
    printf("\"predicted_step_s\":%.4f,\"predicted_tokens_per_s\":%.1f,", time->step_s,
           time->tokens_per_s);
}

bl_status bl_bench_step_plan(const step_options *o, int rank, int n_ranks)
{
    bl_plan_case c;
    bl_plan plan = {0};
    bl_time_estimate time;
    bl_bench_needs needs = {0};

    bl_log_set_silent(true);
    bl_status st = open_case(o, rank, n_ranks, &c);
    if (st == BL_OK) st = choose(o, &c, &plan, &needs);
    if (st == BL_OK) st = predict(o, &c, &plan, &time);
    if (st == BL_OK) print(o, &c, &plan, &time);
    bl_plan_case_close(&c);
    BL_TRY(st);
    needs.seconds += (double)(o->steps + 1) * time.step_s;
    return bl_bench_plan_end("step", o->plan_for, &needs);
}
