/* SPDX-License-Identifier: Apache-2.0 */
/* build_id.h -- which build of Ballast this is. */
#ifndef BALLAST_BASE_BUILD_ID_H
#define BALLAST_BASE_BUILD_ID_H

/* 16 hexadecimal digits of a hash of the sources, the compiler with its version, and its options
 * (cmake/build_id.cmake). Two builds with one id compute the same bits on the same machine.
 * Static. */
const char *bl_build_id(void);

#endif
