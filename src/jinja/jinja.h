/* SPDX-License-Identifier: Apache-2.0 */
/* jinja.h -- an interpreter of the part of Jinja that chat templates use.
 *
 * The environment is that of transformers' apply_chat_template: jinja2's
 * ImmutableSandboxedEnvironment with trim_blocks, lstrip_blocks, break and continue,
 * {% generation %}, raise_exception, strftime_now, namespace, and a tojson that escapes no HTML.
 * Values, errors and texts are Python's. Sources: jinja2 3.1.6 (lexer.py, parser.py, filters.py,
 * runtime.py, sandbox.py), transformers 5.23 (utils/chat_template_utils.py).
 *
 * A template is untrusted: it reads its variables and writes text, nothing else, within the limits
 * below and the time of base/deadline.h. What the interpreter does not know is refused with the
 * template's name, the line and the construct. */
#ifndef BALLAST_JINJA_JINJA_H
#define BALLAST_JINJA_JINJA_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/status.h"

enum {
    BL_JINJA_MAX_TEMPLATE_BYTES = 1 << 20,
    BL_JINJA_MAX_NESTING = 100,          /* of statements and expressions in the text */
    BL_JINJA_MAX_CALLS = 100,            /* of nested macro calls */
    BL_JINJA_MAX_DEPTH = 1000,           /* of nested evaluations */
    BL_JINJA_MAX_DATA_DEPTH = 256,       /* of nested lists and dictionaries */
    BL_JINJA_MAX_STEPS = 20000000,       /* nodes evaluated, texts and elements touched */
    BL_JINJA_MAX_MEMORY_BYTES = 1 << 28, /* of values and output, in one rendering */
    BL_JINJA_MAX_OUTPUT_BYTES = 1 << 26
};

/* A character that callers may put into texts, and take out of the output again: repr() and JSON
 * write it as it is, though Python would escape it. U+E100, private use. */
#define BL_JINJA_MARK_CODE 0xE100
#define BL_JINJA_MARK      "\xee\x84\x80"

/* A parsed template. Never changes: any number of threads may render it at once. */
typedef struct bl_jinja bl_jinja;

/* `name` begins each error: "name:line: reason". BL_EINPUT: not UTF-8, too long, a syntax error, a
 * statement that is not supported; BL_ENOMEM. */
bl_status bl_jinja_parse(const char *name, const char *text, size_t n_bytes, bl_jinja **out);
void bl_jinja_destroy(bl_jinja *template); /* NULL is fine */

/* Whether it has {% generation %}, so that spans mark the learned text. */
bool bl_jinja_has_generation(const bl_jinja *template);

typedef struct bl_jinja_span {
    size_t begin, end; /* bytes of the output */
} bl_jinja_span;

/* Zero-initialize it before first use; bl_jinja_output_free empties it. */
typedef struct bl_jinja_output {
    char *text; /* UTF-8, with a NUL behind it */
    size_t n_bytes;
    bl_jinja_span *span; /* of {% generation %}, in order */
    size_t n_spans;
    bool raised; /* it failed by the template's own raise_exception */
} bl_jinja_output;

/* Renders with `variables`, an object, which must not change meanwhile. A number of 2^63 and more
 * cannot be written: base/json.h reads integers and floats of that size alike. strftime_now writes
 * `now`. BL_EINPUT: an error of the template ("name:line: reason"), a limit; BL_ENOMEM. *out holds
 * no text then. */
bl_status bl_jinja_render(const bl_jinja *template, const json_t *variables, const struct tm *now,
                          bl_jinja_output *out);
/* The messages, objects, as apply_chat_template hands them to a template: without keys of null, and
 * with reasoning under the names that templates read. *out is the caller's; BL_ENOMEM. */
bl_status bl_jinja_prepare_messages(const json_t *messages, json_t **out);
void bl_jinja_output_free(bl_jinja_output *output);

#endif
