/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic and comparisons. Integers have 64 bits; Python's longer ones are an error. */
#include <math.h>
#include <string.h>

#include "jinja/internal.h"

static bl_status fail_operator(jinja_run *run, jinja_operator op, const jinja_value *a,
                               const jinja_value *b)
{
    static const char *const names[] = {
        "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "in", "not in"};

    for (int i = 0; i < 2; i++) {
        const jinja_value *value = i ? b : a;
        if (value->kind == JINJA_UNDEFINED)
            return jinja_fail(run, "operator %s: %.60s is undefined", names[op], value->text);
    }
    return jinja_fail(run, "operator %s on a %s and a %s", names[op], jinja_type_name(a),
                      jinja_type_name(b));
}

static bl_status divide_ints(jinja_run *run, jinja_operator op, int64_t x, int64_t y, int64_t *out)
{
    if (!y) return jinja_fail(run, "division by zero");
    if (y == -1) { /* INT64_MIN / -1 overflows */
        *out = 0;
        if (op == OP_FLOORDIV && __builtin_sub_overflow(0, x, out))
            return jinja_fail(run, "an integer of more than 64 bits");
        return BL_OK;
    }
    int64_t quotient = x / y, rest = x % y;
    bool down = rest && (rest < 0) != (y < 0); /* rounded down, as the rest has the sign of y */
    *out = op == OP_FLOORDIV ? quotient - down : rest + (down ? y : 0);
    return BL_OK;
}

static bl_status power(jinja_run *run, int64_t x, int64_t y, jinja_value *out)
{
    int64_t result = 1;

    if (y < 0) {
        if (!x) return jinja_fail(run, "division by zero");
        *out = jinja_real(pow((double)x, (double)y));
        return BL_OK;
    }
    if (y > 64 && x != 0 && x != 1 && x != -1)
        return jinja_fail(run, "an integer of more than 64 bits");
    if (y > 64) y = 64 + y % 2;
    while (y-- > 0)
        if (__builtin_mul_overflow(result, x, &result))
            return jinja_fail(run, "an integer of more than 64 bits");
    *out = jinja_int(result);
    return BL_OK;
}

static bl_status binary_ints(jinja_run *run, jinja_operator op, int64_t x, int64_t y,
                             jinja_value *out)
{
    bool overflows = false;

    *out = jinja_int(0);
    switch (op) {
    case OP_ADD:
        overflows = __builtin_add_overflow(x, y, &out->integer);
        break;
    case OP_SUB:
        overflows = __builtin_sub_overflow(x, y, &out->integer);
        break;
    case OP_MUL:
        overflows = __builtin_mul_overflow(x, y, &out->integer);
        break;
    case OP_DIV:
        if (!y) return jinja_fail(run, "division by zero");
        *out = jinja_real((double)x / (double)y);
        break;
    case OP_POW:
        return power(run, x, y, out);
    default:
        return divide_ints(run, op, x, y, &out->integer);
    }
    return overflows ? jinja_fail(run, "an integer of more than 64 bits") : BL_OK;
}

static bl_status binary_reals(jinja_run *run, jinja_operator op, double x, double y,
                              jinja_value *out)
{
    if (y == 0 && (op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD))
        return jinja_fail(run, "division by zero");
    double rest = op == OP_MOD ? fmod(x, y) : 0;
    if (rest != 0 && (rest < 0) != (y < 0)) rest += y;
    *out = jinja_real(op == OP_ADD        ? x + y
                      : op == OP_SUB      ? x - y
                      : op == OP_MUL      ? x * y
                      : op == OP_DIV      ? x / y
                      : op == OP_FLOORDIV ? floor(x / y)
                      : op == OP_MOD      ? rest
                                          : pow(x, y));
    return BL_OK;
}

static bl_status add_texts(jinja_run *run, const jinja_value *a, const jinja_value *b,
                           jinja_value *out)
{
    jinja_buffer sum = {0};
    jinja_value left = *a, right = *b;
    bool is_markup = a->is_markup || b->is_markup;

    if (is_markup && !a->is_markup) BL_TRY(jinja_escape(run, a, &left));
    if (is_markup && !b->is_markup) BL_TRY(jinja_escape(run, b, &right));
    if (left.n_bytes && right.n_bytes) { /* else one of them is the sum */
        BL_TRY(jinja_step(run, left.n_bytes + right.n_bytes));
        BL_TRY(jinja_append(&run->arena, &sum, left.text, left.n_bytes));
        BL_TRY(jinja_append(&run->arena, &sum, right.text, right.n_bytes));
        left = jinja_text(sum.text, sum.n);
    } else if (right.n_bytes) {
        left = right;
    }
    *out = left;
    out->is_markup = is_markup;
    return BL_OK;
}

static bl_status add_lists(jinja_run *run, const jinja_value *a, const jinja_value *b,
                           jinja_value *out)
{
    BL_TRY(jinja_list_new(run, a->kind, a->list->n + b->list->n, out));
    for (size_t i = 0; i < a->list->n; i++)
        BL_TRY(jinja_list_add(run, out->list, a->list->item[i]));
    for (size_t i = 0; i < b->list->n; i++)
        BL_TRY(jinja_list_add(run, out->list, b->list->item[i]));
    return BL_OK;
}

static bl_status repeat(jinja_run *run, const jinja_value *text, int64_t n, jinja_value *out)
{
    jinja_buffer whole = {0};

    for (; n > 0 && text->n_bytes; n--) {
        BL_TRY(jinja_step(run, text->n_bytes));
        BL_TRY(jinja_append(&run->arena, &whole, text->text, text->n_bytes));
    }
    *out = jinja_text(whole.n ? whole.text : "", whole.n);
    return BL_OK;
}

bl_status jinja_binary(jinja_run *run, jinja_operator op, const jinja_value *a,
                       const jinja_value *b, jinja_value *out)
{
    if (jinja_is_number(a) && jinja_is_number(b)) {
        if (a->kind == JINJA_REAL || b->kind == JINJA_REAL)
            return binary_reals(run, op, jinja_as_real(a), jinja_as_real(b), out);
        return binary_ints(run, op, jinja_as_int(a), jinja_as_int(b), out);
    }
    if (op == OP_ADD && a->kind == JINJA_STRING && b->kind == JINJA_STRING)
        return add_texts(run, a, b, out);
    if (op == OP_ADD && a->kind == b->kind && (a->kind == JINJA_LIST || a->kind == JINJA_TUPLE))
        return add_lists(run, a, b, out);
    bool a_counts = a->kind == JINJA_INT || a->kind == JINJA_BOOL;
    bool b_counts = b->kind == JINJA_INT || b->kind == JINJA_BOOL;
    if (op == OP_MUL && a->kind == JINJA_STRING && b_counts)
        return repeat(run, a, jinja_as_int(b), out);
    if (op == OP_MUL && b->kind == JINJA_STRING && a_counts)
        return repeat(run, b, jinja_as_int(a), out);
    if (op == OP_MOD && a->kind == JINJA_STRING)
        return jinja_fail(run, "operator %% on a string is not supported");
    return fail_operator(run, op, a, b);
}

bl_status jinja_compare(jinja_run *run, jinja_operator op, const jinja_value *a,
                        const jinja_value *b, bool *out)
{
    int order;

    switch (op) {
    case OP_EQ:
    case OP_NE:
        BL_TRY(jinja_equals(run, a, b, out));
        *out = *out == (op == OP_EQ);
        return BL_OK;
    case OP_IN:
    case OP_NOT_IN:
        BL_TRY(jinja_contains(run, b, a, out));
        *out = *out == (op == OP_IN);
        return BL_OK;
    default:
        break;
    }
    if (a->kind == JINJA_UNDEFINED || b->kind == JINJA_UNDEFINED)
        return fail_operator(run, op, a, b);
    BL_TRY(jinja_order(run, a, b, &order));
    *out = op == OP_LT   ? order < 0
           : op == OP_LE ? order <= 0
           : op == OP_GT ? order > 0
                         : order >= 0;
    return BL_OK;
}
