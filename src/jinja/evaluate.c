/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c -- evaluates expressions of a parsed template, and counts its steps. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "jinja/internal.h"

bl_status jinja_fail(const jinja_run *run, const char *format, ...)
{
    char reason[BL_ERROR_TEXT_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    return jinja_fail_at(run->template, run->line, "%s", reason);
}

bl_status jinja_step(jinja_run *run, size_t n_bytes)
{
    enum { STEP_BYTES = 1024, LOOK_STEPS = 4096 };
    double limit_s;

    run->n_steps += 1 + (int64_t)(n_bytes / STEP_BYTES);
    if (run->n_steps > BL_JINJA_MAX_STEPS)
        return jinja_fail(run, "more than %d steps", BL_JINJA_MAX_STEPS);
    if (run->n_steps < run->next_look) return BL_OK;
    run->next_look = run->n_steps + LOOK_STEPS;
    if (!bl_deadline_is_over(&limit_s)) return BL_OK;
    return jinja_fail(run, "more than %.0f s for this conversation", limit_s);
}

bl_status jinja_scan(jinja_run *run, size_t n_bytes)
{
    enum { SLOWER = 64 };

    return jinja_step(run, SLOWER * n_bytes);
}

bl_status jinja_walk(jinja_run *run, size_t n_links)
{
    enum { LINK_BYTES = 64 }; /* copied in the time that a link takes */

    return jinja_step(run, LINK_BYTES * n_links);
}

static bl_status evaluate_name(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    size_t n = 0;

    for (const jinja_scope *scope = run->scope; scope; scope = scope->parent, n++)
        for (const jinja_binding *b = scope->first; b; b = b->next, n++)
            if (b->name == node->name) {
                *out = b->value;
                return jinja_walk(run, n);
            }
    *out = jinja_undefined(node->text);
    return jinja_walk(run, n);
}

static bl_status evaluate_attribute(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value object;

    BL_TRY(jinja_evaluate(run, node->a, &object));
    return jinja_attribute(run, &object, node->text, out);
}

static bl_status evaluate_subscript(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value object, key;

    BL_TRY(jinja_evaluate(run, node->a, &object));
    BL_TRY(jinja_evaluate(run, node->b, &key));
    return jinja_subscript(run, &object, &key, out);
}

static bl_status evaluate_slice(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value object, bound[3];
    const jinja_node *part[] = {node->b, node->c, node->d};

    BL_TRY(jinja_evaluate(run, node->a, &object));
    for (int i = 0; i < 3; i++) {
        bound[i] = jinja_none();
        if (part[i]) BL_TRY(jinja_evaluate(run, part[i], &bound[i]));
    }
    return jinja_slice(run, &object, bound, out);
}

static bl_status add_spread(jinja_run *run, const jinja_node *node, jinja_list *items)
{
    jinja_value value;
    jinja_list *list;

    BL_TRY(jinja_evaluate(run, node->a, &value));
    BL_TRY(jinja_iterate(run, &value, &list));
    for (size_t i = 0; i < list->n; i++) BL_TRY(jinja_list_add(run, items, list->item[i]));
    return BL_OK;
}

static bl_status add_argument(jinja_run *run, const jinja_node *node, jinja_list *items,
                              jinja_arguments *out)
{
    jinja_value value;

    if (node->kind == NODE_SPREAD) return add_spread(run, node, items);
    BL_TRY(jinja_evaluate(run, node->kind == NODE_KEYWORD ? node->a : node, &value));
    if (node->kind != NODE_KEYWORD) return jinja_list_add(run, items, value);
    out->keyword[out->n_keywords] = node->text;
    out->value[out->n_keywords++] = value;
    return BL_OK;
}

bl_status jinja_evaluate_arguments(jinja_run *run, const jinja_node *list, jinja_arguments *out)
{
    jinja_list items = {0};
    size_t n_keywords = 0;

    *out = (jinja_arguments){0};
    for (const jinja_node *node = list; node; node = node->next)
        n_keywords += node->kind == NODE_KEYWORD;
    if (n_keywords) {
        BL_TRY(jinja_new(&run->arena, n_keywords * sizeof *out->value, &out->value));
        BL_TRY(jinja_new(&run->arena, n_keywords * sizeof *out->keyword, &out->keyword));
    }
    for (const jinja_node *node = list; node; node = node->next)
        BL_TRY(add_argument(run, node, &items, out));
    out->item = items.item;
    out->n = items.n;
    return BL_OK;
}

static bl_status evaluate_call(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value callee;
    jinja_arguments args;

    BL_TRY(jinja_evaluate(run, node->a, &callee));
    BL_TRY(jinja_evaluate_arguments(run, node->list, &args));
    run->line = node->line;
    return jinja_call(run, &callee, &args, out);
}

static bl_status evaluate_filter(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value input = run->block;
    jinja_arguments args;

    if (node->a) BL_TRY(jinja_evaluate(run, node->a, &input));
    BL_TRY(jinja_evaluate_arguments(run, node->list, &args));
    run->line = node->line;
    return jinja_apply_filter(run, node->text, &input, &args, out);
}

static bl_status evaluate_test(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value input;
    jinja_arguments args;

    BL_TRY(jinja_evaluate(run, node->a, &input));
    BL_TRY(jinja_evaluate_arguments(run, node->list, &args));
    *out = jinja_bool(false);
    return jinja_apply_test(run, node->text, &input, &args, &out->truth);
}

static bl_status evaluate_binary(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value a, b;

    BL_TRY(jinja_evaluate(run, node->a, &a));
    BL_TRY(jinja_evaluate(run, node->b, &b));
    run->line = node->line;
    return jinja_binary(run, node->op, &a, &b, out);
}

static bl_status evaluate_compare(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value left, right;

    *out = jinja_bool(true);
    BL_TRY(jinja_evaluate(run, node->a, &left));
    for (const jinja_node *operand = node->list; operand && out->truth; operand = operand->next) {
        BL_TRY(jinja_evaluate(run, operand->a, &right));
        BL_TRY(jinja_compare(run, operand->op, &left, &right, &out->truth));
        left = right;
    }
    return BL_OK;
}

/* and, or: the operand that decides. */
static bl_status evaluate_logic(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    BL_TRY(jinja_evaluate(run, node->a, out));
    if (jinja_is_true(out) == (node->kind == NODE_OR)) return BL_OK;
    return jinja_evaluate(run, node->b, out);
}

static bl_status evaluate_unary(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value zero = jinja_int(0), value;

    BL_TRY(jinja_evaluate(run, node->a, &value));
    if (node->kind == NODE_NOT) {
        *out = jinja_bool(!jinja_is_true(&value));
        return BL_OK;
    }
    if (!jinja_is_number(&value))
        return jinja_fail(run, "a sign before a %s", jinja_type_name(&value));
    if (value.kind == JINJA_REAL) {
        *out = jinja_real(node->kind == NODE_NEGATE ? -value.real : value.real);
        return BL_OK;
    }
    return jinja_binary(run, node->kind == NODE_NEGATE ? OP_SUB : OP_ADD, &zero, &value, out);
}

static bl_status evaluate_concat(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_buffer whole = {0};
    jinja_value part;

    for (const jinja_node *item = node->list; item; item = item->next) {
        BL_TRY(jinja_evaluate(run, item, &part));
        BL_TRY(jinja_write(run, &part, &whole));
    }
    *out = jinja_text(whole.n ? whole.text : "", whole.n);
    return BL_OK;
}

static bl_status evaluate_condition(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value condition;

    BL_TRY(jinja_evaluate(run, node->b, &condition));
    if (jinja_is_true(&condition)) return jinja_evaluate(run, node->a, out);
    *out = jinja_undefined("the missing else of an if");
    return node->c ? jinja_evaluate(run, node->c, out) : BL_OK;
}

static bl_status evaluate_list(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value item;

    BL_TRY(jinja_list_new(run, node->kind == NODE_MAKE_LIST ? JINJA_LIST : JINJA_TUPLE, 0, out));
    for (const jinja_node *child = node->list; child; child = child->next) {
        BL_TRY(jinja_evaluate(run, child, &item));
        BL_TRY(jinja_list_add(run, out->list, item));
    }
    return BL_OK;
}

static bl_status evaluate_dict(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value key, value;

    BL_TRY(jinja_dict_new(run, out));
    for (const jinja_node *pair = node->list; pair; pair = pair->next) {
        BL_TRY(jinja_evaluate(run, pair->a, &key));
        BL_TRY(jinja_evaluate(run, pair->b, &value));
        BL_TRY(jinja_dict_set(run, out->dict, key, value));
    }
    return BL_OK;
}

static bl_status evaluate_constant(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    (void)run;
    *out = node->value;
    return BL_OK;
}

bl_status jinja_evaluate(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    static bl_status (*const evaluators[])(jinja_run *, const jinja_node *, jinja_value *) = {
        [NODE_CONSTANT] = evaluate_constant,   [NODE_NAME] = evaluate_name,
        [NODE_ATTRIBUTE] = evaluate_attribute, [NODE_SUBSCRIPT] = evaluate_subscript,
        [NODE_SLICE] = evaluate_slice,         [NODE_CALL] = evaluate_call,
        [NODE_FILTER] = evaluate_filter,       [NODE_TEST] = evaluate_test,
        [NODE_BINARY] = evaluate_binary,       [NODE_COMPARE] = evaluate_compare,
        [NODE_AND] = evaluate_logic,           [NODE_OR] = evaluate_logic,
        [NODE_NOT] = evaluate_unary,           [NODE_NEGATE] = evaluate_unary,
        [NODE_PLUS] = evaluate_unary,          [NODE_CONCAT] = evaluate_concat,
        [NODE_CONDITION] = evaluate_condition, [NODE_MAKE_LIST] = evaluate_list,
        [NODE_MAKE_TUPLE] = evaluate_list,     [NODE_MAKE_DICT] = evaluate_dict};

    run->line = node->line;
    BL_TRY(jinja_step(run, 0));
    if (run->depth >= BL_JINJA_MAX_DEPTH)
        return jinja_fail(run, "expressions and calls more than %d deep", BL_JINJA_MAX_DEPTH);
    run->depth++;
    bl_status st = evaluators[node->kind](run, node, out);
    run->depth--;
    return st;
}
