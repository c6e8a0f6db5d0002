/* SPDX-License-Identifier: Apache-2.0 */
/* programs_internal.h -- other programs as data for convert.c: how a file is recognized, the
 * defaults of each trainer where they are not Ballast's, and differences that no key removes. */
#ifndef BALLAST_CONFIG_PROGRAMS_INTERNAL_H
#define BALLAST_CONFIG_PROGRAMS_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

/* A name that only files of this program have, or mostly; a pattern of fnmatch. */
typedef struct config_marker {
    const char *tool, *name;
} config_marker;

/* Patterns of fnmatch over "name=value", separated by blanks; NULL: every file of the program. The
 * first row that fits is the trainer. `name` begins with the program's: "trl-dpo". */
typedef struct config_trainer {
    const char *name, *title, *version, *markers;
} config_trainer;

/* `of`: a program, for all of its trainers, or one trainer. The first row of a key that holds is
 * taken. `value` "2*key": that number times the value of the key.
 * `when`: conditions, separated by commas, that all hold; NULL: always.
 *   key         given, not 0
 *   key=value   given so
 *   !key=value  not given so
 *   ~name       no value of that name in the file was rejected
 *   -pattern    no "name=value" of the file fits the pattern
 *   +pattern    one does
 * `replaces`: also a value that the file gives. `why`: the comment; NULL: "default of PROGRAM". */
typedef struct config_default {
    const char *of, *key, *value, *when;
    bool replaces;
    const char *why;
} config_default;

typedef struct config_note {
    const char *of, *when, *text;
} config_note;

extern const char *const config_programs[];
extern const size_t config_n_programs;
extern const config_marker config_markers[];
extern const size_t config_n_markers;
extern const config_trainer config_trainers[];
extern const size_t config_n_trainers;
extern const config_default config_defaults[];
extern const size_t config_n_defaults;
extern const config_note config_notes[];
extern const size_t config_n_notes;

#endif
