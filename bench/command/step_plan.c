/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that a rank of `ballast bench step` needs, by the functions that a training's plan
 * uses. scripts/gpu-check asks this before each of its steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "bench/command/step_internal.h"
#include "plan/case.h"
#include "plan/plan.h"

typedef struct needs {
    int64_t gpu, gpu_available, host, host_available;
} needs;

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

static bl_status choose(const step_options *o, bl_plan_case *c, bl_plan *plan, needs *out)
{
    BL_TRY(bl_plan_choose(&c->input, plan));
    out->gpu = bl_memory_gpu_bytes(&plan->memory, 1);
    out->gpu_available = bl_plan_gpu_available_bytes(&c->input);
    out->host = host_bytes(o, c->model.config.n_layers, &plan->memory);
    out->host_available =
        o->plan_host_gb > 0 ? (int64_t)(o->plan_host_gb * 1e9) : bl_memory_available_bytes();
    return BL_OK;
}

static void print(const step_options *o, const bl_plan_case *c, const bl_plan *plan, const needs *n)
{
    int64_t n_layers = c->model.config.n_layers;
    bool all = o->distinct_layers == 0 || o->distinct_layers >= n_layers;

    bl_bench_step_print_case(o, &(step_case){.device = "cuda",
                                             .n_layers = n_layers,
                                             .n_distinct = all ? n_layers : o->distinct_layers,
                                             .visit_micro = plan->pass.max_group});
    printf("\"plan_for\":\"%s\",\"gpu_gb\":%.1f,\"gpu_available_gb\":%.1f,\"host_gb\":%.1f,"
           "\"host_available_gb\":%.1f,\"fits\":%s}\n",
           o->plan_for, 1e-9 * (double)n->gpu, 1e-9 * (double)n->gpu_available,
           1e-9 * (double)n->host, 1e-9 * (double)n->host_available,
           n->gpu <= n->gpu_available && n->host <= n->host_available ? "true" : "false");
    fflush(stdout);
}

bl_status bl_bench_step_plan(const step_options *o, int rank, int n_ranks)
{
    bl_plan_case c;
    bl_plan plan = {0};
    needs n = {0};

    bl_log_set_silent(true);
    bl_status st = open_case(o, rank, n_ranks, &c);
    if (st == BL_OK) st = choose(o, &c, &plan, &n);
    if (st == BL_OK) print(o, &c, &plan, &n);
    bl_plan_case_close(&c);
    BL_TRY(st);
    if (n.gpu > n.gpu_available)
        return BL_FAIL(BL_ENOMEM,
                       "bench step: %.1f GB of GPU memory are needed, %.1f GB are available",
                       1e-9 * (double)n.gpu, 1e-9 * (double)n.gpu_available);
    if (n.host > n.host_available)
        return BL_FAIL(BL_ENOMEM,
                       "bench step: %.1f GB of host memory are needed, %.1f GB are available",
                       1e-9 * (double)n.host, 1e-9 * (double)n.host_available);
    return BL_OK;
}
