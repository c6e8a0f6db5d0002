/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h -- how kernels and products get onto the emulated runtime's streams. For the files of this folder. */
#ifndef BALLAST_TESTS_EMULATE_QUEUE_H
#define BALLAST_TESTS_EMULATE_QUEUE_H

#ifdef __cplusplus
extern "C" {
#endif

/* work(argument) as device work of a cudaStream_t, in its order, on its thread; the stream's device must be current. Returns a
 * cudaError_t: on an error, work is never called. */
int emulated_queue(void *stream, void (*work)(void *), void *argument);

#ifdef __cplusplus
}
#endif

#endif
