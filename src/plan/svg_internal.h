/* SPDX-License-Identifier: Apache-2.0 */
/* svg_internal.h -- what pictures of this room have in common. */
#ifndef BALLAST_PLAN_SVG_INTERNAL_H
#define BALLAST_PLAN_SVG_INTERNAL_H

#include <stdio.h>

#include "base/status.h"

/* Text between two tags: & and < are escaped for XML. */
void plan_svg_text(FILE *out, const char *text);

/* The head of a white picture with a title of two parts, the second may be "". Ends with
 * "</svg>". */
void plan_svg_begin(FILE *out, double width, double height, const char *title, const char *rest);

/* Writes what draw(user, out) prints. BL_ENOMEM; errors of bl_file_write_atomic. */
bl_status plan_svg_write(const char *path, void (*draw)(const void *user, FILE *out),
                         const void *user);

#endif
