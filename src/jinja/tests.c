/* SPDX-License-Identifier: Apache-2.0 */
/* tests.c -- jinja's tests: `value is name` and `value is name(argument)`. */
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

/* What a kind of value is. */
typedef enum trait {
    IS_CALLABLE = 1,
    IS_ITERABLE = 2,
    IS_SEQUENCE = 4, /* it has a length and items by number or key */
} trait;

static bool has_trait(const jinja_value *value, trait wanted)
{
    static const unsigned traits[JINJA_N_KINDS] = {[JINJA_UNDEFINED] =
                                                       IS_CALLABLE | IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_STRING] = IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_LIST] = IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_TUPLE] = IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_RANGE] = IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_VIEW] = IS_ITERABLE,
                                                   [JINJA_ITERATOR] = IS_ITERABLE,
                                                   [JINJA_DICT] = IS_ITERABLE | IS_SEQUENCE,
                                                   [JINJA_LOOP] = IS_CALLABLE | IS_ITERABLE,
                                                   [JINJA_MACRO] = IS_CALLABLE,
                                                   [JINJA_METHOD] = IS_CALLABLE,
                                                   [JINJA_GLOBAL] = IS_CALLABLE};
    return traits[value->kind] & wanted;
}

/* Tests without an argument, by the value alone; false: another test. */
static bool test_kind(const char *name, const jinja_value *value, bool *out)
{
    jinja_kind kind = value->kind;
    const struct {
        const char *name;
        bool holds;
    } tests[] = {{"defined", kind != JINJA_UNDEFINED},
                 {"undefined", kind == JINJA_UNDEFINED},
                 {"none", kind == JINJA_NONE},
                 {"boolean", kind == JINJA_BOOL},
                 {"true", kind == JINJA_BOOL && value->truth},
                 {"false", kind == JINJA_BOOL && !value->truth},
                 {"integer", kind == JINJA_INT},
                 {"float", kind == JINJA_REAL},
                 {"number", jinja_is_number(value)},
                 {"string", kind == JINJA_STRING},
                 {"mapping", kind == JINJA_DICT},
                 {"iterable", has_trait(value, IS_ITERABLE)},
                 {"sequence", has_trait(value, IS_SEQUENCE)},
                 {"callable", has_trait(value, IS_CALLABLE)},
                 {"escaped", value->is_markup}};

    for (size_t i = 0; i < BL_COUNT(tests); i++)
        if (!strcmp(tests[i].name, name)) {
            *out = tests[i].holds;
            return true;
        }
    return false;
}

static bool find_comparison(const char *name, jinja_operator *op)
{
    static const struct {
        const char *name;
        jinja_operator op;
    } names[] = {{"eq", OP_EQ},       {"equalto", OP_EQ}, {"ne", OP_NE}, {"lt", OP_LT},
                 {"lessthan", OP_LT}, {"le", OP_LE},      {"gt", OP_GT}, {"greaterthan", OP_GT},
                 {"ge", OP_GE},       {"in", OP_IN},      {"==", OP_EQ}, {"!=", OP_NE},
                 {"<", OP_LT},        {"<=", OP_LE},      {">", OP_GT},  {">=", OP_GE}};

    for (size_t i = 0; i < BL_COUNT(names); i++)
        if (!strcmp(names[i].name, name)) {
            *op = names[i].op;
            return true;
        }
    return false;
}

static bl_status test_rest(jinja_run *run, const char *name, const jinja_value *value,
                           const jinja_arguments *args, bool *out)
{
    const jinja_value two = jinja_int(2), *by = args->n ? &args->item[0] : &two;
    jinja_value rest, text;
    bool known;

    if (!strcmp(name, "odd") || !strcmp(name, "even") ||
        (!strcmp(name, "divisibleby") && args->n == 1)) {
        BL_TRY(jinja_binary(run, OP_MOD, value, by, &rest));
        *out = !jinja_is_true(&rest) != !strcmp(name, "odd");
        return BL_OK;
    }
    if (!strcmp(name, "lower") || !strcmp(name, "upper")) {
        BL_TRY(jinja_to_text(run, value, &text));
        return jinja_text_is(run, &text, name[0] == 'l' ? "islower" : "isupper", &known, out);
    }
    if (strcmp(name, "sameas")) return jinja_fail(run, "test %.40s is not supported", name);
    if (args->n != 1 || (by->kind != JINJA_NONE && by->kind != JINJA_BOOL))
        return jinja_fail(run, "test sameas is supported with true, false and none only");
    *out = value->kind == by->kind && (by->kind == JINJA_NONE || value->truth == by->truth);
    return BL_OK;
}

bl_status jinja_apply_test(jinja_run *run, const char *name, const jinja_value *value,
                           const jinja_arguments *args, bool *out)
{
    jinja_operator op;

    if (find_comparison(name, &op)) {
        if (args->n != 1) return jinja_fail(run, "test %s: expected one argument", name);
        return jinja_compare(run, op, value, &args->item[0], out);
    }
    if (!test_kind(name, value, out)) return test_rest(run, name, value, args, out);
    if (args->n) return jinja_fail(run, "test %s: expected no argument", name);
    return BL_OK;
}
