/* SPDX-License-Identifier: Apache-2.0 */
/* hub.h -- model directories, and paths that are names on the Hugging Face Hub instead. */
#ifndef BALLAST_BASE_HUB_H
#define BALLAST_BASE_HUB_H

#include <stdbool.h>

#include "base/status.h"

/* BL_EINPUT, with the command that downloads it: nothing is at `path`, which has the form
 * "owner/name", nor at "owner". */
bl_status bl_hub_check_path(const char *path);

/* BL_EINPUT, with the command that downloads it: `path` is a data set's address on the Hub, or has
 * the form "owner/name" and nothing is there, nor at "owner"; or it is another URL. */
bl_status bl_hub_check_dataset(const char *path);

/* bl_hub_check_path for a directory; also BL_EINPUT: a file is there. */
bl_status bl_hub_check_dir(const char *path);

/* bl_hub_check_path for a model's directory or its JSON file `name`; also BL_EINPUT: another file
 * is there. *is_dir: which. */
bl_status bl_hub_check_json(const char *path, const char *name, bool *is_dir);

/* *out: the snapshot of "owner/name" in the Hub's cache on this machine, of the branch main; NULL
 * where `path` exists, has another form, or is not in the cache. The cache is HF_HUB_CACHE,
 * HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub. The caller frees *out.
 * BL_ENOMEM. */
bl_status bl_hub_find_cached(const char *path, char **out);

#endif
