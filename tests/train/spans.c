/* SPDX-License-Identifier: Apache-2.0 */
/* spans.c -- spans as text: lane, name, layer, item, bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "spans.h"

static void add_span(spans *s, const char *lane, const char *name, int64_t unit, int64_t item,
                     int64_t n_bytes)
{
    assert_in_range(s->n, 0, SPANS_MOST - 1);
    snprintf(s->text[s->n++], SPANS_BYTES, "%s: %s, layer %lld, item %lld, %lld bytes", lane, name,
             (long long)unit, (long long)item, (long long)n_bytes);
}

static int64_t number_or(const json_t *object, const char *key, int64_t otherwise)
{
    const json_t *value = json_object_get(object, key);
    return value ? json_integer_value(value) : otherwise;
}

void spans_read_trace(const char *path, spans *out)
{
    json_t *trace = json_load_file(path, 0, NULL), *event;
    size_t i;

    assert_non_null(trace);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        const json_t *args = json_object_get(event, "args");
        if (strcmp(json_string_value(json_object_get(event, "ph")), "X") != 0 ||
            json_integer_value(json_object_get(event, "pid")) != 0)
            continue;
        add_span(out, bl_lane_name((bl_lane)json_integer_value(json_object_get(event, "tid"))),
                 json_string_value(json_object_get(event, "name")), number_or(args, "layer", -1),
                 number_or(args, "item", -1), number_or(args, "bytes", 0));
    }
    json_decref(trace);
}

void spans_add_foreseen(void *user, const bl_span *span)
{
    char name[32];

    snprintf(name, sizeof name, "%s%s%s", span->name, span->is_stall ? " for " : "",
             span->is_stall ? bl_lane_name(span->lane) : "");
    assert_true(span->end_s >= span->begin_s);
    add_span(user, bl_lane_name(span->is_stall ? BL_LANE_COMPUTE : span->lane), name, span->unit,
             span->item, span->n_bytes);
}

void spans_assert_same(const spans *done, const spans *foreseen, int least)
{
    for (int i = 0; i < done->n && i < foreseen->n; i++)
        if (strcmp(done->text[i], foreseen->text[i]) != 0)
            fail_msg("span %d of %d: done is \"%s\", foreseen \"%s\"", i, done->n, done->text[i],
                     foreseen->text[i]);
    assert_int_equal(done->n, foreseen->n);
    assert_true(done->n > least);
}
