/* SPDX-License-Identifier: Apache-2.0 */
/* scratch.h -- a file without a name, for the disk tier of the optimizer's state, which every step
 * rewrites. The file ends with the process, also after SIGKILL; checkpoints hold the state. */
#ifndef BALLAST_OFFLOAD_SCRATCH_H
#define BALLAST_OFFLOAD_SCRATCH_H

#include "io/reader.h"

/* A file of n_bytes on the disk of `dir`, with its space allocated; it reads as zeros. Messages
 * call it "DIR (what)". BL_ELIMIT: too little space; names dir, the bytes needed and the bytes
 * free. BL_EIO: dir does not exist, or cannot be written. */
bl_status bl_scratch_open(const char *dir, const char *what, int64_t n_bytes, bl_io_files **out);

#endif
