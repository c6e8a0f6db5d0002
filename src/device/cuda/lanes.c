/* SPDX-License-Identifier: Apache-2.0 */
/* The clocks of a GPU's streams: which tasks come before a point, and which of them failed first
 * (the head of stream.c says how they are used). */
#include "device/cuda/device.h"

const cuda_lane *device_cuda_find_failure(const cuda_device *device, const cuda_clock *clock)
{
    const cuda_lane *first = NULL;
    if (atomic_load_explicit(&device->whole.failed_task, memory_order_acquire) != UINT64_MAX)
        first = &device->whole;
    for (int i = 0; i < CUDA_LANES; i++) {
        const cuda_lane *lane = &device->lanes[i];
        if (atomic_load_explicit(&lane->failed_task, memory_order_acquire) >= clock->n_tasks[i])
            continue;
        if (!first || lane->failure < first->failure) first = lane;
    }
    return first;
}

bl_status device_cuda_status_at(const cuda_device *device, const cuda_clock *clock)
{
    const cuda_lane *failed = device_cuda_find_failure(device, clock);
    return failed ? bl_error_restore(&failed->error) : BL_OK;
}

void device_cuda_join_clocks(cuda_clock *clock, const cuda_clock *other)
{
    for (int i = 0; i < CUDA_LANES; i++)
        if (other->n_tasks[i] > clock->n_tasks[i]) clock->n_tasks[i] = other->n_tasks[i];
}

bl_status device_cuda_lane_take(cuda_device *device, const char *name, int *out)
{
    pthread_mutex_lock(&device->lock);
    for (*out = 0; *out < CUDA_LANES; ++*out) {
        cuda_lane *lane = &device->lanes[*out];
        if (lane->is_taken ||
            atomic_load_explicit(&lane->failed_task, memory_order_acquire) != UINT64_MAX)
            continue;
        lane->is_taken = true;
        break;
    }
    pthread_mutex_unlock(&device->lock);
    return *out < CUDA_LANES
               ? BL_OK
               : BL_FAIL(BL_ELIMIT, "stream %s: a CUDA device has at most %d", name, CUDA_LANES);
}

void device_cuda_lane_leave(cuda_device *device, int index, uint64_t n_tasks)
{
    pthread_mutex_lock(&device->lock);
    device->lanes[index].is_taken = false;
    device->lanes[index].n_tasks_before = n_tasks;
    pthread_mutex_unlock(&device->lock);
}

void device_cuda_lane_fail(cuda_device *device, int index, uint64_t task, bl_status st)
{
    cuda_lane *lane = &device->lanes[index];

    if (atomic_load_explicit(&lane->failed_task, memory_order_relaxed) != UINT64_MAX) return;
    bl_error_save(&lane->error, st);
    lane->failure = atomic_fetch_add_explicit(&device->n_failures, 1, memory_order_relaxed);
    atomic_store_explicit(&lane->failed_task, task, memory_order_release);
}

void bl_cuda_device_fail(bl_device *device, const bl_error *error)
{
    cuda_device *self = (cuda_device *)device;

    if (atomic_flag_test_and_set(&self->is_failing)) return;
    self->whole.error = *error;
    self->whole.failure = atomic_fetch_add_explicit(&self->n_failures, 1, memory_order_relaxed);
    atomic_store_explicit(&self->whole.failed_task, 0, memory_order_release);
}
