/* SPDX-License-Identifier: Apache-2.0 */
/* spool.h -- the directory of a queue: jobs are files, and their state is where they are.
 *
 *   DIR/NAME.yaml            waits (also .yml; not with a dot before it); others are ignored
 *   DIR/running/NAME.yaml    has been started: it continues when the queue starts again
 *   DIR/done/, failed/, rejected/NAME.yaml   has ended; the last two with NAME.yaml.error, a line
 *   DIR/stop                 no job is taken any more; the queue ends after those that run
 *
 * A file moves by rename. Files are of the process of rank 0. */
#ifndef BALLAST_TRAIN_RUN_SPOOL_H
#define BALLAST_TRAIN_RUN_SPOOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bl_spool bl_spool;

typedef enum bl_spool_end {
    BL_SPOOL_DONE,
    BL_SPOOL_FAILED,
    BL_SPOOL_REJECTED,
    BL_N_SPOOL_ENDS
} bl_spool_end;

/* Makes the directories and locks DIR. BL_EUSAGE: another queue has it, or it is not a directory;
 * BL_EIO. Close it after a failure, too. */
bl_status bl_spool_open(const char *dir, bl_spool **out);
void bl_spool_close(bl_spool *spool); /* NULL is fine */

/* The next job, by name: of those in running/ that this queue has not returned, then of those that
 * wait, unless takes_none. *name, the caller's to free; NULL: none. *has_run: it is in running/.
 * BL_EIO. */
bl_status bl_spool_next(bl_spool *spool, bool takes_none, char **name, bool *has_run);
/* Where the file of a job is; the caller frees *path. Also in processes that have not opened
 * `dir`. */
bl_status bl_spool_path(const char *dir, const char *name, bool has_run, char **path);
/* To running/. BL_EIO. */
bl_status bl_spool_begin(bl_spool *spool, const char *name);
/* To the directory of that end; `line`: the reason, NULL for done. has_run: it is in running/.
 * BL_EIO. */
bl_status bl_spool_end_job(bl_spool *spool, const char *name, bool has_run, bl_spool_end end,
                           const char *line);
/* Whether DIR/stop is there; and removes it, once it was obeyed. */
bool bl_spool_stops(const bl_spool *spool);
void bl_spool_clear_stop(const bl_spool *spool);
/* Jobs that this queue has ended so. */
int64_t bl_spool_count(const bl_spool *spool, bl_spool_end end);

#endif
