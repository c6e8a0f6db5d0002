/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA runtime that device/cuda uses, made of the CPU device: a stream is a CPU
 * stream, its thread the GPU. It checks that no host function calls CUDA, a stream is used with its
 * device current, times are read only from events that have them, and no stream waits for the
 * legacy one.
 *
 * In the strict mode the thread that queues an operation waits until it has run; device memory is
 * accessible only meanwhile, and never to a host function (device/guard.h). */
#include "counts.h"
#include "emulated.h"
#include "queue.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/guard.h"
#include "runtime.h"

struct CUevent_st {
    bl_event *event;
    bl_stamp *stamp;
    bool is_recorded, has_time;
    atomic_int pretended_ms; /* when it was reached */
    int device;
    emulated_launches *launches; /* of the stream that recorded it last */
    uint64_t given;              /* there, then */
};

typedef struct host_call {
    cudaHostFn_t fn;
    void *arg;
} host_call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic cudaError_t broken = cudaSuccess;
static _Thread_local bool in_host_function;
static _Thread_local int current_device;

cudaError_t emulated_enter(void)
{
    if (in_host_function) emulated_fatal("a host function calls CUDA");
    return atomic_load(&broken);
}

cudaError_t emulated_enter_stream(cudaStream_t stream)
{
    cudaError_t error = emulated_enter();
    if (error != cudaSuccess) return error;
    return stream->device == current_device ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

/* An H100 is reported to hold 1,024 launches. */
enum { LAUNCH_QUEUE = 1024 };

void emulated_launch(cudaStream_t stream)
{
    uint64_t given = atomic_fetch_add(&stream->launches->given, 1) + 1;
    if (given - atomic_load(&stream->launches->over) > LAUNCH_QUEUE)
        emulated_fatal("a stream's launch queue may be full: nothing has waited for any of its "
                       "last %d launches",
                       LAUNCH_QUEUE);
}

static void note_over(emulated_launches *launches, uint64_t n)
{
    uint64_t over = launches ? atomic_load(&launches->over) : n;
    while (over < n && !atomic_compare_exchange_weak(&launches->over, &over, n)) continue;
}

#define ENTER()                                                                                    \
    do {                                                                                           \
        cudaError_t error_ = emulated_enter();                                                     \
        if (error_ != cudaSuccess) return error_;                                                  \
    } while (0)

#define ENTER_STREAM(stream)                                                                       \
    do {                                                                                           \
        cudaError_t error_ = emulated_enter_stream(stream);                                        \
        if (error_ != cudaSuccess) return error_;                                                  \
    } while (0)

int emulated_current_device(void)
{
    return current_device;
}

int emulated_physical_device(int device)
{
    const emulated_settings *settings = emulated_settings_get();
    return device < settings->n_devices ? settings->visible[device] : device;
}

static bool is_strict(void)
{
    return emulated_settings_get()->is_strict;
}

/* Made once, and never gone: *out of the first. */
static bl_device *make_device(bl_device **out, bool guarded)
{
    pthread_mutex_lock(&lock);
    if (!*out)
        (void)(guarded ? bl_device_create_cpu_guarded(1, out) : bl_device_create_cpu(1, out));
    pthread_mutex_unlock(&lock);
    return *out;
}

bl_device *emulated_cpu_device(void)
{
    static bl_device *device;
    return make_device(&device, is_strict());
}

/* Where host functions run in the strict mode. */
static bl_device *host_device(void)
{
    static bl_device *device;
    return make_device(&device, false);
}

/* ---- one operation at a time, or delays ---- */

static pthread_mutex_t one_operation = PTHREAD_MUTEX_INITIALIZER;

static void nap_at_random(uint64_t seed)
{
    static _Atomic uint64_t n_works;
    uint64_t x = seed + 0x9E3779B97F4A7C15u * (1 + atomic_fetch_add(&n_works, 1));
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u; /* SplitMix64 */
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    if (x % 4 == 0) nanosleep(&(struct timespec){.tv_nsec = (long)(x >> 8) % 300000}, NULL);
}

void emulated_begin_work(void)
{
    uint64_t seed = emulated_settings_get()->seed;
    if (seed) nap_at_random(seed);
    if (is_strict()) pthread_mutex_lock(&one_operation);
}

void emulated_end_work(void)
{
    if (is_strict()) pthread_mutex_unlock(&one_operation);
}

/* ---- control by tests ---- */

/* -1: as the environment has it. */
static atomic_int driver_version = -1, n_devices = -1;

static int count_devices(void)
{
    int n = atomic_load(&n_devices);
    return n >= 0 ? n : emulated_settings_get()->n_devices;
}

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
    atomic_store(&driver_version, driver);
    atomic_store(&n_devices, devices);
}

/* ---- errors, versions, devices ---- */

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
#define NAME(name, number)                                                                         \
    case name:                                                                                     \
        return #name;
    switch (error) {
        EMULATED_ERRORS(NAME)
    }
    return "unrecognized error code";
#undef NAME
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorIllegalAddress   ? "an illegal memory access was encountered"
           : error == cudaErrorSystemNotReady ? "system not yet initialized"
                                              : "an emulated error";
}

cudaError_t cudaDriverGetVersion(int *version)
{
    int known = atomic_load(&driver_version);
    *version = known >= 0 ? known : emulated_settings_get()->driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* The first call that wants the driver to have started. */
cudaError_t cudaGetDeviceCount(int *count)
{
    int error = emulated_settings_get()->start_error;
    if (error != 0) return (cudaError_t)error;
    *count = count_devices();
    return cudaSuccess;
}

static atomic_bool has_context;

bool emulated_has_context(void)
{
    return atomic_load(&has_context);
}

static void *run_driver(void *unused)
{
    for (;;) pause();
    return unused;
}

/* With a context the driver runs threads in the process; they inherit the signal mask of the
 * thread that made the context. */
static void make_driver_thread(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_driver, NULL) != 0) emulated_fatal("no driver thread");
    pthread_setname_np(thread, "emulated driver");
    pthread_detach(thread);
}

static void make_context(void)
{
    emulated_open_queues();
    make_driver_thread();
    atomic_store(&has_context, true);
}

cudaError_t cudaSetDevice(int device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    ENTER();
    if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
    pthread_once(&once, make_context);
    current_device = device;
    return cudaSuccess;
}

/* No device of the machine that this runs on is there. Hosts that a test names have other
 * GPUs. */
cudaError_t cudaDeviceGetPCIBusId(char *bus_id, int length, int device)
{
    if (!bus_id || length < 13) return cudaErrorInvalidValue;
    if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
    unsigned domain = 0xFFFF;
    for (const char *c = emulated_settings_get()->host; c && *c; c++)
        domain = 0x8000 | ((domain * 31 + (unsigned char)*c) & 0x7FFF);
    snprintf(bus_id, (size_t)length, "%04X:%02X:00.0", domain,
             (unsigned)emulated_physical_device(device));
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    int capability = emulated_settings_get()->capability;

    if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = capability / 10;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = capability % 10;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = capability >= 90 ? 132 : 108;
        return cudaSuccess;
    default:
        return cudaErrorInvalidValue;
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device)
{
    ENTER();
    if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "Emulated GPU");
    return cudaSuccess;
}

/* ---- streams ---- */

static emulated_launches *make_launches(void)
{
    static emulated_launches *all;
    emulated_launches *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    pthread_mutex_lock(&lock);
    made->next = all;
    all = made;
    pthread_mutex_unlock(&lock);
    return made;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    ENTER();
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
    cudaStream_t stream = calloc(1, sizeof *stream);
    bl_device *cpu = emulated_cpu_device(), *host = is_strict() ? host_device() : NULL;

    *out = stream;
    if (!stream || !cpu || (is_strict() && !host)) return cudaErrorMemoryAllocation;
    stream->device = current_device;
    stream->fifo = emulated_take_fifo(current_device);
    if (!(stream->launches = make_launches())) return cudaErrorMemoryAllocation;
    if (bl_stream_create(cpu, "emulated", &stream->stream) != BL_OK)
        return cudaErrorMemoryAllocation;
    if (host && bl_stream_create(host, "host function", &stream->host) != BL_OK)
        return cudaErrorMemoryAllocation;
    return cudaSuccess;
}

enum { LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5 }; /* as an H100 has them */

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER();
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned int flags, int priority)
{
    cudaError_t error = cudaStreamCreateWithFlags(out, flags);
    if (error == cudaSuccess)
        (*out)->priority = priority < GREATEST_PRIORITY ? GREATEST_PRIORITY
                           : priority > LEAST_PRIORITY  ? LEAST_PRIORITY
                                                        : priority;
    return error;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    ENTER();
    *priority = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    bl_stream_destroy(stream->stream);
    if (stream->host) bl_stream_destroy(stream->host);
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    ENTER();
    uint64_t given = atomic_load(&stream->launches->given);
    (void)bl_stream_synchronize(stream->stream);
    note_over(stream->launches, given);
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
    emulated_launch(stream);
    emulated_count("host_function", 0);
    const host_call call = {fn, arg};
    if (!stream->host) {
        emulated_give(stream, true, call_host_function, &call, sizeof call);
        return cudaSuccess;
    }
    (void)bl_stream_call(stream->host, call_host_function, &call, sizeof call);
    (void)bl_stream_synchronize(stream->host);
    return cudaSuccess;
}

/* In place of the C library's: host functions of all streams may share a thread of the driver, so
 * one that sleeps holds up the others. */
int nanosleep(const struct timespec *time, struct timespec *left)
{
    if (in_host_function) emulated_fatal("a host function sleeps");
    int error = clock_nanosleep(CLOCK_REALTIME, 0, time, left);
    if (error == 0) return 0;
    errno = error;
    return -1;
}

typedef struct device_work {
    void (*work)(void *);
    void *argument;
    int device;
} device_work;

static bl_status run_device_work(bl_stream *stream, const void *args)
{
    const device_work *w = args;
    (void)stream;
    emulated_hold_gpu(w->device);
    emulated_begin_work();
    w->work(w->argument);
    emulated_end_work();
    emulated_release_gpu(w->device);
    return BL_OK;
}

int emulated_queue(void *stream, void (*work)(void *), void *argument)
{
    cudaStream_t to = stream;
    ENTER_STREAM(to);
    emulated_launch(to);
    emulated_give(to, false, run_device_work, &(device_work){work, argument, to->device},
                  sizeof(device_work));
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    ENTER();
    if (!(*out = calloc(1, sizeof **out))) return cudaErrorMemoryAllocation;
    (*out)->has_time = !(flags & cudaEventDisableTiming);
    (*out)->device = current_device;
    return bl_event_create(emulated_cpu_device(), &(*out)->event) == BL_OK &&
                   bl_stamp_create(emulated_cpu_device(), &(*out)->stamp) == BL_OK
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
    emulated_launch(stream);
    event->launches = stream->launches;
    event->given = atomic_load(&stream->launches->given);
    emulated_give(stream, false, note_pretended, &event, sizeof event);
    (void)bl_stamp_record(event->stamp, stream->stream);
    (void)bl_event_record(event->event, stream->stream);
    event->is_recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    ENTER();
    emulated_launches *launches = event->launches;
    uint64_t given = event->given;
    (void)bl_event_synchronize(event->event);
    note_over(launches, given);
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
    emulated_launch(stream);
    if (is_strict())
        (void)bl_event_synchronize(event->event);
    else
        emulated_give_wait(stream, event->event);
    return cudaSuccess;
}
