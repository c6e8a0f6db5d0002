/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h -- streams and events of the CPU device; for device.c only. */
#ifndef BALLAST_DEVICE_CPU_STREAM_H
#define BALLAST_DEVICE_CPU_STREAM_H

#include "device/cpu/guard.h"
#include "device/device_internal.h"

bl_cpu_guard *bl_cpu_device_guard(bl_device *device); /* device.c; NULL: not guarded */

bl_status bl_cpu_stream_create(bl_device *device, const char *name, bl_stream **out);
bl_status bl_cpu_stream_create_inline(bl_device *device, bl_stream **out);

bl_status bl_cpu_event_create(bl_device *device, bl_event **out);
void bl_cpu_event_destroy(bl_event *event);
bl_status bl_cpu_event_synchronize(bl_event *event);

bl_status bl_cpu_stamp_create(bl_device *device, bl_stamp **out);
void bl_cpu_stamp_destroy(bl_stamp *stamp);
double bl_cpu_stamp_seconds(const bl_stamp *stamp);
double bl_cpu_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end);

#endif
