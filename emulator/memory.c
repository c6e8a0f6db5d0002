/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated GPU's memory: allocations, registered host memory, copies.
 *
 * An allocation begins at a multiple of 256, as CUDA promises, and never of 512. The 256 bytes
 * before it and after it are checked when it is freed: a kernel that wrote there ends the
 * program with a line. Unwritten bytes are 0xA5. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "counts.h"
#include "emulated.h"
#include "queue.h"
#include "runtime.h"

enum { FENCE_BYTES = 256, FENCE = 0xC3, FILL = 0xA5 };

typedef struct range {
    uintptr_t begin, end; /* 0, 0: a place that is free */
    int device;           /* of device memory */
} range;

typedef struct ranges {
    range *items;
    int n, room;
} ranges;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ranges registered, memory;

static bool add_range(ranges *set, range r)
{
    bool done = true;
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < set->n && set->items[i].end) i++;
    if (i == set->room) {
        int room = 2 * set->room + 64;
        range *items = realloc(set->items, (size_t)room * sizeof *items);
        done = items != NULL;
        if (done) *set = (ranges){items, set->n, room};
    }
    if (done) set->items[i] = r;
    if (done && i == set->n) set->n++;
    pthread_mutex_unlock(&lock);
    return done;
}

/* The range that holds `at`, {0, 0} for none; takes it away when it begins there and `take` says
 * so. */
static range find_range(ranges *set, const void *at, bool take)
{
    range found = {0, 0, 0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < set->n && !found.end; i++) {
        range *r = &set->items[i];
        if ((uintptr_t)at < r->begin || (uintptr_t)at >= r->end) continue;
        if (take && r->begin != (uintptr_t)at) continue;
        found = *r;
        if (take) *r = (range){0, 0, 0};
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static size_t used_bytes(int device)
{
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < memory.n; i++)
        if (memory.items[i].device == device) bytes += memory.items[i].end - memory.items[i].begin;
    pthread_mutex_unlock(&lock);
    return bytes;
}

int emulated_cuda_registrations(void)
{
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < registered.n; i++) n += registered.items[i].end != 0;
    pthread_mutex_unlock(&lock);
    return n;
}

/* Of registered host memory. */
static atomic_size_t registered_bytes, registered_peak;

static void count_registered(size_t bytes)
{
    size_t now = atomic_fetch_add(&registered_bytes, bytes) + bytes,
           peak = atomic_load(&registered_peak);
    while (now > peak && !atomic_compare_exchange_weak(&registered_peak, &peak, now)) {
    }
}

size_t emulated_cuda_registered_peak(void)
{
    return atomic_exchange(&registered_peak, atomic_load(&registered_bytes));
}

uintptr_t emulated_registered_end(const void *at)
{
    return find_range(&registered, at, false).end;
}

uintptr_t emulated_memory_begin(const void *at)
{
    return find_range(&memory, at, false).begin;
}

uintptr_t emulated_memory_end(const void *at)
{
    return find_range(&memory, at, false).end;
}

/* ---- device memory ---- */

/* STRICT: reports that the host touched device memory, then lets the signal end the program. Reads
 * without the lock, which the thread may hold. */
static void tell_touch(int signal_number, siginfo_t *info, void *context)
{
    static const char text[] = "emulated GPU: the host touched device memory\n";
    uintptr_t at = (uintptr_t)info->si_addr;
    (void)context;
    for (int i = 0; i < memory.n; i++)
        if (at >= memory.items[i].begin && at < memory.items[i].end)
            (void)!write(STDERR_FILENO, text, sizeof text - 1);
    signal(signal_number, SIG_DFL); /* the touch is repeated */
}

static void watch_touches(void)
{
    struct sigaction action = {.sa_sigaction = tell_touch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
}

/* A stream for the runtime's operations on its own memory; calls wait for it. */
static bl_stream *own_stream;

static void open_own_stream(void)
{
    bl_device *cpu = emulated_cpu_device();
    if (!cpu || bl_stream_create(cpu, "emulated", &own_stream) != BL_OK)
        emulated_fatal("no stream of its own");
    if (emulated_settings_get()->is_strict) watch_touches();
}

static void do_now(bl_stream_fn fn, const void *args, size_t args_bytes)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    if (!own_stream) open_own_stream();
    (void)bl_stream_call(own_stream, fn, args, args_bytes);
    (void)bl_stream_synchronize(own_stream);
    pthread_mutex_unlock(&one);
}

typedef struct block {
    unsigned char *begin;
    size_t bytes;
} block;

static bl_status fill_block(bl_stream *stream, const void *args)
{
    const block *b = args;
    (void)stream;
    memset(b->begin - FENCE_BYTES, FENCE, FENCE_BYTES);
    memset(b->begin, FILL, b->bytes);
    memset(b->begin + b->bytes, FENCE, FENCE_BYTES);
    return BL_OK;
}

static bl_status check_block(bl_stream *stream, const void *args)
{
    const block *b = args;
    (void)stream;
    for (int i = 0; i < FENCE_BYTES; i++) {
        if (b->begin[-1 - i] != FENCE)
            emulated_fatal("%d bytes before an allocation of %zu were written", i + 1, b->bytes);
        if (b->begin[b->bytes + (size_t)i] != FENCE)
            emulated_fatal("%d bytes behind an allocation of %zu were written", i, b->bytes);
    }
    return BL_OK;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    size_t total = emulated_settings_get()->memory_bytes,
           used = used_bytes(emulated_current_device());
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    cudaError_t error = emulated_enter();
    size_t free_bytes, total_bytes;
    void *room;

    if (error != cudaSuccess) return error;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    bl_device *cpu = emulated_cpu_device();
    if (bytes > free_bytes || !cpu ||
        bl_device_alloc(cpu, BL_SPACE_DEVICE, bytes + 2 * (size_t)FENCE_BYTES, "emulated", &room) !=
            BL_OK)
        return cudaErrorMemoryAllocation;
    block b = {(unsigned char *)room + FENCE_BYTES, bytes};
    do_now(fill_block, &b, sizeof b);
    *out = b.begin;
    uintptr_t begin = (uintptr_t)b.begin;
    return add_range(&memory, (range){begin, begin + bytes, emulated_current_device()})
               ? cudaSuccess
               : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *pointer)
{
    cudaError_t error = emulated_enter();
    if (error != cudaSuccess) return error;
    range r = find_range(&memory, pointer, true);
    if (!r.end) return cudaErrorInvalidValue;
    block b = {pointer, r.end - r.begin};
    do_now(check_block, &b, sizeof b);
    bl_device_free(emulated_cpu_device(), BL_SPACE_DEVICE, b.begin - FENCE_BYTES);
    return cudaSuccess;
}

/* ---- host memory ---- */

static atomic_size_t largest_registration = SIZE_MAX;

void emulated_limit_registrations(size_t bytes)
{
    atomic_store(&largest_registration, bytes);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    cudaError_t error = emulated_enter();
    if (error != cudaSuccess) return error;
    if (bytes > atomic_load(&largest_registration)) return cudaErrorMemoryAllocation;
    if (flags != (cudaHostRegisterPortable | cudaHostRegisterMapped) ||
        emulated_registered_end(pointer))
        return cudaErrorInvalidValue;
    uintptr_t begin = (uintptr_t)pointer;
    if (!add_range(&registered, (range){begin, begin + bytes, 0})) return cudaErrorMemoryAllocation;
    count_registered(bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer)
{
    cudaError_t error = emulated_enter();
    if (error != cudaSuccess) return error;
    range r = find_range(&registered, pointer, true);
    atomic_fetch_sub(&registered_bytes, r.end - r.begin);
    return r.end ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    cudaError_t error = emulated_enter();
    if (error != cudaSuccess) return error;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = find_range(&memory, pointer, false).end ? cudaMemoryTypeDevice
                       : emulated_registered_end(pointer)      ? cudaMemoryTypeHost
                                                               : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

/* ---- copies ---- */

typedef struct rows {
    unsigned char *dst;
    const unsigned char *src; /* NULL: zeros */
    size_t dst_pitch, src_pitch, width, height;
    int multiprocessors_of; /* the device; -1: a copy engine moves them */
} rows;

static bl_status move_rows(bl_stream *stream, const void *args)
{
    const rows *r = args;
    (void)stream;
    emulated_hold_gpu(r->multiprocessors_of);
    emulated_begin_work();
    for (size_t row = 0; row < r->height; row++)
        if (r->src)
            memcpy(r->dst + row * r->dst_pitch, r->src + row * r->src_pitch, r->width);
        else
            memset(r->dst + row * r->dst_pitch, 0, r->width);
    emulated_end_work();
    emulated_release_gpu(r->multiprocessors_of);
    return BL_OK;
}

/* Whether one range has all of it: a registration's, device memory's, or, but not in the strict
 * mode, memory that CUDA does not know. */
static bool is_in_one_place(const void *begin, size_t pitch, size_t width, size_t height)
{
    size_t bytes = height ? (height - 1) * pitch + width : 0;
    uintptr_t end = find_range(&memory, begin, false).end;
    if (!end) end = emulated_registered_end(begin);
    if (!end && emulated_settings_get()->is_strict && bytes > 0)
        emulated_fatal(
            "an asynchronous copy of %zu bytes from or to host memory that is not pinned",
            width * height);
    return !end || (uintptr_t)begin + bytes <= end;
}

/* Copies within a device, and zeros, take multiprocessors: CUDA's default. */
static void count_rows(rows *r, int device)
{
    static const char *const directions[2][2] = {{"copy:host_to_host", "copy:host_to_device"},
                                                 {"copy:device_to_host", "copy:device_to_device"}};
    bool to_device = find_range(&memory, r->dst, false).end != 0,
         from_device = r->src && find_range(&memory, r->src, false).end != 0;
    r->multiprocessors_of = to_device && (from_device || !r->src) ? device : -1;
    emulated_count(r->src ? directions[from_device][to_device] : "zeros", r->width * r->height);
}

static cudaError_t queue_rows(cudaStream_t stream, rows r)
{
    cudaError_t error = emulated_enter_stream(stream);
    if (error != cudaSuccess) return error;
    if ((r.src && !is_in_one_place(r.src, r.src_pitch, r.width, r.height)) ||
        !is_in_one_place(r.dst, r.dst_pitch, r.width, r.height))
        return cudaErrorInvalidValue;
    emulated_launch(stream);
    count_rows(&r, stream->device);
    emulated_give(stream, false, move_rows, &r, sizeof r);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    bool both_on_device =
        find_range(&memory, dst, false).end && find_range(&memory, src, false).end;
    if (kind != cudaMemcpyDefault && (kind != cudaMemcpyDeviceToDevice || !both_on_device))
        return cudaErrorInvalidValue;
    return queue_rows(stream, (rows){dst, src, dst_pitch, src_pitch, width, height, -1});
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream)
{
    if (value != 0 || !find_range(&memory, dst, false).end) return cudaErrorInvalidValue;
    return queue_rows(stream, (rows){dst, NULL, pitch, 0, width, height, -1});
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    return cudaMemset2DAsync(dst, bytes, value, bytes, 1, stream);
}
