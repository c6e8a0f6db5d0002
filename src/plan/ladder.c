/* SPDX-License-Identifier: Apache-2.0 */
/* ladder.c -- bytes and seconds of each classical strategy by closed formulas, which
 * bench/results/predictions.md derives. */
#include "plan/ladder.h"

#include "base/sizes.h"
#include "arch/arch.h"

enum {
    BUCKET = 500000000,  /* elements of a bucket of reductions: DeepSpeed's default */
    GATHERED_LAYERS = 2, /* the one at work and the next */
    CONTEXT_BYTES = 1 << 30,
    LOGIT_BYTES = 14 /* fp16, fp32, a shifted copy, probabilities and their gradient in turn */
};

const bl_ladder_rung bl_ladder[] = {
    {"each device everything", {.checkpointing = true}},
    {"ZeRO-1", {.zero_stage = 1, .checkpointing = true}},
    {"ZeRO-2", {.zero_stage = 2, .checkpointing = true}},
    {"ZeRO-3", {.zero_stage = 3, .checkpointing = true}},
    {"+ state in host memory", {.zero_stage = 3, .offloads_state = true, .checkpointing = true}},
    {"+ weights in host memory",
     {.zero_stage = 3, .offloads_state = true, .offloads_base = true, .checkpointing = true}},
    {"LoRA, ZeRO-2", {.zero_stage = 2, .lora = true, .checkpointing = true}},
    {"+ FP8 base", {.zero_stage = 2, .lora = true, .fp8 = true, .checkpointing = true}},
    {"+ sharded base",
     {.zero_stage = 2, .lora = true, .fp8 = true, .shards_base = true, .checkpointing = true}},
    {"+ base in host memory",
     {.zero_stage = 2,
      .lora = true,
      .fp8 = true,
      .shards_base = true,
      .offloads_base = true,
      .checkpointing = true}},
};
const size_t bl_ladder_length = BL_COUNT(bl_ladder);

/* ---- numbers of parameters ---- */

typedef struct counts {
    double all, projections, layer; /* Psi; P; those of a layer on average */
    double lora;                    /* of LoRA at the job's rank */
    double trained;                 /* p */
} counts;

/* Layers that have the projection. */
static int64_t count_layers(const bl_model_config *c, int projection)
{
    int64_t n = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        if (bl_arch_has(c->arch, (bl_layer_kind)k, projection))
            n += bl_model_layers_of(c, (bl_layer_kind)k);
    return n;
}

static counts count_params(const bl_strategy *s, const bl_strategy_job *job)
{
    const bl_model_config *c = job->model;
    counts n = {.all = job->n_params};

    if (n.all == 0) n.all = (double)bl_model_config_n_params(c);
    for (int p = 0; p < c->arch->n_projections; p++) {
        int64_t rows, cols;
        double n_layers = (double)count_layers(c, p);
        bl_projection_shape(c, p, &rows, &cols);
        n.projections += n_layers * (double)rows * (double)cols;
        if (!bl_arch_is_routed(c->arch, p))
            n.lora += n_layers * (double)job->lora_r * (double)(rows + cols);
    }
    n.layer = n.projections / (double)c->n_layers;
    n.trained = s->lora ? n.lora : n.all;
    return n;
}

/* ---- memory ---- */

static double share(bool is_divided, const bl_strategy_job *job)
{
    return is_divided ? 1.0 / job->n_devices : 1.0;
}

/* Of the frozen base: FP8 with a scale a row in fp32 for the projections, all else in two bytes. */
static double base_bytes(const bl_strategy *s, const bl_strategy_job *job, const counts *n)
{
    const bl_model_config *c = job->model;
    double scales = 0;

    if (!s->fp8) return 2 * n->all;
    for (int p = 0; p < c->arch->n_projections; p++) {
        int64_t rows, cols;
        bl_projection_shape(c, p, &rows, &cols);
        scales += (double)sizeof(float) * (double)(rows * count_layers(c, p));
    }
    return n->projections + scales + 2 * (n->all - n->projections);
}

static void count_states(const bl_strategy *s, const bl_strategy_job *job, const counts *n,
                         bl_strategy_memory *m)
{
    double of_gradients = share(s->zero_stage >= 2, job),
           of_moments = share(s->zero_stage >= 1, job), of_weights = share(s->zero_stage >= 3, job);

    if (!s->lora) {
        double weights = 2 * n->all * of_weights, gradients = 2 * n->all * of_gradients,
               optimizer = 12 * n->all * of_moments;
        m->weights = s->offloads_base ? 0 : (int64_t)weights;
        m->gradients = s->offloads_state ? 0 : (int64_t)gradients;
        m->optimizer = s->offloads_state ? 0 : (int64_t)optimizer;
        m->host = (int64_t)((s->offloads_base ? weights : 0) +
                            (s->offloads_state ? gradients + optimizer : 0));
        return;
    }
    double base = base_bytes(s, job, n) * share(s->shards_base || s->zero_stage >= 3, job);
    m->weights = (int64_t)(4 * n->lora * of_weights + (s->offloads_base ? 0 : base));
    m->gradients = (int64_t)(4 * n->lora * of_gradients);
    m->optimizer = (int64_t)(8 * n->lora * of_moments);
    m->host = s->offloads_base ? (int64_t)base : 0;
}

static int64_t activation_bytes(const bl_strategy *s, const bl_strategy_job *job)
{
    const bl_model_config *c = job->model;
    double h = (double)c->hidden_size, sbh = (double)(job->length * job->batch) * h,
           layer = sbh * (34 + 5 * (double)c->n_heads * (double)job->length / h),
           L = (double)c->n_layers;
    return (int64_t)(s->checkpointing ? 2 * sbh * L + layer : layer * L);
}

/* A bucket to reduce and one to gather, no larger than the trained weights; and the gathered
 * layers. */
static int64_t buffer_bytes(const bl_strategy *s, const counts *n)
{
    double bucket = n->trained < BUCKET ? n->trained : BUCKET, bytes = 0;

    if (s->zero_stage >= 1) bytes += 2 * bucket * (s->lora ? 4 : 2);
    if (s->zero_stage >= 3 || s->shards_base || s->offloads_base)
        bytes += GATHERED_LAYERS * n->layer * (s->fp8 ? 1 : 2);
    return (int64_t)bytes;
}

void bl_strategy_count(const bl_strategy *strategy, const bl_strategy_job *job,
                       bl_strategy_memory *out)
{
    counts n = count_params(strategy, job);

    *out = (bl_strategy_memory){.activations = activation_bytes(strategy, job),
                                .logits =
                                    LOGIT_BYTES * job->length * job->batch * job->model->vocab_size,
                                .buffers = buffer_bytes(strategy, &n)};
    count_states(strategy, job, &n, out);
}

int64_t bl_strategy_states(const bl_strategy_memory *m)
{
    return m->weights + m->gradients + m->optimizer;
}

int64_t bl_strategy_total(const bl_strategy_memory *m)
{
    return bl_strategy_states(m) + m->activations + m->logits + m->buffers;
}

int64_t bl_strategy_room(const bl_hardware *hardware)
{
    return (int64_t)(0.95 * (hardware->device_memory_bytes.value - CONTEXT_BYTES));
}

/* ---- time ---- */

double bl_strategy_step_s(const bl_strategy *s, const bl_strategy_job *job,
                          const bl_hardware *hardware)
{
    const bl_model_config *c = job->model;
    counts n = count_params(s, job);
    double tokens = (double)(job->length * job->batch), others = 1 - share(true, job),
           passes = 1 + (s->lora ? 1 : 2) + (s->checkpointing ? 1 : 0), bytes = 0;
    /* Products of all weights but the embedding; QK^T and PV, whose gradient is always whole. */
    double weights = n.projections + (double)(c->vocab_size * c->hidden_size),
           scores = 2 * (double)job->length * (double)(c->n_heads * c->head_dim * c->n_layers);
    double flops = tokens * (2 * weights * passes + scores * (passes + (s->lora ? 1 : 0)));

    if (s->zero_stage >= 3) bytes += 2 * 2 * n.all * others; /* forward, backward */
    bytes += (s->zero_stage >= 3 ? 1 : 2) * (s->lora ? 4 : 2) * n.trained * others;
    double rate = hardware->n_devices > 1 ? hardware->gather_bytes_per_s.value
                                          : hardware->network_bytes_per_s.value;
    return flops / hardware->bf16_gemm_flops_per_s.value + (bytes > 0 ? bytes / rate : 0);
}

/* ---- choice ---- */

static bool is_better(double step_s, int64_t bytes, bool fits, double best_s, int64_t best_bytes,
                      bool best_fits)
{
    static const double TIE = 0.99;
    if (fits != best_fits) return fits;
    return fits ? step_s < TIE * best_s : bytes < best_bytes;
}

bool bl_strategy_choose(const bl_strategy_job *job, const bl_hardware *hardware, bl_strategy *out)
{
    int64_t room = bl_strategy_room(hardware), best_bytes = INT64_MAX;
    double best_s = 0;
    bool best_fits = false;

    for (int stage = 1; stage <= 3; stage++)
        for (int recomputes = 0; recomputes < 2; recomputes++) {
            bl_strategy s = {.zero_stage = stage, .lora = true, .checkpointing = recomputes};
            bl_strategy_memory m;
            bl_strategy_count(&s, job, &m);
            int64_t bytes = bl_strategy_total(&m);
            double step_s = bl_strategy_step_s(&s, job, hardware);
            if (!is_better(step_s, bytes, bytes <= room, best_s, best_bytes, best_fits)) continue;
            *out = s;
            best_s = step_s;
            best_bytes = bytes;
            best_fits = bytes <= room;
        }
    return best_fits;
}
