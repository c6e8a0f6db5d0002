/* SPDX-License-Identifier: Apache-2.0 */
/* series.h -- metrics.jsonl as series of bounded length, for a picture: up to BL_SERIES_BINS points
 * of as many consecutive steps each. With as many steps or fewer, each point is one step. */
#ifndef BALLAST_TRAIN_REPORT_SERIES_H
#define BALLAST_TRAIN_REPORT_SERIES_H

#include <stdint.h>

#include "base/status.h"
#include "device/timeline.h"

enum { BL_SERIES_BINS = 512 };

/* Consecutive steps, or evaluations: then of the members only the first seven are used, and seconds
 * are those of the evaluations. */
typedef struct bl_series_bin {
    int64_t first_step, last_step, n;
    double loss_sum, loss_least, loss_most;
    double seconds;
    double tokens, learning_rate; /* the rate of last_step */
    double stall_s[BL_N_LANES];   /* of BL_LANE_COMPUTE: 0 */
    double moved_bytes[BL_N_LANES];
} bl_series_bin;

typedef struct bl_series {
    bl_series_bin bin[BL_SERIES_BINS];
    int64_t n_bins, per_bin; /* steps in each bin but the last, which may have fewer */
    bl_series_bin first, last, total;
    int64_t least_step; /* the first one with the lowest loss, total.loss_least */
} bl_series;

/* Of total.n = 0 the other members are zero. */
typedef struct bl_run_series {
    bl_series steps, evaluations;
    int64_t n_skipped; /* lines that are neither, or have values that are not finite */
} bl_run_series;

/* Reads the first n_bytes of a metrics log; overwrites *out. Any thread, also while lines are
 * appended. BL_EIO names the file; BL_ENOMEM. */
bl_status bl_run_series_read(const char *path, int64_t n_bytes, bl_run_series *out);

#endif
