/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h -- queues kernels and products on the emulated runtime's streams, and has its settings
 * for files without CUDA's headers. For the files of this directory. */
#ifndef BALLAST_TESTS_EMULATE_QUEUE_H
#define BALLAST_TESTS_EMULATE_QUEUE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* work(argument) as device work of a cudaStream_t, in its order, on its thread; the stream's device
 * must be current. Returns a cudaError_t: on an error, work is never called. */
int emulated_queue(void *stream, void (*work)(void *), void *argument);

int emulated_capability(void); /* BALLAST_EMULATED_ARCH */
uint64_t emulated_seed(void);  /* BALLAST_EMULATED_SEED */

#ifdef __cplusplus
}
#endif

#endif
