/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench step: the training steps of one rank, on weights that are made up, without the
 * other ranks. The device copies its own data in place of theirs, at the rate of a link if one is
 * given (echo.h). So one device measures the work of each of eight. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "bench/command/arguments.h"
#include "bench/command/bench.h"
#include "bench/command/echo.h"
#include "bench/command/made_weights.h"
#include "bench/command/model.h"
#include "bench/command/step_internal.h"
#include "trained/choose.h"
#include "plan/model.h"
#include "train/rank.h"

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench step", .type = BL_OPTION_##kind,                                \
    .offset = offsetof(step_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(model, PATH), .default_text = "llama-3.2-1b",
     .help = "model: a name (llama-3.1-405b) or a directory with config.json"},
    {OPTION(layers, INT), .default_text = "0", .min = 0, .max = 4096,
     .help = "layers of the model; 0: all"},
    {OPTION(distinct_layers, INT), .default_text = "0", .min = 0, .max = 4096,
     .help = "layers with weights in memory, which the others repeat; 0: all"},
    {OPTION(as_rank, STRING), .default_text = "0/1",
     .help = "RANK/RANKS: this rank, and the ranks that share the base; the others are simulated"},
    {OPTION(link_gb_per_s, REAL), .default_text = "0", .min = 0, .max = 1e6,
     .help = "simulated GB/s received per rank; 0: as fast as the device copies"},
    {OPTION(tokens, INT), .default_text = "1024", .min = 1, .max = 1 << 20,
     .help = "tokens per micro-batch, which is one sequence"},
    {OPTION(micro_batches, INT), .default_text = "1", .min = 1, .max = 4096,
     .help = "micro-batches per step"},
    {OPTION(visit_tokens, INT), .default_text = "0", .min = 0, .max = INT64_C(1) << 30,
     .help = "tokens per gather of a layer; 0: the step's"},
    {OPTION(lora_r, INT), .default_text = "16", .min = 1, .max = 4096, .help = "LoRA rank"},
    {OPTION(base_format, ENUM), .names = "auto|" BL_FORMATS_MADE "|stored",
     .default_text = "fp8_row",
     .help = "format of the frozen base; stored: bf16; 4-bit formats on CPUs only"},
    {OPTION(device, STRING), .default_text = "auto", .help = "auto, cpu or cuda"},
    {OPTION(compute_dtype, STRING), .default_text = "auto", .help = "auto, fp32, bf16 or fp8"},
    {OPTION(offload_ratio, REAL), .default_text = "0", .min = 0, .max = 1,
     .help = "fraction of the base in pinned host memory"},
    {OPTION(activation_checkpointing, STRING), .default_text = "full",
     .help = "none, mlp, selective or full"},
    {OPTION(activation_offload, BOOL), .default_text = "false",
     .help = "keep saved activations in host memory"},
    {OPTION(ring_depth, INT), .default_text = "2", .min = 1, .max = 64,
     .help = "layers of the base held at once"},
    {OPTION(expert_group, INT), .default_text = "auto", .min = 1, .max = INT64_C(1) << 20,
     .has_auto = true, .help = "experts gathered together in a mixture"},
    {OPTION(threads, INT), .default_text = "2", .min = 1, .max = 256, .help = "CPU threads"},
    {OPTION(steps, INT), .default_text = "3", .min = 1, .max = 10000,
     .help = "measured steps, after one that is not"},
    {OPTION(dir, PATH), .default_text = "/tmp",
     .help = "directory for a scratch directory, removed at the end"},
    {OPTION(plan_for, STRING), .help = "print the memory and time needed on this GPU (h100, "
                                       "h200, ...; here: this machine's), run nothing"},
    {OPTION(plan_host_gb, REAL), .default_text = "0", .min = 0, .max = 1e6,
     .help = "host memory for plan_for, GB; 0: this machine's"},
};

enum { PATH_BYTES = 512 };

typedef struct step_bench {
    const step_options *options;
    char scratch[PATH_BYTES];
    int rank_index, n_ranks;
    bl_train_config *config;
    bl_model *model, *small; /* small: with the distinct layers alone; may be model */
    bl_job job;
    bl_rank rank;
    bl_model_weights *weights; /* of small */
    bl_model_weights whole;    /* the same for all layers, and their norms */
    bl_batches *batches;
    bl_pass_micro *micro;
    bl_timeline_totals counted;
} step_bench;

/* ---- the job ---- */

void bl_bench_step_add_keys(const step_options *o, int n_ranks, bl_bench_arguments *a)
{
    bl_bench_add(a, "data_format", "tokens");
    bl_bench_add(a, "max_seq_length", "%lld", (long long)o->tokens);
    bl_bench_add(a, "per_device_train_batch_size", "1");
    bl_bench_add(a, "gradient_accumulation_steps", "%lld", (long long)o->micro_batches);
    bl_bench_add(a, "visit_tokens", "%lld",
                 (long long)(o->visit_tokens ? o->visit_tokens : o->tokens * o->micro_batches));
    bl_bench_add(a, "ranks", "%d", n_ranks);
    bl_bench_add(a, "shard_size", "%d", n_ranks);
    bl_bench_add(a, "threads", "%lld", (long long)o->threads);
    bl_bench_add(a, "device", "%s", o->device);
    bl_bench_add(a, "compute_dtype", "%s", o->compute_dtype);
    bl_bench_add(a, "base_format", "%s", bl_base_format_name(o->base_format));
    bl_bench_add(a, "ring_depth", "%lld", (long long)o->ring_depth);
    if (o->expert_group > 0) bl_bench_add(a, "expert_group", "%lld", (long long)o->expert_group);
    bl_bench_add(a, "lora_r", "%lld", (long long)o->lora_r);
    bl_bench_add(a, "activation_checkpointing", "%s", o->activation_checkpointing);
    bl_bench_add(a, "activation_offload", "%s", o->activation_offload ? "true" : "false");
    bl_bench_add(a, "offload_ratio", "%g", o->offload_ratio);
}

static bl_status configure(step_bench *b)
{
    const step_options *o = b->options;
    bl_bench_arguments *a = calloc(1, sizeof *a);

    if (!a) return BL_FAIL(BL_ENOMEM, "the configuration of a training");
    bl_bench_add(a, "model_name_or_path", "%s/model", b->scratch);
    bl_bench_add(a, "train_file", "%s/train.jsonl", b->scratch);
    bl_bench_add(a, "output_dir", "%s/run", b->scratch);
    bl_bench_step_add_keys(o, b->n_ranks, a);
    bl_status st = bl_bench_load(a, &b->config);
    free(a);
    return st;
}

static bl_status read_shape(const step_options *o, bl_model_config *shape)
{
    if (access(o->model, F_OK) == 0) {
        BL_TRY(bl_model_config_load(o->model, shape));
    } else {
        bl_plan_model model;
        BL_TRY(bl_plan_model_open(o->model, o->base_format, &model));
        *shape = model.config;
        bl_plan_model_close(&model);
    }
    if (o->layers > 0) shape->n_layers = o->layers;
    BL_TRY(bl_arch_set_expert_group(shape, o->expert_group));
    int64_t least = o->ring_depth + 2;
    if (o->distinct_layers == 0 || o->distinct_layers >= shape->n_layers ||
        o->distinct_layers >= least)
        return BL_OK;
    return BL_FAIL(BL_EUSAGE, "--distinct_layers %lld: at least %lld for a ring_depth of %lld",
                   (long long)o->distinct_layers, (long long)least, (long long)o->ring_depth);
}

static bl_status make_models(step_bench *b)
{
    const step_options *o = b->options;
    bl_model_config shape;

    BL_TRY(read_shape(o, &shape));
    BL_TRY(bl_made_model_open(&shape, o->base_format, o->tokens, &b->model));
    b->small = b->model;
    if (o->distinct_layers == 0 || o->distinct_layers >= shape.n_layers) return BL_OK;
    shape.n_layers = o->distinct_layers;
    return bl_made_model_open(&shape, o->base_format, o->tokens, &b->small);
}

/* 4 bits on a GPU, as in a training. */
static bl_status check_format(const step_bench *b)
{
    bl_base_formats formats = {0};

    bl_base_formats_count(&formats, BL_SCALE_NONE, BL_BF16, b->model->formats[0]);
    return bl_base_formats_check_device(&formats, bl_train_config_device_kind(b->config));
}

static bl_status open_job(step_bench *b)
{
    const step_options *o = b->options;
    bl_job *job = &b->job;
    bl_bench_model rows = {
        .vocab = b->model->config.vocab_size, .rows = o->micro_batches, .row_tokens = o->tokens};

    BL_TRY(bl_bench_model_write_rows(&rows, b->scratch));
    *job = (bl_job){.config = b->config,
                    .topology = {.n_ranks = b->n_ranks,
                                 .first_here = b->rank_index,
                                 .n_here = 1,
                                 .n_on_host = 1},
                    .model = b->model};
    BL_TRY(bl_run_data_open_training(b->config, &b->model->config, NULL, (int)b->config->ranks,
                                     &job->data));
    BL_TRY(bl_adapter_choose_lora(b->config, &b->model->config, true, &job->lora));
    bl_plan_input input = bl_job_plan_input(job);
    input.is_training = true;
    return bl_job_choose_plan(job, &input);
}

/* ---- the rank ---- */

static bl_status make_weights(step_bench *b)
{
    bl_rank *r = &b->rank;
    int64_t n_layers = b->model->config.n_layers, n_distinct = b->small->config.n_layers;
    bl_placement placement = b->job.plan.placement;

    placement.index = 0;
    placement.n = 1;
    BL_TRY(bl_made_weights_create(b->small, r->device, b->rank_index, b->n_ranks, &placement,
                                  &b->weights));
    r->weights = b->weights;
    BL_TRY(bl_rank_create_base(r));
    if (n_layers == n_distinct) return BL_OK;
    b->whole = *b->weights;
    b->whole.model = b->model;
    BL_TRY(bl_made_vectors_create(b->model, r->device, &b->whole.vectors));
    r->weights = &b->whole;
    bl_base_repeat_layers(r->base, n_layers, n_distinct);
    return BL_OK;
}

static bl_status fill_batches(step_bench *b)
{
    const bl_rows *rows = &b->job.data.train;
    int n = (int)b->options->micro_batches;

    BL_TRY(bl_batches_create(b->rank.device, n, b->job.plan.pass.T_max, &b->batches));
    bl_batches_clear(b->batches);
    for (int m = 0; m < n; m++)
        BL_TRY(bl_batches_append(b->batches, m, rows->set, rows->first + m, m));
    BL_TRY(bl_batches_upload(b->batches, b->rank.compute));
    b->micro = calloc((size_t)n, sizeof *b->micro);
    return b->micro ? BL_OK : BL_FAIL(BL_ENOMEM, "micro-batches");
}

static bl_status open_rank(step_bench *b)
{
    bl_rank *r = &b->rank;

    *r = (bl_rank){.job = &b->job, .index = b->rank_index};
    BL_TRY(
        bl_echo_create(b->rank_index, b->n_ranks, 1e9 * b->options->link_gb_per_s, &r->host_world));
    BL_TRY(bl_rank_open(r));
    BL_TRY(make_weights(b));
    BL_TRY(bl_rank_create_adapter(r));
    BL_TRY(bl_rank_fill_adapter(r));
    BL_TRY(bl_rank_create_pass(r));
    return fill_batches(b);
}

static void close_rank(step_bench *b)
{
    bl_rank *r = &b->rank;

    bl_rank_drain(r);
    bl_batches_destroy(b->batches);
    if (r->weights == &b->whole) bl_device_free(r->device, BL_SPACE_DEVICE, b->whole.vectors);
    r->weights = b->weights;
    bl_rank_close(r);
    free(b->micro);
}

/* ---- steps ---- */

static bl_status run_step(step_bench *b, int64_t step, double *loss, double *grad_norm)
{
    bl_rank *r = &b->rank;
    int64_t group = b->job.plan.pass.max_group;
    bl_lane_totals lanes[BL_N_LANES] = {{0}};

    r->adapter.dropout = (bl_lora_dropout){.step = (uint64_t)step};
    bl_pass_input input = {.micro = b->micro};
    for (int64_t first = 0; first < b->batches->n_micro; first += group) {
        input.n_micro = (int)bl_min_i64(group, b->batches->n_micro - first);
        for (int m = 0; m < input.n_micro; m++)
            b->micro[m] = (bl_pass_micro){.batch = b->batches->micro + first + m,
                                          .adapter = &r->adapter,
                                          .loss_sum = bl_trained_state_loss_sum(r->state),
                                          .gradients = bl_trained_state_sink(r->state),
                                          .loss_scale = 1.0 / (double)b->batches->n_labels};
        BL_TRY(bl_pass_run(r->pass, &input));
    }
    BL_TRY(bl_trained_state_join(r->state));
    BL_TRY(bl_trained_state_reduce(r->state, loss, grad_norm, lanes));
    *loss /= (double)b->batches->n_labels;
    if (!isfinite(*loss) || !isfinite(*grad_norm))
        return BL_FAIL(BL_ENUMERIC, "bench step: loss %g, gradient norm %g", *loss, *grad_norm);
    BL_TRY(bl_trained_state_update(r->state, step + 1, 1e-5, 0.9, 0.999, 1e-8, 0, 1));
    return bl_stream_synchronize(r->compute);
}

/* Without LoRA's. */
static double model_flops(const step_bench *b)
{
    double T = (double)b->options->tokens, tokens = (double)b->options->micro_batches * T;

    return bl_arch_step_flops(&b->model->config, 0, 0, tokens, T, tokens);
}

static void print_lanes(step_bench *b)
{
    bl_timeline_totals before = b->counted, *now = &b->counted;

    bl_timeline_collect(b->rank.timeline);
    bl_timeline_get_totals(b->rank.timeline, now);
    for (int i = 0; i < BL_N_LANES; i++)
        printf(",\"%s_s\":%.6f,\"%s_stall_s\":%.6f", bl_lane_name((bl_lane)i),
               now->lane[i].busy_s - before.lane[i].busy_s, bl_lane_name((bl_lane)i),
               now->lane[i].stall_s - before.lane[i].stall_s);
}

void bl_bench_step_print_case(const step_options *o, const step_case *what)
{
    printf("{\"bench\":\"step\",\"model\":\"%s\",\"device\":\"%s\",\"compute_dtype\":\"%s\","
           "\"base_format\":\"%s\",\"layers\":%lld,\"distinct_layers\":%lld,\"as_rank\":\"%s\","
           "\"link_gb_per_s\":%g,\"tokens\":%lld,\"micro_batches\":%lld,\"visit_micro\":%d,"
           "\"lora_r\":%lld,\"offload_ratio\":%g,\"activation_checkpointing\":\"%s\","
           "\"activation_offload\":%s,",
           o->model, what->device, o->compute_dtype, bl_base_format_name(o->base_format),
           (long long)what->n_layers, (long long)what->n_distinct, o->as_rank, o->link_gb_per_s,
           (long long)o->tokens, (long long)o->micro_batches, what->visit_micro,
           (long long)o->lora_r, o->offload_ratio, o->activation_checkpointing,
           o->activation_offload ? "true" : "false");
}

static void print_case(const step_bench *b)
{
    bool is_cuda = bl_device_get_kind(b->rank.device) == BL_DEVICE_CUDA;

    bl_bench_step_print_case(b->options, &(step_case){.device = is_cuda ? "cuda" : "cpu",
                                                      .n_layers = b->model->config.n_layers,
                                                      .n_distinct = b->small->config.n_layers,
                                                      .visit_micro = b->job.plan.pass.max_group});
}

static bl_status measure(step_bench *b)
{
    double loss, grad_norm, flops = model_flops(b);

    for (int64_t step = 0; step <= b->options->steps; step++) {
        double start_s = bl_now_s();
        BL_TRY(run_step(b, step, &loss, &grad_norm));
        double step_s = bl_now_s() - start_s;
        if (step == 0) { /* products are planned, memory is touched */
            bl_timeline_collect(b->rank.timeline);
            bl_timeline_get_totals(b->rank.timeline, &b->counted);
            continue;
        }
        print_case(b);
        printf("\"step\":%lld,\"step_s\":%.6f,\"tokens_per_s\":%.2f,\"tflops_a_rank\":%.4f,"
               "\"loss\":%.4f,\"device_bytes\":%lld",
               (long long)step, step_s,
               (double)(b->n_ranks * b->options->micro_batches * b->options->tokens) / step_s,
               flops / step_s / 1e12, loss, (long long)bl_device_bytes(b->rank.device));
        print_lanes(b);
        printf("}\n");
        fflush(stdout);
    }
    return BL_OK;
}

static bl_status parse_rank(const char *text, int *rank, int *n_ranks)
{
    char rest;
    if (sscanf(text, "%d/%d%c", rank, n_ranks, &rest) == 2 && *rank >= 0 && *rank < *n_ranks &&
        *n_ranks <= 4096)
        return BL_OK;
    return BL_FAIL(BL_EUSAGE, "--as_rank: expected RANK/RANKS, as 0/8, got '%s'", text);
}

static bl_status run_in_scratch(step_bench *b)
{
    BL_TRY(configure(b));
    BL_TRY(make_models(b));
    BL_TRY(check_format(b));
    BL_TRY(open_job(b));
    bl_status st = open_rank(b);
    if (st == BL_OK) st = measure(b);
    bl_error error; /* closing meets the streams' own errors */
    bl_error_save(&error, st);
    close_rank(b);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static bl_status run(const void *values)
{
    step_bench *b = calloc(1, sizeof *b);

    if (!b) return BL_FAIL(BL_ENOMEM, "bench step");
    b->options = values;
    bl_status st = parse_rank(b->options->as_rank, &b->rank_index, &b->n_ranks);
    if (st == BL_OK && b->options->plan_for) {
        st = bl_bench_step_plan(b->options, b->rank_index, b->n_ranks);
        free(b);
        return st;
    }
    snprintf(b->scratch, sizeof b->scratch, "%s/ballast-bench-XXXXXX", b->options->dir);
    if (st == BL_OK && !mkdtemp(b->scratch))
        st = bl_fail_errno(BL_EIO, "make a folder in %s", b->options->dir);
    if (st != BL_OK) {
        free(b);
        return st;
    }
    bl_log_set_silent(true);
    st = run_in_scratch(b);
    bl_error error;
    bl_error_save(&error, st);
    b->job.model = NULL; /* it is not a checkpoint's */
    bl_job_close(&b->job);
    if (b->small != b->model) bl_made_model_close(b->small);
    bl_made_model_close(b->model);
    bl_train_config_free(b->config);
    (void)bl_tree_remove(b->scratch);
    free(b);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

const bl_bench bl_bench_step = {
    .name = "step",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(step_options),
    .details = "Runs training steps as one rank of several, on random weights; the other ranks are "
               "simulated: their\n"
               "data is copied on the device. tokens_per_s counts all ranks. JSON lines, "
               "one per step.\n",
    .run = run,
};
