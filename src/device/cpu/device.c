/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the CPU as a device. Memory comes from mmap: zero pages cost nothing until they are
 * touched, so buffers sized for the largest step are cheap. Under AddressSanitizer it comes from
 * the heap instead, whose red zones catch a write past the end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/memory.h"
#include "base/sizes.h"
#include "device/cpu/guard.h"
#include "device/cpu/stream.h"
#include "device/guard.h"

#if defined(__SANITIZE_ADDRESS__)
#define USE_HEAP 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define USE_HEAP 1
#endif
#endif

enum { HUGE_PAGE_BYTES = 2 << 20 };

typedef struct cpu_device {
    bl_device base;
    bl_pool *pool;
    bl_cpu_guard *guard; /* has the device memory; NULL: ordinary memory */
} cpu_device;

static bl_pool *cpu_pool(bl_device *device)
{
    return ((cpu_device *)device)->pool;
}

static void cpu_destroy(bl_device *device)
{
    cpu_device *self = (cpu_device *)device;
    bl_pool_destroy(self->pool);
    bl_device_base_close(&self->base);
    bl_cpu_guard_destroy(self->guard);
    free(self);
}

static bool cpu_host_writes(const bl_device *device)
{
    return !((const cpu_device *)device)->guard;
}

bl_cpu_guard *bl_cpu_device_guard(bl_device *device)
{
    return ((cpu_device *)device)->guard;
}

#ifdef USE_HEAP

static void *take_memory(size_t size_bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, BL_DEVICE_ALIGNMENT_BYTES, size_bytes) != 0) return NULL;
    return memset(memory, 0, size_bytes);
}

static void give_memory_back(void *memory, size_t size_bytes)
{
    (void)size_bytes;
    free(memory);
}

#else

static void *take_memory(size_t size_bytes)
{
    void *memory =
        mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (size_bytes >= HUGE_PAGE_BYTES)
        madvise(memory, size_bytes, MADV_HUGEPAGE); /* a hint: may fail */
    return memory;
}

static void give_memory_back(void *memory, size_t size_bytes)
{
    munmap(memory, size_bytes);
}

#endif

static void *cpu_alloc(bl_device *device, bl_space space, size_t size_bytes)
{
    bl_cpu_guard *guard = bl_cpu_device_guard(device);
    return guard && space == BL_SPACE_DEVICE ? bl_cpu_guard_alloc(guard, size_bytes)
                                             : take_memory(size_bytes);
}

static void cpu_free(bl_device *device, bl_space space, void *memory, size_t size_bytes)
{
    bl_cpu_guard *guard = bl_cpu_device_guard(device);
    if (guard && space == BL_SPACE_DEVICE)
        bl_cpu_guard_free(guard, memory, size_bytes);
    else
        give_memory_back(memory, size_bytes);
}

static bl_status cpu_pin(bl_device *device, void *memory, size_t size_bytes)
{
    struct rlimit limit;

    (void)device;
    if (mlock(memory, size_bytes) == 0) return BL_OK;
    int error = errno;
    munlock(memory, size_bytes);
    if ((error == ENOMEM || error == EPERM) && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
        limit.rlim_cur != RLIM_INFINITY)
        return BL_FAIL(BL_ELIMIT,
                       "cannot lock %zu bytes in memory: RLIMIT_MEMLOCK allows %llu (ulimit -l "
                       "%zu, in KiB, would do)",
                       size_bytes, (unsigned long long)limit.rlim_cur,
                       (size_t)bl_ceil_div((int64_t)size_bytes + bl_memory_locked_bytes(), 1024));
    errno = error;
    return bl_fail_errno(BL_ELIMIT, "cannot lock %zu bytes in memory", size_bytes);
}

static void cpu_unpin(bl_device *device, void *memory, size_t size_bytes)
{
    (void)device;
    munlock(memory, size_bytes);
}

static bl_status cpu_stream_create(bl_device *device, const char *name, bool is_urgent,
                                   bl_stream **out)
{
    (void)is_urgent; /* the system shares the cores among the streams' threads */
    return bl_cpu_stream_create(device, name, out);
}

static const bl_device_backend cpu_backend = {
    .kind = BL_DEVICE_CPU,
    .destroy = cpu_destroy,
    .pool = cpu_pool,
    .host_writes = cpu_host_writes,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .stream_create = cpu_stream_create,
    .host_stream_create = bl_cpu_stream_create,
    .inline_stream_create = bl_cpu_stream_create_inline,
    .event_create = bl_cpu_event_create,
    .event_destroy = bl_cpu_event_destroy,
    .event_synchronize = bl_cpu_event_synchronize,
    .stamp_create = bl_cpu_stamp_create,
    .stamp_destroy = bl_cpu_stamp_destroy,
    .stamp_seconds = bl_cpu_stamp_seconds,
    .stamp_elapsed_s = bl_cpu_stamp_elapsed_s,
};

/* parallel NULL: its own threads. */
static bl_status create(int n_threads, bl_parallel_fn parallel, bool guards, bl_device **out)
{
    *out = NULL;
    cpu_device *self = calloc(1, sizeof *self);
    if (!self) return BL_FAIL(BL_ENOMEM, "CPU device");
    bl_status st = guards ? bl_cpu_guard_create(&self->guard) : BL_OK;
    if (st == BL_OK)
        st = parallel ? bl_pool_create_over(n_threads, parallel, &self->pool)
                      : bl_pool_create(n_threads, &self->pool);
    if (st != BL_OK) {
        bl_cpu_guard_destroy(self->guard);
        free(self);
        return st;
    }
    bl_device_base_init(&self->base, &cpu_backend);
    *out = &self->base;
    return BL_OK;
}

bl_status bl_device_create_cpu(int n_threads, bl_device **out)
{
    return create(n_threads, NULL, bl_cpu_guard_is_asked_for(), out);
}

bl_status bl_device_create_cpu_over(int n_threads, bl_parallel_fn parallel, bl_device **out)
{
    *out = NULL;
    if (!parallel) return BL_FAIL(BL_EUSAGE, "CPU device: parallel is NULL");
    return create(n_threads, parallel, bl_cpu_guard_is_asked_for(), out);
}

bl_status bl_device_create_cpu_guarded(int n_threads, bl_device **out)
{
    return create(n_threads, NULL, true, out);
}
