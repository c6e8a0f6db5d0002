/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- where a rank computes: memory, streams of work and events between them. One
 * interface, chosen at run time.
 *
 * A device belongs to one rank. Its streams run side by side; within a stream, tasks run one after
 * the other in the order they were given. On the CPU a stream is a thread with a bounded queue, so
 * overlap and races are real there too.
 *
 * The stream contract
 *   1. A call copies its arguments (at most BL_STREAM_ARGS_BYTES) into a fixed ring and returns; a
 *      full ring blocks the caller. Nothing is allocated.
 *   2. Buffers named by the arguments belong to the caller, who keeps them alive until an event
 *      recorded after their last use.
 *   3. An event's wait refers to the latest record before the wait call; an event never recorded is
 *      no wait.
 *   4. The first error of a stream is sticky: later tasks are skipped, events still fire and carry
 *      the error, a stream that waits for such an event inherits it, and bl_stream_synchronize /
 *      bl_event_synchronize return it with its text. A failed stream still waits for events: one
 *      recorded on it promises as much as any other. CUDA: device work behind a failed task does
 *      run, on memory that is valid; its results are lost in the same way.
 *   5. Streams and events may be used by one caller thread at a time; different streams by
 *      different threads at once. */
#ifndef BALLAST_DEVICE_DEVICE_H
#define BALLAST_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whose memory and arithmetic. */
typedef enum bl_device_kind { BL_DEVICE_CPU, BL_DEVICE_CUDA } bl_device_kind;

/* BL_SPACE_DEVICE: where the device computes. BL_SPACE_HOST: host memory that the device copies
 * from and to at full speed (pinned where that means something). On the CPU both are ordinary
 * memory, but host code touches the first in tasks of streams only: staging.h. */
typedef enum bl_space { BL_SPACE_DEVICE, BL_SPACE_HOST, BL_SPACES } bl_space;

typedef struct bl_device bl_device;
typedef struct bl_stream bl_stream;
typedef struct bl_event bl_event;
typedef struct bl_stamp bl_stamp;

/* Most bytes of a task's arguments; tasks that wait in a stream; alignment of device memory. */
enum { BL_STREAM_ARGS_BYTES = 256, BL_STREAM_DEPTH = 256, BL_DEVICE_ALIGNMENT_BYTES = 4096 };

/* A CPU device whose worker pool has n_threads (>= 1) threads, the compute stream's own among
 * them. */
BL_API bl_status bl_device_create_cpu(int n_threads, bl_device **out);
/* The same with a pool over the threads of the caller's runtime (bl_pool_create_over). */
BL_API bl_status bl_device_create_cpu_over(int n_threads, bl_parallel_fn parallel, bl_device **out);

BL_API bool bl_device_has_cuda(void); /* this build; there may be no GPU */

enum { BL_CUDA_CAPABILITY_MIN = 80 }; /* the least compute capability, 10 x major + minor */

/* GPU number `index` (CUDA's numbering, CUDA_VISIBLE_DEVICES applied), of compute capability 8.0 or
 * more. BL_ELIMIT when the build, machine or driver lacks support, naming the missing part. Several
 * devices may share one GPU. A CUDA device has at most 32 streams. */
BL_API bl_status bl_device_create_cuda(int index, bl_device **out);
/* Sets CUDA_DEVICE_MAX_CONNECTIONS to 32 unless it is 32 or more: as many hardware queues as a
 * device has streams, so that streams that wait do not block others. Logs a warning when it
 * replaces a value. Call it before CUDA makes a context, while the process has one thread; the
 * first call for a GPU does it otherwise, and logs a warning when it is too late. */
BL_API void bl_device_prepare_environment(void);

/* Result of a search for a GPU. */
typedef enum bl_gpu_state {
    BL_GPU_BROKEN,   /* the driver, or the search itself, has failed */
    BL_GPU_ABSENT,   /* the machine has no driver or no GPU, or the build no CUDA */
    BL_GPU_UNSUITED, /* its compute capability is too low */
    BL_GPU_READY
} bl_gpu_state;

/* Whether bl_device_create_cuda(index) would find its GPU, and the GPU's properties: allocates
 * nothing there, makes no context. Errors as there; `state` is set then, too. */
typedef struct bl_gpu_info {
    bl_gpu_state state;
    int n_gpus;      /* of this machine */
    int capability;  /* 10 * major + minor: 90 on Hopper */
    char name[256];  /* the driver's: "NVIDIA H200" */
    char bus_id[16]; /* where it is on the PCI bus: "0000:1B:00.0" */
} bl_gpu_info;
bl_status bl_device_find_cuda(int index, bl_gpu_info *out);
/* As above, but in a forked child, which ends after it: the caller's process then has not used CUDA
 * and may start others that do. Call it before there are threads. BL_ELIMIT also when the child
 * ends without an answer. */
bl_status bl_device_probe_cuda(int index, bl_gpu_info *out);
/* Bytes of its memory, total and free of all processes. Makes this process's context on it, whose
 * memory then counts as used. */
bl_status bl_device_measure_cuda(int index, size_t *free_bytes, size_t *total_bytes);

BL_API void
bl_device_destroy(bl_device *device); /* after its streams, events and memory; NULL is fine */
/* Constant from creation on. */
BL_API bl_device_kind bl_device_get_kind(const bl_device *device);

/* The dtype of activations and their gradients in computations on the device: a choice of its
 * owner, which ops do not read. fp32 on a CPU unless it is set to bf16, before anything is created
 * for the device; bf16 on a GPU. BL_EUSAGE: another dtype, or fp32 on a GPU. */
bl_dtype bl_device_act(const bl_device *device);
bl_status bl_device_set_act(bl_device *device, bl_dtype act);

/* The rank's worker threads on the host; borrowed. A CPU's exist from create on. A GPU has none,
 * NULL, until start_workers gives it n_threads (>= 1, the caller of bl_pool_run among them):
 * weights are quantized and memory is touched on them. BL_EINTERNAL: it has some. */
BL_API bl_pool *bl_device_pool(bl_device *device);
bl_status bl_device_start_workers(bl_device *device, int n_threads);

/* Whether host code may read and write BL_SPACE_DEVICE memory itself: on a CPU that is not guarded
 * (guard.h). Only for ways that carry the whole base, where a staging buffer would cost time; all
 * other code stages (staging.h), whatever the device. */
BL_API bool bl_device_host_writes(const bl_device *device);

/* Zero-filled memory, aligned to BL_DEVICE_ALIGNMENT_BYTES (a GPU's own memory: 256); size 0 gives
 * a valid pointer. The caller frees it with the same device and space. BL_ENOMEM names `what` and
 * the bytes. Any thread may call these. */
BL_API bl_status bl_device_alloc(bl_device *device, bl_space space, size_t size_bytes,
                                 const char *what, void **out);
BL_API void bl_device_free(bl_device *device, bl_space space, void *memory);
/* Counts memory of this device that another library (NCCL) allocated for the rank, as if
 * bl_device_alloc had, until disown with the same size. Any thread may call these. */
void bl_device_adopt(bl_device *device, bl_space space, size_t size_bytes);
void bl_device_disown(bl_device *device, bl_space space, size_t size_bytes);
BL_API size_t bl_device_bytes(const bl_device *device); /* allocated now, both spaces together */
/* Peak of the bytes allocated in one space, as requested from bl_device_alloc and adopt. */
BL_API size_t bl_device_peak_bytes(const bl_device *device, bl_space space);
int64_t bl_device_allocations(const bl_device *device); /* calls so far: a step must not add any */

/* Makes host memory of the caller's such that the device copies from and to it at full speed and
 * the system never moves or swaps it (CPU: mlock; CUDA: cudaHostRegister). BL_ELIMIT names
 * RLIMIT_MEMLOCK, its value and the required size; the memory is then unchanged. unpin gets the
 * same range. */
BL_API bl_status bl_device_pin(bl_device *device, void *memory, size_t size_bytes);
BL_API void bl_device_unpin(bl_device *device, void *memory, size_t size_bytes);

/* `name` (copied) names the stream's thread and its lane in a trace. */
BL_API bl_status bl_stream_create(bl_device *device, const char *name, bl_stream **out);
/* A stream for work that others wait for, next to the products that fill a GPU: where
 * multiprocessors become free its kernels take them first (CUDA: the greatest priority of
 * cudaDeviceGetStreamPriorityRange). Elsewhere as bl_stream_create. */
bl_status bl_stream_create_urgent(bl_device *device, const char *name, bl_stream **out);
/* A stream without a thread, for a caller that waits after each call anyway: a call runs its tasks
 * on the calling thread before it returns. Errors surface as on all streams. CPUs only: BL_EUSAGE
 * on other devices. */
BL_API bl_status bl_stream_create_inline(bl_device *device, bl_stream **out);
BL_API void bl_stream_destroy(bl_stream *stream); /* waits for its tasks; NULL is fine */

/* A stream for work that waits (a disk, other processes), beside the device's own: its tasks run on
 * a thread of the host, where waiting holds up nothing else. It takes calls, waits, events and
 * stamps. Events join both kinds: a stream of the device waits for an event recorded here without
 * occupying a thread, and the reverse; errors travel as between any two. On the CPU it is a stream
 * like all others. On CUDA its tasks may wait for events and streams, copies and zeroing are
 * BL_EINTERNAL (no task of it has device memory to touch), and it counts among the 32.
 *
 * A CUDA stream that waits for an event of a host stream blocks all streams of its hardware queue.
 * So no stream of the device may wait for a task that queues work on the device: the caller first
 * waits itself (bl_timeline_wait_here, bl_event_synchronize). */
bl_status bl_stream_create_host(bl_device *device, const char *name, bl_stream **out);

/* A stream of the caller's, a CUDA stream handle, for use as one of `device`, on whose GPU it
 * lives. It is borrowed: destroying *out waits for the work on it and leaves it alone. BL_EUSAGE
 * for a device that is no GPU, BL_ELIMIT in a build without CUDA. */
BL_API bl_status bl_stream_wrap_cuda(bl_device *device, void *handle, bl_stream **out);

/* The device that the stream was made on; borrowed. */
BL_API bl_device *bl_stream_device(bl_stream *stream);

/* A host function in stream order. It may call bl_pool_run on
 * bl_device_pool(bl_stream_device(stream)). It must not call anything that waits for the same
 * stream; on CUDA, nothing that waits for any stream's task, and nothing of CUDA. A failing status
 * becomes the stream's sticky error. The call itself fails for too large arguments only
 * (BL_EINTERNAL), never because of the stream's state. */
typedef bl_status (*bl_stream_fn)(bl_stream *stream, const void *args);
BL_API bl_status bl_stream_call(bl_stream *stream, bl_stream_fn fn, const void *args,
                                size_t args_bytes);

/* Reads of a disk, as two calls: fn of begin starts the read and returns, fn of end waits for it. A
 * stream has BL_STREAM_READS of them at a time; `slot` names one. On a device that is a model
 * (device/model.h) neither is called: a read of n_bytes takes the disk's time. Errors as
 * bl_stream_call's; BL_EINTERNAL for another slot. */
enum { BL_STREAM_READS = 36 };
bl_status bl_stream_begin_read(bl_stream *stream, int slot, size_t n_bytes, bl_stream_fn fn,
                               const void *args, size_t args_bytes);
bl_status bl_stream_end_read(bl_stream *stream, int slot, bl_stream_fn fn, const void *args,
                             size_t args_bytes);

/* In stream order: any space, no overlap. */
BL_API bl_status bl_stream_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes);
BL_API bl_status bl_stream_zero(bl_stream *stream, void *dst, size_t size_bytes);

/* Device memory to device memory: n_rows rows of row_bytes, whose starts are dst_stride and
 * src_stride bytes apart (>= row_bytes). No overlap. */
typedef struct bl_row_copy {
    void *dst;
    const void *src;
    size_t dst_stride, src_stride, row_bytes, n_rows;
} bl_row_copy;
BL_API bl_status bl_stream_copy_rows(bl_stream *stream, const bl_row_copy *copy);

/* Returns when all tasks given before have ended, with the sticky error if there is one. */
BL_API bl_status bl_stream_synchronize(bl_stream *stream);

/* The sticky error, if a task has failed by now; does not wait. For callers that would rather not
 * queue more behind a failure. */
BL_API bl_status bl_stream_status(bl_stream *stream);

/* An event may outlive the stream it was recorded on. bl_stream_wait: later tasks of `stream` run
 * after the latest record; the event may then be recorded again or destroyed. bl_event_synchronize:
 * the calling thread waits. */
BL_API bl_status bl_event_create(bl_device *device, bl_event **out);
BL_API void
bl_event_destroy(bl_event *event); /* NULL is fine; no thread may be in bl_event_synchronize */
BL_API bl_status bl_event_record(bl_event *event, bl_stream *stream);
BL_API bl_status bl_stream_wait(bl_stream *stream, bl_event *event);
BL_API bl_status bl_event_synchronize(bl_event *event);

/* A stamp notes when a stream reached it: seconds of CLOCK_MONOTONIC, or BL_NEVER_S (-HUGE_VAL)
 * while the latest record has not been reached. Recording it again before that is an error of the
 * caller's. Failed streams reach their stamps, too. Destroy it after the stream's tasks. */
bl_status bl_stamp_create(bl_device *device, bl_stamp **out);
void bl_stamp_destroy(bl_stamp *stamp); /* NULL is fine */
bl_status bl_stamp_record(bl_stamp *stamp, bl_stream *stream);
double bl_stamp_seconds(const bl_stamp *stamp);

/* Seconds from one stamp to another of the same device by that device's own clock, 0 while either
 * has not been reached. On CUDA the difference of two bl_stamp_seconds is good to some ten
 * microseconds only, this to one. */
double bl_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end);

#ifdef __cplusplus
}
#endif

#endif
