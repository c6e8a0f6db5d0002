/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- a device made of rates: streams in simulated time, memory that is counted, not made. A
 * program that queues its work on one is timed and measured without a machine: it behaves as one
 * rank of the modeled kind, whose ops, copies, reads and collectives take the time that bl_rates
 * give them, and compute nothing.
 *
 *   - The clock moves only while the program waits (bl_stream_synchronize, bl_event_synchronize):
 *     work queued later begins then or later. Stamps are seconds of this clock, from 1 on.
 *   - bl_stream_call runs nothing and takes no time. The work that a task models is queued as work.
 *   - Memory has addresses and zeros, which pages are made for when host code writes them. Device
 *     memory of a GPU has addresses only. Nothing is copied.
 *   - One thread uses it. */
#ifndef BALLAST_DEVICE_MODEL_H
#define BALLAST_DEVICE_MODEL_H

#include "device/device.h"
#include "device/rates.h"
#include "device/simulation.h"

typedef struct bl_model_kernel {
    const char *op;
    int rate;
    double flops, bytes, seconds; /* bytes: of device memory */
} bl_model_kernel;

typedef struct bl_model_device_options {
    bl_device_kind kind; /* the modeled kind; bl_device_get_kind */
    bl_rates rates;
    /* Of the data, which costs depend on and arguments do not show (ops/cost.h). */
    double document_tokens, label_part;
    /* Of micro-batches with other statistics, by their tokens; borrowed. */
    const bl_token_statistics *data;
    int n_data;
    /* Called for each kernel that an op queues: the op's name, its bl_cost_rate. NULL: no calls. */
    void (*on_kernel)(void *user, const bl_stream *stream, const bl_model_kernel *kernel);
    void *on_kernel_user;
} bl_model_device_options;

bl_status bl_device_create_model(const bl_model_device_options *options, bl_device **out);

/* NULL: the device computes. */
const bl_model_device_options *bl_device_model(const bl_device *device);

/* ---- for the code of such a device: ops/model, comm/model.c ---- */

/* Work of a stream of a model device. */
bl_status bl_model_stream_work(bl_stream *stream, const bl_work *work);

/* Its streams in simulated time, and a stream's number among them. */
const bl_simulation *bl_device_model_simulation(const bl_device *device);
int bl_model_stream_index(const bl_stream *stream);
/* Waits for all of its streams. */
bl_status bl_device_model_drain(bl_device *device);

/* A write of so many bytes to the disk. */
bl_status bl_model_stream_write(bl_stream *stream, size_t n_bytes);
/* Work that moves bytes without computing, from one place to another: as bl_stream_copy. */
bl_work bl_model_memory_work(const bl_device *device, double bytes);

#endif
