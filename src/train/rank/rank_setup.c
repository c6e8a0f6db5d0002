/* SPDX-License-Identifier: Apache-2.0 */
/* rank_setup.c -- a rank's device, streams, weights and buffers, in the order in which they depend
 * on each other. */
#include "base/sizes.h"
#include "comm/nccl/nccl.h"
#include "train/rank/evaluate.h"
#include "train/rank/preference.h"

static int index_on_host(const bl_rank *r)
{
    return r->job->topology.first_on_host + r->index - r->job->topology.first_here;
}

static const char *gpu_bus_id(const bl_job *job)
{
    return job->gpu.n_gpus > 0 ? job->gpu.bus_id : NULL;
}

bl_status bl_rank_create_base(bl_rank *r)
{
    const bl_train_config *c = r->job->config;
    bl_model_base_options options = {.shard_group = r->shard_group,
                                     .copy = r->copy,
                                     .gather = r->gather,
                                     .ring_depth = (int)c->ring_depth,
                                     .queue_depth =
                                         bl_model_pager_queue_depth(r->job->topology.n_on_host),
                                     .verify_always = c->verify_base == BL_VERIFY_ALWAYS,
                                     .timeline = r->timeline,
                                     .hooks = r->job->hooks};
    return bl_model_base_create(r->weights, &options, &r->base);
}

/* Room for the spans of some visits: finished spans are collected when it runs out. */
static bl_status create_timeline(bl_rank *r)
{
    enum { SPANS_A_LAYER = 64, MIN_SPANS = 1024 };
    int64_t n_spans = bl_max_i64(MIN_SPANS, SPANS_A_LAYER * r->job->model->config.n_layers);
    bl_span_sink sink = r->job->trace ? bl_trace_span : NULL;
    return bl_timeline_create(r->device, (int)n_spans, sink, &r->trace_lane, &r->timeline);
}

/* All ranks of a process share its GPU. Its host threads are the rank's workers, as on a CPU. */
static bl_status create_device(bl_rank *r)
{
    const bl_train_config *c = r->job->config;

    if (c->device == BL_CONFIG_DEVICE_CPU) {
        BL_TRY(bl_device_create_cpu((int)c->threads, &r->device));
        return bl_device_set_act(r->device, bl_train_config_act(c));
    }
    BL_TRY(bl_device_create_cuda(r->job->topology.gpu, &r->device));
    return bl_device_start_workers(r->device, (int)c->threads);
}

static void leave(void *user)
{
    bl_launch_leave(user);
}

/* Most communication is gathers of the base: NCCL is asked to use copy engines for them, which take
 * no multiprocessors from the products. */
static bl_status connect_gpus(bl_rank *r)
{
    const bl_job *job = r->job;
    bl_adapter_bytes lora =
        bl_trained_state_measure(bl_device_act(r->device), &job->lora, job->model->config.n_layers,
                                 job->topology.n_ranks, (int)job->config->ring_depth);
    bl_nccl_options options = {.name = "ballast",
                               .deadline_s = job->config->step_deadline_s,
                               .copy_engines = true,
                               .gathers_by_hosts = job->config->gather_by_hosts,
                               .compares_calls = job->config->compare_collectives,
                               .sum_bytes = (size_t)lora.whole,
                               .host_memory = job->host_memory,
                               .leave = leave,
                               .leave_user = job->launch};
    return bl_comm_create_nccl(r->host_world, r->device, &options, &r->world);
}

/* On a CPU all memory is the host's: small collectives use the stream of LoRA's sums. On a GPU they
 * have a separate stream, which waits for no kernel. The base has a separate communicator also
 * where one shard group has all ranks: a slow disk must not delay gradients (comm/README.md). */
static bl_status create_communicators(bl_rank *r)
{
    bool is_cpu = bl_device_get_kind(r->device) == BL_DEVICE_CPU;

    BL_TRY(bl_host_comm_open(r->host_world, is_cpu ? r->communication : NULL, &r->host_comm));
    if (is_cpu)
        r->world = r->host_world;
    else
        BL_TRY(r->job->launch ? connect_gpus(r) : bl_comm_split(r->host_world, 0, &r->world));
    return bl_comm_split(r->world, r->index / (int)r->job->config->shard_size, &r->shard_group);
}

bl_status bl_rank_open(bl_rank *r)
{
    const bl_job *job = r->job;

    /* Before the device starts its threads. */
    BL_TRY(bl_model_bind_rank(index_on_host(r), job->topology.n_on_host, gpu_bus_id(job)));
    BL_TRY(create_device(r));
    BL_TRY(bl_stream_create(r->device, "compute", &r->compute));
    BL_TRY(bl_stream_create_urgent(r->device, "comm", &r->communication));
    BL_TRY(bl_stream_create_urgent(r->device, "gather", &r->gather));
    BL_TRY(bl_stream_create_urgent(r->device, "copy", &r->copy));
    if (job->plan.pass.offload_activations)
        BL_TRY(bl_stream_create_urgent(r->device, "activations", &r->activations));
    r->trace_lane = (bl_trace_rank){job->trace, r->index};
    BL_TRY(create_timeline(r));
    return create_communicators(r);
}

bl_status bl_rank_load_base(bl_rank *r)
{
    bl_placement placement = r->job->plan.placement;

    placement.index = index_on_host(r);
    placement.gpu_bus_id = gpu_bus_id(r->job);
    placement.stop = r->stop;
    placement.stop_user = r->stop_user;
    BL_TRY(bl_model_weights_load(r->job->model, r->device, r->shard_group, r->gather, &placement,
                                 &r->weights));
    BL_TRY(bl_rank_create_base(r));
    return bl_rank_compare_weights(r);
}

bl_trained_context bl_rank_context(const bl_rank *r)
{
    return (bl_trained_context){.device = r->device,
                                .world = r->world,
                                .compute = r->compute,
                                .communication = r->communication,
                                .timeline = r->timeline};
}

bl_status bl_rank_create_adapter(bl_rank *r)
{
    const bl_job *job = r->job;
    bl_trained_context context = bl_rank_context(r);
    bl_optimizer_placement optimizer = job->plan.optimizer;

    optimizer.hooks = job->hooks;
    if (job->model->is_trained)
        return bl_trained_full_create(&context, r->weights, r->base, &optimizer, &r->state);
    if (job->lora.n_floats == 0) return BL_OK;
    if (job->modules.names.n > 0) BL_TRY(bl_adapter_modules_prepare(r->weights, &job->modules.set));
    BL_TRY(bl_trained_state_create(&context, &job->lora, job->model->config.n_layers,
                                   (int)job->config->ring_depth, &r->state));
    const bl_trained_set *set = job->modules.names.n > 0 ? &job->modules.set : NULL;
    if ((set || job->lora.n_table_floats > 0) && job->plan.pass.training)
        BL_TRY(bl_trained_state_add_modules(r->state, r->weights, set));
    r->adapter = bl_trained_state_adapter(r->state);
    return BL_OK;
}

const bl_pass_adapter *bl_rank_adapter(const bl_rank *r)
{
    return r->adapter.ring ? &r->adapter : NULL;
}

bl_status bl_rank_fill_adapter(bl_rank *r)
{
    const bl_train_config *c = r->job->config;
    if (!r->state || r->job->model->is_trained) return BL_OK;
    if (c->init_adapter && r->job->modules.names.n > 0)
        BL_TRY(
            bl_adapter_modules_read(r->weights, &r->job->modules.set, c->init_adapter, r->compute));
    if (c->init_adapter && r->index == 0)
        BL_TRY(bl_adapter_terms_check_base(r->job->model->files, &r->job->model->config,
                                           c->init_adapter));
    if (c->init_adapter)
        return bl_trained_state_read_peft(r->state, &r->job->model->config, c->init_adapter);
    return bl_trained_state_initialize(r->state, (uint64_t)c->seed);
}

bl_status bl_rank_create_pass(bl_rank *r)
{
    bl_pass_options options = r->job->plan.pass;

    options.activations = r->activations;
    options.timeline = r->timeline;
    BL_TRY(bl_matmul_spare_multiprocessors(r->device, bl_nccl_multiprocessors(r->shard_group)));
    BL_TRY(bl_group_create(&options, &r->group));
    return bl_pass_create(r->device, r->weights, r->base, r->compute, &options, &r->pass);
}

bl_status bl_rank_replace_pass(bl_rank *r)
{
    bl_pass_destroy(r->pass);
    bl_group_destroy(r->group);
    r->pass = NULL;
    r->group = NULL;
    return bl_rank_create_pass(r);
}

bl_pass_micro bl_rank_train_micro(const bl_rank *r, const bl_micro_batch *batch, double *loss_sum,
                                  double loss_scale)
{
    return (bl_pass_micro){.batch = batch,
                           .adapter = bl_rank_adapter(r),
                           .loss_sum = loss_sum,
                           .gradients = bl_trained_state_sink(r->state),
                           .loss_scale = loss_scale};
}

/* A base that has changed has spoilt the steps since the last checkpoint: none is made of them.
 * Prefetches for the next step end first. */
bl_status bl_rank_verify_base(bl_rank *r)
{
    if (r->job->config->verify_base == BL_VERIFY_FIRST) return BL_OK;
    BL_TRY(bl_stream_synchronize(r->copy));
    BL_TRY(bl_stream_synchronize(r->gather));
    return bl_base_verify(r->base);
}

bl_status bl_rank_create_evaluation(bl_rank *r)
{
    BL_TRY(bl_preference_create(r, &r->preference));
    if (!r->job->data.validation.set) return BL_OK;
    return bl_evaluation_create(r, &r->evaluation);
}

void bl_rank_borrow(bl_rank *r, const bl_rank *lead, const bl_job *job)
{
    *r = *lead;
    r->job = job;
    r->lead = lead;
    r->state = NULL;
    r->adapter = (bl_pass_adapter){0};
    r->evaluation = NULL;
    r->preference = NULL;
}

void bl_rank_close_run(bl_rank *r)
{
    bl_evaluation_destroy(r->evaluation);
    bl_preference_destroy(r->preference);
    bl_trained_state_destroy(r->state);
    r->evaluation = NULL;
    r->preference = NULL;
    r->state = NULL;
}

void bl_rank_drain(bl_rank *r)
{
    bl_stream *const streams[] = {r->compute, r->communication, r->copy, r->gather, r->activations};
    for (size_t i = 0; i < BL_COUNT(streams); i++)
        if (streams[i]) (void)bl_stream_synchronize(streams[i]);
}

void bl_rank_close(bl_rank *r)
{
    bl_rank_drain(r);
    bl_pass_destroy(r->pass);
    bl_group_destroy(r->group);
    bl_rank_close_run(r);
    bl_base_destroy(r->base);
    bl_model_weights_free(r->weights);
    bl_timeline_collect(r->timeline);
    bl_timeline_destroy(r->timeline);
    bl_host_comm_close(&r->host_comm); /* it may use `communication` */
    bl_stream_destroy(r->compute);
    bl_stream_destroy(r->communication);
    bl_stream_destroy(r->gather);
    bl_stream_destroy(r->copy);
    bl_stream_destroy(r->activations);
    bl_comm_destroy(r->shard_group); /* on a GPU they have some of its memory */
    if (r->world != r->host_world) bl_comm_destroy(r->world);
    bl_comm_destroy(r->host_world);
    bl_device_destroy(r->device);
}
