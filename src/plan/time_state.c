/* SPDX-License-Identifier: Apache-2.0 */
/* time_state.c -- trained weights, moments and gradients outside of device memory: the tier of each
 * unit's, the costs of their transfers and updates, and what the actions of a pass queue for them,
 * as adapter/units*.c do it. */
#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "plan/time_layer_internal.h"
#include "plan/time_machine_internal.h"

enum {
    FLOAT = sizeof(float),
    N_ARRAYS = 4, /* both moments, weights, gradients */
    WEIGHTS = 2,
    GRADIENTS = 3
};

/* ---- places ---- */

/* As adapter_units_place: a CPU's device memory is host memory. */
static bl_tier place_of(const bl_time_input *in, bl_tier tier)
{
    return tier == BL_TIER_DEVICE && in->kind == BL_DEVICE_CPU ? BL_TIER_HOST : tier;
}

static bool is_apart(const bl_time_input *in, bl_tier tier)
{
    return tier == BL_TIER_DISK || (in->kind == BL_DEVICE_CUDA && tier == BL_TIER_HOST);
}

/* Bytes that an update moves. */
typedef struct moved {
    double read, written; /* of the disk */
    double out, in;       /* of a GPU's memory */
    double host;          /* of host memory, by the update itself */
} moved;

static void add_array(const bl_time_input *in, int array, bl_tier tier, double n_elements, moved *m)
{
    bool is_moment = array != WEIGHTS && array != GRADIENTS;
    double n = n_elements * (is_moment && in->moments == BL_BF16 ? 2 : FLOAT);
    bl_tier place = place_of(in, tier);

    m->host += array == GRADIENTS ? n : 2 * n;
    if (place == BL_TIER_HOST) return;
    *(place == BL_TIER_DISK ? &m->read : &m->out) += n;
    if (array != GRADIENTS) *(place == BL_TIER_DISK ? &m->written : &m->in) += n;
}

/* ---- costs ---- */

static double seconds_for(double bytes, double rate)
{
    return bytes > 0 ? bytes / rate : 0;
}

/* Of the update on the host's cores. */
static double update_rate(const bl_time_input *in)
{
    const bl_rates *r = &in->rates;
    double rate = in->kind == BL_DEVICE_CUDA     ? r->host_memory_bytes_per_s
                  : r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s
                                                 : r->memory_bytes_per_s;
    return rate > 0 ? rate : INFINITY;
}

static double write_rate(const bl_rates *r)
{
    return r->disk_write_bytes_per_s > 0 ? r->disk_write_bytes_per_s : r->disk_bytes_per_s;
}

/* Transfers and arithmetic of an update's pieces overlap: the slowest of them decides. */
static bl_work update_work(const bl_time_input *in, const moved *m)
{
    const bl_rates *r = &in->rates;
    double disk_s =
               seconds_for(m->read, r->disk_bytes_per_s) + seconds_for(m->written, write_rate(r)),
           in_s = seconds_for(m->in, r->copy_in_bytes_per_s),
           out_s = seconds_for(m->out, r->copy_out_bytes_per_s), host_s = m->host / update_rate(in),
           seconds = fmax(fmax(disk_s, host_s), fmax(in_s, out_s));
    bl_work w = {.seconds = seconds};

    if (seconds <= 0) return w;
    w.use[BL_RESOURCE_DISK] = disk_s / seconds;
    if (in->kind == BL_DEVICE_CPU) {
        w.use[BL_RESOURCE_CORES] = r->compute_cores * host_s / seconds;
        return w;
    }
    w.use[BL_RESOURCE_LINK_IN] = m->in / seconds;
    w.use[BL_RESOURCE_LINK_OUT] = m->out / seconds;
    w.use[BL_RESOURCE_LINK_BOTH] = (m->in + m->out) / seconds;
    w.use[BL_RESOURCE_HOST_MEMORY] = (m->host + m->read + m->written + m->in + m->out) / seconds;
    return w;
}

static void price_gradients(const bl_time_input *in, plan_unit *u)
{
    double n = (double)u->n_bytes, memory = in->rates.memory_bytes_per_s;
    double pass_s = memory > 0 ? n / memory : 0;

    u->clear = u->square = plan_work_of(in, pass_s, n);
    u->in = plan_copy(in, n, true);
    u->out = plan_copy(in, n, false);
    if (u->tier != BL_TIER_DISK) return;
    u->read = plan_disk_work(n, in->rates.disk_bytes_per_s);
    u->write = plan_disk_work(n, write_rate(&in->rates));
}

/* ---- units ---- */

static int64_t n_parts(const plan_state *s, int64_t unit)
{
    return unit < s->n_layers ? BL_LAYER_MATRICES : 1;
}

/* Elements of a matrix's trained rows. */
static int64_t chosen_elements(const bl_time_input *in, int run, int64_t unit, int64_t matrix)
{
    const bl_trained_spans *chosen = &in->trained->unit[unit].matrix[matrix];
    bool is_layer = unit < in->model->n_layers;
    int64_t rows = 0, cols = is_layer ? plan_matrix_of(in, &in->runs[run], (int)matrix).weight.cols
                                      : in->model->hidden_size;

    for (int i = 0; i < chosen->n; i++) rows += chosen->at[i].n;
    return rows * cols;
}

/* Sizes of a unit's arrays, whose parts are aligned. */
static void measure_unit(plan_state *s, const plan_amounts *amounts, const int *run_of_layer,
                         int64_t unit)
{
    plan_unit *u = &s->unit[unit];
    bool is_layer = unit < s->n_layers;
    int run = is_layer ? run_of_layer[unit] : 0;
    const plan_item *items = is_layer ? amounts->layers[run].item : &amounts->head_item;

    for (int64_t i = 0; i < n_parts(s, unit); i++) {
        int64_t n = plan_trained_elements(s->in, &items[i], is_layer);
        u->n_elements[i] = u->n_trained[i] = n;
        if (s->in->trained) u->n_trained[i] = bl_min_i64(n, chosen_elements(s->in, run, unit, i));
        u->n_bytes += bl_round_up(FLOAT * u->n_trained[i], BL_DEVICE_ALIGNMENT_BYTES);
    }
}

/* Whole units' moments and gradients; of the weights, parts. */
static bl_status place_units(plan_state *s, bl_tier *weights)
{
    const bl_time_input *in = s->in;
    int64_t n_all = s->n_layers * BL_LAYER_MATRICES + s->n_units - s->n_layers, at = 0;
    size_t *bytes = calloc((size_t)bl_max_i64(n_all, s->n_units), sizeof *bytes);
    bl_tier *tiers = calloc((size_t)s->n_units, sizeof *tiers);

    if (!bytes || !tiers) {
        free(bytes), free(tiers);
        return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    }
    for (int64_t u = 0; u < s->n_units; u++) bytes[u] = (size_t)s->unit[u].n_bytes;
    bl_tier_spread(bytes, s->n_units, in->optimizer_ratio, in->optimizer_tier, tiers);
    for (int64_t u = 0; u < s->n_units; u++)
        for (int64_t i = 0; i < n_parts(s, u); i++)
            bytes[at++] = FLOAT * (size_t)s->unit[u].n_elements[i];
    if (in->tier == BL_TIER_DISK)
        bl_tier_spread_two(bytes, n_all, in->offload_ratio, in->host_part, weights);
    else
        bl_tier_spread(bytes, n_all, in->offload_ratio, in->tier, weights);
    for (int64_t u = 0; u < s->n_units; u++) {
        bool is_device =
            s->unit[u].n_bytes == 0 || (in->kind == BL_DEVICE_CPU && tiers[u] == BL_TIER_HOST);
        s->unit[u].tier = is_device ? BL_TIER_DEVICE : tiers[u];
    }
    free(tiers);
    free(bytes);
    return BL_OK;
}

static void price_update(const plan_state *s, const bl_tier *weights, plan_unit *u, int64_t n)
{
    const bl_time_input *in = s->in;
    moved m = {.read = 0};

    u->is_paged = is_apart(in, u->tier);
    for (int64_t i = 0; i < n; i++) {
        if (u->n_trained[i] == 0) continue;
        u->is_paged |= is_apart(in, weights[i]);
        for (int a = 0; a < N_ARRAYS; a++)
            add_array(in, a, a == WEIGHTS ? weights[i] : u->tier, (double)u->n_trained[i], &m);
        if (in->act == BL_F32) continue; /* the copy in bf16 */
        m.host += 6 * (double)u->n_trained[i];
        bl_tier copy = place_of(in, in->places_copy ? weights[i] : BL_TIER_DEVICE);
        if (copy == BL_TIER_DEVICE) m.in += 2 * (double)u->n_trained[i];
        if (copy == BL_TIER_DISK) m.written += 2 * (double)u->n_trained[i];
    }
    u->lane = m.read > 0 ? BL_LANE_DISK : BL_LANE_COPY;
    u->update_bytes = (int64_t)(m.read > 0 ? m.read + m.written : m.in + m.out);
    u->update = update_work(in, &m);
}

/* The last unit is a tied embedding's: gradients alone. */
bl_status plan_state_create(const bl_time_input *in, const plan_amounts *amounts,
                            const int *run_of_layer, int64_t n_layers, plan_state *s)
{
    bool is_tied = in->model->tie_word_embeddings;

    *s = (plan_state){.in = in, .n_layers = n_layers, .n_units = n_layers + (is_tied ? 1 : 2)};
    s->unit = calloc((size_t)s->n_units + 1, sizeof *s->unit);
    s->weights = calloc((size_t)(n_layers + 2) * BL_LAYER_MATRICES, sizeof *s->weights);
    if (!s->unit || !s->weights) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    for (int64_t u = 0; u < s->n_units; u++) measure_unit(s, amounts, run_of_layer, u);
    BL_TRY(place_units(s, s->weights));
    for (int64_t u = 0, at = 0; u < s->n_units; u++) {
        price_update(s, &s->weights[at], &s->unit[u], n_parts(s, u));
        price_gradients(in, &s->unit[u]);
        s->is_paged |= s->unit[u].is_paged;
        at += n_parts(s, u);
    }
    s->unit[s->n_units] = s->unit[s->n_units - 1];
    return BL_OK;
}

void plan_state_free(plan_state *s)
{
    free(s->unit);
    free(s->weights);
}

/* The rows of the ring's tables begin at multiples of BL_LAYER_MATRICES. */
void plan_state_copy_weights(const plan_state *s, bl_tier *tiers)
{
    int64_t at = 0;

    for (int64_t u = 0; u < s->n_units; u++)
        for (int64_t i = 0; i < n_parts(s, u); i++)
            tiers[u * BL_LAYER_MATRICES + i] = s->weights[at++];
}

/* ---- the frames of a visit: adapter/units_frames.c ---- */

enum { LAYER_FRAMES = 2, TABLE = 2, TIED = 3 };

static int frame_of(const plan_state *s, int64_t unit)
{
    return unit == s->n_units ? TIED : unit >= s->n_layers ? TABLE : (int)(unit & 1);
}

static bool overlap(int a, int b)
{
    return a == b || (a == TIED && b < LAYER_FRAMES) || (b == TIED && a < LAYER_FRAMES);
}

static bl_lane lane_of(const plan_unit *u)
{
    return u->tier == BL_TIER_DISK ? BL_LANE_DISK : BL_LANE_COPY;
}

static bl_status queue_read(machine *m, int64_t unit)
{
    const plan_state *s = m->pass->state;
    const plan_unit *u = &s->unit[unit];
    int frame = frame_of(s, unit);

    m->frames.held[frame] = unit;
    if (u->tier == BL_TIER_DISK) {
        BL_TRY(plan_machine_span(m, PLAN_STATE, BL_LANE_DISK, "gradients", unit, -1, u->n_bytes,
                                 &u->read));
        m->frames.ready[frame] = bl_simulation_last(m->sim);
    }
    if (s->in->kind != BL_DEVICE_CUDA) return BL_OK;
    if (u->tier == BL_TIER_DISK)
        BL_TRY(plan_machine_wait(m, PLAN_STATE_IN, m->frames.ready[frame]));
    for (int i = 0; i < MACHINE_FRAMES; i++)
        if (overlap(i, frame)) BL_TRY(plan_machine_wait(m, PLAN_STATE_IN, m->frames.written[i]));
    BL_TRY(plan_machine_span(m, PLAN_STATE_IN, BL_LANE_COPY, "gradients", unit, -1, u->n_bytes,
                             &u->in));
    m->frames.ready[frame] = bl_simulation_last(m->sim);
    return BL_OK;
}

void plan_machine_init_frames(machine *m)
{
    m->frames.is_clean = m->pass->is_first;
    for (int i = 0; i < MACHINE_FRAMES; i++)
        m->frames.held[i] = m->frames.ready[i] = m->frames.written[i] = BL_SIM_NOTHING;
}

static bl_status open_frame(machine *m, int64_t unit, plan_stream stream)
{
    const plan_state *s = m->pass->state;
    const plan_unit *u = &s->unit[unit];
    int frame = frame_of(s, unit);

    if (u->tier == BL_TIER_DEVICE) return BL_OK;
    if (m->frames.is_clean) {
        for (int i = 0; i < MACHINE_FRAMES; i++)
            if (overlap(i, frame))
                BL_TRY(plan_machine_stall_on(m, stream, lane_of(u), "gradients",
                                             m->frames.written[i], unit, -1));
        return plan_machine_work(m, stream, BL_LANE_COMPUTE, &u->clear);
    }
    if (m->frames.held[frame] != unit) BL_TRY(queue_read(m, unit));
    m->frames.held[frame] = BL_SIM_NOTHING;
    return plan_machine_stall_on(m, stream, lane_of(u), "gradients", m->frames.ready[frame], unit,
                                 -1);
}

static bl_status prefetch_next(machine *m, int64_t unit)
{
    const plan_state *s = m->pass->state;
    int64_t next = unit - 1;

    if (m->frames.is_clean || unit >= s->n_units || next < 0 || next >= s->n_layers) return BL_OK;
    return s->unit[next].tier == BL_TIER_DEVICE ? BL_OK : queue_read(m, next);
}

static bl_status close_frame(machine *m, int64_t unit, plan_stream stream)
{
    const plan_state *s = m->pass->state;
    const plan_unit *u = &s->unit[unit];
    plan_stream last = stream;

    if (u->tier == BL_TIER_DEVICE) return BL_OK;
    if (unit < s->n_units) BL_TRY(plan_machine_work(m, stream, BL_LANE_COMPUTE, &u->square));
    if (s->in->kind == BL_DEVICE_CUDA) {
        BL_TRY(plan_machine_wait(m, PLAN_STATE_OUT, bl_simulation_event(m->sim, (int)last)));
        last = PLAN_STATE_OUT;
        BL_TRY(
            plan_machine_span(m, last, BL_LANE_COPY, "gradients", unit, -1, u->n_bytes, &u->out));
    }
    if (u->tier == BL_TIER_DISK) {
        BL_TRY(plan_machine_wait(m, PLAN_STATE, bl_simulation_event(m->sim, (int)last)));
        last = PLAN_STATE;
        BL_TRY(
            plan_machine_span(m, last, BL_LANE_DISK, "gradients", unit, -1, u->n_bytes, &u->write));
    }
    m->frames.written[frame_of(s, unit)] = bl_simulation_last(m->sim);
    return BL_OK;
}

/* Several ranks add to their rows on the communication stream. */
static plan_stream stream_of(const machine *m)
{
    return m->in->n_ranks > 1 ? PLAN_LORA : PLAN_COMPUTE;
}

bl_status plan_machine_open_gradients(machine *m, int64_t unit)
{
    if (m->in->n_ranks > 1)
        BL_TRY(plan_machine_wait(m, PLAN_LORA, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(open_frame(m, unit, stream_of(m)));
    return prefetch_next(m, unit);
}

bl_status plan_machine_close_gradients(machine *m, int64_t unit)
{
    return close_frame(m, unit, stream_of(m));
}

bl_status plan_machine_join_tied(machine *m)
{
    const plan_state *s = m->pass->state;
    int64_t head = s->n_units - 1, embedding = s->n_units;

    if (!m->in->model->tie_word_embeddings || s->unit[head].tier == BL_TIER_DEVICE) return BL_OK;
    m->frames.is_clean = false;
    BL_TRY(open_frame(m, head, PLAN_COMPUTE));
    BL_TRY(open_frame(m, embedding, PLAN_COMPUTE));
    BL_TRY(plan_machine_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, &s->unit[head].square));
    return close_frame(m, head, PLAN_COMPUTE);
}

/* ---- updates ---- */

bl_status plan_machine_update(machine *m, int64_t unit)
{
    const plan_pass *pass = m->pass;
    const plan_unit *u = &pass->state->unit[unit];

    if (!pass->is_first || !pass->before || unit >= pass->state->n_units || !u->is_paged)
        return BL_OK;
    BL_TRY(
        plan_machine_span(m, PLAN_STATE, u->lane, "update", unit, -1, u->update_bytes, &u->update));
    int updated = bl_simulation_last(m->sim);
    BL_TRY(plan_machine_wait(m, PLAN_COPY, updated));
    BL_TRY(plan_machine_wait(m, PLAN_GATHER, updated));
    return plan_machine_stall_on(m, PLAN_COMPUTE, u->lane, "update", updated, unit, -1);
}
