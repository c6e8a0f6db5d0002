/* SPDX-License-Identifier: Apache-2.0 */
/* one_program.c -- many programs in one file, which share its libraries: it runs the one that its
 * file is named after. Hard links give it the names, since ranks start as /proc/self/exe, which has
 * the name of a hard link but not that of a symbolic one. Without /proc, argv[0] decides. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM(name) int main_##name(int argc, char **argv);
#include "one_program.h" /* by cmake/one_program.cmake: PROGRAM(name) for each */
#undef PROGRAM

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} programs[] = {
#define PROGRAM(name) {#name, main_##name},
#include "one_program.h"
#undef PROGRAM
};

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int main(int argc, char **argv)
{
    char path[4096] = "";
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    const char *name = last_part(n > 0 ? path : argv[0]);

    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(programs[i].name, name) == 0) return programs[i].run(argc, argv);
    fprintf(stderr,
            "error: %s is not the name of a program in this file; rename it to one of:", name);
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        fprintf(stderr, " %s", programs[i].name);
    fprintf(stderr, "\n");
    return 2;
}
