/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.h -- metrics.jsonl, a line per step, the same for TensorBoard, and the progress shown on
 * a terminal. */
#ifndef BALLAST_TRAIN_METRICS_H
#define BALLAST_TRAIN_METRICS_H

#include <stdint.h>

#include "base/status.h"
#include "device/timeline.h"
#include "train/preference.h"

struct bl_events;
typedef struct bl_metrics bl_metrics;

typedef struct bl_step_metrics {
    int64_t step, total_steps; /* steps completed, of all */
    double loss, grad_norm, learning_rate, epoch;
    int64_t tokens, label_tokens; /* of the step, all ranks */
    double step_s, flops;         /* model FLOPs of the step, docs/internals/plan.md */
    /* Of the step: bytes of all ranks; of the rank that stalled on a lane the longest, how
     * long. */
    bl_lane_totals lanes[BL_N_LANES];
    /* Products that were to be in FP8 and were made in bf16, of rank 0; -1: none was to be. */
    int64_t n_fallbacks;
    /* of the same devices in a plain GEMM, measured at the start; 0: unknown */
    double peak_flops;
    bl_preference_metrics preference;
} bl_step_metrics;

/* The evaluations of a run so far, as transformers' Trainer and EarlyStoppingCallback compare them;
 * that before the first step does not count. */
typedef struct bl_best {
    int64_t step;    /* of the lowest validation loss; -1: none was made */
    double loss;     /* of that step */
    int64_t n_stale; /* evaluations since the last one that was better by more than
                        early_stopping_threshold */
} bl_best;

typedef struct bl_eval_metrics {
    int64_t step;
    double loss;
    int64_t label_tokens;
    double seconds;
    const bl_best *best; /* of the run, this evaluation included; NULL or step -1: not logged */
    bl_preference_metrics preference;
} bl_eval_metrics;

/* Opens `path` for appending; the first line cuts it to keep_bytes (0: a fresh log; a log that is
 * shorter is warned about and kept). logging_steps: how often a line is printed. All: BL_EIO names
 * the file. BL_ENOMEM. */
bl_status bl_metrics_open(const char *path, int64_t keep_bytes, int64_t logging_steps,
                          bl_metrics **out);
/* From now on, steps and evaluations are also written there; takes it over. */
void bl_metrics_report_to(bl_metrics *metrics, struct bl_events *events);
bl_status bl_metrics_step(bl_metrics *metrics, const bl_step_metrics *step);
bl_status bl_metrics_eval(bl_metrics *metrics, const bl_eval_metrics *evaluation);
/* The end of a run: its steps, tokens, duration and speed. */
void bl_metrics_print_end(const bl_metrics *metrics);
bl_status bl_metrics_sync(bl_metrics *metrics,
                          int64_t *bytes); /* durable; *bytes = length so far */
/* Of its complete lines, those of the run so far; any thread. */
int64_t bl_metrics_bytes(const bl_metrics *metrics);
void bl_metrics_close(bl_metrics *metrics); /* NULL is fine */

#endif
