/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_internal.h -- what checkpoint.c and checkpoint_tidy.c share. */
#ifndef BALLAST_STORE_CHECKPOINT_INTERNAL_H
#define BALLAST_STORE_CHECKPOINT_INTERNAL_H

#include <stdbool.h>

#include "store/checkpoint.h"

/* After step-N: incomplete, or being removed; complete, being replaced. */
#define BL_CHECKPOINT_TMP   ".tmp"
#define BL_CHECKPOINT_ASIDE ".old.tmp"

/* DIR/step-N; the caller frees it. */
bl_status store_checkpoint_step_path(const char *dir, int64_t step, char **path);
/* N of exactly "step-N". */
bool store_checkpoint_parse_step(const char *name, int64_t *step);
/* bl_checkpoint_verify, the files' content only when asked for. */
bl_status store_checkpoint_check(const char *dir, bool read_content, int64_t *step, json_t **state);

#endif
