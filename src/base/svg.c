/* SPDX-License-Identifier: Apache-2.0 */
/* svg.c -- the frame of an SVG, escaped text, and writing it without replacing another program's
 * file. */
#include "base/svg.h"

#include <stdlib.h>

#include "base/file_kind.h"
#include "base/files.h"

void bl_svg_text(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '&' || *text == '<')
            fputs(*text == '&' ? "&amp;" : "&lt;", out);
        else
            fputc(*text, out);
    }
}

void bl_svg_begin(FILE *out, double width, double height, const char *title, const char *rest)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" " BL_SVG_MARK
            "\n<rect width=\"%.0f\" height=\"%.0f\" fill=\"#fff\"/>\n"
            "<text x=\"%.0f\" y=\"28\" text-anchor=\"middle\" font-size=\"16\" "
            "font-weight=\"bold\">",
            width, height, width, height, width, height, width / 2);
    bl_svg_text(out, title);
    bl_svg_text(out, rest);
    fputs("</text>\n", out);
}

bl_status bl_svg_write(const char *path, void (*draw)(const void *user, FILE *out),
                       const void *user)
{
    char *text = NULL;
    size_t n_bytes;

    BL_TRY(bl_file_check_kind("svg", path, BL_SVG_MARK));
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out) return BL_FAIL(BL_ENOMEM, "the picture %s", path);
    draw(user, out);
    bl_status st = fclose(out) == 0 ? bl_file_write_atomic(path, text, n_bytes)
                                    : BL_FAIL(BL_ENOMEM, "the picture %s", path);
    free(text);
    return st;
}
