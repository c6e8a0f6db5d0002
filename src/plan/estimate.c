/* SPDX-License-Identifier: Apache-2.0 */
/* estimate.c -- a plan as an input of the time model: layers, rates, and the micro-batches of all
 * trainings. */
#include "plan/estimate.h"

#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
#include "base/sizes.h"

/* Links and shared resources are the machine's in any case. */
static bl_rates rates_of(const bl_plan_input *in)
{
    bl_rates rates = bl_time_rates_of(in->hardware, in->topology.n_on_host,
                                      (int)in->config->threads, bl_train_config_act(in->config));
    const bl_rates *measured = in->measured;

    if (!measured) return rates;
    rates.gemm_flops_per_s = rates.peak_flops_per_s = measured->gemm_flops_per_s;
    rates.lora_flops_per_s = measured->lora_flops_per_s;
    rates.head_flops_per_s = measured->head_flops_per_s;
    rates.attention_forward_flops_per_s = measured->attention_forward_flops_per_s;
    rates.attention_backward_flops_per_s = measured->attention_backward_flops_per_s;
    rates.memory_bytes_per_s = measured->memory_bytes_per_s;
    rates.optimizer_bytes_per_s = measured->optimizer_bytes_per_s;
    return rates;
}

/* As gathered for a product. Trained weights are stored in fp32; of other activations layers
 * compute with a copy. */
static bl_format format_of(const bl_plan_input *in, const bl_plan *plan, bl_format stored)
{
    bl_format format = stored;
    if (bl_train_config_is_full(in->config)) bl_format_from_dtype(plan->pass.act, &format);
    return format;
}

/* Consecutive layers that are alike. */
static int fill_runs(const bl_plan_input *in, const bl_plan *plan, bl_time_run *runs)
{
    int n_runs = 0, n_projections = in->model->arch->n_projections;
    size_t n_bytes = (size_t)n_projections * sizeof *in->formats;

    for (int64_t l = 0; l < in->model->n_layers; l++) {
        const bl_format *formats = &in->formats[l * n_projections];
        bl_time_run *run = n_runs > 0 ? &runs[n_runs - 1] : NULL;
        unsigned exceptions = in->bf16_matrices ? in->bf16_matrices[l] : 0;
        unsigned save = bl_pass_save_of(&plan->pass, in->model->n_layers, l);
        const bl_trained_unit *trained = in->trained ? &in->trained->unit[l] : NULL;
        bool is_last =
            in->trained && l == in->trained->first && !bl_trained_has_embedding(in->trained);
        bl_layer_kind kind = bl_model_kind(in->model, l);
        if (!run || run->kind != kind || memcmp(run->format, formats, n_bytes) != 0 ||
            run->bf16_matrices != exceptions || run->save != save || is_last || run->is_last ||
            (trained && memcmp(run->trained, trained, sizeof *trained) != 0)) {
            run = &runs[n_runs++];
            *run = (bl_time_run){.kind = kind,
                                 .save = save,
                                 .bf16_matrices = exceptions,
                                 .trained = trained,
                                 .is_last = is_last};
            memcpy(run->format, formats, n_bytes);
        }
        run->n_layers++;
    }
    for (int r = 0; r < n_runs; r++)
        for (int p = 0; p < n_projections; p++)
            runs[r].format[p] = format_of(in, plan, runs[r].format[p]);
    return n_runs;
}

static bl_time_preference preference_of(const bl_train_config *c)
{
    bl_losses losses = bl_plan_losses_of(c);
    bool has_companion = losses.has_reference && !c->precompute_ref_log_probs;

    return (bl_time_preference){.is_weighed = losses.is_preference,
                                .has_reference = has_companion,
                                .is_adapter = has_companion && c->init_adapter,
                                .has_mismatched = losses.is_unpaired};
}

/* Full micro-batches. */
static bl_time_training training_of(const bl_plan_input *in, const bl_plan_run *run,
                                    int n_overlapped)
{
    const bl_train_config *c = run->config;
    bl_time_preference preference = preference_of(c);
    double n_documents = preference.is_weighed && !preference.has_mismatched ? 2 : 1; /* pairs */
    int64_t n_rows = c->per_device_eval_batch_size,
            n_micro = bl_ceil_div(run->n_validation_rows, n_rows * in->topology.n_ranks);

    return (bl_time_training){
        .lora = run->lora,
        .micro_tokens = c->per_device_train_batch_size * run->longest_train_row,
        .document_tokens = (double)run->longest_train_row / n_documents,
        .label_part = 1,
        .useful_part = 1,
        .n_micro = (int)c->gradient_accumulation_steps,
        .preference = preference,
        .evaluation = {.n_micro = n_micro,
                       .micro_tokens = n_rows * run->longest_validation_row,
                       .document_tokens = (double)run->longest_validation_row / n_documents,
                       .is_overlapped = c->eval_overlap && n_overlapped > 0}};
}

static bl_time_input time_input(const bl_plan_input *in, const bl_plan *plan,
                                const bl_time_training *own)
{
    const bl_train_config *c = in->config;
    bool is_full = bl_train_config_is_full(c);

    return (bl_time_input){
        .model = in->model,
        .lora = own->lora,
        .is_trained = is_full,
        .places_copy = plan->placement.places_copy,
        .trained = in->trained,
        .modules = in->modules,
        .moments = bl_train_config_moments(c),
        .optimizer_ratio = plan->optimizer.ratio,
        .optimizer_tier = plan->optimizer.tier,
        .head_dtype = is_full ? plan->pass.act : in->head_dtype,
        .kind = plan->pass.kind,
        .act = plan->pass.act,
        .mode = c->compute_dtype == BL_COMPUTE_FP8 ? BL_MATMUL_FP8 : BL_MATMUL_BF16,
        .sums = plan->pass.sums,
        .rates = rates_of(in),
        .n_ranks = in->topology.n_ranks,
        .n_hosts = (int)bl_ceil_div(in->topology.n_ranks, in->topology.n_on_host),
        .n_shards = bl_plan_n_shards(c, &in->topology),
        .sum_block = (int)c->sum_block,
        .gathers_by_hosts = c->gather_by_hosts,
        .ring_depth = (int)c->ring_depth,
        .micro_tokens = own->micro_tokens,
        .document_tokens = own->document_tokens,
        .label_part = own->label_part,
        .useful_part = own->useful_part,
        .n_micro = own->n_micro,
        .preference = own->preference,
        .evaluation = own->evaluation,
        .group = plan->pass.max_group,
        .n_overlapped = bl_plan_count_overlapped(in, &plan->pass),
        .offload_ratio = plan->placement.ratio,
        .tier = plan->placement.tier,
        .host_part = plan->placement.host_part,
        .offload_activations = plan->pass.offload_activations,
        .writes_device = plan->pass.kind == BL_DEVICE_CPU,
        .decodes_each_use = bl_plan_uses_prepared(in, &plan->pass) &&
                            bl_linear_prepared_bytes(&plan->pass.prepared) == 0};
}

bl_status bl_plan_time_open(const bl_plan_input *in, const bl_plan *plan, bl_plan_time *out)
{
    int n_overlapped = bl_plan_count_overlapped(in, &plan->pass);
    bl_plan_run first = bl_plan_run_at(in, 0);
    bl_time_training own = training_of(in, &first, n_overlapped);

    *out = (bl_plan_time){.input = time_input(in, plan, &own),
                          .runs = calloc((size_t)in->model->n_layers, sizeof *out->runs),
                          .others = calloc((size_t)in->n_others + 1, sizeof *out->others)};
    if (!out->runs || !out->others) {
        bl_plan_time_close(out);
        return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    }
    for (int i = 0; i < in->n_others; i++)
        out->others[i] = training_of(in, &in->others[i], n_overlapped);
    out->input.runs = out->runs;
    out->input.n_runs = fill_runs(in, plan, out->runs);
    out->input.others = out->others;
    out->input.n_others = in->n_others;
    return BL_OK;
}

void bl_plan_time_close(bl_plan_time *time)
{
    free(time->runs);
    free(time->others);
}

bl_status bl_plan_estimate(const bl_plan_input *in, const bl_plan *plan, bl_time_estimate *out)
{
    bl_plan_time time;

    BL_TRY(bl_plan_time_open(in, plan, &time));
    bl_status st = bl_time_predict(&time.input, out);
    bl_plan_time_close(&time);
    /* Rates are checked against peaks where they are read (bl_hardware_check_peaks). */
    if (st == BL_OK && out->mfu > 1)
        st = BL_FAIL(BL_EINTERNAL, "plan: MFU %.1f %%: a step cannot compute above the peak of %s",
                     100 * out->mfu, in->hardware->name);
    return st;
}
