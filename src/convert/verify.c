/* SPDX-License-Identifier: Apache-2.0 */
/* verify.c -- the report of a verification. */
#include "convert/verify.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"

enum { TEXT_BYTES = 512 };

void bl_verify_fault(bl_verify *v, const char *kind, const char *tensor, const char *expected,
                     const char *found, ...)
{
    char text[TEXT_BYTES];
    va_list arguments;

    va_start(arguments, found);
    vsnprintf(text, sizeof text, found, arguments);
    va_end(arguments);
    json_array_append_new(v->faults, json_pack("{s:s, s:s, s:s, s:s}", "kind", kind, "tensor",
                                               tensor, "found", text, "expected", expected));
}

void bl_verify_warning(bl_verify *v, const char *format, ...)
{
    char text[TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    json_array_append_new(v->warnings, json_string(text));
}

static void describe_adapter(bl_verify *v)
{
    const bl_verify_adapter *a = &v->adapter;
    size_t n_fit = 0;

    for (size_t i = 0; i < a->n_pairs; i++) n_fit += a->pairs[i].fits;
    json_object_set_new(v->report, "adapter_modules",
                        json_pack("{s:I, s:I, s:I, s:f, s:b, s:s?}", "n", (json_int_t)a->n_pairs,
                                  "n_fit", (json_int_t)n_fit, "r", (json_int_t)a->r, "lora_alpha",
                                  a->alpha, "use_rslora", (int)a->use_rslora, "layout", a->layout));
}

static bl_status start_report(bl_verify *v)
{
    const bl_verify_options *o = v->options;

    bl_json_watch_memory();
    v->faults = json_array();
    v->warnings = json_array();
    v->report =
        json_pack("{s:s, s:s, s:s, s:s?, s:o, s:o}", "verdict", "ok", "base", o->base, "adapter",
                  o->adapter, "merged", o->merged, "faults", v->faults, "warnings", v->warnings);
    if (v->report) return BL_OK;
    return bl_json_ran_out() ? BL_FAIL(BL_ENOMEM, "the report")
                             : BL_FAIL(BL_EUSAGE, "%s: a directory's name is not UTF-8", o->base);
}

bl_status bl_model_verify(const bl_verify_options *options, json_t **report, size_t *n_faults)
{
    bl_verify v = {.options = options};
    bl_status st;

    *report = NULL;
    BL_TRY_GOTO(st, done, start_report(&v));
    BL_TRY_GOTO(st, done, bl_verify_index_open(options->base, &v.base));
    BL_TRY_GOTO(st, done, bl_verify_adapter_open(&v));
    if (v.adapter.n_pairs + v.adapter.n_others == 0)
        bl_verify_fault(&v, "empty", options->adapter, "A and B of some module", "no tensor");
    BL_TRY_GOTO(st, done, bl_verify_targets(&v));
    BL_TRY_GOTO(st, done, bl_verify_frozen(&v));
    describe_adapter(&v);
    BL_TRY_GOTO(st, done, bl_verify_loads(&v));
    if (options->merged) BL_TRY_GOTO(st, done, bl_verify_merged(&v));
    *n_faults = json_array_size(v.faults);
    if (*n_faults > 0) json_object_set_new(v.report, "verdict", json_string("fault"));
    if (bl_json_ran_out()) {
        st = BL_FAIL(BL_ENOMEM, "the report");
        goto done;
    }
    *report = json_incref(v.report);
done:
    bl_verify_adapter_close(&v.adapter);
    bl_verify_index_close(&v.base);
    bl_verify_index_close(&v.merged);
    json_decref(v.report);
    return st;
}
