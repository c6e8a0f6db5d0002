/* SPDX-License-Identifier: Apache-2.0 */
/* whole.c -- BALLAST_EMULATED_WHOLE_GPU=yes: what runs on multiprocessors has the whole GPU from
 * its beginning to its end, a kernel of NCCL also while it waits for other ranks. The worst that a
 * GPU may do: a product leaves no registers for another kernel. What depends on two of them being
 * there at once hangs.
 *
 * Whether two kernels of NCCL wait for each other is then a matter of which of them is first on
 * which rank. crossed: ranks with an even number begin with sends and receives, the others with
 * collectives, where streams leave them the choice: each holds back the other kind until that one
 * has the GPU, or for HOLD_BACK_S. */
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "runtime.h"

enum { HOLD_BACK_S = 1 };

typedef struct gpu {
    pthread_mutex_t is_taken; /* by what has it */
    pthread_mutex_t lock;     /* of the following */
    pthread_cond_t changed;
    bool has[2]; /* a kernel of NCCL: [1] of sends and receives, [0] of a collective */
} gpu;

static gpu gpus[EMULATED_MAX_DEVICES] = {
    [0 ... EMULATED_MAX_DEVICES - 1] = {PTHREAD_MUTEX_INITIALIZER,
                                        PTHREAD_MUTEX_INITIALIZER,
                                        PTHREAD_COND_INITIALIZER,
                                        {false, false}}};

static bool is_on(void)
{
    const emulated_settings *settings = emulated_settings_get();
    return settings->whole_gpus != EMULATED_SHARED && !settings->is_strict; /* one at a time */
}

void emulated_hold_gpu(int device)
{
    if (device >= 0 && is_on()) pthread_mutex_lock(&gpus[device].is_taken);
}

void emulated_release_gpu(int device)
{
    if (device >= 0 && is_on()) pthread_mutex_unlock(&gpus[device].is_taken);
}

static void wait_for(gpu *g, bool pairs)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += HOLD_BACK_S;
    pthread_mutex_lock(&g->lock);
    while (!g->has[pairs] && pthread_cond_timedwait(&g->changed, &g->lock, &until) != ETIMEDOUT) {
    }
    pthread_mutex_unlock(&g->lock);
}

static void set_has(gpu *g, bool pairs, bool has)
{
    pthread_mutex_lock(&g->lock);
    g->has[pairs] = has;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

void emulated_hold_gpu_for_nccl(int device, int rank, bool pairs)
{
    if (!is_on()) return;
    gpu *g = &gpus[device];
    bool pairs_first = rank % 2 == 0;
    if (emulated_settings_get()->whole_gpus == EMULATED_CROSSED && pairs != pairs_first)
        wait_for(g, pairs_first);
    emulated_hold_gpu(device);
    set_has(g, pairs, true);
}

void emulated_release_gpu_of_nccl(int device, bool pairs)
{
    if (!is_on()) return;
    set_has(&gpus[device], pairs, false);
    emulated_release_gpu(device);
}
