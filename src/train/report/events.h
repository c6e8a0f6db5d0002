/* SPDX-License-Identifier: Apache-2.0 */
/* events.h -- an event file, as TensorBoard reads it: records of TFRecord, each a message Event of
 * tensorflow/core/util/event.proto. Tags are those of transformers' TensorBoardCallback.
 *
 *   record   length (8 bytes), checksum of the length (4), Event, checksum of the Event (4)
 *   checksum CRC-32C, rotated right by 15 bits, plus 0xa282ead8
 *
 * A directory of event files is one run of TensorBoard, which reads them in the order of their
 * names. A file begins with the step from which on its events replace those of files before it. */
#ifndef BALLAST_TRAIN_REPORT_EVENTS_H
#define BALLAST_TRAIN_REPORT_EVENTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* How names of event files begin: by it TensorBoard finds them. */
#define BL_EVENTS_NAME "events.out.tfevents."

enum { BL_EVENTS_MAX_SCALARS = 8, BL_EVENTS_MAX_TAG_BYTES = 40 };

typedef struct bl_events bl_events;

typedef struct bl_scalar {
    const char *tag; /* at most BL_EVENTS_MAX_TAG_BYTES */
    double value;    /* written as a float */
} bl_scalar;

/* A path in `dir` that is not there yet, by time, host and process; the caller frees it. */
bl_status bl_events_path(const char *dir, char **path);
/* Creates the file, which must not be there. first_step: events of that step and later ones, in
 * files before this one, are void. wall_s: seconds since 1970. BL_EIO, BL_ELIMIT name the file;
 * BL_ENOMEM. */
bl_status bl_events_open(const char *path, int64_t first_step, double wall_s, bl_events **out);
/* One event with n <= BL_EVENTS_MAX_SCALARS scalars; allocates nothing. */
bl_status bl_events_add(bl_events *events, int64_t step, double wall_s, const bl_scalar *scalars,
                        size_t n);
void bl_events_close(bl_events *events); /* NULL is fine */

double bl_wall_s(void); /* now: seconds since 1970 */

#endif
