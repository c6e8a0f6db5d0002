/* SPDX-License-Identifier: Apache-2.0 */
/* json.h -- reading JSON that comes from outside: strict, size-limited, and with errors that name
 * the place.
 *
 * Documents are jansson's json_t (borrowed and owned as jansson says: json_decref the root).
 * Rejected beyond RFC 8259: duplicate keys, reals outside double, lone surrogates, NUL in a
 * key, and nesting deeper than 2048 (jansson's bound). A top-level scalar is accepted. Different
 * threads may use different documents; jansson seeds its hash atomically on the first object, and
 * keys keep the order of the file.
 *
 * An integer outside int64 is read as a real, the nearest double (the largest where none is near),
 * so that unused keys cause no error; a getter of integers rejects it, like any real.
 * Integers of int64 are exact. */
#ifndef BALLAST_BASE_JSON_H
#define BALLAST_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Parses n_bytes of text. `file` and `first_line` (1 for a whole file, the line's number for a row
 * of JSONL) only name the place in errors: "file:line:column: reason". *out is owned by the caller.
 * BL_EINPUT, BL_ENOMEM. */
bl_status bl_json_parse(const char *file, int64_t first_line, const void *text, size_t n_bytes,
                        json_t **out);

/* Parses a whole regular file of at most max_bytes, with or without a byte order mark; as
 * bl_json_parse, and the errors of bl_file_read_all and bl_text_skip_mark. */
bl_status bl_json_load(const char *path, size_t max_bytes, json_t **out);

/* For building documents. Of jansson's functions some return NULL or -1 when memory runs out, and
 * some leave a value out. bl_json_ran_out says whether any of them could not allocate on this
 * thread since bl_json_watch_memory. */
void bl_json_watch_memory(void);
bool bl_json_ran_out(void);

/* Whether a getter accepts that the key is absent or null, and then leaves *out as it was. */
typedef enum bl_json_need { BL_JSON_REQUIRED, BL_JSON_OPTIONAL } bl_json_need;

/* Typed getters of object[key]. A value of another type or outside [min, max] is BL_EINPUT: "file:
 * key K: expected an integer in [a, b], got V". Returned pointers are borrowed from the
 * document. */
bl_status bl_json_get_int(const char *file, const json_t *object, const char *key,
                          bl_json_need need, int64_t min, int64_t max, int64_t *out);
bl_status bl_json_get_real(const char *file, const json_t *object, const char *key,
                           bl_json_need need, double min, double max,
                           double *out); /* an integer is accepted too */
bl_status bl_json_get_bool(const char *file, const json_t *object, const char *key,
                           bl_json_need need, bool *out);
/* Without NUL inside: *out is the whole text. */
bl_status bl_json_get_string(const char *file, const json_t *object, const char *key,
                             bl_json_need need, const char **out);
bl_status bl_json_get_array(const char *file, const json_t *object, const char *key,
                            bl_json_need need, const json_t **out);
bl_status bl_json_get_object(const char *file, const json_t *object, const char *key,
                             bl_json_need need, const json_t **out);

/* The text of a string without NUL inside; NULL for any other value. For values that no getter
 * reads: json_string_value ends at the NUL. */
const char *bl_json_text(const json_t *value);

/* A value as errors show it: one line without control characters, in JSON where that is short. NULL
 * is "nothing". Returns `shown`. */
enum { BL_JSON_SHOWN_BYTES = 64 };
const char *bl_json_show(const json_t *value, char shown[BL_JSON_SHOWN_BYTES]);

/* Replaces control characters by '?': text of a hostile file must not reach the terminal, nor break
 * the rule of one line per message. */
void bl_text_hide_controls(char *text);

/* Fails with "file: expected a JSON object, got V" when `value` is none. */
bl_status bl_json_check_object(const char *file, const json_t *value);

/* BL_EINPUT with "file: key K: expected `expected`, got V"; for checks a getter cannot say. */
bl_status bl_json_fail(const char *file, const char *key, const char *expected,
                       const json_t *value);

#endif
