/* SPDX-License-Identifier: Apache-2.0 */
/* svg.c -- the frame of an SVG, escaped text, and writing it without replacing another program's
 * file. */
#include "plan/svg_internal.h"

#include <stdlib.h>

#include "base/file_kind.h"
#include "base/files.h"

void plan_svg_text(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '&' || *text == '<')
            fputs(*text == '&' ? "&amp;" : "&lt;", out);
        else
            fputc(*text, out);
    }
}

/* By which a picture of ours is known: another file is not replaced. */
#define FONT "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#333\">"

void plan_svg_begin(FILE *out, double width, double height, const char *title, const char *rest)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" " FONT "\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"#fff\"/>\n"
            "<text x=\"%.0f\" y=\"28\" text-anchor=\"middle\" font-size=\"16\" "
            "font-weight=\"bold\">",
            width, height, width, height, width, height, width / 2);
    plan_svg_text(out, title);
    plan_svg_text(out, rest);
    fputs("</text>\n", out);
}

bl_status plan_svg_write(const char *path, void (*draw)(const void *user, FILE *out),
                         const void *user)
{
    char *text = NULL;
    size_t n_bytes;

    BL_TRY(bl_file_check_kind("svg", path, FONT));
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out) return BL_FAIL(BL_ENOMEM, "the picture %s", path);
    draw(user, out);
    bl_status st = fclose(out) == 0 ? bl_file_write_atomic(path, text, n_bytes)
                                    : BL_FAIL(BL_ENOMEM, "the picture %s", path);
    free(text);
    return st;
}
