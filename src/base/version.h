/* SPDX-License-Identifier: Apache-2.0 */
/* version.h -- which version of the library is loaded. docs/stability.md has its ABI's rule. */
#ifndef BALLAST_BASE_VERSION_H
#define BALLAST_BASE_VERSION_H

#include "base/api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "0.2.0". Static. Programs compiled with the headers of a version run with each library of the
 * same SONAME. */
BL_API const char *bl_version(void);

#ifdef __cplusplus
}
#endif

#endif
