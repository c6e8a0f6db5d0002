/* SPDX-License-Identifier: Apache-2.0 */
/* file_progress.c -- a thread notes the times of its file calls for a thread that watches it. */
#include "base/file_progress.h"

#include <stddef.h>

#include "base/clock.h"

static _Thread_local bl_file_progress *noted;

void bl_file_note_move(void)
{
    if (noted) atomic_store(&noted->moved_s, bl_now_s());
}

void bl_file_note_sync(bool begins)
{
    if (!noted) return;
    if (!begins) bl_file_note_move();
    atomic_store(&noted->syncs, begins);
}

void bl_file_note_progress(bl_file_progress *progress)
{
    noted = progress;
    if (!noted) return;
    bl_file_note_move();
    atomic_store(&noted->began_s, atomic_load(&noted->moved_s));
    atomic_store(&noted->has_begun, true);
}

bool bl_file_hangs(const bl_file_progress *progress, double limit_s, double *idle_s)
{
    bool has_begun = atomic_load(&progress->has_begun);
    double began_s = atomic_load(&progress->began_s), moved_s = atomic_load(&progress->moved_s);

    *idle_s = has_begun ? bl_now_s() - moved_s : 0;
    return has_begun && *idle_s > limit_s + (atomic_load(&progress->syncs) ? moved_s - began_s : 0);
}
