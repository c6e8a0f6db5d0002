/* SPDX-License-Identifier: Apache-2.0 */
/* svg.h -- what all pictures that Ballast writes have in common. */
#ifndef BALLAST_BASE_SVG_H
#define BALLAST_BASE_SVG_H

#include <stdio.h>

#include "base/status.h"

/* In the first lines of every picture, by which it is known: another file is not replaced. */
#define BL_SVG_MARK "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#333\">"

/* Text between two tags: & and < are escaped for XML. */
void bl_svg_text(FILE *out, const char *text);

/* The head of a white picture with a title of two parts, the second may be "". Ends with
 * "</svg>". */
void bl_svg_begin(FILE *out, double width, double height, const char *title, const char *rest);

/* Writes what draw(user, out) prints. BL_ENOMEM; errors of bl_file_check_kind and
 * bl_file_write_atomic. */
bl_status bl_svg_write(const char *path, void (*draw)(const void *user, FILE *out),
                       const void *user);

#endif
