/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the model device: streams of a simulation, an event as the operation that came last
 * when it was recorded, memory as addresses. */
#include "device/model.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "device/device_internal.h"

enum { WORKS_PER_CHUNK = 1024, REGION_BYTES = 64 << 20 };

/* Reserved addresses of a space: handed out one after the other, never twice. */
typedef struct region {
    struct region *next;
    bl_space space;
    char *memory;
    size_t n_bytes, used;
} region;

typedef struct work_chunk {
    struct work_chunk *next;
    int n;
    bl_work work[WORKS_PER_CHUNK];
} work_chunk;

typedef struct model_device {
    bl_device base;
    bl_model_device_options options;
    bl_simulation sim;
    work_chunk *works;
    region *regions;
    bool is_taken[BL_SIM_STREAMS]; /* streams of the simulation */
    int reader;                    /* its stream; BL_SIM_NOTHING: none yet */
} model_device;

typedef struct model_stream {
    bl_stream base;
    int index;
    int read[BL_STREAM_READS]; /* operations of the reader that were begun here */
} model_stream;

typedef struct model_event {
    bl_event base;
    int op;
} model_event;

typedef struct model_stamp {
    bl_stamp base;
    int op;
    double recorded_s; /* when the program recorded it: no stream reaches it earlier */
    bool is_recorded;
} model_stamp;

static model_device *device_of(bl_stream *stream)
{
    return (model_device *)stream->device;
}

static bool is_cuda(const model_device *self)
{
    return self->options.kind == BL_DEVICE_CUDA;
}

/* ---- memory ---- */

/* In front of the others; NULL: no memory, or no addresses (ulimit -v). */
static region *reserve(model_device *self, bl_space space, size_t n_bytes)
{
    bool is_hidden = space == BL_SPACE_DEVICE && is_cuda(self);
    region *r = malloc(sizeof *r);

    if (!r) return NULL;
    void *memory = mmap(NULL, n_bytes, is_hidden ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        free(r);
        return NULL;
    }
    *r = (region){.next = self->regions, .space = space, .memory = memory, .n_bytes = n_bytes};
    return self->regions = r;
}

static void *model_alloc(bl_device *device, bl_space space, size_t size_bytes)
{
    model_device *self = (model_device *)device;
    size_t n_bytes;

    if (bl_add_overflows(size_bytes, BL_DEVICE_ALIGNMENT_BYTES - 1, &n_bytes)) return NULL;
    n_bytes -= n_bytes % BL_DEVICE_ALIGNMENT_BYTES;
    region *r = self->regions;
    while (r && (r->space != space || n_bytes > r->n_bytes - r->used)) r = r->next;
    if (!r && !(r = reserve(self, space, n_bytes > REGION_BYTES ? n_bytes : REGION_BYTES)))
        return NULL;
    char *memory = r->memory + r->used;
    r->used += n_bytes;
    return memory;
}

/* Zeros again are not needed: addresses are used once. */
static void model_free(bl_device *device, bl_space space, void *memory, size_t size_bytes)
{
    (void)device;
    (void)space;
    (void)madvise(memory, size_bytes, MADV_DONTNEED);
}

static bl_status model_pin(bl_device *device, void *memory, size_t size_bytes)
{
    (void)device, (void)memory, (void)size_bytes;
    return BL_OK;
}

static void model_unpin(bl_device *device, void *memory, size_t size_bytes)
{
    (void)device, (void)memory, (void)size_bytes;
}

static bool is_device_memory(const model_device *self, const void *memory)
{
    for (const region *r = self->regions; r; r = r->next)
        if ((const char *)memory >= r->memory && (const char *)memory < r->memory + r->n_bytes)
            return r->space == BL_SPACE_DEVICE;
    return false;
}

/* ---- work ---- */

/* NULL: no memory. */
static const bl_work *keep_work(model_device *self, const bl_work *work)
{
    if (!self->works || self->works->n == WORKS_PER_CHUNK) {
        work_chunk *chunk = malloc(sizeof *chunk);
        if (!chunk) return NULL;
        chunk->next = self->works;
        chunk->n = 0;
        self->works = chunk;
    }
    bl_work *kept = &self->works->work[self->works->n++];
    *kept = *work;
    return kept;
}

static bl_status queue_work(model_device *self, int stream, const bl_work *work)
{
    if (work->seconds <= 0) return BL_OK;
    const bl_work *kept = keep_work(self, work);
    if (!kept) return BL_FAIL(BL_ENOMEM, "a simulation");
    return bl_simulation_add(&self->sim, &(bl_sim_op){.stream = stream, .work = kept});
}

static bl_status queue_wait(model_device *self, int stream, int op)
{
    if (bl_simulation_is_done(&self->sim, op)) return BL_OK;
    return bl_simulation_add(&self->sim, &(bl_sim_op){.stream = stream, .of = op});
}

bl_status bl_model_stream_work(bl_stream *stream, const bl_work *work)
{
    return queue_work(device_of(stream), ((model_stream *)stream)->index, work);
}

bl_status bl_model_stream_write(bl_stream *stream, size_t n_bytes)
{
    const bl_rates *r = &device_of(stream)->options.rates;
    double rate = r->disk_write_bytes_per_s > 0 ? r->disk_write_bytes_per_s : r->disk_bytes_per_s;

    return bl_model_stream_work(
        stream, &(bl_work){.seconds = (double)n_bytes / rate,
                           .use = {[BL_RESOURCE_DISK] = 1, [BL_RESOURCE_HOST_MEMORY] = rate}});
}

bl_work bl_model_memory_work(const bl_device *device, double bytes)
{
    const model_device *self = (const model_device *)device;
    double rate = self->options.rates.memory_bytes_per_s;
    bl_work work = {.seconds = rate > 0 ? bytes / rate : 0};

    if (is_cuda(self))
        work.use[BL_RESOURCE_DEVICE_MEMORY] = rate;
    else
        work.use[BL_RESOURCE_CORES] = self->options.rates.copy_cores;
    return work;
}

/* Between host and device memory: over the link, through both memories. */
static bl_work link_work(const model_device *self, double bytes, bool is_in)
{
    const bl_rates *r = &self->options.rates;
    double rate = is_in ? r->copy_in_bytes_per_s : r->copy_out_bytes_per_s;
    bl_work w = {.seconds = rate > 0 ? bytes / rate : 0};

    if (!is_cuda(self)) {
        w.use[BL_RESOURCE_CORES] = r->copy_cores;
        return w;
    }
    w.use[is_in ? BL_RESOURCE_LINK_IN : BL_RESOURCE_LINK_OUT] = rate;
    w.use[BL_RESOURCE_LINK_BOTH] = w.use[BL_RESOURCE_HOST_MEMORY] =
        w.use[BL_RESOURCE_DEVICE_MEMORY] = rate;
    return w;
}

/* ---- streams ---- */

static bl_status model_call(bl_stream *stream, bl_stream_fn fn, const void *args, size_t args_bytes)
{
    (void)stream, (void)fn, (void)args, (void)args_bytes;
    return BL_OK;
}

static bl_status model_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes)
{
    model_device *self = device_of(stream);
    bool to_device = is_device_memory(self, dst), from_device = is_device_memory(self, src);
    bl_work work = to_device == from_device
                       ? bl_model_memory_work(&self->base, 2 * (double)size_bytes)
                       : link_work(self, (double)size_bytes, to_device);
    return bl_model_stream_work(stream, &work);
}

static bl_status model_copy_rows(bl_stream *stream, const bl_row_copy *copy)
{
    bl_work work =
        bl_model_memory_work(stream->device, 2 * (double)copy->row_bytes * (double)copy->n_rows);
    return bl_model_stream_work(stream, &work);
}

static bl_status model_zero(bl_stream *stream, void *dst, size_t size_bytes)
{
    bl_work work = bl_model_memory_work(stream->device, (double)size_bytes);
    (void)dst;
    return bl_model_stream_work(stream, &work);
}

static bl_status model_wait(bl_stream *stream, bl_event *event)
{
    return queue_wait(device_of(stream), ((model_stream *)stream)->index,
                      ((model_event *)event)->op);
}

static bl_status model_synchronize(bl_stream *stream)
{
    model_device *self = device_of(stream);
    return bl_simulation_run_until(
        &self->sim, bl_simulation_event(&self->sim, ((model_stream *)stream)->index));
}

static bl_status model_status(bl_stream *stream)
{
    (void)stream;
    return BL_OK;
}

static bl_status model_record(bl_stream *stream, bl_event *event)
{
    ((model_event *)event)->op =
        bl_simulation_event(&device_of(stream)->sim, ((model_stream *)stream)->index);
    return BL_OK;
}

static bl_status model_stamp_record(bl_stream *stream, bl_stamp *stamp)
{
    model_stamp *self = (model_stamp *)stamp;
    self->op = bl_simulation_event(&device_of(stream)->sim, ((model_stream *)stream)->index);
    self->recorded_s = device_of(stream)->sim.now;
    self->is_recorded = true;
    return BL_OK;
}

/* The reader takes reads in the order in which they are begun, of all streams. */
static bl_status model_begin_read(bl_stream *stream, int slot, size_t n_bytes)
{
    model_device *self = device_of(stream);
    model_stream *s = (model_stream *)stream;
    const bl_rates *r = &self->options.rates;
    bl_work work = {.seconds = (double)n_bytes / r->disk_bytes_per_s};

    work.use[BL_RESOURCE_HOST_MEMORY] = r->disk_bytes_per_s;
    work.use[BL_RESOURCE_DISK] = 1;
    if (!is_cuda(self)) work.use[BL_RESOURCE_CORES] = r->copy_cores;
    BL_TRY(queue_wait(self, self->reader, bl_simulation_event(&self->sim, s->index)));
    BL_TRY(queue_work(self, self->reader, &work));
    s->read[slot] = bl_simulation_event(&self->sim, self->reader);
    return BL_OK;
}

static bl_status model_end_read(bl_stream *stream, int slot)
{
    model_stream *s = (model_stream *)stream;
    return queue_wait(device_of(stream), s->index, s->read[slot]);
}

static void model_stream_destroy(bl_stream *stream)
{
    (void)model_synchronize(stream);
    device_of(stream)->is_taken[((model_stream *)stream)->index] = false;
    free(stream);
}

static int take_stream(model_device *self)
{
    for (int s = 0; s < BL_SIM_STREAMS; s++)
        if (!self->is_taken[s]) {
            self->is_taken[s] = true;
            return s;
        }
    return BL_SIM_NOTHING;
}

static bl_status model_host_stream_create(bl_device *device, const char *name, bl_stream **out)
{
    static const bl_stream_backend backend = {.destroy = model_stream_destroy,
                                              .call = model_call,
                                              .begin_read = model_begin_read,
                                              .end_read = model_end_read,
                                              .copy = model_copy,
                                              .copy_rows = model_copy_rows,
                                              .zero = model_zero,
                                              .wait = model_wait,
                                              .synchronize = model_synchronize,
                                              .status = model_status,
                                              .record = model_record,
                                              .stamp = model_stamp_record};
    int index = take_stream((model_device *)device);

    *out = NULL;
    if (index == BL_SIM_NOTHING)
        return BL_FAIL(BL_ELIMIT, "stream %s: a model device has at most %d streams", name,
                       BL_SIM_STREAMS);
    model_stream *self = calloc(1, sizeof *self);
    if (!self) return BL_FAIL(BL_ENOMEM, "stream %s", name);
    *self = (model_stream){.base = {device, &backend}, .index = index};
    *out = &self->base;
    return BL_OK;
}

/* Operations of two streams share a resource by their rates, not by their streams' priorities. */
static bl_status model_stream_create(bl_device *device, const char *name, bool is_urgent,
                                     bl_stream **out)
{
    (void)is_urgent;
    return model_host_stream_create(device, name, out);
}

/* ---- events and stamps ---- */

static bl_status model_event_create(bl_device *device, bl_event **out)
{
    model_event *self = calloc(1, sizeof *self);

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "an event");
    *self = (model_event){.base = {device}, .op = BL_SIM_NOTHING};
    *out = &self->base;
    return BL_OK;
}

static void model_event_destroy(bl_event *event)
{
    free(event);
}

static bl_status model_event_synchronize(bl_event *event)
{
    return bl_simulation_run_until(&((model_device *)event->device)->sim,
                                   ((model_event *)event)->op);
}

static bl_status model_stamp_create(bl_device *device, bl_stamp **out)
{
    model_stamp *self = calloc(1, sizeof *self);

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "a stamp");
    *self = (model_stamp){.base = {device}, .op = BL_SIM_NOTHING};
    *out = &self->base;
    return BL_OK;
}

static void model_stamp_destroy(bl_stamp *stamp)
{
    free(stamp);
}

static double model_stamp_seconds(const bl_stamp *stamp)
{
    const model_stamp *self = (const model_stamp *)stamp;
    const bl_simulation *sim = &((const model_device *)stamp->device)->sim;

    if (!self->is_recorded || !bl_simulation_is_done(sim, self->op)) return BL_NEVER_S;
    double reached_s = self->op == BL_SIM_NOTHING ? 0 : sim->ops[self->op].end_s;
    return fmax(reached_s, self->recorded_s);
}

static double model_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end)
{
    double from = model_stamp_seconds(begin), to = model_stamp_seconds(end);
    return from > BL_NEVER_S && to > BL_NEVER_S ? to - from : 0;
}

/* ---- the device ---- */

static bool model_host_writes(const bl_device *device)
{
    return !is_cuda((const model_device *)device);
}

static void model_destroy(bl_device *device)
{
    model_device *self = (model_device *)device;

    bl_device_base_close(&self->base);
    for (region *r = self->regions, *next; r; r = next) {
        next = r->next;
        munmap(r->memory, r->n_bytes);
        free(r);
    }
    for (work_chunk *chunk = self->works, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    bl_simulation_free(&self->sim);
    free(self);
}

static void set_capacities(model_device *self)
{
    const bl_rates *r = &self->options.rates;
    double *capacity = self->sim.capacity;

    capacity[BL_RESOURCE_CORES] = r->cores;
    capacity[BL_RESOURCE_NETWORK] = capacity[BL_RESOURCE_DISK] = 1;
    if (!is_cuda(self)) return;
    capacity[BL_RESOURCE_DEVICE_MEMORY] = r->memory_bytes_per_s;
    capacity[BL_RESOURCE_LINK_IN] = r->copy_in_bytes_per_s;
    capacity[BL_RESOURCE_LINK_OUT] = r->copy_out_bytes_per_s;
    capacity[BL_RESOURCE_LINK_BOTH] = 2 * r->copy_both_bytes_per_s;
    capacity[BL_RESOURCE_HOST_MEMORY] = r->host_memory_bytes_per_s;
}

#define BACKEND(of_kind)                                                                           \
    {                                                                                              \
        .kind = of_kind, .is_model = true, .destroy = model_destroy,                               \
        .host_writes = model_host_writes, .alloc = model_alloc, .free = model_free,                \
        .pin = model_pin, .unpin = model_unpin, .stream_create = model_stream_create,              \
        .host_stream_create = model_host_stream_create, .event_create = model_event_create,        \
        .event_destroy = model_event_destroy, .event_synchronize = model_event_synchronize,        \
        .stamp_create = model_stamp_create, .stamp_destroy = model_stamp_destroy,                  \
        .stamp_seconds = model_stamp_seconds, .stamp_elapsed_s = model_stamp_elapsed_s             \
    }

bl_status bl_device_create_model(const bl_model_device_options *options, bl_device **out)
{
    static const bl_device_backend cpu = BACKEND(BL_DEVICE_CPU), cuda = BACKEND(BL_DEVICE_CUDA);
    model_device *self = calloc(1, sizeof *self);

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "a model device");
    bl_device_base_init(&self->base, options->kind == BL_DEVICE_CUDA ? &cuda : &cpu);
    self->options = *options;
    bl_simulation_init(&self->sim);
    set_capacities(self);
    self->reader = take_stream(self);
    *out = &self->base;
    return BL_OK;
}

const bl_model_device_options *bl_device_model(const bl_device *device)
{
    return device->backend->is_model ? &((const model_device *)device)->options : NULL;
}

const bl_simulation *bl_device_model_simulation(const bl_device *device)
{
    return &((const model_device *)device)->sim;
}

int bl_model_stream_index(const bl_stream *stream)
{
    return ((const model_stream *)stream)->index;
}

bl_status bl_device_model_drain(bl_device *device)
{
    return bl_simulation_run(&((model_device *)device)->sim);
}
