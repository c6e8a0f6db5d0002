/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h -- the device memory of a guarded CPU device (device/guard.h); for device.c and stream.c
 * only. */
#ifndef BALLAST_DEVICE_CPU_GUARD_H
#define BALLAST_DEVICE_CPU_GUARD_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct bl_cpu_guard bl_cpu_guard;

bool bl_cpu_guard_is_asked_for(void); /* by bl_device_guard_memory */
bl_status bl_cpu_guard_create(bl_cpu_guard **out);
void bl_cpu_guard_destroy(bl_cpu_guard *guard); /* NULL is fine */

/* As those of bl_device_backend. */
void *bl_cpu_guard_alloc(bl_cpu_guard *guard, size_t size_bytes);
void bl_cpu_guard_free(bl_cpu_guard *guard, void *memory, size_t size_bytes);

/* Around each task; tasks of several streams may overlap. NULL is fine. BL_ELIMIT: the system has
 * refused to open or close the memory, once and for good; close is due all the same. */
bl_status bl_cpu_guard_open(bl_cpu_guard *guard);
void bl_cpu_guard_close(bl_cpu_guard *guard);

#endif
