/* SPDX-License-Identifier: Apache-2.0 */
/* scratch.h -- a file without a name for bytes that are rewritten all the time: the disk tier of
 * the optimizer's state. It ends with the process, however that ends: checkpoints have the
 * state. */
#ifndef BALLAST_OFFLOAD_SCRATCH_H
#define BALLAST_OFFLOAD_SCRATCH_H

#include "io/reader.h"

/* A file of n_bytes on the disk of `dir`, whose space is taken; it reads as zeros. Messages call it
 * "DIR (what)". BL_ELIMIT: dir, the bytes needed and those free. BL_EIO: no directory, or it cannot
 * be written. */
bl_status bl_scratch_open(const char *dir, const char *what, int64_t n_bytes, bl_io_files **out);

#endif
