/* SPDX-License-Identifier: Apache-2.0 */
/* host_name.h -- the name of this machine, for messages and for telling machines apart. */
#ifndef BALLAST_BASE_HOST_NAME_H
#define BALLAST_BASE_HOST_NAME_H

#include <stddef.h>

/* Writes the host's name, cut to the buffer, and its NUL; "?" where the system has none. n_bytes >
 * 0. Bytes after the NUL stay as they are. */
void bl_host_name(char *name, size_t n_bytes);

#endif
