/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA runtime that device/cuda uses, made of the CPU device: a stream is a CPU stream,
 * device memory is malloc's. It lets the bookkeeping above it (rings, clocks, errors, pieces of pinned
 * memory) be tested where there is no GPU. What it checks itself: a copy stays within one registration, and
 * nothing is called by a host function, times are asked of events that have them, and no stream waits for
 * the legacy one. */
#include "emulated.h"
#include "queue.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/sizes.h"
#include "device/device.h"

typedef struct range {
    uintptr_t begin, end; /* 0, 0: a place that is free */
} range;

typedef struct ranges {
    range *items;
    int n, room;
} ranges;

struct CUstream_st {
    bl_stream *stream;
    int device;
};

struct CUevent_st {
    bl_event *event;
    bl_stamp *stamp;
    bool is_recorded, has_time;
    atomic_int pretended_ms; /* when it was reached */
    int device;
};

typedef struct host_call {
    cudaHostFn_t fn;
    void *arg;
} host_call;

static bl_device *cpu;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ranges registered, memory;
static _Atomic cudaError_t broken = cudaSuccess;
static int driver_version = 13000, n_devices = 1;
static _Thread_local bool in_host_function;
static _Thread_local int current_device;

#define ENTER()                                                                                    \
    do {                                                                                           \
        if (in_host_function) abort();                                                             \
        if (atomic_load(&broken) != cudaSuccess) return atomic_load(&broken);                      \
    } while (0)

/* Work is queued with the stream's device current: kernels have to be, and all that uses a stream here is held to it. */
#define ENTER_STREAM(stream)                                                                       \
    do {                                                                                           \
        ENTER();                                                                                   \
        if ((stream)->device != current_device) return cudaErrorInvalidResourceHandle;             \
    } while (0)

void emulated_cuda_break(void)
{
    atomic_store(&broken, cudaErrorIllegalAddress);
}

void emulated_cuda_mend(void)
{
    atomic_store(&broken, cudaSuccess);
}

void emulated_cuda_set_machine(int driver, int devices)
{
    driver_version = driver;
    n_devices = devices;
}

static bool add_range(ranges *set, const void *begin, size_t bytes)
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
    if (done) set->items[i] = (range){(uintptr_t)begin, (uintptr_t)begin + bytes};
    if (done && i == set->n) set->n++;
    pthread_mutex_unlock(&lock);
    return done;
}

/* The end of the range that holds `at`, 0 for none; takes it away when it begins there and `take` says so. */
static uintptr_t find_range(ranges *set, const void *at, bool take)
{
    uintptr_t end = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < set->n && !end; i++) {
        range *r = &set->items[i];
        if ((uintptr_t)at < r->begin || (uintptr_t)at >= r->end) continue;
        if (take && r->begin != (uintptr_t)at) continue;
        end = r->end;
        if (take) *r = (range){0, 0};
    }
    pthread_mutex_unlock(&lock);
    return end;
}

int emulated_cuda_registrations(void)
{
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < registered.n; i++) n += registered.items[i].end != 0;
    pthread_mutex_unlock(&lock);
    return n;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaErrorEmulated";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                            : "an emulated error";
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = n_devices;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    ENTER();
    if (device >= n_devices) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    (void)device;
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
             : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                              : 132;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    if (atomic_load(&broken) != cudaSuccess) return atomic_load(&broken);
    if (device < 0 || device >= n_devices) return cudaErrorInvalidDevice;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "Emulated GPU");
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *free_bytes = *total_bytes = (size_t)1 << 30;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    ENTER();
    if (bytes > (size_t)1 << 30 ||
        !(*out = aligned_alloc(256, (size_t)bl_round_up((int64_t)bytes, 256))))
        return cudaErrorMemoryAllocation;
    memset(*out, 0xA5, bytes);
    return add_range(&memory, *out, bytes) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *pointer)
{
    ENTER();
    if (!find_range(&memory, pointer, true)) return cudaErrorInvalidValue;
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    ENTER();
    if (flags != (cudaHostRegisterPortable | cudaHostRegisterMapped) ||
        find_range(&registered, pointer, false))
        return cudaErrorInvalidValue;
    return add_range(&registered, pointer, bytes) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaHostUnregister(void *pointer)
{
    ENTER();
    return find_range(&registered, pointer, true) ? cudaSuccess : cudaErrorInvalidValue;
}

/* Another address than the host's, as a GPU may have: only what gives it back reads through it. */
enum { DEVICE_SHIFT = 1 << 20 };

cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned int flags)
{
    ENTER();
    if (flags != 0 || !find_range(&registered, pointer, false)) return cudaErrorInvalidValue;
    *out = (char *)pointer + DEVICE_SHIFT;
    return cudaSuccess;
}

typedef struct value_wait {
    const _Atomic uint32_t *at;
    uint32_t value;
} value_wait;

static bl_status wait_for_value(bl_stream *stream, const void *args)
{
    static const struct timespec nap = {.tv_nsec = 10000};
    const value_wait *w = args;
    (void)stream;
    while ((int32_t)(atomic_load_explicit(w->at, memory_order_acquire) - w->value) < 0)
        nanosleep(&nap, NULL);
    return BL_OK;
}

static CUresult stream_wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                  unsigned int flags)
{
    const char *at = (const char *)(uintptr_t)address - DEVICE_SHIFT;
    if (in_host_function) abort();
    if (stream->device != current_device) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || address % 4 || !find_range(&registered, at, false))
        return CUDA_ERROR_INVALID_VALUE;
    (void)bl_stream_call(stream->stream, wait_for_value,
                         &(value_wait){(const _Atomic uint32_t *)(const void *)at, value},
                         sizeof(value_wait));
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    CUresult (*function)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = stream_wait_value;
    ENTER();
    if (strcmp(symbol, "cuStreamWaitValue32") != 0 || version < 11070 || flags != cudaEnableDefault)
        return cudaErrorInvalidValue;
    memcpy(out, &function, sizeof *out);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    ENTER();
    memset(attributes, 0, sizeof *attributes);
    attributes->type = find_range(&memory, pointer, false)       ? cudaMemoryTypeDevice
                       : find_range(&registered, pointer, false) ? cudaMemoryTypeHost
                                                                 : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    ENTER();
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
    pthread_mutex_lock(&lock);
    bl_status st = cpu ? BL_OK : bl_device_create_cpu(1, &cpu);
    pthread_mutex_unlock(&lock);
    if ((*out = malloc(sizeof **out))) (*out)->device = current_device;
    return st == BL_OK && *out && bl_stream_create(cpu, "emulated", &(*out)->stream) == BL_OK
               ? cudaSuccess
               : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    bl_stream_destroy(stream->stream);
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    ENTER();
    (void)bl_stream_synchronize(stream->stream);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    ENTER();
    (void)stream;
    return cudaErrorNotReady;
}

static bl_status call_host_function(bl_stream *stream, const void *args)
{
    const host_call *call = args;
    (void)stream;
    if (atomic_load(&broken) != cudaSuccess) return BL_OK;
    in_host_function = true;
    call->fn(call->arg);
    in_host_function = false;
    return BL_OK;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    ENTER_STREAM(stream);
    (void)bl_stream_call(stream->stream, call_host_function, &(host_call){fn, arg},
                         sizeof(host_call));
    return cudaSuccess;
}

typedef struct device_work {
    void (*work)(void *);
    void *argument;
} device_work;

static bl_status run_device_work(bl_stream *stream, const void *args)
{
    const device_work *w = args;
    (void)stream;
    w->work(w->argument);
    return BL_OK;
}

int emulated_queue(void *stream, void (*work)(void *), void *argument)
{
    cudaStream_t to = stream;
    ENTER_STREAM(to);
    (void)bl_stream_call(to->stream, run_device_work, &(device_work){work, argument},
                         sizeof(device_work));
    return cudaSuccess;
}

static bool is_in_one_range(const void *begin, size_t bytes)
{
    uintptr_t end = find_range(&registered, begin, false);
    return !end || (uintptr_t)begin + bytes <= end;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    ENTER_STREAM(stream);
    if (!is_in_one_range(dst, bytes) || !is_in_one_range(src, bytes)) return cudaErrorInvalidValue;
    if (kind == cudaMemcpyDeviceToDevice) {
        if (!find_range(&memory, dst, false) || !find_range(&memory, src, false))
            return cudaErrorInvalidValue;
    } else if (kind != cudaMemcpyDefault) {
        return cudaErrorInvalidValue;
    }
    (void)bl_stream_copy(stream->stream, dst, src, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    ENTER_STREAM(stream);
    if (value != 0) return cudaErrorInvalidValue;
    (void)bl_stream_zero(stream->stream, dst, bytes);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    ENTER();
    if (!(*out = calloc(1, sizeof **out))) return cudaErrorMemoryAllocation;
    (*out)->has_time = !(flags & cudaEventDisableTiming);
    (*out)->device = current_device;
    return bl_event_create(cpu, &(*out)->event) == BL_OK &&
                   bl_stamp_create(cpu, &(*out)->stamp) == BL_OK
               ? cudaSuccess
               : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    (void)bl_event_synchronize(event->event); /* its stamp is about to be written */
    bl_event_destroy(event->event);
    bl_stamp_destroy(event->stamp);
    free(event);
    return cudaSuccess;
}

static atomic_int pretended_ms;

void emulated_cuda_pretend_ms(int ms)
{
    atomic_fetch_add(&pretended_ms, ms);
}

static bl_status note_pretended(bl_stream *stream, const void *args)
{
    cudaEvent_t event = *(cudaEvent_t const *)args;
    (void)stream;
    atomic_store(&event->pretended_ms, atomic_load(&pretended_ms));
    return BL_OK;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    ENTER_STREAM(stream);
    if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
    (void)bl_stream_call(stream->stream, note_pretended, &event, sizeof event);
    (void)bl_stamp_record(event->stamp, stream->stream);
    (void)bl_event_record(event->event, stream->stream);
    event->is_recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    ENTER();
    (void)bl_event_synchronize(event->event);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    ENTER();
    return !event->is_recorded || bl_stamp_seconds(event->stamp) > 0 ? cudaSuccess
                                                                     : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    ENTER();
    if (!begin->has_time || !end->has_time || !begin->is_recorded || !end->is_recorded)
        return cudaErrorInvalidResourceHandle;
    double begin_s = bl_stamp_seconds(begin->stamp), end_s = bl_stamp_seconds(end->stamp);
    if (begin_s == 0 || end_s == 0) return cudaErrorNotReady;
    *ms = (float)(1e3 * (end_s - begin_s) + atomic_load(&end->pretended_ms) -
                  atomic_load(&begin->pretended_ms));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    ENTER_STREAM(stream);
    (void)flags;
    (void)bl_stream_wait(stream->stream, event->event);
    return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream)
{
    for (size_t row = 0; row < height; row++) {
        cudaError_t error = cudaMemsetAsync((char *)dst + row * pitch, value, width, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    for (size_t row = 0; row < height; row++) {
        cudaError_t error =
            cudaMemcpyAsync((char *)dst + row * dst_pitch, (const char *)src + row * src_pitch,
                            width, kind, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
