/* SPDX-License-Identifier: Apache-2.0 */
/* planted.h -- kernels with a fault each, and their twins without it, for
 * test_emulated_kernels.c. */
#ifndef BALLAST_TESTS_EMULATE_PLANTED_H
#define BALLAST_TESTS_EMULATE_PLANTED_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PLANTED_THREADS = 128, PLANTED_BLOCKS = 4, PLANTED_N = PLANTED_BLOCKS * PLANTED_THREADS };

/* `out` has PLANTED_N floats, `in` PLANTED_N of value i. */

typedef struct planted_args {
    float *out;
    const float *in;
    bool with_fault;
} planted_args;

typedef bl_status planted_launch(bl_stream *stream, const planted_args *args);

/* out[i] = the sum of what thread i's left and right neighbors took from `in`; without a barrier
 * between. */
planted_launch planted_race, planted_race_in_warp, planted_race_between_warps;
planted_launch planted_race_after_shuffle, planted_overwrite;
planted_launch planted_race_of_loads, planted_race_of_lanes, planted_race_in_cluster;
planted_launch planted_not_written;
/* out[i] = in[i] by asynchronous copies. */
planted_launch planted_copy, planted_copy_overwrites, planted_copy_unfinished;
planted_launch planted_barrier, planted_shuffle, planted_collective;
planted_launch planted_misaligned, planted_bounds_static, planted_bounds_dynamic;
planted_launch planted_blocks_write, planted_blocks_read, planted_blocks_load;
/* Asks for so many bytes of dynamic shared memory, with the attribute that more than 48 KiB need or
 * without. */
bl_status planted_shared(bl_stream *stream, float *out, size_t bytes, bool with_attribute);
/* out[i] = an index that block and thread i computed in a grid of 3 x 5 x 2 blocks of 4 x 4 x 2
 * threads. */
bl_status planted_grid(bl_stream *stream, float *out);
/* Sums, ballots, shuffles and an exchange of each warp, in out[0..4 * PLANTED_THREADS). */
bl_status planted_warps(bl_stream *stream, float *out);
/* Each thread calls planted_note_thread, which the test has. */
bl_status planted_order(bl_stream *stream);
void planted_note_thread(int block, int thread);
/* Each thread loads word threadIdx.x * stride of shared memory. */
bl_status planted_strided(bl_stream *stream, float *out, int stride);

#ifdef __cplusplus
}
#endif

#endif
