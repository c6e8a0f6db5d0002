/* SPDX-License-Identifier: Apache-2.0 */
/* bound.c -- bounds of a step's time: a pass over a few layers measures the compute of visits,
 * sizes and rates give the transfers. */
#include "plan/bound_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/model.h"
#include "plan/run_pass_internal.h"

enum { MOST_KINDS = 8, MORE_LAYERS = 3, MOST_GROUPS = 4 * MOST_KINDS, FLOAT = sizeof(float) };

/* Compute time of a layer's visits. */
typedef struct visit {
    double forward_s, backward_s;
} visit;

/* One division of a step and one way of saving: the visits of each kind of layer. */
typedef struct measured {
    struct measured *next;
    int64_t micro_tokens;
    int n_micro, group;
    unsigned save;
    bool decodes_each_use;
    visit kind[MOST_KINDS];
    double last_backward_s, head_s; /* last_backward_s: of the last layer */
} measured;

struct plan_bounds {
    measured *first;
};

bl_status plan_bounds_create(plan_bounds **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: bounds of a plan");
}

void plan_bounds_destroy(plan_bounds *b)
{
    for (measured *m = b ? b->first : NULL, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    free(b);
}

/* ---- kinds of layers ---- */

static bool is_alike(const bl_time_run *a, const bl_time_run *b)
{
    bool is_same = a->trained && b->trained
                       ? memcmp(a->trained, b->trained, sizeof *a->trained) == 0
                       : a->trained == b->trained;
    return is_same && a->kind == b->kind && memcmp(a->format, b->format, sizeof a->format) == 0 &&
           a->bf16_matrices == b->bf16_matrices && a->is_last == b->is_last;
}

/* The layers of one kind that save the same tensors. */
typedef struct layers {
    const bl_time_run *run; /* the first of them */
    int kind;
    bool has_backward;
    int64_t n;
} layers;

/* Kinds are numbered in the order of their first layers, whatever these save. Kinds beyond
 * MOST_KINDS count as the last one. */
typedef struct sorted {
    const bl_time_run *kind[MOST_KINDS];
    layers of[MOST_GROUPS];
    int n_kinds, n;
} sorted;

static int kind_of(const bl_time_run *run, sorted *s)
{
    int k = 0;

    while (k < s->n_kinds && !is_alike(run, s->kind[k])) k++;
    if (k < s->n_kinds) return k;
    if (s->n_kinds == MOST_KINDS) return MOST_KINDS - 1;
    s->kind[s->n_kinds] = run;
    return s->n_kinds++;
}

static void sort_layers(const bl_time_input *in, sorted *s)
{
    int64_t layer = 0, first = in->trained ? in->trained->first : 0;

    *s = (sorted){.n = 0};
    for (int r = 0; r < in->n_runs; layer += in->runs[r++].n_layers) {
        const bl_time_run *run = &in->runs[r];
        bool has_backward = layer >= first;
        int kind = kind_of(run, s), i = 0;
        while (i < s->n && (s->of[i].kind != kind || s->of[i].run->save != run->save ||
                            s->of[i].has_backward != has_backward))
            i++;
        if (i == MOST_GROUPS) i = MOST_GROUPS - 1;
        if (i == s->n) s->of[s->n++] = (layers){run, kind, has_backward, 0};
        s->of[i].n += run->n_layers;
    }
}

/* ---- compute ---- */

typedef struct measuring {
    measured *out;
    int kind[MOST_KINDS + MORE_LAYERS]; /* of each layer */
    int64_t n_layers;
} measuring;

static void take_visit(void *user, const bl_span *span)
{
    measuring *m = user;
    double seconds = span->end_s - span->begin_s;
    bool is_layer = span->unit < m->n_layers;

    if (span->lane != BL_LANE_COMPUTE || span->is_stall) return;
    if (strcmp(span->name, "head") == 0)
        m->out->head_s = seconds;
    else if (strcmp(span->name, "forward") == 0 && is_layer)
        m->out->kind[m->kind[span->unit]].forward_s = seconds;
    else if (is_layer && span->unit == m->n_layers - 1)
        m->out->last_backward_s = seconds;
    else if (is_layer && (span->unit > 0 || m->kind[1] > 0)) /* layer 0 needs no gradient of x */
        m->out->kind[m->kind[span->unit]].backward_s = seconds;
}

/* One layer of each kind, and MORE_LAYERS of the last kind, so that the backward visits of the
 * first ones do not wait for the head. All tensors are trained, also if the run trains only
 * some. */
static int choose_runs(const sorted *all, unsigned save, bl_time_run *runs, measuring *m)
{
    int n = all->n_kinds + MORE_LAYERS;

    for (int l = 0; l < n; l++) {
        m->kind[l] = (int)bl_min_i64(l, all->n_kinds - 1);
        runs[l] = *all->kind[m->kind[l]];
        runs[l].n_layers = 1;
        runs[l].save = save;
        runs[l].is_last = false;
        runs[l].trained = NULL;
    }
    m->n_layers = n;
    return n;
}

/* A pass of the training with the longest micro-batches. */
static bl_time_input largest_of(const bl_time_input *in)
{
    bl_time_input largest = plan_training_of(in, 0);
    int64_t n_micro = 0;

    for (int i = 0; i <= in->n_others; i++) {
        bl_time_input t = plan_training_of(in, i);
        if (t.micro_tokens > largest.micro_tokens) largest = t;
        n_micro += t.n_micro;
    }
    largest.n_micro = (int)bl_max_i64(1, bl_min_i64(in->group, n_micro));
    return largest;
}

static bl_status measure(const bl_time_input *in, const sorted *all, measured *out)
{
    bl_time_run runs[MOST_KINDS + MORE_LAYERS];
    bl_time_input alone = largest_of(in);
    measuring m = {.out = out};
    bl_rates *r = &alone.rates;

    alone.n_runs = choose_runs(all, out->save, runs, &m);
    alone.runs = runs;
    alone.trained = alone.modules = NULL;
    alone.offload_ratio = alone.optimizer_ratio = 0;
    alone.optimizer_tier = BL_TIER_DEVICE;
    alone.offload_activations = false;
    alone.n_shards = alone.n_ranks;
    r->gather_bytes_per_s = r->network_bytes_per_s = INFINITY;
    r->gather_latency_s = r->network_latency_s = 0;
    return plan_run_trace(&alone, BL_TIME_FIRST_PASS, BL_TIME_AFTER_STEP, take_visit, &m);
}

static bl_status find(plan_bounds *b, const bl_time_input *in, const sorted *all, unsigned save,
                      const measured **out)
{
    measured *m = b->first;

    while (m && (m->micro_tokens != in->micro_tokens || m->n_micro != in->n_micro ||
                 m->group != in->group || m->save != save ||
                 m->decodes_each_use != in->decodes_each_use))
        m = m->next;
    *out = m;
    if (m) return BL_OK;
    m = calloc(1, sizeof *m);
    if (!m) return BL_FAIL(BL_ENOMEM, "out of memory: bounds of a plan");
    *m = (measured){.next = b->first,
                    .micro_tokens = in->micro_tokens,
                    .n_micro = in->n_micro,
                    .group = in->group,
                    .save = save,
                    .decodes_each_use = in->decodes_each_use};
    b->first = m;
    *out = m;
    return measure(in, all, m);
}

/* ---- transfers ---- */

/* The work of a phase, or of a part of it, per resource. */
typedef struct lanes {
    double compute_s;
    double in, out;                           /* bytes over the link */
    double disk_s, gather_s, sum_s, update_s; /* update_s: of trained weights, by the host */
} lanes;

static double per(double bytes, double rate)
{
    return rate > 0 && bytes > 0 ? bytes / rate : 0;
}

static void add_lanes(lanes *sum, double n, const lanes *l)
{
    sum->compute_s += n * l->compute_s;
    sum->in += n * l->in;
    sum->out += n * l->out;
    sum->disk_s += n * l->disk_s;
    sum->gather_s += n * l->gather_s;
    sum->sum_s += n * l->sum_s;
    sum->update_s += n * l->update_s;
}

static double longest(const bl_time_input *in, const lanes *l)
{
    const bl_rates *r = &in->rates;
    double s = fmax(l->compute_s, fmax(l->disk_s, l->update_s));

    s = fmax(s, fmax(per(l->in, r->copy_in_bytes_per_s), per(l->out, r->copy_out_bytes_per_s)));
    s = fmax(s, per(l->in + l->out, 2 * r->copy_both_bytes_per_s));
    s = fmax(s, per(l->in + l->out, r->host_memory_bytes_per_s));
    bool is_shared = in->n_hosts > 1; /* they share the network */
    return fmax(s, is_shared ? l->gather_s + l->sum_s : fmax(l->gather_s, l->sum_s));
}

static double seconds_of(const bl_time_input *in, double bytes, double size, bool is_sum)
{
    double n_on_host = (double)in->n_ranks / in->n_hosts;
    bl_exchange e = {.size = size,
                     .n_on_host = n_on_host,
                     .bytes = bytes,
                     .kind = is_sum ? BL_EXCHANGE_SUM : bl_exchange_gather_kind(in->kind),
                     .block = in->sum_block > 0 ? in->sum_block : BL_COMM_SUM_BLOCK};

    if (!is_sum && in->gathers_by_hosts && size > n_on_host && n_on_host > 1) {
        e.kind = BL_EXCHANGE_BLOCKS;
        e.block = (int)n_on_host;
    }
    return size > 1 && bytes > 0 ? bl_exchange_work(&e, in->kind, &in->rates).seconds : 0;
}

/* A rank's part of a layer, as it is stored. */
static double layer_bytes(const bl_time_input *in, const bl_time_run *run)
{
    double bytes = 0;

    for (int p = 0; p < in->model->arch->n_projections; p++) {
        int64_t rows, cols;
        if (!bl_arch_has(in->model->arch, run->kind, p)) continue;
        bl_projection_shape(in->model, p, &rows, &cols);
        bytes += (double)rows / in->n_shards * (double)bl_format_row_bytes(run->format[p], cols);
    }
    return bytes;
}

static int64_t rows_of(const bl_trained_unit *unit, int matrix)
{
    int64_t n = 0;
    for (int i = 0; i < unit->matrix[matrix].n; i++) n += unit->matrix[matrix].at[i].n;
    return n;
}

/* A rank's trained weights of a layer, and of the head. */
static double trained_weights(const bl_time_input *in, const bl_time_run *run)
{
    unsigned seen = 0; /* bit m: matrix m, of several projections */
    double n = 0;

    for (int p = 0; p < in->model->arch->n_projections; p++) {
        int matrix = (int)in->model->arch->projections[p].matrix;
        int64_t rows, cols;
        if (!bl_arch_has(in->model->arch, run->kind, p)) continue;
        bl_projection_shape(in->model, p, &rows, &cols);
        if (run->trained) rows = seen >> matrix & 1u ? 0 : rows_of(run->trained, matrix);
        n += (double)rows * (double)cols;
        seen |= 1u << matrix;
    }
    return n / in->n_shards;
}

static double trained_head_weights(const bl_time_input *in)
{
    int64_t rows =
        in->trained ? rows_of(&in->trained->unit[in->model->n_layers], 0) : in->model->vocab_size;
    return (double)rows * (double)in->model->hidden_size / in->n_shards;
}

/* Loading and gathering of a unit with `bytes` on this rank. On a GPU trained weights are gathered
 * from their bf16 copy. */
static lanes bring(const bl_time_input *in, double bytes)
{
    double ratio = in->is_trained && in->act != BL_F32 && !in->places_copy ? 0 : in->offload_ratio,
           away = ratio * bytes,
           on_disk = in->tier == BL_TIER_DISK ? away * (1 - in->host_part) : 0;
    double copied = in->writes_device ? away - on_disk : away;

    return (lanes){.in = copied,
                   .disk_s = per(on_disk, in->rates.disk_bytes_per_s),
                   .gather_s = seconds_of(in, bytes, in->n_shards, false)};
}

static double write_rate(const bl_rates *r)
{
    return r->disk_write_bytes_per_s > 0 ? r->disk_write_bytes_per_s : r->disk_bytes_per_s;
}

/* Adds the update of n trained weights, on average with the bytes of trained/units_model.c. The
 * host updates a whole unit if one of its matrices is outside of device memory. */
static void add_update(const bl_time_input *in, double n, lanes *l)
{
    const bl_rates *r = &in->rates;
    bool is_gpu = in->kind == BL_DEVICE_CUDA;
    double moment = in->moments == BL_BF16 ? 2 : FLOAT,
           state = in->optimizer_tier == BL_TIER_DEVICE ? 0 : in->optimizer_ratio,
           weights = in->offload_ratio, paged = fmax(state, fmin(1, BL_LAYER_MATRICES * weights));
    double host = paged * n * (4 * moment + 3 * FLOAT + (in->act == BL_F32 ? 0 : 6));
    double state_read = 2 * moment + FLOAT, state_written = 2 * moment;
    bool state_on_disk = in->optimizer_tier == BL_TIER_DISK;
    double weights_on_disk = in->tier == BL_TIER_DISK ? weights * (1 - in->host_part) : 0;
    double disk_read = n * ((state_on_disk ? state * state_read : 0) + weights_on_disk * FLOAT),
           disk_written =
               n * ((state_on_disk ? state * state_written : 0) + weights_on_disk * FLOAT);

    l->disk_s += per(disk_read, r->disk_bytes_per_s) + per(disk_written, write_rate(r));
    l->update_s = per(host, is_gpu ? r->host_memory_bytes_per_s
                                   : fmax(r->optimizer_bytes_per_s, r->memory_bytes_per_s));
    if (!is_gpu) return;
    l->out += n * ((paged - state) * state_read + (paged - weights) * FLOAT);
    l->in += n * ((paged - state) * state_written + (paged - weights) * FLOAT +
                  (in->places_copy ? paged - weights : paged) * 2);
}

/* Adds the sum and the moves of the gradients of n trained weights in one visit. */
static void add_gradients(const bl_time_input *in, double n, bool is_first, lanes *l)
{
    double bytes = n * FLOAT * (in->optimizer_tier == BL_TIER_DEVICE ? 0 : in->optimizer_ratio);
    bool on_disk = in->optimizer_tier == BL_TIER_DISK;

    l->sum_s = in->group * seconds_of(in, n * FLOAT, in->n_ranks, true);
    if (in->kind == BL_DEVICE_CUDA) {
        l->out += bytes;
        l->in += is_first ? 0 : bytes;
    }
    if (!on_disk) return;
    l->disk_s += per(bytes, write_rate(&in->rates));
    if (!is_first) l->disk_s += per(bytes, in->rates.disk_bytes_per_s);
}

/* ---- a pass ---- */

static double table_bytes(const bl_time_input *in)
{
    return (double)in->model->vocab_size * (double)in->model->hidden_size / in->n_shards *
           (double)bl_dtype_bytes(in->head_dtype);
}

/* Passes of a round. *part: the tokens of one on average, in parts of the measured one's. */
static int64_t count_passes(const bl_time_input *in, double *part)
{
    bl_time_input largest = largest_of(in);
    int64_t n_micro = 0;
    double n_tokens = 0;

    for (int i = 0; i <= in->n_others; i++) {
        bl_time_input t = plan_training_of(in, i);
        n_micro += t.n_micro;
        n_tokens += (double)t.n_micro * (double)t.micro_tokens;
    }
    int64_t n_passes = bl_ceil_div(n_micro, largest.n_micro);
    *part = n_tokens / ((double)(n_passes * largest.n_micro) * (double)largest.micro_tokens);
    return n_passes;
}

/* Bytes of a visit's layer inputs and saved tensors that are offloaded to host memory. */
static double spilled_bytes(const bl_time_input *in, const bl_time_run *run)
{
    bl_time_input pass = largest_of(in);
    bl_block_dims dims = bl_block_dims_of(in->model, run->kind, in->kind, in->act);
    double rows = (double)bl_block_rows(&dims, pass.micro_tokens) * pass.n_micro;
    double input = (double)in->model->hidden_size * (double)bl_dtype_bytes(in->act);

    return in->offload_activations ? rows * (input + (double)bl_block_saved_bytes(&dims, run->save))
                                   : 0;
}

static bl_status pass_seconds(plan_bounds *b, const bl_time_input *in, const sorted *all,
                              bool is_first, double part, double *out)
{
    const measured *m = NULL;
    lanes forward_sum = {0}, backward_sum = {0};

    for (int i = 0; i < all->n; i++) {
        const layers *l = &all->of[i];
        double n = trained_weights(in, l->run), spilled = part * spilled_bytes(in, l->run);
        BL_TRY(find(b, in, all, l->run->save, &m));
        lanes forward = bring(in, layer_bytes(in, l->run)), backward = forward;
        forward.compute_s = part * m->kind[l->kind].forward_s;
        backward.compute_s = part * m->kind[l->kind].backward_s;
        if (l->has_backward) forward.out += spilled;
        backward.in += spilled;
        if (in->is_trained && is_first) add_update(in, n, &forward);
        if (in->is_trained) add_gradients(in, n, is_first, &backward);
        add_lanes(&forward_sum, (double)l->n, &forward);
        if (!l->has_backward) continue;
        add_lanes(&backward_sum, (double)l->n, &backward);
        if (i == all->n - 1)
            backward_sum.compute_s += part * m->last_backward_s - backward.compute_s;
    }
    lanes head = bring(in, table_bytes(in));
    head.compute_s = m ? part * m->head_s : 0;
    if (in->is_trained) add_gradients(in, trained_head_weights(in), is_first, &head);
    add_lanes(&backward_sum, 1, &head);
    *out = longest(in, &forward_sum) + longest(in, &backward_sum);
    return BL_OK;
}

/* AdamW of the weights whose state is in device memory. */
static double optimizer_s(const bl_time_input *in, const sorted *all)
{
    double moment = in->moments == BL_BF16 ? 2 : FLOAT, n = 0,
           rate = in->rates.optimizer_bytes_per_s > 0 ? in->rates.optimizer_bytes_per_s
                                                      : in->rates.memory_bytes_per_s;

    if (!in->is_trained) return 0;
    for (int i = 0; i < all->n; i++)
        n += (double)all->of[i].n * trained_weights(in, all->of[i].run);
    double state = in->optimizer_tier == BL_TIER_DEVICE ? 0 : in->optimizer_ratio;
    return per((1 - fmax(state, in->offload_ratio)) * n * (4 * moment + 5 * FLOAT + 6), rate);
}

bl_status plan_bound(plan_bounds *b, const bl_time_input *in, double *step_s)
{
    double first_s, later_s = 0, part;
    int64_t n_passes = count_passes(in, &part);
    sorted s;

    sort_layers(in, &s);
    BL_TRY(pass_seconds(b, in, &s, true, part, &first_s));
    if (n_passes > 1) BL_TRY(pass_seconds(b, in, &s, false, part, &later_s));
    *step_s = first_s + (double)(n_passes - 1) * later_s + optimizer_s(in, &s) +
              in->rates.step_overhead_s;
    return BL_OK;
}
