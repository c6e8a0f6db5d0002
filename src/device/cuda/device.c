/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device: choosing it, and memory. Streams and events are in stream.c, streams of
 * the host in host_stream.c.
 *
 * Device memory is cudaMalloc's, of exactly the size asked for. Host memory is mmap's, registered
 * with the driver in pieces that end at multiples of CUDA_PIECE_BYTES: a single registration of
 * hundreds of GB is one long call that looks like a hang, and one copy may touch only one piece.
 * Threads other than the device's creator may call: each entry makes the device current, which
 * costs a thread-local store when it already is.
 *
 * A pinned range is the driver's: RLIMIT_MEMLOCK does not apply to it. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/thread.h"
#include "device/cuda/device.h"

enum { HUGE_PAGE_BYTES = 2 << 20, CONTEXT_STATE_SINCE = 7000 /* CUDA's version */ };

/* Errors of the machine, not of this program: something is missing, broken or in use. A hint says
 * where to look where CUDA's text does not. */
static const struct {
    cudaError_t error;
    const char *hint;
} machine_errors[] = {
    {cudaErrorNoDevice, NULL},
    {cudaErrorInvalidDevice, NULL},
    {cudaErrorDevicesUnavailable, NULL},
    {cudaErrorInitializationError, NULL},
    {cudaErrorInsufficientDriver, NULL},
    {cudaErrorStubLibrary, "LD_LIBRARY_PATH names the toolkit's stubs in the place of the driver"},
    {cudaErrorNoKernelImageForDevice, "this build has no code for this GPU"},
    {cudaErrorUnsupportedPtxVersion, "this build has no code for this GPU but PTX, and the driver "
                                     "is too old to compile that"},
    {cudaErrorECCUncorrectable, "the GPU's memory has failed: nvidia-smi -q -d ECC"},
    {cudaErrorNvlinkUncorrectable, "NVLink has failed: nvidia-smi nvlink -e"},
    {cudaErrorOperatingSystem, "the driver's devices cannot be used: look at /dev/nvidia*"},
    {cudaErrorSystemNotReady, "the fabric of the GPUs is not up: is nvidia-fabricmanager running, "
                              "of the driver's version?"},
    {cudaErrorSystemDriverMismatch, "the driver's kernel module and its libcuda.so.1 are of "
                                    "different versions: restart the machine, or the container"},
    {cudaErrorCompatNotSupportedOnDevice, "CUDA's compat package does not serve this GPU: use the "
                                          "driver's own libcuda.so.1"},
    {cudaErrorUnknown, "often the driver's devices are not all there: look for /dev/nvidia-uvm"},
};

bl_status bl_cuda_fail(const char *what, int cuda_error)
{
    cudaError_t error = (cudaError_t)cuda_error;
    bl_status st = error == cudaErrorMemoryAllocation ? BL_ENOMEM : BL_EINTERNAL;
    const char *hint = NULL;

    (void)cudaGetLastError(); /* handled here: the next launch's check must not see it */
    for (size_t i = 0; i < BL_COUNT(machine_errors); i++)
        if (machine_errors[i].error == error) {
            st = BL_ELIMIT;
            hint = machine_errors[i].hint;
        }
    return BL_FAIL(st, "%s: %s (%s)%s%s", what, cudaGetErrorString(error), cudaGetErrorName(error),
                   hint ? "; " : "", hint ? hint : "");
}

bl_status bl_cuda_launched(const char *what)
{
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? BL_OK : bl_cuda_fail(what, (int)error);
}

bl_status device_cuda_check(int cuda_error, const char *call)
{
    return cuda_error == (int)cudaSuccess ? BL_OK : bl_cuda_fail(call, cuda_error);
}

bl_status device_cuda_enter(const bl_device *device)
{
    return device_cuda_check((int)cudaSetDevice(((const cuda_device *)device)->properties.index),
                             "cudaSetDevice");
}

const bl_cuda_properties *bl_cuda_device_properties(const bl_device *device)
{
    return &((const cuda_device *)device)->properties;
}

bl_status bl_cuda_device_extension(bl_device *device, bl_cuda_extension_create create,
                                   bl_cuda_extension_destroy destroy, void **out)
{
    cuda_device *self = (cuda_device *)device;
    bl_status st = BL_OK;

    pthread_mutex_lock(&self->lock);
    if (!self->extension) {
        st = create(device, &self->extension);
        self->destroy_extension = destroy;
    }
    *out = self->extension;
    pthread_mutex_unlock(&self->lock);
    return st;
}

/* ---- memory ---- */

/* The bytes from `memory` to the end of its piece, at most size_bytes. */
static size_t piece_bytes(const void *memory, size_t size_bytes)
{
    size_t rest = CUDA_PIECE_BYTES - (size_t)((uintptr_t)memory % CUDA_PIECE_BYTES);
    return rest < size_bytes ? rest : size_bytes;
}

static void unregister(char *memory, size_t size_bytes)
{
    for (size_t done = 0, bytes; done < size_bytes; done += bytes) {
        bytes = piece_bytes(memory + done, size_bytes - done);
        if (cudaHostUnregister(memory + done) != cudaSuccess)
            (void)cudaGetLastError(); /* the process goes on without */
    }
}

/* Half a TB takes minutes. */
static bl_status register_pieces(char *memory, size_t size_bytes)
{
    double told_s = bl_now_s();
    bool has_told = false;

    for (size_t done = 0, bytes; done < size_bytes; done += bytes) {
        bytes = piece_bytes(memory + done, size_bytes - done);
        cudaError_t error = cudaHostRegister(memory + done, bytes,
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (error != cudaSuccess) {
            unregister(memory, done);
            return bl_cuda_fail("cudaHostRegister", (int)error);
        }
        has_told |= bl_log_advance(&told_s, "pinning host memory: %.1f of %.1f GB",
                                   (double)(done + bytes) * 1e-9, (double)size_bytes * 1e-9);
    }
    if (has_told) bl_log_progress("%s", "");
    return BL_OK;
}

void *device_cuda_alloc_host(size_t size_bytes)
{
    void *memory =
        mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (size_bytes >= HUGE_PAGE_BYTES)
        madvise(memory, size_bytes, MADV_HUGEPAGE); /* a hint: may fail */
    if (register_pieces(memory, size_bytes) == BL_OK) return memory;
    munmap(memory, size_bytes);
    return NULL;
}

void device_cuda_free_host(void *memory, size_t size_bytes)
{
    unregister(memory, size_bytes);
    munmap(memory, size_bytes);
}

static void *alloc_device(const cuda_device *self, size_t size_bytes)
{
    cudaStream_t stream = self->own_stream;
    void *memory = NULL;

    if (cudaMalloc(&memory, size_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    if (cudaMemsetAsync(memory, 0, size_bytes, stream) == cudaSuccess &&
        cudaStreamSynchronize(stream) == cudaSuccess)
        return memory;
    (void)cudaGetLastError();
    cudaFree(memory);
    return NULL;
}

static void *cuda_alloc(bl_device *device, bl_space space, size_t size_bytes)
{
    if (device_cuda_enter(device) != BL_OK) return NULL;
    return space == BL_SPACE_HOST ? device_cuda_alloc_host(size_bytes)
                                  : alloc_device((const cuda_device *)device, size_bytes);
}

static void cuda_free(bl_device *device, bl_space space, void *memory, size_t size_bytes)
{
    if (device_cuda_enter(device) != BL_OK) return; /* the process is past using it */
    if (space == BL_SPACE_HOST) {
        device_cuda_free_host(memory, size_bytes);
    } else if (cudaFree(memory) != cudaSuccess) {
        (void)cudaGetLastError();
    }
}

static bl_status cuda_pin(bl_device *device, void *memory, size_t size_bytes)
{
    BL_TRY(device_cuda_enter(device));
    if (register_pieces(memory, size_bytes) == BL_OK) return BL_OK;
    return bl_error_prefix(BL_ELIMIT,
                           "cannot pin %zu bytes of host memory (use less of it, or raise the "
                           "memory limit of the container: memory.max of its cgroup)",
                           size_bytes);
}

static void cuda_unpin(bl_device *device, void *memory, size_t size_bytes)
{
    if (device_cuda_enter(device) == BL_OK) unregister(memory, size_bytes);
}

/* ---- the device ---- */

static bool cuda_host_writes(const bl_device *device)
{
    (void)device;
    return false;
}

static void cuda_destroy(bl_device *device)
{
    cuda_device *self = (cuda_device *)device;

    bool is_alive =
        device_cuda_enter(device) == BL_OK; /* first: an extension frees its memory on this GPU */
    if (self->extension) self->destroy_extension(self->extension);
    if (is_alive) {
        device_cuda_time_close(self);
        if (self->own_stream) cudaStreamDestroy(self->own_stream);
        if (self->host_done)
            device_cuda_free_host(self->host_done, CUDA_LANES * sizeof *self->host_done);
    }
    pthread_mutex_destroy(&self->lock);
    bl_device_base_close(&self->base);
    free(self);
}

static const bl_device_backend cuda_backend = {
    .kind = BL_DEVICE_CUDA,
    .destroy = cuda_destroy,
    .host_writes = cuda_host_writes,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .stream_create = device_cuda_stream_create,
    .host_stream_create = device_cuda_host_stream_create,
    .event_create = device_cuda_event_create,
    .event_destroy = device_cuda_event_destroy,
    .event_synchronize = device_cuda_event_synchronize,
    .stamp_create = device_cuda_stamp_create,
    .stamp_destroy = device_cuda_stamp_destroy,
    .stamp_seconds = device_cuda_stamp_seconds,
    .stamp_elapsed_s = device_cuda_stamp_elapsed_s,
};

/* A runtime runs on drivers of the same major version and newer ones. */
static bl_status check_versions(bl_gpu_state *state)
{
    int driver = 0, runtime = 0;

    BL_TRY(device_cuda_check((int)cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
    BL_TRY(device_cuda_check((int)cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion"));
    if (driver == 0) {
        *state = BL_GPU_ABSENT;
        return BL_FAIL(BL_ELIMIT, "CUDA: this machine has no NVIDIA driver");
    }
    if (driver / 1000 < runtime / 1000)
        return BL_FAIL(
            BL_ELIMIT,
            "CUDA: the NVIDIA driver serves CUDA %d.%d, and this build is of CUDA %d.%d: it needs "
            "a newer driver",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return BL_OK;
}

static bl_status read_property(int index, enum cudaDeviceAttr attribute, int *out)
{
    return device_cuda_check((int)cudaDeviceGetAttribute(out, attribute, index),
                             "cudaDeviceGetAttribute");
}

/* Whether the process, or a library in it, has used a GPU already. */
static bool has_context(void)
{
    CUresult (*get_state)(CUdevice device, unsigned int *flags, int *is_active);
    enum cudaDriverEntryPointQueryResult found;
    unsigned int flags;
    int n_gpus = 0, is_active = 0;
    void *entry = NULL;

    if (cudaGetDeviceCount(&n_gpus) != cudaSuccess ||
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, CONTEXT_STATE_SINCE,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        !entry) {
        (void)cudaGetLastError();
        return false;
    }
    memcpy(&get_state, &entry, sizeof get_state);
    for (int i = 0; i < n_gpus && !is_active; i++)
        if (get_state(i, &flags, &is_active) != CUDA_SUCCESS) is_active = 0;
    return is_active != 0;
}

static void prepare(void)
{
    char was[DEVICE_QUEUES_TEXT_BYTES];

    if (!device_raise_queues(was)) return;
    if (has_context())
        bl_log_warning("CUDA was in use before Ballast, with %s hardware queues: set "
                       "CUDA_DEVICE_MAX_CONNECTIONS=32 for more overlap",
                       *was ? was : "8");
    else
        device_log_queues(was);
}

/* Nothing here makes a context. */
static bl_status count_gpus(int *n_gpus, bl_gpu_state *state)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, prepare);
    BL_TRY(check_versions(state));
    cudaError_t error = cudaGetDeviceCount(n_gpus);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && *n_gpus == 0))
        *state = BL_GPU_ABSENT;
    return device_cuda_check((int)error, "cudaGetDeviceCount");
}

static bl_status find_gpu(int index, bl_gpu_info *out)
{
    int major = 0, minor = 0;

    BL_TRY(count_gpus(&out->n_gpus, &out->state));
    if (index < 0 || index >= out->n_gpus)
        return BL_FAIL(BL_ELIMIT, "CUDA: GPU %d is not among this machine's %d", index,
                       out->n_gpus);
    BL_TRY(read_property(index, cudaDevAttrComputeCapabilityMajor, &major));
    BL_TRY(read_property(index, cudaDevAttrComputeCapabilityMinor, &minor));
    out->capability = 10 * major + minor;
    if (out->capability >= BL_CUDA_CAPABILITY_MIN) return BL_OK;
    out->state = BL_GPU_UNSUITED;
    return BL_FAIL(BL_ELIMIT, "CUDA: GPU %d has compute capability %d.%d; bf16 needs 8.0", index,
                   major, minor);
}

bool bl_device_has_cuda(void)
{
    return true;
}

static bl_status describe_gpu(int index, bl_gpu_info *out)
{
    struct cudaDeviceProp properties;

    BL_TRY(find_gpu(index, out));
    BL_TRY(device_cuda_check((int)cudaGetDeviceProperties(&properties, index),
                             "cudaGetDeviceProperties"));
    snprintf(out->name, sizeof out->name, "%s", properties.name);
    BL_TRY(
        device_cuda_check((int)cudaDeviceGetPCIBusId(out->bus_id, (int)sizeof out->bus_id, index),
                          "cudaDeviceGetPCIBusId"));
    out->state = BL_GPU_READY;
    return BL_OK;
}

/* The driver's threads are made by the first calls of a process, and by the first that wants a
 * context. They must not take its signals. */
bl_status bl_device_find_cuda(int index, bl_gpu_info *out)
{
    sigset_t signals;

    *out = (bl_gpu_info){0};
    bl_thread_block_signals(&signals);
    bl_status st = describe_gpu(index, out);
    bl_thread_restore_signals(&signals);
    return st;
}

bl_status bl_device_measure_cuda(int index, size_t *free_bytes, size_t *total_bytes)
{
    sigset_t signals;

    bl_thread_block_signals(&signals);
    bl_status st = device_cuda_check((int)cudaSetDevice(index), "cudaSetDevice");
    if (st == BL_OK)
        st = device_cuda_check((int)cudaMemGetInfo(free_bytes, total_bytes), "cudaMemGetInfo");
    bl_thread_restore_signals(&signals);
    return st;
}

static bl_status read_properties(int index, bl_cuda_properties *out)
{
    bl_gpu_info gpu = {0};
    size_t free_bytes;

    BL_TRY(find_gpu(index, &gpu));
    out->capability = gpu.capability;
    BL_TRY(read_property(index, cudaDevAttrMultiProcessorCount, &out->n_multiprocessors));
    out->index = index;
    return bl_device_measure_cuda(index, &free_bytes, &out->total_bytes);
}

bl_status bl_device_create_cuda(int index, bl_device **out)
{
    cuda_device *self = calloc(1, sizeof *self);
    cudaStream_t stream = NULL;
    bl_status st;

    *out = NULL;
    if (!self) return BL_FAIL(BL_ENOMEM, "a CUDA device");
    bl_device_base_init(&self->base, &cuda_backend);
    pthread_mutex_init(&self->lock, NULL);
    atomic_init(&self->n_failures, 0);
    for (int i = 0; i < CUDA_LANES; i++) atomic_init(&self->lanes[i].failed_task, UINT64_MAX);
    atomic_init(&self->whole.failed_task, UINT64_MAX);
    atomic_flag_clear(&self->is_failing);
    BL_TRY_GOTO(st, failed, read_properties(index, &self->properties));
    BL_TRY_GOTO(st, failed,
                device_cuda_check((int)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                  "cudaStreamCreateWithFlags"));
    self->own_stream = stream;
    BL_TRY_GOTO(st, failed, device_cuda_time_open(self));
    *out = &self->base;
    return BL_OK;

failed:
    if (stream) {
        device_cuda_time_close(self);
        cudaStreamDestroy(stream);
    }
    pthread_mutex_destroy(&self->lock);
    bl_device_base_close(&self->base);
    free(self);
    return st;
}
