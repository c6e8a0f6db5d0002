/* SPDX-License-Identifier: Apache-2.0 */
/* published_full.c -- a full fine-tuning that another system published, predicted with its choices,
 * then with Ballast's. */
#include "plan/published.h"

#include "base/sizes.h"

/* Hugging Face, "Fine-tuning Llama 2 70B using PyTorch FSDP" (2023): two hosts of eight A100 80 GB
 * with 96 cores and EFA, one packed row of 2,048 tokens per GPU, 500 steps, gradient
 * checkpointing. */
enum { GPUS = 8, HOSTS = 2, ROW_TOKENS = 2048, STEPS = 500 };
static const double HOURS = 13.5;

/* Assumed: p4de.24xlarge (96 cores), which has four adapters of 100 Gb/s, at 85 % of their rate. */
static const double NETWORK_BYTES_PER_S = 0.85 * 50e9;

typedef struct job {
    bl_model_config model;
    bl_lora_layout lora;
    bl_time_run run;
    bl_hardware hardware;
    bl_time_input input;
} job;

static bl_status open_job(job *j)
{
    *j = (job){.run = {.save = BL_SAVE_S0}};
    BL_TRY(bl_model_config_preset("llama2-70b", &j->model));
    BL_TRY(bl_hardware_preset("2x8xa100", &j->hardware));
    for (int p = 0; p < j->model.arch->n_projections; p++) j->run.format[p] = BL_FORMAT_BF16;
    j->run.n_layers = j->model.n_layers;
    bl_lora_layout_init(&j->model, NULL, &j->lora);
    j->input = (bl_time_input){
        .model = &j->model,
        .lora = &j->lora,
        .is_trained = true,
        .moments = BL_F32,
        .runs = &j->run,
        .n_runs = 1,
        .head_dtype = BL_BF16,
        .kind = BL_DEVICE_CUDA,
        .act = BL_BF16,
        .mode = BL_MATMUL_BF16,
        .rates = bl_time_rates_of(&j->hardware, GPUS, 1, BL_BF16),
        .n_ranks = GPUS * HOSTS,
        .n_hosts = HOSTS,
        .n_shards = GPUS * HOSTS,
        .ring_depth = 2,
        .micro_tokens = ROW_TOKENS,
        .document_tokens = ROW_TOKENS,
        .label_part = 1,
        .useful_part = 1,
        .n_micro = 1,
        .group = 1,
        .tier = BL_TIER_HOST,
        .habits = {.recomputes_all = true, .is_eager = true, .reduces_in_ring = true},
    };
    j->input.rates.network_bytes_per_s = NETWORK_BYTES_PER_S;
    return BL_OK;
}

static bl_status add_row(const job *j, const char *change, bl_published_full *out)
{
    bl_published_row *row = &out->rows[out->n_rows++];
    row->change = change;
    return bl_time_predict(&j->input, &row->time);
}

bl_status bl_published_explain_full(bl_published_full *out)
{
    job j;

    BL_TRY(open_job(&j));
    double seconds = HOURS * 3600, tokens = (double)STEPS * ROW_TOKENS * GPUS * HOSTS;
    *out = (bl_published_full){.n_steps = STEPS, .hours = HOURS, .tokens_per_s = tokens / seconds};
    BL_TRY(add_row(&j, "as published", out));
    out->mfu = out->rows[0].time.model_flops * STEPS /
               (seconds * j.input.rates.peak_flops_per_s * j.input.n_ranks);
    j.input.habits.is_eager = false;
    BL_TRY(add_row(&j, "fused matrices and operations", out));
    j.input.habits.recomputes_all = false;
    BL_TRY(add_row(&j, "what nobody reads is not computed again", out));
    j.input.habits.reduces_in_ring = false;
    BL_TRY(add_row(&j, "gradients are added in a fixed order, fp32", out));
    j.input.gathers_by_hosts = true;
    BL_TRY(add_row(&j, "weights enter each host once (gather_by_hosts)", out));
    BL_TRY(open_job(&j));
    j.input.micro_tokens *= GPUS * HOSTS;
    return add_row(&j, "as published, with 16 rows per GPU", out);
}
