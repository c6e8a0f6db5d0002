/* SPDX-License-Identifier: Apache-2.0 */
/* spool.h -- the directory of a queue. Each job is a file, whose directory is the job's state:
 *
 *   DIR/NAME.yaml            waits (also .yml); ignored if NAME begins with a dot
 *   DIR/running/NAME.yaml    was started; it resumes when the queue starts again
 *   DIR/done/, failed/, rejected/NAME.yaml   has ended; failed and rejected also have
 *                            NAME.yaml.error with one line
 *
 * With a file DIR/stop no waiting job is taken, and the queue ends when the started jobs have
 * ended.
 *
 * Files move by rename. Only rank 0's process moves them. A waiting file whose name is also in
 * running/ is passed over. A relative symbolic link is made absolute in its place before it moves.
 *
 * The reason is written before the job's file moves. After a crash between the two the job resumes,
 * and may end otherwise: open removes a NAME.yaml.error without its NAME.yaml. */
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

/* Creates the directories and locks DIR. BL_EUSAGE: another queue has locked it, it is not a
 * directory, or another user than this process's or root owns it or one of the four, or may write
 * it; BL_EIO. Close *out after a failure, too. */
bl_status bl_spool_open(const char *dir, bl_spool **out);
void bl_spool_close(bl_spool *spool); /* NULL is fine */

/* The next job: first those that were in running/ when the queue started, each once; then, unless
 * takes_none, those that wait, by name. The caller frees *name; NULL: none. *has_run: it is in
 * running/. BL_EIO. */
bl_status bl_spool_next(bl_spool *spool, bool takes_none, char **name, bool *has_run);
/* The path of a job's file; the caller frees *path. Also for processes that have not opened
 * `dir`. */
bl_status bl_spool_path(const char *dir, const char *name, bool has_run, char **path);
/* Whether the job's file is still there; true if that is not known. */
bool bl_spool_has(const bl_spool *spool, const char *name, bool has_run);
/* Moves a waiting job to running/. BL_EIO. */
bl_status bl_spool_begin(bl_spool *spool, const char *name);
/* Moves a job to done/, failed/ or rejected/, there by NAME.yaml.1 or so where a directory is in
 * the way, or the job is one. `line`: the reason; NULL for done. has_run: the job is in running/.
 * Warns if the file was removed or the reason cannot be written. BL_EIO. */
bl_status bl_spool_end_job(bl_spool *spool, const char *name, bool has_run, bl_spool_end end,
                           const char *line);
/* Whether DIR/stop exists. clear_stop removes it, when the queue has ended. */
bool bl_spool_stops(const bl_spool *spool);
void bl_spool_clear_stop(const bl_spool *spool);
/* The number of jobs that this process has moved to that directory. */
int64_t bl_spool_count(const bl_spool *spool, bl_spool_end end);

#endif
