/* SPDX-License-Identifier: Apache-2.0 */
/* whole.c -- BALLAST_EMULATED_WHOLE_GPU=1: what runs on multiprocessors has the whole GPU from its
 * beginning to its end, a kernel of NCCL also while it waits for other ranks. The worst that a GPU
 * may do: a product leaves no registers for another kernel. What depends on two of them being there
 * at once hangs. */
#include <pthread.h>

#include "runtime.h"

static pthread_mutex_t gpus[EMULATED_MAX_DEVICES] = {[0 ... EMULATED_MAX_DEVICES - 1] =
                                                         PTHREAD_MUTEX_INITIALIZER};

static bool is_on(void)
{
    const emulated_settings *settings = emulated_settings_get();
    return settings->has_whole_gpus && !settings->is_strict; /* strict: one at a time anyway */
}

void emulated_hold_gpu(int device)
{
    if (device >= 0 && is_on()) pthread_mutex_lock(&gpus[device]);
}

void emulated_release_gpu(int device)
{
    if (device >= 0 && is_on()) pthread_mutex_unlock(&gpus[device]);
}
