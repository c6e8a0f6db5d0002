/* SPDX-License-Identifier: Apache-2.0 */
/* rank_setup.c -- a rank's device, streams, weights and buffers, in the order in which they depend on each other. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "train/job.h"

static int index_on_host(const bl_rank *r)
{
    return r->job->topology.first_on_host + r->index - r->job->topology.first_here;
}

static bl_status create_base(bl_rank *r)
{
    const bl_train_config *c = r->job->config;
    bl_llama_base_options options = {.shards = r->shards,
                                     .copy = r->copy,
                                     .gather = r->gather,
                                     .ring_depth = (int)c->ring_depth,
                                     .queue_depth =
                                         bl_llama_pager_queue_depth(r->job->topology.n_on_host),
                                     .verify_always = c->verify_base == BL_VERIFY_ALWAYS,
                                     .timeline = r->timeline,
                                     .hooks = c->hooks};
    bl_llama_placement placement = r->job->plan.placement;

    placement.index = index_on_host(r);
    BL_TRY(bl_llama_weights_load(r->job->host, r->device, r->shards, r->gather, &placement,
                                 &r->weights));
    return bl_llama_base_create(r->weights, &options, &r->base);
}

/* Room for the spans of some visits: what has finished is taken in when it runs out. */
static bl_status create_timeline(bl_rank *r)
{
    enum { SPANS_A_LAYER = 64, MIN_SPANS = 1024 };
    int64_t n_spans = bl_max_i64(MIN_SPANS, SPANS_A_LAYER * r->job->host->config.n_layers);
    bl_span_sink sink = r->job->trace ? bl_trace_span : NULL;
    return bl_timeline_create(r->device, (int)n_spans, sink, &r->trace_lane, &r->timeline);
}

static bl_status create_state(bl_rank *r)
{
    const bl_job *job = r->job;
    if (job->lora.n_floats == 0) return BL_OK;
    BL_TRY(bl_adapter_state_create(r->device, r->world, r->compute, r->communication, r->timeline,
                                   &job->lora, job->host->config.n_layers,
                                   (int)job->config->ring_depth, &r->state));
    if (job->start.dir)
        return bl_adapter_state_read_shards(r->state, job->start.dir, job->start.n_ranks);
    if (job->config->init_adapter)
        return bl_adapter_state_read_peft(r->state, &job->host->config, job->config->init_adapter);
    return bl_adapter_state_initialise(r->state, (uint64_t)job->config->seed);
}

/* What a plain GEMM of this rank reaches while the other ranks run theirs: the peak that mfu is a share of. */
static void measure_peak(bl_rank *r)
{
    enum { N = 512, RUNS = 4 };
    float *block = calloc(3 * N * N, sizeof *block);
    if (!block) return;
    for (int i = 0; i < 2 * N * N; i++) block[i] = 1.0f;
    for (int run = 0; run < RUNS; run++) {
        double start = bl_now_s();
        if (bl_cpu_gemm_f32(bl_device_pool(r->device), false, true, N, N, N, 1.0f, block, N,
                            block + N * N, N, 0.0f, block + 2 * N * N, N) != BL_OK)
            break;
        double flops = 2.0 * N * N * N / (bl_now_s() - start);
        if (flops > r->peak_flops) r->peak_flops = flops;
    }
    free(block);
}

bl_status bl_rank_setup(bl_rank *r)
{
    bl_job *job = r->job;
    const bl_train_config *c = job->config;
    bl_pass_options options = job->plan.pass;

    BL_TRY(bl_llama_bind_rank(index_on_host(r),
                              job->topology.n_on_host)); /* before the device starts its threads */
    BL_TRY(bl_device_create_cpu((int)c->threads, &r->device));
    BL_TRY(bl_stream_create(r->device, "compute", &r->compute));
    BL_TRY(bl_stream_create(r->device, "comm", &r->communication));
    BL_TRY(bl_stream_create(r->device, "gather", &r->gather));
    BL_TRY(bl_stream_create(r->device, "copy", &r->copy));
    if (c->activation_offload && !job->evaluate_only)
        BL_TRY(bl_stream_create(r->device, "activations", &r->activations));
    r->trace_lane = (bl_trace_rank){job->trace, r->index};
    BL_TRY(create_timeline(r));
    /* Also where one shard group has all ranks: what comes from a slow disk must not hold up gradients (comm/README.md). */
    BL_TRY(bl_comm_split(r->world, r->index / (int)c->shard_size, &r->shards));
    measure_peak(r);
    BL_TRY(create_base(r));
    BL_TRY(bl_rank_check_weights(r));
    BL_TRY(create_state(r));
    if (r->state) r->adapter = bl_adapter_state_adapter(r->state);
    r->micro = calloc((size_t)options.max_group, sizeof *r->micro);
    if (!r->micro) return BL_FAIL(BL_ENOMEM, "micro-batches");
    options.activations = r->activations;
    options.timeline = r->timeline;
    BL_TRY(bl_llama_pass_create(r->device, r->weights, r->base, r->compute, &options, &r->pass));
    for (int i = 0; i < 2 && !job->evaluate_only; i++)
        BL_TRY(bl_batches_create(r->device, (int)c->gradient_accumulation_steps, options.T_max,
                                 &r->batches[i]));
    if (job->data.validation.set)
        BL_TRY(bl_batches_create(r->device, 1, options.T_max, &r->evaluation));
    BL_TRY(bl_twin_create(r->device, (size_t)job->topology.n_ranks * sizeof(bl_checkpoint_file),
                          "checkpoint files", &r->files));
    return bl_twin_create(r->device, 4 * sizeof(int64_t), "counters", &r->counts);
}

void bl_rank_free(bl_rank *r)
{
    if (r->compute) (void)bl_stream_synchronize(r->compute);
    if (r->communication) (void)bl_stream_synchronize(r->communication);
    if (r->copy) (void)bl_stream_synchronize(r->copy);
    if (r->gather) (void)bl_stream_synchronize(r->gather);
    if (r->activations) (void)bl_stream_synchronize(r->activations);
    for (int i = 0; i < 2; i++) bl_batches_destroy(r->batches[i]);
    bl_batches_destroy(r->evaluation);
    bl_twin_destroy(r->counts);
    bl_twin_destroy(r->files);
    bl_llama_pass_destroy(r->pass);
    free(r->micro);
    bl_adapter_state_destroy(r->state);
    bl_base_destroy(r->base);
    bl_llama_weights_free(r->weights);
    bl_timeline_collect(r->timeline);
    bl_timeline_destroy(r->timeline);
    bl_stream_destroy(r->compute);
    bl_stream_destroy(r->communication);
    bl_stream_destroy(r->gather);
    bl_stream_destroy(r->copy);
    bl_stream_destroy(r->activations);
    bl_device_destroy(r->device);
    bl_comm_destroy(r->shards);
    bl_comm_destroy(r->world);
}
