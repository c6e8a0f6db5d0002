/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.h -- a directory of numbered states of a run, of which one survives any crash.
 *
 *   DIR/step-N.tmp/   incomplete; safe to delete
 *   DIR/step-N.old.tmp/   complete, being replaced by a new step-N
 *   DIR/step-N/       complete: its files, and manifest.json with the size and XXH3-64 of each
 *
 * The files are made durable first, the manifest after them, then the folder gets its final name
 * and its parent is made durable. "Latest" is the highest step whose manifest verifies: there is no
 * pointer file that could be wrong. The caller holds DIR's lock (base/files.h).
 *
 * Errors: BL_ECHECKPOINT for a checkpoint that cannot be used, BL_ELIMIT for a full disk (path and
 * bytes), BL_EIO for a system that cannot read or write; a failed fsync is final. */
#ifndef BALLAST_STORE_CHECKPOINT_H
#define BALLAST_STORE_CHECKPOINT_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/file_list.h"
#include "base/status.h"

/* ---- saving ---- */

typedef struct bl_checkpoint bl_checkpoint; /* one that is being written */

/* Starts DIR/step-N.tmp: removes an old one, creates DIR. BL_EIO where DIR's parent does not exist.
 * n_bytes: bytes that the caller will write; BL_ELIMIT at once when the disk has less. */
bl_status bl_checkpoint_begin(const char *dir, int64_t step, int64_t n_bytes, bl_checkpoint **out);

/* The directory for files that the caller writes itself; the checkpoint's. */
const char *bl_checkpoint_path(const bl_checkpoint *checkpoint);

/* Adds a file that the caller has finished writing in bl_checkpoint_path, and makes it durable;
 * several threads may call it at a time. `name` is a plain file name, used once. After a failure
 * the checkpoint can only be aborted: commit returns that failure. */
bl_status bl_checkpoint_add_file(bl_checkpoint *checkpoint, const char *name);

/* A file that another process has written into the same directory, on a file system they share:
 * that process makes it durable and describes it, this one enters the description. BL_EIO when the
 * file is not seen here at that size; its content is not read again. */
typedef struct bl_checkpoint_file {
    int64_t n_bytes;
    uint64_t xxh3_64;
} bl_checkpoint_file;

/* The directory that bl_checkpoint_begin makes; the caller frees it. */
bl_status bl_checkpoint_step_tmp_path(const char *dir, int64_t step, char **path);
/* A file that this process has written: BL_EIO when it is missing, not BL_EINPUT. */
bl_status bl_checkpoint_describe_file(const char *path, bl_checkpoint_file *out);
bl_status bl_checkpoint_add_described(bl_checkpoint *checkpoint, const char *name,
                                      const bl_checkpoint_file *file);

/* Writes the manifest with `state` (any JSON object, borrowed: world size, seed, log offset, ...)
 * and gives the directory its final name; an older step-N is replaced. Frees the checkpoint in any
 * case. */
bl_status bl_checkpoint_commit(bl_checkpoint *checkpoint, const json_t *state);
void bl_checkpoint_abort(bl_checkpoint *checkpoint); /* removes step-N.tmp; NULL is fine */
/* Frees it without touching the disk: another process has the directory by now. NULL is fine. */
void bl_checkpoint_leave(bl_checkpoint *checkpoint);

/* ---- finding ---- */

/* Reads the checkpoint in `path` back, every byte, against its manifest. *state (may be NULL) is
 * the caller's to json_decref. BL_ECHECKPOINT names the file and its problem. */
bl_status bl_checkpoint_verify(const char *path, int64_t *step, json_t **state);

/* The steps of DIR/step-*, newest first, unverified; the caller frees *steps. An absent DIR has
 * none. */
bl_status bl_checkpoint_list(const char *dir, int64_t **steps, size_t *n_steps);

/* The newest checkpoint that verifies; damaged ones are warned about and passed over. *path is the
 * caller's to free, NULL when there is none. step and state may be NULL. */
bl_status bl_checkpoint_latest(const char *dir, char **path, int64_t *step, json_t **state);

/* ---- tidying ----
 *
 * Only steps whose DIR/step-N `files` lists are the caller's: others are never removed. NULL: all
 * of DIR are. */

/* As bl_checkpoint_list, the caller's steps only. */
bl_status bl_checkpoint_list_owned(const char *dir, const bl_file_list *files, int64_t **steps,
                                   size_t *n_steps);

/* BL_EUSAGE: a step-N, or the name of one under construction, is there with N > `after`, and is not
 * the caller's. */
bl_status bl_checkpoint_check_others(const char *dir, const bl_file_list *files, int64_t after);

/* Removes DIR/step-N and its step-N.tmp, whole or not at all under its name. */
bl_status bl_checkpoint_remove(const char *dir, int64_t step);

/* After saved_step was saved: reads it back, and only then removes checkpoints of higher steps,
 * which the run has left behind by starting before them, and old ones so that `limit` remain, and
 * never fewer than two whole ones while there are such. saved_step itself always stays; other steps
 * may be damaged. When it is damaged nothing is removed and its error returned, BL_EIO when it is
 * gone. best_step (-1: none), if it is not above saved_step, is kept as one of `limit`. limit <= 0
 * keeps all. */
bl_status bl_checkpoint_prune(const char *dir, const bl_file_list *files, int64_t saved_step,
                              int64_t best_step, int64_t limit);

/* Removes the remains of crashed saves (step-N.tmp). A step-N.old.tmp becomes step-N again where
 * there is none. */
bl_status bl_checkpoint_clean(const char *dir, const bl_file_list *files);

#endif
