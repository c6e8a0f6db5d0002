/* SPDX-License-Identifier: Apache-2.0 */
/* file_progress.h -- how far a thread's work on files is, for a thread that watches it. */
#ifndef BALLAST_BASE_FILE_PROGRESS_H
#define BALLAST_BASE_FILE_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>

typedef struct bl_file_progress {
    atomic_bool has_begun;
    _Atomic double began_s;
    _Atomic double moved_s; /* end of the newest read, write or sync */
    atomic_bool syncs;      /* a sync is under way: of all that was written before */
} bl_file_progress;

/* From now on the calling thread notes its reads, writes, syncs and removals by files.h in
 * *progress, borrowed until the next call; NULL: it notes nothing, as at the start. */
void bl_file_note_progress(bl_file_progress *progress);
/* Whether the work hangs: nothing for limit_s; in a sync, for the time of the work before it and
 * limit_s. idle_s: since the newest. Any thread; false before the work begins. */
bool bl_file_hangs(const bl_file_progress *progress, double limit_s, double *idle_s);

/* files.c, after a read, write or removal, and around a sync. */
void bl_file_note_move(void);
void bl_file_note_sync(bool begins);

#endif
