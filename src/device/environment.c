/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c -- how many hardware queues CUDA gives the process's streams on a GPU. */
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "device/device_internal.h"

#define VARIABLE "CUDA_DEVICE_MAX_CONNECTIONS"
enum { QUEUES = 32 }; /* CUDA's most */

bool device_raise_queues(char was[DEVICE_QUEUES_TEXT_BYTES])
{
    const char *text = getenv(VARIABLE);

    snprintf(was, DEVICE_QUEUES_TEXT_BYTES, "%s", text ? text : "");
    if (text && strtol(text, NULL, 10) >= QUEUES) return false;
    setenv(VARIABLE, "32", 1);
    return true;
}

void device_log_queues(const char *was)
{
    if (*was)
        bl_log_warning(VARIABLE "=%s is replaced by 32: streams that share a hardware queue wait "
                                "for one another",
                       was);
}

void bl_device_prepare_environment(void)
{
    char was[DEVICE_QUEUES_TEXT_BYTES];
    if (device_raise_queues(was) && bl_device_has_cuda()) device_log_queues(was);
}
