/* SPDX-License-Identifier: Apache-2.0 */
/* output.c -- the lock of output_dir, and what is under way in it. */
#include "train/training.h"

bl_status bl_output_open(const char *dir, bl_output *output)
{
    bl_status st = bl_dir_create(dir);
    if (st != BL_OK) return bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "output_dir");
    return bl_dir_lock_acquire(dir, &output->lock);
}

bl_status bl_output_check_lock(const bl_output *output)
{
    if (!output->lock) return BL_OK;
    bl_status st = bl_dir_lock_check(output->lock);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

bl_status bl_output_failure(const bl_output *output, bl_status st)
{
    bl_error error;

    if (st == BL_OK) return BL_OK;
    bl_error_save(&error, st);
    bl_status lost = bl_output_check_lock(output);
    return lost == BL_OK ? bl_error_restore(&error) : lost;
}

void bl_output_abort_saving(bl_output *output)
{
    if (bl_output_check_lock(output) == BL_OK)
        bl_checkpoint_abort(output->saving);
    else
        bl_checkpoint_leave(output->saving);
    output->saving = NULL;
}

void bl_output_close(bl_output *output)
{
    bl_metrics_close(output->metrics);
    bl_output_abort_saving(output);
    bl_dir_lock_release(output->lock);
}
