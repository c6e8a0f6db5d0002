/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h -- proof on a CPU that host code leaves device memory alone, as it must on a GPU. For
 * tests.
 *
 * A guarded CPU device takes all BL_SPACE_DEVICE memory from one range of addresses that can be
 * neither read nor written (PROT_NONE) except while a task of one of its streams runs: host code
 * that touches it ends by SIGSEGV, a system call by EFAULT. A thread that queues a task waits until
 * it has run, so that no touch of the same rank coincides with a task and is missed. Streams do not
 * overlap then; results are the same. */
#ifndef BALLAST_DEVICE_GUARD_H
#define BALLAST_DEVICE_GUARD_H

#include <stdbool.h>

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether CPU devices created from now on are guarded; at first they are not. It is of the whole
 * process: the code under test creates its devices itself. No device may be under construction
 * meanwhile. */
void bl_device_guard_memory(bool guards);

/* bl_device_create_cpu with a guard, whatever was said above. */
bl_status bl_device_create_cpu_guarded(int n_threads, bl_device **out);

#ifdef __cplusplus
}
#endif

#endif
