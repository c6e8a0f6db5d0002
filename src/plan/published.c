/* SPDX-License-Identifier: Apache-2.0 */
/* published.c -- two published runs of another system, recomputed step by step with its choices
 * replaced by Ballast's. */
#include "plan/published.h"

#include <string.h>

#include "base/sizes.h"

/* The recipe: 4 rows of 512 + 512 padded tokens per GPU, LoRA of rank 64 on all projections,
 * offload_ratio 0.75 on one host (Snowflake-Labs/snowflake-arctic,
 * training/llama3.1/run-llama.sh). */
enum { GPUS = 8, ROWS = 4, ROW_TOKENS = 1024, RANK = 64 };
static const double OFFLOADED = 0.75;

/* 20 million tokens in 24 hours on one host, in 4 hours on two. */
static const double ONE_HOST_TOKENS_PER_S = 231, TWO_HOSTS_TOKENS_PER_S = 1389;

/* Not published: how much of the padded rows is padding. 20 M tokens that count padding would leave
 * both jobs slower than the model by the same factor (docs/model.md); this is that factor. */
static const double USEFUL_PART = 0.55;

/* Device memory to memory that was allocated for the copy: PyTorch pull request 138018, an A100. */
static const double FRESH_PAGEABLE_BYTES_PER_S = 1.4e9;
/* All-gathers over hosts with eight 400 Gb/s adapters each: NCCL issue 1218. */
static const double NETWORK_BYTES_PER_S = 200e9;

typedef struct job {
    bl_model_config model;
    bl_lora_layout lora;
    bl_time_run run;
    bl_hardware hardware;
    bl_time_input input;
} job;

static bl_status open_job(int n_hosts, job *j)
{
    bl_lora_options lora = {.r = RANK, .alpha = RANK};

    *j = (job){.run = {.save = BL_SAVE_S0}};
    BL_TRY(bl_model_config_preset("llama3.1-405b", &j->model));
    BL_TRY(bl_hardware_preset(n_hosts == 1 ? "8xh100" : "2x8xh100", &j->hardware));
    for (int p = 0; p < j->model.arch->n_projections; p++) {
        lora.target[p] = true;
        j->run.format[p] = BL_FORMAT_FP8_ROW;
    }
    j->run.n_layers = j->model.n_layers;
    bl_lora_layout_init(&j->model, &lora, &j->lora);
    j->input = (bl_time_input){
        .model = &j->model,
        .lora = &j->lora,
        .runs = &j->run,
        .n_runs = 1,
        .head_dtype = BL_BF16,
        .kind = BL_DEVICE_CUDA,
        .act = BL_BF16,
        .mode = BL_MATMUL_BF16,
        .rates = bl_time_rates_of(&j->hardware, GPUS, 1, BL_BF16),
        .n_ranks = GPUS * n_hosts,
        .n_hosts = n_hosts,
        .n_shards = GPUS * n_hosts,
        .ring_depth = 2,
        .micro_tokens = ROWS * ROW_TOKENS,
        .document_tokens = ROW_TOKENS,
        .label_part = 1,
        .useful_part = USEFUL_PART,
        .n_micro = 1,
        .group = 1,
        .offload_ratio = n_hosts == 1 ? OFFLOADED : 0,
        .tier = BL_TIER_HOST,
        .habits = {.is_synchronous = true,
                   .gathers_decoded = true,
                   .copy_back_bytes_per_s = FRESH_PAGEABLE_BYTES_PER_S,
                   .recomputes_all = true,
                   .is_eager = true},
    };
    j->input.rates.network_bytes_per_s = NETWORK_BYTES_PER_S;
    j->input.rates.copy_in_bytes_per_s = j->hardware.pageable_copy_bytes_per_s.value;
    return BL_OK;
}

static bl_status add_row(const job *j, const char *change, bl_published *out)
{
    bl_published_row *row = &out->rows[out->n_rows++];
    row->change = change;
    return bl_time_predict(&j->input, &row->time);
}

static bl_status add_offloading_rows(job *j, bl_published *out)
{
    j->input.habits.copy_back_bytes_per_s = 0;
    BL_TRY(add_row(j, "shards are not copied back", out));
    j->input.rates.copy_in_bytes_per_s = j->hardware.copy_in_bytes_per_s.value;
    return add_row(j, "host memory is pinned", out);
}

bl_status bl_published_explain(int n_hosts, bl_published *out)
{
    job j;
    bl_time_habits *habits = &j.input.habits;

    *out = (bl_published){.n_hosts = n_hosts,
                          .tokens_per_s =
                              n_hosts == 1 ? ONE_HOST_TOKENS_PER_S : TWO_HOSTS_TOKENS_PER_S};
    BL_TRY(open_job(n_hosts, &j));
    BL_TRY(add_row(&j, "as published", out));
    if (n_hosts == 1) BL_TRY(add_offloading_rows(&j, out));
    habits->gathers_decoded = false;
    BL_TRY(add_row(&j, "FP8 codes are gathered, not bf16", out));
    habits->is_synchronous = false;
    BL_TRY(add_row(&j, "the next layer comes while this one computes", out));
    habits->is_eager = false;
    BL_TRY(add_row(&j, "fused matrices and operations", out));
    habits->recomputes_all = false;
    BL_TRY(add_row(&j, "what nobody reads is not computed again", out));
    j.input.mode = BL_MATMUL_FP8;
    BL_TRY(add_row(&j, "FP8 products", out));
    j.input.useful_part = 1;
    return add_row(&j, "rows are packed, not padded", out);
}

static void print_job(const bl_published *p, FILE *out)
{
    fprintf(out, "%d x 8 H100: %.0f tokens/s published\n", p->n_hosts, p->tokens_per_s);
    fprintf(out, "  %-46s %9s %9s %9s %9s\n", "", "tokens/s", "step, s", "compute", "waiting");
    for (int i = 0; i < p->n_rows; i++) {
        const bl_time_estimate *t = &p->rows[i].time;
        double compute_s = 0;
        for (int k = 0; k < BL_TIME_PHASES; k++) compute_s += t->part[k].compute_s;
        fprintf(out, "  %-46s %9.0f %9.2f %9.2f %9.2f\n", p->rows[i].change, t->tokens_per_s,
                t->step_s, compute_s, t->step_s - compute_s);
    }
}

static bl_status print_full(FILE *out)
{
    bl_published_full p;

    BL_TRY(bl_published_explain_full(&p));
    fprintf(out,
            "2 x 8 A100, every weight of Llama 2 70B: %d steps in %.1f hours published: %.0f "
            "tokens/s, MFU %.1f %%\n",
            p.n_steps, p.hours, p.tokens_per_s, 100 * p.mfu);
    fprintf(out, "  %-46s %9s %9s %9s %9s\n", "", "tokens/s", "step, s", "hours", "MFU");
    for (int i = 0; i < p.n_rows; i++) {
        const bl_time_estimate *t = &p.rows[i].time;
        fprintf(out, "  %-46s %9.0f %9.2f %9.2f %7.1f %%\n", p.rows[i].change, t->tokens_per_s,
                t->step_s, t->step_s * p.n_steps / 3600, 100 * t->mfu);
    }
    return BL_OK;
}

bl_status bl_published_print(FILE *out)
{
    for (int n_hosts = 1; n_hosts <= 2; n_hosts++) {
        bl_published p;
        BL_TRY(bl_published_explain(n_hosts, &p));
        print_job(&p, out);
    }
    fprintf(out,
            "The padded part of the published rows, %.0f %%, is not published: docs/model.md.\n",
            100 * (1 - USEFUL_PART));
    return print_full(out);
}
