/* SPDX-License-Identifier: Apache-2.0 */
/* host_name.c -- the name of this machine. */
#include "base/host_name.h"

#include <stdio.h>
#include <sys/utsname.h>

void bl_host_name(char *name, size_t n_bytes)
{
    struct utsname system;

    snprintf(name, n_bytes, "%s", uname(&system) == 0 ? system.nodename : "?");
}
