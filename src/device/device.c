/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the half of a device that all kinds share: dispatch, argument checks, and the account
 * of memory by blocks. */
#include "device/device_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "base/sizes.h"

void bl_device_base_init(bl_device *device, const bl_device_backend *backend)
{
    *device =
        (bl_device){.backend = backend, .act = backend->kind == BL_DEVICE_CUDA ? BL_BF16 : BL_F32};
    pthread_mutex_init(&device->lock, NULL);
}

void bl_device_base_close(bl_device *device)
{
    assert(device->n_blocks == 0 && "memory of a device must be freed before it");
    pthread_mutex_destroy(&device->lock);
    bl_pool_destroy(device->workers);
    free(device->blocks);
}

void bl_device_destroy(bl_device *device)
{
    if (device) device->backend->destroy(device);
}

bl_device_kind bl_device_get_kind(const bl_device *device)
{
    return device->backend->kind;
}

bl_dtype bl_device_act(const bl_device *device)
{
    return device->act;
}

bl_status bl_device_set_act(bl_device *device, bl_dtype act)
{
    bool is_cuda = bl_device_get_kind(device) == BL_DEVICE_CUDA;

    if (act != BL_BF16 && (is_cuda || act != BL_F32))
        return BL_FAIL(BL_EUSAGE, "a %s computes in %s, not in %s", is_cuda ? "GPU" : "CPU",
                       is_cuda ? "BF16" : "F32 or BF16", bl_dtype_name(act));
    device->act = act;
    return BL_OK;
}

bl_pool *bl_device_pool(bl_device *device)
{
    return device->backend->pool ? device->backend->pool(device) : device->workers;
}

bl_status bl_device_start_workers(bl_device *device, int n_threads)
{
    if (bl_device_pool(device)) return BL_FAIL(BL_EINTERNAL, "a device has its workers");
    return bl_pool_create(n_threads, &device->workers);
}

bool bl_device_host_writes(const bl_device *device)
{
    return device->backend->host_writes(device);
}

/* Makes room for one more block, so that nothing can fail once the memory is there. Under the
 * lock. */
static bool reserve_block(bl_device *device)
{
    if (device->n_blocks < device->max_blocks) return true;
    size_t max_blocks = device->max_blocks ? 2 * device->max_blocks : 64, bytes;
    if (bl_mul_overflows(max_blocks, sizeof *device->blocks, &bytes)) return false;
    bl_device_block *blocks = realloc(device->blocks, bytes);
    if (!blocks) return false;
    device->blocks = blocks;
    device->max_blocks = max_blocks;
    return true;
}

/* Under the lock. */
static void count_bytes(bl_device *device, bl_space space, size_t size_bytes)
{
    size_t now = device->space_bytes[space] += size_bytes;
    if (now > device->peak_bytes[space]) device->peak_bytes[space] = now;
}

static size_t both_spaces(const bl_device *device)
{
    return device->space_bytes[BL_SPACE_DEVICE] + device->space_bytes[BL_SPACE_HOST];
}

bl_status bl_device_alloc(bl_device *device, bl_space space, size_t size_bytes, const char *what,
                          void **out)
{
    *out = NULL;
    pthread_mutex_lock(&device->lock);
    device->n_allocations++;
    void *memory = reserve_block(device)
                       ? device->backend->alloc(device, space, size_bytes ? size_bytes : 1)
                       : NULL;
    if (memory) {
        device->blocks[device->n_blocks++] =
            (bl_device_block){.memory = memory, .size_bytes = size_bytes, .space = space};
        count_bytes(device, space, size_bytes);
    }
    size_t total_bytes = both_spaces(device);
    pthread_mutex_unlock(&device->lock);

    if (!memory) {
        struct rlimit limit;
        bool is_limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
        return BL_FAIL(BL_ENOMEM, "%s: no memory for %zu bytes (%zu bytes are allocated)%s", what,
                       size_bytes, total_bytes,
                       is_limited ? "; addresses are limited: ulimit -v unlimited" : "");
    }
    *out = memory;
    return BL_OK;
}

void bl_device_free(bl_device *device, bl_space space, void *memory)
{
    if (!memory) return;
    pthread_mutex_lock(&device->lock);
    size_t index = device->n_blocks; /* from the end: the newest is usually freed first */
    while (index > 0 && device->blocks[index - 1].memory != memory) index--;
    assert(index > 0 && device->blocks[index - 1].space == space &&
           "memory of another device or space");
    bl_device_block block = device->blocks[index - 1];
    device->blocks[index - 1] = device->blocks[--device->n_blocks];
    device->space_bytes[space] -= block.size_bytes;
    pthread_mutex_unlock(&device->lock);

    device->backend->free(device, space, memory, block.size_bytes ? block.size_bytes : 1);
}

void bl_device_adopt(bl_device *device, bl_space space, size_t size_bytes)
{
    pthread_mutex_lock(&device->lock);
    device->n_allocations++;
    count_bytes(device, space, size_bytes);
    pthread_mutex_unlock(&device->lock);
}

void bl_device_disown(bl_device *device, bl_space space, size_t size_bytes)
{
    pthread_mutex_lock(&device->lock);
    assert(size_bytes <= device->space_bytes[space] && "memory that was not adopted");
    device->space_bytes[space] -= size_bytes;
    pthread_mutex_unlock(&device->lock);
}

size_t bl_device_bytes(const bl_device *device)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&device->lock; /* const to the caller only */
    pthread_mutex_lock(lock);
    size_t total_bytes = both_spaces(device);
    pthread_mutex_unlock(lock);
    return total_bytes;
}

size_t bl_device_peak_bytes(const bl_device *device, bl_space space)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&device->lock;
    pthread_mutex_lock(lock);
    size_t peak_bytes = device->peak_bytes[space];
    pthread_mutex_unlock(lock);
    return peak_bytes;
}

int64_t bl_device_allocations(const bl_device *device)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&device->lock;
    pthread_mutex_lock(lock);
    int64_t n_allocations = device->n_allocations;
    pthread_mutex_unlock(lock);
    return n_allocations;
}

bl_status bl_device_pin(bl_device *device, void *memory, size_t size_bytes)
{
    return size_bytes ? device->backend->pin(device, memory, size_bytes) : BL_OK;
}

void bl_device_unpin(bl_device *device, void *memory, size_t size_bytes)
{
    if (size_bytes) device->backend->unpin(device, memory, size_bytes);
}

bl_status bl_stream_create(bl_device *device, const char *name, bl_stream **out)
{
    return device->backend->stream_create(device, name, false, out);
}

bl_status bl_stream_create_urgent(bl_device *device, const char *name, bl_stream **out)
{
    return device->backend->stream_create(device, name, true, out);
}

bl_status bl_stream_create_host(bl_device *device, const char *name, bl_stream **out)
{
    return device->backend->host_stream_create(device, name, out);
}

bl_status bl_stream_create_inline(bl_device *device, bl_stream **out)
{
    if (device->backend->inline_stream_create)
        return device->backend->inline_stream_create(device, out);
    *out = NULL;
    return BL_FAIL(BL_EUSAGE, "an inline stream needs a CPU device");
}

void bl_stream_destroy(bl_stream *stream)
{
    if (stream) stream->backend->destroy(stream);
}

bl_device *bl_stream_device(bl_stream *stream)
{
    return stream->device;
}

bl_status bl_stream_call(bl_stream *stream, bl_stream_fn fn, const void *args, size_t args_bytes)
{
    if (args_bytes > BL_STREAM_ARGS_BYTES)
        return BL_FAIL(BL_EINTERNAL, "a stream call with %zu bytes of arguments (%d at most)",
                       args_bytes, BL_STREAM_ARGS_BYTES);
    return stream->backend->call(stream, fn, args, args_bytes);
}

bl_status bl_stream_begin_read(bl_stream *stream, int slot, size_t n_bytes, bl_stream_fn fn,
                               const void *args, size_t args_bytes)
{
    if (slot < 0 || slot >= BL_STREAM_READS)
        return BL_FAIL(BL_EINTERNAL, "read %d of a stream with %d", slot, BL_STREAM_READS);
    if (stream->backend->begin_read) return stream->backend->begin_read(stream, slot, n_bytes);
    return bl_stream_call(stream, fn, args, args_bytes);
}

bl_status bl_stream_end_read(bl_stream *stream, int slot, bl_stream_fn fn, const void *args,
                             size_t args_bytes)
{
    if (stream->backend->end_read) return stream->backend->end_read(stream, slot);
    return bl_stream_call(stream, fn, args, args_bytes);
}

bl_status bl_stream_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes)
{
    return size_bytes ? stream->backend->copy(stream, dst, src, size_bytes) : BL_OK;
}

bl_status bl_stream_copy_rows(bl_stream *stream, const bl_row_copy *copy)
{
    if (copy->n_rows == 0 || copy->row_bytes == 0) return BL_OK;
    if (copy->row_bytes > copy->dst_stride || copy->row_bytes > copy->src_stride)
        return BL_FAIL(BL_EINTERNAL, "a copy of rows of %zu bytes, %zu and %zu apart",
                       copy->row_bytes, copy->dst_stride, copy->src_stride);
    return stream->backend->copy_rows(stream, copy);
}

bl_status bl_stream_zero(bl_stream *stream, void *dst, size_t size_bytes)
{
    return size_bytes ? stream->backend->zero(stream, dst, size_bytes) : BL_OK;
}

bl_status bl_stream_synchronize(bl_stream *stream)
{
    return stream->backend->synchronize(stream);
}

bl_status bl_stream_status(bl_stream *stream)
{
    return stream->backend->status(stream);
}

bl_status bl_stream_wait(bl_stream *stream, bl_event *event)
{
    return stream->backend->wait(stream, event);
}

bl_status bl_event_create(bl_device *device, bl_event **out)
{
    return device->backend->event_create(device, out);
}

void bl_event_destroy(bl_event *event)
{
    if (event) event->device->backend->event_destroy(event);
}

bl_status bl_event_record(bl_event *event, bl_stream *stream)
{
    return stream->backend->record(stream, event);
}

bl_status bl_event_synchronize(bl_event *event)
{
    return event->device->backend->event_synchronize(event);
}

bl_status bl_stamp_create(bl_device *device, bl_stamp **out)
{
    return device->backend->stamp_create(device, out);
}

void bl_stamp_destroy(bl_stamp *stamp)
{
    if (stamp) stamp->device->backend->stamp_destroy(stamp);
}

bl_status bl_stamp_record(bl_stamp *stamp, bl_stream *stream)
{
    return stream->backend->stamp(stream, stamp);
}

double bl_stamp_seconds(const bl_stamp *stamp)
{
    return stamp->device->backend->stamp_seconds(stamp);
}

double bl_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end)
{
    return begin->device->backend->stamp_elapsed_s(begin, end);
}
