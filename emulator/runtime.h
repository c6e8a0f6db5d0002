/* SPDX-License-Identifier: Apache-2.0 */
/* runtime.h -- declarations shared by the emulated runtime's files; for this directory only. */
#ifndef BALLAST_TESTS_EMULATE_RUNTIME_H
#define BALLAST_TESTS_EMULATE_RUNTIME_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

/* ---- settings.c ---- */

/* Settings from the environment (README.md); an invalid value ends the program with a line. */
typedef enum emulated_windows {
    EMULATED_WINDOWS_YES,
    /* symmetric memory is not served: no error, and by version a window or none */
    EMULATED_WINDOWS_NO,
    EMULATED_WINDOWS_FAIL
} emulated_windows;
typedef enum emulated_whole { EMULATED_SHARED, EMULATED_WHOLE, EMULATED_CROSSED } emulated_whole;
/* What ncclCommAbort ends: the waits of kernels alone, as the real one, all waits, or nothing.
 * Unless all work of its communicator ends, it does not return. */
typedef enum emulated_abort {
    EMULATED_ABORT_KERNELS,
    EMULATED_ABORT_ALL,
    EMULATED_ABORT_HANGS
} emulated_abort;
enum { EMULATED_MAX_DEVICES = 64, EMULATED_MAX_QUEUES = 32, EMULATED_ENTRY_BYTES = 208 };
typedef struct emulated_settings {
    bool is_strict;
    int capability;     /* 80 or 90 */
    int driver_version; /* CUDA's number, 13000; 0: no driver */
    int start_error;    /* CUDA's error number when the driver fails to start; 0: it starts */
    int n_most_devices; /* of the host: no process sees more */
    int n_devices;
    int visible[EMULATED_MAX_DEVICES]; /* of the host's GPUs, the process's */
    const char *host;                  /* NULL: this one */
    int nccl_version;                  /* NCCL's number, 22809; 0: no library */
    const char *nccl_hidden;           /* functions that it lacks, with commas; NULL: none */
    emulated_windows nccl_windows;
    bool nccl_reports; /* the death of a rank is an asynchronous error; or the others just hang */
    emulated_abort nccl_abort;
    const char *nccl_log;      /* NULL: none */
    const char *fault;         /* NULL: none */
    const char *ptx;           /* a directory; NULL: none */
    size_t memory_bytes;       /* of a device */
    bool has_fp8;              /* whether cuBLASLt has FP8 products at all */
    uint64_t seed;             /* 0: no delays */
    emulated_whole whole_gpus; /* whole.c */
} emulated_settings;
const emulated_settings *emulated_settings_get(void);

/* BALLAST_EMULATED_QUEUES, or else n_connections: CUDA_DEVICE_MAX_CONNECTIONS as the driver reads
 * it. 0: each stream has a queue. */
int emulated_read_queues(int *n_connections);

/* The program ends with this line on stderr. */
_Noreturn void emulated_fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- runtime.c ---- */

/* Entries that a stream has been given, and of those the ones that a wait on the host has proved to
 * be over. Lives as long as the program: events refer to it. */
typedef struct emulated_launches {
    _Atomic uint64_t given, over;
    struct emulated_launches *next;
} emulated_launches;

typedef struct emulated_fifo emulated_fifo;

struct CUstream_st {
    bl_stream *stream;
    emulated_fifo *fifo; /* its hardware queue; NULL: not shared */
    emulated_launches *launches;
    bl_stream *host; /* STRICT: host functions run here, with device memory closed */
    int device, priority;
};

/* Whether a call may continue: cudaSuccess, or a broken GPU's error. Ends the program when a host
 * function calls CUDA. */
cudaError_t emulated_enter(void);
/* The same; a stream is used with its device current. */
cudaError_t emulated_enter_stream(cudaStream_t stream);
/* One more entry of the stream's launch queue. Ends the program when so many may be waiting there
 * that a GPU's queue is full: nothing on the host has waited for an earlier one. */
void emulated_launch(cudaStream_t stream);
int emulated_current_device(void);
bool emulated_has_context(void); /* of any device */
/* Which of the host's GPUs the process's `device` is. */
int emulated_physical_device(int device);

/* The CPU device that is all GPUs, made by the first who asks; guarded in the strict mode. NULL: no
 * memory. */
bl_device *emulated_cpu_device(void);

/* Around device work, on the stream's thread: STRICT: one at a time; a delay where a seed asks for
 * some. */
void emulated_begin_work(void);
void emulated_end_work(void);

/* ---- queues.c ---- */

/* With the first context: reads how many queues there are. */
void emulated_open_queues(void);
/* That of the process's next stream of the `device`. */
emulated_fifo *emulated_take_fifo(int device);
/* fn(args) on the stream's thread, as an entry of its queue. blocks: later entries of the queue
 * wait for its end, not for its start. At most EMULATED_ENTRY_BYTES of args. */
void emulated_give(cudaStream_t stream, bool blocks, bl_stream_fn fn, const void *args,
                   size_t n_bytes);
void emulated_give_wait(cudaStream_t stream, bl_event *event); /* an entry that blocks */

/* ---- whole.c ---- */

/* Around what multiprocessors of the process's `device` do, on the stream's thread; -1: they do
 * not, it is a copy engine. */
void emulated_hold_gpu(int device);
void emulated_release_gpu(int device);
/* The same around a kernel of NCCL, of sends and receives (pairs) or of a collective. */
void emulated_hold_gpu_for_nccl(int device, int rank, bool pairs);
void emulated_release_gpu_of_nccl(int device, bool pairs);

/* ---- memory.c ---- */

/* The first byte after the registration that `at` is in; 0: none. */
uintptr_t emulated_registered_end(const void *at);
/* The same of an allocation of device memory, and its first byte. */
uintptr_t emulated_memory_end(const void *at);
uintptr_t emulated_memory_begin(const void *at);

#endif
