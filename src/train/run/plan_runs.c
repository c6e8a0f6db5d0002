/* SPDX-License-Identifier: Apache-2.0 */
/* plan_runs.c -- one plan for all runs over a base: the placement of the base and the sizes of the
 * pass. */
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "train/rank/preference.h"
#include "train/run/runs.h"

static double trainable_m(const bl_job *job)
{
    return (double)(bl_lora_n_weights(&job->lora, job->model->config.n_layers) +
                    job->modules.set.n_weights) *
           1e-6;
}

/* What the names in lora_target_modules reached of routed experts. */
static void print_experts(const bl_job *job)
{
    const bl_model_config *model = &job->model->config;
    const bl_lora_layout *lora = &job->lora;
    const bl_string_list *list = &job->config->lora_target_modules;
    bool is_given = bl_train_config_given(job->config, "lora_target_modules");
    bl_peft_modules modules = bl_arch_peft_modules(model->arch);

    if (modules.n_routed == 0) return;
    if (!bl_lora_has_experts(lora))
        bl_log_info("routed experts are frozen: name experts in lora_target_modules to train them");
    for (int p = modules.n; p < modules.n + modules.n_routed; p++) {
        char names[256] = "";
        size_t used = 0;
        for (int64_t i = 0; is_given && i < list->n_items && used < sizeof names; i++) {
            int module, piece;
            bool is_all = strcmp(list->items[i], "all-linear") == 0;
            if (!is_all && (!bl_peft_expert_parse(&modules, list->items[i], &module, &piece) ||
                            (module >= 0 && module != p)))
                continue;
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "; ",
                                     list->items[i]);
        }
        if (lora->a_offset[p] >= 0)
            bl_log_info("LoRA on %s of all %lld experts: r %lld, scale %g%s",
                        model->arch->projections[p].module, (long long)model->n_experts,
                        (long long)lora->r[p], (double)lora->scale_of[p], names);
    }
    if (is_given && strcmp(list->items[0], "all-linear") == 0)
        bl_log_info("all-linear has the routed experts and not the router; PEFT's has the router "
                    "and no routed experts");
}

bl_status bl_job_print_model(const bl_job *job, bool has_adapter)
{
    const bl_train_config *c = job->config;
    char products[BL_CUDA_GEMM_TEXT_BYTES], trained[64] = "", chosen[BL_TRAINED_TEXT_BYTES];

    BL_TRY(bl_products_describe(job, products));
    bl_log_info("products: %s", products);
    if (c->device == BL_CONFIG_DEVICE_CPU && !bl_train_config_given(c, "compute_dtype") &&
        bl_cpu_gemm_has_bf16())
        bl_log_info("products are in fp32; this processor has AVX512-BF16: compute_dtype bf16 "
                    "is faster and rounds more");
    if (job->model->is_trained)
        snprintf(trained, sizeof trained, "; %s trainable",
                 job->model->trained.is_all ? "all" : "some");
    else if (has_adapter)
        snprintf(trained, sizeof trained, "; LoRA r %lld, %.2f M trainable",
                 (long long)job->lora.options.r, trainable_m(job));
    bl_log_info("model: %.1f M parameters, %lld layers%s; %d rank%s x %lld thread%s, shards of "
                "%lld",
                (double)bl_model_config_n_params(&job->model->config) * 1e-6,
                (long long)job->model->config.n_layers, trained, job->topology.n_ranks,
                job->topology.n_ranks == 1 ? "" : "s", (long long)c->threads,
                c->threads == 1 ? "" : "s", (long long)c->shard_size);
    if (has_adapter && job->modules.names.n > 0)
        bl_log_info("modules_to_save: %.2f M weights in %lld tensors, whole on every rank",
                    (double)job->modules.set.n_weights * 1e-6,
                    (long long)job->modules.set.n_tensors);
    if (has_adapter) print_experts(job);
    if (has_adapter && job->lora.n_table_floats > 0)
        bl_log_info("LoRA terms of the embedding and the head: %.2f M weights, whole on every rank",
                    (double)job->lora.n_table_floats * 1e-6);
    if (!job->model->is_trained || job->model->trained.is_all) return BL_OK;
    bl_trained_describe(&job->model->config, &job->model->trained, chosen);
    bl_log_info("trainable_modules, freeze: %s", chosen);
    return BL_OK;
}

/* The plan assumes that all micro-batches are as large as the longest row allows. */
static void print_expected(const bl_job *job, const bl_plan_rows *rows)
{
    int64_t bound = job->plan.memory.total, expected = job->expected.total;

    if (rows->n_micro > 0 && expected < bound / 100 * 99)
        bl_log_info("memory expected with these rows: %.4g GB; micro-batches have %.0f tokens on "
                    "average, %lld at most, of %lld",
                    bl_gb(expected), rows->mean, (long long)rows->largest,
                    (long long)job->plan.pass.T_max);
}

/* Of the reference's sums, of all ranks of this process. */
static int64_t reference_bytes(const bl_job *job)
{
    bl_reference_size size = bl_preference_size(job);
    return job->topology.n_here * bl_reference_sums_bytes(&size);
}

static bl_plan_run plan_run(const bl_job *job)
{
    return (bl_plan_run){.config = job->config,
                         .lora = &job->lora,
                         .longest_train_row = job->data.train.longest,
                         .longest_validation_row = job->data.validation.longest,
                         .n_validation_rows = job->data.validation.n,
                         .data_bytes = bl_run_data_bytes(&job->data),
                         .tokenizer_bytes = job->data.tokenizer_bytes + reference_bytes(job),
                         .rows = bl_run_data_measure(job->config, &job->data)};
}

/* The input borrows others[n - 1]. */
static bl_plan_input input_of(const bl_training *const *trainings, int n, bl_plan_run *others)
{
    const bl_job *first = &trainings[0]->job;
    bl_plan_input input = bl_job_plan_input(first);

    input.is_training = true;
    input.rows = bl_run_data_measure(first->config, &first->data);
    input.tokenizer_bytes += reference_bytes(first);
    for (int i = 1; i < n; i++) {
        bl_plan_run run = plan_run(&trainings[i]->job);
        bl_plan_add_run(&input, others, &run);
    }
    return input;
}

static bl_status plan(const bl_training *const *trainings, int n, const bl_plan_limits *limits,
                      bl_plan_run *others, bl_job *job)
{
    bl_plan_input input = input_of(trainings, n, others);

    for (int i = 0; i < n && n > 1; i++)
        if (trainings[i]->job.modules.names.n > 0)
            return BL_FAIL(BL_EUSAGE,
                           "%s: modules_to_save replaces modules of the base, which several runs "
                           "share: start them one after the other",
                           trainings[i]->job.config->output_dir);

    if (limits) {
        input.config = limits->config;
        input.available_bytes = limits->available_bytes;
        input.gpu_available_bytes = limits->gpu_available_bytes;
    }
    BL_TRY(limits ? bl_job_choose_pass(job, &input) : bl_job_choose_plan(job, &input));
    BL_TRY(bl_plan_expect_memory(&input, &job->plan.placement, &job->plan.optimizer,
                                 &job->plan.pass, &job->expected));
    if (!limits) BL_TRY(bl_job_print_model(job, true));
    for (int i = limits ? 0 : 1; i < n; i++)
        bl_log_info("%s: LoRA r %lld, %.2f M trainable", trainings[i]->name,
                    (long long)trainings[i]->job.lora.options.r, trainable_m(&trainings[i]->job));
    bl_plan_print(&input, &job->plan);
    print_expected(job, &input.rows);
    return bl_plan_check(&input, &job->plan);
}

bl_status bl_trainings_plan(const bl_training *const *trainings, int n,
                            const bl_plan_limits *limits, bl_job *job)
{
    bl_plan_run *others = calloc((size_t)n, sizeof *others);

    if (!others) return BL_FAIL(BL_ENOMEM, "%d runs", n);
    bl_status st = plan(trainings, n, limits, others, job);
    free(others);
    return st;
}
