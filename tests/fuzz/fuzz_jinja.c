/* SPDX-License-Identifier: Apache-2.0 */
/* A chat template and the variables that it is rendered with: the template, JSON. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "fuzz.h"
#include "jinja/jinja.h"

static json_t *default_variables(void)
{
    static const char text[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"h\xc3\xa9\"},"
        "{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"a\": 1.5}]}],"
        "\"tools\": null, \"add_generation_prompt\": true, \"bos_token\": \"<s>\"}";
    static json_t *variables;

    if (!variables && bl_json_parse("variables", 1, text, strlen(text), &variables) != BL_OK)
        abort();
    return json_incref(variables);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static const struct tm now = {.tm_year = 124, .tm_mon = 6, .tm_mday = 26};
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    fuzz_part text = fuzz_next(&input), json = fuzz_next(&input);
    bl_jinja_output out = {0};
    bl_jinja *template = NULL;
    json_t *variables = NULL;

    fuzz_check(bl_jinja_parse("template", (const char *)text.bytes, text.n_bytes, &template));
    if (template && json.bytes)
        fuzz_check(bl_json_parse("variables", 1, json.bytes, json.n_bytes, &variables));
    else if (template)
        variables = default_variables();
    if (template && json_is_object(variables)) {
        bl_status st = bl_jinja_render(template, variables, &now, &out);
        fuzz_check(st);
        if ((st == BL_OK) != (out.text != NULL) || (out.text && out.text[out.n_bytes])) abort();
        for (size_t i = 0; i < out.n_spans; i++)
            if (out.span[i].begin > out.span[i].end || out.span[i].end > out.n_bytes) abort();
    }
    bl_jinja_output_free(&out);
    json_decref(variables);
    bl_jinja_destroy(template);
    return 0;
}
