/* SPDX-License-Identifier: Apache-2.0 */
/* units_model.c -- the update of PAGED units on a device made of rates (device/model.h), which runs
 * no tasks: the time that it takes. */
#include <math.h>

#include "trained/units_paged_internal.h"
#include "device/model.h"

/* Bytes that an update moves. */
typedef struct moved {
    double read, written; /* of the disk */
    double out, in;       /* of a GPU's memory */
    double host;          /* of host memory, by the update itself */
} moved;

static double seconds_for(double bytes, double rate)
{
    return bytes > 0 ? bytes / rate : 0;
}

static double write_rate(const bl_rates *r)
{
    return r->disk_write_bytes_per_s > 0 ? r->disk_write_bytes_per_s : r->disk_bytes_per_s;
}

/* Bytes per second of the update on the host's cores. */
static double update_rate(const trained_units *units, const bl_rates *r)
{
    double rate = units->is_gpu                  ? r->host_memory_bytes_per_s
                  : r->optimizer_bytes_per_s > 0 ? r->optimizer_bytes_per_s
                                                 : r->memory_bytes_per_s;
    return rate > 0 ? rate : INFINITY;
}

static void add_array(const trained_units *units, const trained_span *span, trained_array array,
                      moved *m)
{
    double n = (double)(span->n * trained_units_element(units, array));
    bl_tier place = trained_units_place(units, span, array, 0).tier;

    m->host += array == TRAINED_GRAD ? n : 2 * n;
    if (place == BL_TIER_HOST) return;
    *(place == BL_TIER_DISK ? &m->read : &m->out) += n;
    if (array != TRAINED_GRAD) *(place == BL_TIER_DISK ? &m->written : &m->in) += n;
}

/* The rows of the bf16 copy. */
static void add_copy(const trained_units *units, const trained_span *span, moved *m)
{
    double n = (double)span->n;

    if (!units->options.weights->copy) return;
    bl_tier place = trained_units_copy_place(units, &span->at, 0).tier;
    m->host += 6 * n;
    if (place == BL_TIER_DEVICE) m->in += 2 * n;
    if (place == BL_TIER_DISK) m->written += 2 * n;
}

/* Transfers and arithmetic of the pieces overlap: the slowest of them decides. */
bl_status trained_units_model_update(trained_units *units, int64_t unit)
{
    const bl_rates *r = &bl_device_model(units->options.device)->rates;
    const trained_spans *spans = units->spans;
    moved m = {.read = 0};

    for (int64_t s = spans->first[unit]; s < spans->first[unit + 1]; s++) {
        for (int i = 0; i < TRAINED_N_ARRAYS; i++)
            add_array(units, &spans->span[s], (trained_array)i, &m);
        add_copy(units, &spans->span[s], &m);
    }
    double disk_s =
               seconds_for(m.read, r->disk_bytes_per_s) + seconds_for(m.written, write_rate(r)),
           in_s = seconds_for(m.in, r->copy_in_bytes_per_s),
           out_s = seconds_for(m.out, r->copy_out_bytes_per_s),
           host_s = m.host / update_rate(units, r),
           seconds = fmax(fmax(disk_s, host_s), fmax(in_s, out_s));
    if (seconds <= 0) return BL_OK;
    bl_work w = {.seconds = seconds, .use = {[BL_RESOURCE_DISK] = disk_s / seconds}};
    if (units->is_gpu) {
        w.use[BL_RESOURCE_LINK_IN] = m.in / seconds;
        w.use[BL_RESOURCE_LINK_OUT] = m.out / seconds;
        w.use[BL_RESOURCE_LINK_BOTH] = (m.in + m.out) / seconds;
        w.use[BL_RESOURCE_HOST_MEMORY] = (m.host + m.read + m.written + m.in + m.out) / seconds;
    } else {
        w.use[BL_RESOURCE_CORES] = r->compute_cores * host_s / seconds;
    }
    return bl_model_stream_work(units->disk, &w);
}
