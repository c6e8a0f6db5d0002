/* SPDX-License-Identifier: Apache-2.0 */
/* json_memory_internal.h -- counts jansson's allocations, and frees them when a parse runs out of
 * memory.
 *
 * jansson 2.14's lexer does not look at whether its token could grow. It drops the byte and goes
 * on: a string that lost its closing quote is read past its end, a number that lost a digit stops
 * at an assertion. So the first allocation that fails in a parse ends the parse, by longjmp, and
 * everything the parse allocated is freed. */
#ifndef BALLAST_BASE_JSON_MEMORY_INTERNAL_H
#define BALLAST_BASE_JSON_MEMORY_INTERNAL_H

#include <jansson.h>
#include <stddef.h>

/* json_loadb. NULL with bl_json_ran_out() where memory ran out; bl_json_watch_memory has been
 * called. Private to base/json.c. */
json_t *bl_json_loadb(const char *text, size_t n_bytes, size_t flags, json_error_t *error);

/* malloc, whose failure bl_json_ran_out tells. Free with free(). */
void *bl_json_malloc(size_t n_bytes);

#endif
