/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions of a template as a tree. From loose to tight: if-else, or, and, not, comparisons and
 * in, + and -, ~, * / // %, **, unary signs, filters and tests. */
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"

static bl_status new_two(jinja_parser *p, jinja_node_kind kind, jinja_node *a, jinja_node *b,
                         jinja_node **out)
{
    int line = a->line;

    BL_TRY(jinja_node_new(p, kind, out));
    (*out)->a = a;
    (*out)->b = b;
    (*out)->line = line;
    return BL_OK;
}

/* ---- arguments ---- */

/* Behind "(", up to and with ")". */
static bl_status parse_arguments(jinja_parser *p, jinja_node **list)
{
    for (bool first = true; !jinja_at_operator(p, ")"); first = false) {
        if (!first) BL_TRY(jinja_expect_operator(p, ","));
        if (jinja_at_operator(p, ")")) break;
        if (jinja_at_operator(p, "**"))
            return jinja_fail_at(p->template, p->at->line, "argument ** is not supported");
        if (jinja_skip_operator(p, "*")) {
            BL_TRY(jinja_node_new(p, NODE_SPREAD, list));
            BL_TRY(jinja_parse_expression(p, &(*list)->a));
            list = &(*list)->next;
            continue;
        }
        if (p->at->kind == TOKEN_NAME && p->at[1].kind == TOKEN_OPERATOR &&
            !strcmp(p->at[1].text, "=")) {
            BL_TRY(jinja_node_new(p, NODE_KEYWORD, list));
            (*list)->text = p->at->text;
            p->at += 2;
            BL_TRY(jinja_parse_expression(p, &(*list)->a));
        } else {
            BL_TRY(jinja_parse_expression(p, list));
        }
        list = &(*list)->next;
    }
    p->at++;
    return BL_OK;
}

static bl_status parse_call(jinja_parser *p, jinja_node *function, jinja_node **out)
{
    BL_TRY(new_two(p, NODE_CALL, function, NULL, out));
    p->at++;
    return parse_arguments(p, &(*out)->list);
}

/* ---- what binds tightest ---- */

/* Behind "[" or "{", up to and with `close`. */
static bl_status parse_items(jinja_parser *p, const char *close, jinja_node *node)
{
    for (jinja_node **item = &node->list; !jinja_at_operator(p, close); item = &(*item)->next) {
        if (node->list) BL_TRY(jinja_expect_operator(p, ","));
        if (jinja_at_operator(p, close)) break;
        if (node->kind == NODE_MAKE_LIST) {
            BL_TRY(jinja_parse_expression(p, item));
            continue;
        }
        BL_TRY(jinja_node_new(p, NODE_PAIR, item));
        BL_TRY(jinja_parse_expression(p, &(*item)->a));
        BL_TRY(jinja_expect_operator(p, ":"));
        BL_TRY(jinja_parse_expression(p, &(*item)->b));
    }
    p->at++;
    return BL_OK;
}

static bl_status parse_strings(jinja_parser *p, jinja_node *node)
{
    jinja_buffer whole = {0};

    for (; p->at->kind == TOKEN_STRING; p->at++)
        BL_TRY(jinja_append(&p->template->arena, &whole, p->at->text, p->at->n_bytes));
    node->value = jinja_text(whole.n ? whole.text : "", whole.n);
    return BL_OK;
}

static bl_status parse_name(jinja_parser *p, jinja_node *node)
{
    static const struct {
        const char *name;
        jinja_kind kind;
        bool truth;
    } constants[] = {{"true", JINJA_BOOL, true},   {"True", JINJA_BOOL, true},
                     {"false", JINJA_BOOL, false}, {"False", JINJA_BOOL, false},
                     {"none", JINJA_NONE, false},  {"None", JINJA_NONE, false}};

    for (size_t i = 0; i < BL_COUNT(constants); i++)
        if (jinja_skip_name(p, constants[i].name)) {
            node->value = (jinja_value){.kind = constants[i].kind, .truth = constants[i].truth};
            return BL_OK;
        }
    if (jinja_at_name(p, "varargs") || jinja_at_name(p, "kwargs"))
        return jinja_fail_at(p->template, p->at->line, "%s is not supported", p->at->text);
    node->kind = NODE_NAME;
    node->text = p->at->text;
    return jinja_intern(p->template, p->at++->text, &node->name);
}

static bl_status parse_primary(jinja_parser *p, jinja_node **out)
{
    BL_TRY(jinja_node_new(p, NODE_CONSTANT, out));
    switch (p->at->kind) {
    case TOKEN_NAME:
        return parse_name(p, *out);
    case TOKEN_STRING:
        return parse_strings(p, *out);
    case TOKEN_INT:
    case TOKEN_REAL:
        (*out)->value = p->at++->number;
        return BL_OK;
    default:
        break;
    }
    if (jinja_skip_operator(p, "(")) {
        if (jinja_skip_operator(p, ")")) {
            (*out)->kind = NODE_MAKE_TUPLE;
            return BL_OK;
        }
        BL_TRY(jinja_parse_tuple(p, true, NULL, out));
        return jinja_expect_operator(p, ")");
    }
    if (jinja_skip_operator(p, "[")) {
        (*out)->kind = NODE_MAKE_LIST;
        return parse_items(p, "]", *out);
    }
    if (jinja_skip_operator(p, "{")) {
        (*out)->kind = NODE_MAKE_DICT;
        return parse_items(p, "}", *out);
    }
    return jinja_fail_token(p, "an expression");
}

/* Behind "[", up to and with "]". */
static bl_status parse_bracket(jinja_parser *p, jinja_node *object, jinja_node **out)
{
    jinja_node *bound[3] = {NULL};
    bool is_slice = false;

    BL_TRY(new_two(p, NODE_SUBSCRIPT, object, NULL, out));
    for (int i = 0; i < 3; i++) {
        if (!jinja_at_operator(p, ":") && !jinja_at_operator(p, "]"))
            BL_TRY(jinja_parse_expression(p, &bound[i]));
        if (!jinja_skip_operator(p, ":")) break;
        is_slice = true;
    }
    if (is_slice)
        (*out)->kind = NODE_SLICE;
    else if (!bound[0])
        return jinja_fail_token(p, "a subscript");
    (*out)->b = bound[0];
    (*out)->c = bound[1];
    (*out)->d = bound[2];
    return jinja_expect_operator(p, "]");
}

static bl_status parse_dot(jinja_parser *p, jinja_node *object, jinja_node **out)
{
    if (p->at->kind == TOKEN_NAME) {
        BL_TRY(new_two(p, NODE_ATTRIBUTE, object, NULL, out));
        (*out)->text = p->at++->text;
        return BL_OK;
    }
    if (p->at->kind != TOKEN_INT) return jinja_fail_token(p, "a name");
    BL_TRY(new_two(p, NODE_SUBSCRIPT, object, NULL, out));
    BL_TRY(jinja_node_new(p, NODE_CONSTANT, &(*out)->b));
    (*out)->b->value = p->at++->number;
    return BL_OK;
}

static bl_status parse_postfix(jinja_parser *p, jinja_node *node, jinja_node **out)
{
    for (;; node = *out) {
        *out = node;
        if (jinja_skip_operator(p, "."))
            BL_TRY(parse_dot(p, node, out));
        else if (jinja_skip_operator(p, "["))
            BL_TRY(parse_bracket(p, node, out));
        else if (jinja_at_operator(p, "("))
            BL_TRY(parse_call(p, node, out));
        else
            return BL_OK;
    }
}

/* ---- filters and tests ---- */

static bl_status parse_dotted(jinja_parser *p, const char **out)
{
    if (p->at->kind != TOKEN_NAME) return jinja_fail_token(p, "a name");
    *out = p->at++->text;
    return BL_OK;
}

static bl_status parse_filter(jinja_parser *p, jinja_node *input, jinja_node **out)
{
    BL_TRY(jinja_node_new(p, NODE_FILTER, out));
    (*out)->a = input;
    BL_TRY(parse_dotted(p, &(*out)->text));
    return jinja_skip_operator(p, "(") ? parse_arguments(p, &(*out)->list) : BL_OK;
}

bl_status jinja_parse_filters(jinja_parser *p, jinja_node *first, jinja_node **out)
{
    for (*out = first; jinja_at_operator(p, "|") || (!*out && !first && jinja_at_name(p, "filter"));
         first = *out) {
        p->at++;
        BL_TRY(parse_filter(p, *out, out));
    }
    return BL_OK;
}

static bool at_test_argument(const jinja_parser *p)
{
    switch (p->at->kind) {
    case TOKEN_NAME:
        return !jinja_at_name(p, "else") && !jinja_at_name(p, "or") && !jinja_at_name(p, "and");
    case TOKEN_STRING:
    case TOKEN_INT:
    case TOKEN_REAL:
        return true;
    default:
        return jinja_at_operator(p, "[") || jinja_at_operator(p, "{");
    }
}

static bl_status parse_test(jinja_parser *p, jinja_node *input, jinja_node **out)
{
    bool negated = jinja_skip_name(p, "not");
    jinja_node *test;

    BL_TRY(jinja_node_new(p, NODE_TEST, &test));
    test->a = input;
    BL_TRY(parse_dotted(p, &test->text));
    if (jinja_skip_operator(p, "(")) {
        BL_TRY(parse_arguments(p, &test->list));
    } else if (jinja_at_name(p, "is")) {
        return jinja_fail_token(p, "one test");
    } else if (at_test_argument(p)) {
        jinja_node *argument;
        BL_TRY(parse_primary(p, &argument));
        BL_TRY(parse_postfix(p, argument, &test->list));
    }
    *out = test;
    return negated ? new_two(p, NODE_NOT, test, NULL, out) : BL_OK;
}

static bl_status parse_unary(jinja_parser *p, bool with_filter, jinja_node **out)
{
    jinja_node *node;

    BL_TRY(jinja_enter(p));
    if (jinja_at_operator(p, "-") || jinja_at_operator(p, "+")) {
        BL_TRY(jinja_node_new(p, p->at->text[0] == '-' ? NODE_NEGATE : NODE_PLUS, &node));
        p->at++;
        BL_TRY(parse_unary(p, false, &node->a));
    } else {
        BL_TRY(parse_primary(p, &node));
    }
    BL_TRY(parse_postfix(p, node, out));
    while (with_filter) {
        node = *out;
        if (jinja_at_operator(p, "|"))
            BL_TRY(jinja_parse_filters(p, node, out));
        else if (jinja_skip_name(p, "is"))
            BL_TRY(parse_test(p, node, out));
        else if (jinja_at_operator(p, "("))
            BL_TRY(parse_call(p, node, out));
        else
            break;
    }
    p->depth--;
    return BL_OK;
}

/* ---- operators ---- */

typedef bl_status parse_level(jinja_parser *p, jinja_node **out);

typedef struct sign {
    const char *text;
    jinja_operator op;
} sign;

/* Operators of one level, from left to right. */
static bl_status parse_left(jinja_parser *p, const sign *signs, size_t n, parse_level *inner,
                            jinja_node **out)
{
    BL_TRY(inner(p, out));
    for (;;) {
        jinja_node *left = *out, *right;
        size_t i = 0;
        while (i < n && !jinja_skip_operator(p, signs[i].text)) i++;
        if (i == n) return BL_OK;
        BL_TRY(inner(p, &right));
        BL_TRY(new_two(p, NODE_BINARY, left, right, out));
        (*out)->op = signs[i].op;
    }
}

static bl_status parse_operand(jinja_parser *p, jinja_node **out)
{
    return parse_unary(p, true, out);
}

static bl_status parse_power(jinja_parser *p, jinja_node **out)
{
    static const sign signs[] = {{"**", OP_POW}};
    return parse_left(p, signs, 1, parse_operand, out);
}

static bl_status parse_product(jinja_parser *p, jinja_node **out)
{
    static const sign signs[] = {{"*", OP_MUL}, {"//", OP_FLOORDIV}, {"/", OP_DIV}, {"%", OP_MOD}};
    return parse_left(p, signs, BL_COUNT(signs), parse_power, out);
}

static bl_status parse_concat(jinja_parser *p, jinja_node **out)
{
    jinja_node *first, *concat, **next;

    BL_TRY(parse_product(p, &first));
    *out = first;
    if (!jinja_at_operator(p, "~")) return BL_OK;
    BL_TRY(jinja_node_new(p, NODE_CONCAT, &concat));
    concat->list = first;
    for (next = &first->next; jinja_skip_operator(p, "~"); next = &(*next)->next)
        BL_TRY(parse_product(p, next));
    *out = concat;
    return BL_OK;
}

static bl_status parse_sum(jinja_parser *p, jinja_node **out)
{
    static const sign signs[] = {{"+", OP_ADD}, {"-", OP_SUB}};
    return parse_left(p, signs, BL_COUNT(signs), parse_concat, out);
}

static bool skip_comparison(jinja_parser *p, jinja_operator *op)
{
    static const sign signs[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<=", OP_LE},
                                 {">=", OP_GE}, {"<", OP_LT},  {">", OP_GT}};

    for (size_t i = 0; i < BL_COUNT(signs); i++) {
        *op = signs[i].op;
        if (jinja_skip_operator(p, signs[i].text)) return true;
    }
    *op = OP_IN;
    if (jinja_skip_name(p, "in")) return true;
    *op = OP_NOT_IN;
    if (!jinja_at_name(p, "not") || p->at[1].kind != TOKEN_NAME || strcmp(p->at[1].text, "in"))
        return false;
    p->at += 2;
    return true;
}

static bl_status parse_comparison(jinja_parser *p, jinja_node **out)
{
    jinja_node *first, **operand = NULL;
    jinja_operator op;

    BL_TRY(parse_sum(p, out));
    first = *out;
    while (skip_comparison(p, &op)) {
        if (!operand) {
            BL_TRY(new_two(p, NODE_COMPARE, first, NULL, out));
            operand = &(*out)->list;
        }
        BL_TRY(jinja_node_new(p, NODE_OPERAND, operand));
        (*operand)->op = op;
        BL_TRY(parse_sum(p, &(*operand)->a));
        operand = &(*operand)->next;
    }
    return BL_OK;
}

static bl_status parse_not(jinja_parser *p, jinja_node **out)
{
    if (!jinja_at_name(p, "not")) return parse_comparison(p, out);
    BL_TRY(jinja_node_new(p, NODE_NOT, out));
    p->at++;
    BL_TRY(jinja_enter(p));
    BL_TRY(parse_not(p, &(*out)->a));
    p->depth--;
    return BL_OK;
}

static bl_status parse_and(jinja_parser *p, jinja_node **out)
{
    BL_TRY(parse_not(p, out));
    while (jinja_skip_name(p, "and")) {
        jinja_node *left = *out, *right;
        BL_TRY(parse_not(p, &right));
        BL_TRY(new_two(p, NODE_AND, left, right, out));
    }
    return BL_OK;
}

static bl_status parse_or(jinja_parser *p, jinja_node **out)
{
    BL_TRY(parse_and(p, out));
    while (jinja_skip_name(p, "or")) {
        jinja_node *left = *out, *right;
        BL_TRY(parse_and(p, &right));
        BL_TRY(new_two(p, NODE_OR, left, right, out));
    }
    return BL_OK;
}

bl_status jinja_parse_expression(jinja_parser *p, jinja_node **out)
{
    BL_TRY(jinja_enter(p));
    BL_TRY(parse_or(p, out));
    while (jinja_skip_name(p, "if")) {
        jinja_node *value = *out, *condition;
        BL_TRY(parse_or(p, &condition));
        BL_TRY(new_two(p, NODE_CONDITION, value, condition, out));
        if (jinja_skip_name(p, "else")) BL_TRY(jinja_parse_expression(p, &(*out)->c));
    }
    p->depth--;
    return BL_OK;
}

/* ---- tuples and targets ---- */

static bool at_tuple_end(const jinja_parser *p, const char *end)
{
    return p->at->kind == TOKEN_PRINT_END || p->at->kind == TOKEN_BLOCK_END ||
           jinja_at_operator(p, ")") || (end && jinja_at_name(p, end));
}

/* Items of `parse`, which a comma makes a tuple. */
static bl_status parse_commas(jinja_parser *p, parse_level *parse, const char *end,
                              jinja_node **out)
{
    jinja_node *first, *tuple, **next;

    BL_TRY(parse(p, &first));
    *out = first;
    if (!jinja_at_operator(p, ",")) return BL_OK;
    BL_TRY(jinja_node_new(p, NODE_MAKE_TUPLE, &tuple));
    tuple->list = first;
    next = &first->next;
    while (jinja_skip_operator(p, ",") && !at_tuple_end(p, end)) {
        BL_TRY(parse(p, next));
        next = &(*next)->next;
    }
    *out = tuple;
    return BL_OK;
}

bl_status jinja_parse_tuple(jinja_parser *p, bool with_condition, const char *end, jinja_node **out)
{
    return parse_commas(p, with_condition ? jinja_parse_expression : parse_or, end, out);
}

static bl_status parse_target_item(jinja_parser *p, jinja_node **out)
{
    if (p->at->kind != TOKEN_NAME && !jinja_at_operator(p, "("))
        return jinja_fail_token(p, "a name to assign to");
    BL_TRY(parse_primary(p, out));
    if ((*out)->kind != NODE_NAME && (*out)->kind != NODE_MAKE_TUPLE)
        return jinja_fail_token(p, "a name to assign to");
    return BL_OK;
}

bl_status jinja_parse_target(jinja_parser *p, bool with_namespace, jinja_node **out)
{
    jinja_node *name;

    if (!with_namespace || p->at->kind != TOKEN_NAME || p->at[1].kind != TOKEN_OPERATOR ||
        strcmp(p->at[1].text, "."))
        return parse_commas(p, parse_target_item, "in", out);
    BL_TRY(parse_primary(p, &name));
    p->at++;
    return parse_dot(p, name, out);
}
