/* SPDX-License-Identifier: Apache-2.0 */
/* guard.c -- the memory of a guarded CPU device, which only its tasks can touch. One reservation of
 * addresses, from whose front blocks are taken; none is taken twice, so all are zero. The lock is
 * held while the protection is changed, never while a task runs: collectives wait for one another.
 *
 * A change of protection takes time per page of its range, and every task makes two. So the memory
 * is in huge pages, and addresses before the allocated blocks stay closed. */
#include "device/cpu/guard.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/sizes.h"
#include "device/device.h"
#include "device/guard.h"

static const size_t ARENA_BYTES = (size_t)64 << 30, HUGE_BYTES = (size_t)2 << 20;

struct bl_cpu_guard {
    void *reservation; /* ARENA_BYTES and HUGE_BYTES */
    char *memory;      /* ARENA_BYTES, aligned to HUGE_BYTES */
    pthread_mutex_t lock;
    /* Allocated blocks are between these offsets; first_bytes is a multiple of HUGE_BYTES. */
    size_t first_bytes, used_bytes;
    int n_blocks;  /* allocated */
    int n_running; /* tasks; the memory is closed while there are none */
    bool is_void;  /* the system did not change a protection: the guard proves nothing */
};

/* One switch per process: the code that turns it on does not create the devices. */
static atomic_bool is_on;

void bl_device_guard_memory(bool guards)
{
    atomic_store(&is_on, guards);
}

bool bl_cpu_guard_is_asked_for(void)
{
    return atomic_load(&is_on);
}

static char *align_up(void *at)
{
    return (char *)at + (-(uintptr_t)at & (HUGE_BYTES - 1));
}

bl_status bl_cpu_guard_create(bl_cpu_guard **out)
{
    *out = NULL;
    bl_cpu_guard *guard = calloc(1, sizeof *guard);
    if (!guard) return BL_FAIL(BL_ENOMEM, "a guarded CPU device");
    guard->reservation = mmap(NULL, ARENA_BYTES + HUGE_BYTES, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (guard->reservation == MAP_FAILED) {
        free(guard);
        return BL_FAIL(BL_ENOMEM, "%zu addresses for a guarded CPU device", ARENA_BYTES);
    }
    guard->memory = align_up(guard->reservation);
    /* A hint: without huge pages changes of protection are slower. */
    madvise(guard->memory, ARENA_BYTES, MADV_HUGEPAGE);
    pthread_mutex_init(&guard->lock, NULL);
    *out = guard;
    return BL_OK;
}

void bl_cpu_guard_destroy(bl_cpu_guard *guard)
{
    if (!guard) return;
    munmap(guard->reservation, ARENA_BYTES + HUGE_BYTES);
    pthread_mutex_destroy(&guard->lock);
    free(guard);
}

/* With the lock held. Whole huge pages, because a part would split one. The rest of the reservation
 * stays closed: some systems count writable memory. */
static void protect(bl_cpu_guard *guard, int protection)
{
    char *begin = guard->memory + guard->first_bytes,
         *end = align_up(guard->memory + guard->used_bytes);
    if (mprotect(begin, (size_t)(end - begin), protection) != 0) guard->is_void = true;
}

void *bl_cpu_guard_alloc(bl_cpu_guard *guard, size_t size_bytes)
{
    void *memory = NULL;

    pthread_mutex_lock(&guard->lock);
    if (size_bytes <= ARENA_BYTES - guard->used_bytes) {
        memory = guard->memory + guard->used_bytes;
        guard->used_bytes +=
            (size_t)bl_round_up((int64_t)size_bytes, (int64_t)BL_DEVICE_ALIGNMENT_BYTES);
        guard->n_blocks++;
        if (guard->n_running > 0) protect(guard, PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&guard->lock);
    return memory;
}

void bl_cpu_guard_free(bl_cpu_guard *guard, void *memory, size_t size_bytes)
{
    char *begin = align_up(memory), *end = (char *)memory + size_bytes;

    end -= (uintptr_t)end % HUGE_BYTES;
    if (begin < end) madvise(begin, (size_t)(end - begin), MADV_DONTNEED);
    pthread_mutex_lock(&guard->lock);
    if (--guard->n_blocks == 0) {
        if (guard->n_running > 0) protect(guard, PROT_NONE);
        begin = guard->memory + guard->first_bytes;
        end = align_up(guard->memory + guard->used_bytes);
        madvise(begin, (size_t)(end - begin), MADV_DONTNEED);
        guard->first_bytes = guard->used_bytes = (size_t)(end - guard->memory);
    }
    pthread_mutex_unlock(&guard->lock);
}

bl_status bl_cpu_guard_open(bl_cpu_guard *guard)
{
    if (!guard) return BL_OK;
    pthread_mutex_lock(&guard->lock);
    if (guard->n_running++ == 0) protect(guard, PROT_READ | PROT_WRITE);
    bool is_void = guard->is_void;
    pthread_mutex_unlock(&guard->lock);
    return is_void ? BL_FAIL(BL_ELIMIT, "a guarded CPU device: mprotect failed") : BL_OK;
}

void bl_cpu_guard_close(bl_cpu_guard *guard)
{
    if (!guard) return;
    pthread_mutex_lock(&guard->lock);
    if (--guard->n_running == 0) protect(guard, PROT_NONE);
    pthread_mutex_unlock(&guard->lock);
}
