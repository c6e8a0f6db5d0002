/* SPDX-License-Identifier: Apache-2.0 */
/* version.c -- the version that CMakeLists.txt names. */
#include "base/version.h"

const char *bl_version(void)
{
    return BALLAST_VERSION;
}
