/* SPDX-License-Identifier: Apache-2.0 */
/* present.h -- "present means used": every key of a JSON object that comes from outside is used,
 * known to have no effect, or named. The one rule for all kinds of files:
 *   a key that begins with '_'          ignored
 *   a key of the table                  by its entry
 *   another key, with a neutral value   ignored
 *   another key                         an error, or one of the names of one warning
 * Neutral are null, false, "", and lists and objects of such values only; 0 is a value. The objects
 * inside an object are checked by calls with their tables. */
#ifndef BALLAST_BASE_PRESENT_H
#define BALLAST_BASE_PRESENT_H

#include <jansson.h>
#include <stddef.h>

#include "base/status.h"

typedef enum bl_key_use {
    BL_KEY_USED,     /* the reader reads it, and checks its value */
    BL_KEY_REJECTED, /* except its neutral values */
    BL_KEY_NAMED     /* except its neutral values: in a separate warning where no names are kept */
} bl_key_use;

typedef struct bl_known_key {
    const char *name;
    bl_key_use use;
    /* Of a rejected or named key: its neutral values as the text of a JSON array,
     * "[0, \"silu\"]". null, lists of neutral values only and objects of blank ones are neutral,
     * too; empty ones where they are listed. NULL: as of unknown keys. */
    const char *neutral;
    const char *reason; /* ends the error's or the warning's line; NULL: none, of an error */
} bl_known_key;

typedef struct bl_key_table {
    const bl_known_key *keys;
    size_t n_keys;
    const char *const *used; /* more used keys, NULL-terminated; they hide `keys`; NULL: none */
    /* Keys that are used, or have no effect, whatever their values, with blanks between them; NULL:
     * none. */
    const char *accepted;
} bl_key_table;

/* The names for one warning, each once, with ", " between them; "..." ends a list that is full. */
typedef struct bl_key_names {
    size_t n; /* 0 at first; all that were added */
    char text[1024];
} bl_key_names;

void bl_key_names_add(bl_key_names *names, const char *name);

/* Checks the member `key` of an object. `place` begins the error's line: "FILE", "FILE:LINE",
 * "FILE: OBJECT". An unknown key with a value is added to *unknown; unknown NULL: it is an error
 * that names the key, its value and the nearest key of the table. BL_EINPUT; BL_ENOMEM. */
bl_status bl_key_check(const bl_key_table *table, const char *place, const char *key,
                       const json_t *value, bl_key_names *unknown);

/* Checks all members of `object`, in their order; the first error ends it. */
bl_status bl_keys_check(const bl_key_table *table, const char *place, const json_t *object,
                        bl_key_names *unknown);

#endif
