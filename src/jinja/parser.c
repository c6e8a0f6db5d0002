/* SPDX-License-Identifier: Apache-2.0 */
/* Statements of a template as a tree. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "jinja/internal.h"
#include "tokenizer/text.h"

/* ---- tokens ---- */

bl_status jinja_fail_at(const bl_jinja *template, int line, const char *format, ...)
{
    char reason[BL_ERROR_TEXT_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    return BL_FAIL(BL_EINPUT, "%s:%d: %s", template->title, line, reason);
}

bl_status jinja_fail_token(const jinja_parser *p, const char *expected)
{
    const char *got = p->at->kind == TOKEN_END    ? "the end"
                      : p->at->kind == TOKEN_TEXT ? "text"
                      : p->at->kind == TOKEN_BLOCK_END || p->at->kind == TOKEN_BLOCK_BEGIN ? "%}"
                      : p->at->kind == TOKEN_PRINT_END || p->at->kind == TOKEN_PRINT_BEGIN
                          ? "}}"
                          : p->at->text;
    return jinja_fail_at(p->template, p->at->line, "expected %s, got %.40s", expected, got);
}

bool jinja_at_operator(const jinja_parser *p, const char *text)
{
    return p->at->kind == TOKEN_OPERATOR && !strcmp(p->at->text, text);
}

bool jinja_at_name(const jinja_parser *p, const char *text)
{
    return p->at->kind == TOKEN_NAME && !strcmp(p->at->text, text);
}

bool jinja_skip_operator(jinja_parser *p, const char *text)
{
    bool found = jinja_at_operator(p, text);
    p->at += found;
    return found;
}

bool jinja_skip_name(jinja_parser *p, const char *text)
{
    bool found = jinja_at_name(p, text);
    p->at += found;
    return found;
}

bl_status jinja_expect_operator(jinja_parser *p, const char *text)
{
    char expected[8];

    if (jinja_skip_operator(p, text)) return BL_OK;
    snprintf(expected, sizeof expected, "'%s'", text);
    return jinja_fail_token(p, expected);
}

static bl_status expect_name(jinja_parser *p, const char *text)
{
    return jinja_skip_name(p, text) ? BL_OK : jinja_fail_token(p, text);
}

static bl_status expect_block_end(jinja_parser *p)
{
    if (p->at->kind != TOKEN_BLOCK_END) return jinja_fail_token(p, "%}");
    p->at++;
    return BL_OK;
}

/* The slot of `text`, or the empty one where it belongs. */
static int *find_slot(const bl_jinja *template, const char *text)
{
    size_t mask = 2 * (size_t) template->names_capacity - 1;
    size_t at = XXH3_64bits(text, strlen(text)) & mask;

    while (template->slot[at] && strcmp(template->name[template->slot[at] - 1], text))
        at = (at + 1) & mask;
    return &template->slot[at];
}

static bl_status grow_names(bl_jinja *template)
{
    int capacity = template->names_capacity ? 2 * template->names_capacity : 64;
    const char **grown;

    BL_TRY(jinja_new(&template->arena, (size_t)capacity * sizeof *grown, &grown));
    BL_TRY(jinja_new(&template->arena, 2 * (size_t)capacity * sizeof *template->slot,
                     &template->slot));
    if (template->n_names)
        memcpy(grown, template->name, (size_t) template->n_names * sizeof *grown);
    template->name = grown;
    template->names_capacity = capacity;
    for (int i = 0; i < template->n_names; i++) *find_slot(template, grown[i]) = i + 1;
    return BL_OK;
}

bl_status jinja_intern(bl_jinja *template, const char *text, int *out)
{
    char *copy;
    int *slot;

    if (template->n_names == template->names_capacity) BL_TRY(grow_names(template));
    slot = find_slot(template, text);
    if (!*slot) {
        BL_TRY(jinja_new(&template->arena, strlen(text) + 1, &copy));
        template->name[template->n_names++] = strcpy(copy, text);
        *slot = template->n_names;
    }
    *out = *slot - 1;
    return BL_OK;
}

bl_status jinja_node_new(jinja_parser *p, jinja_node_kind kind, jinja_node **out)
{
    enum { LOOK_NODES = 4096 };
    double limit_s;

    BL_TRY(jinja_new(&p->template->arena, sizeof **out, out));
    (*out)->kind = kind;
    (*out)->line = p->at->line;
    if (++p->template->n_nodes % LOOK_NODES || !bl_deadline_is_over(&limit_s)) return BL_OK;
    return jinja_fail_at(p->template, p->at->line, "more than %.0f s to parse", limit_s);
}

bl_status jinja_enter(jinja_parser *p)
{
    if (++p->depth > BL_JINJA_MAX_NESTING)
        return jinja_fail_at(p->template, p->at->line, "nested more than %d deep",
                             BL_JINJA_MAX_NESTING);
    return BL_OK;
}

/* ---- statements ---- */

static bl_status parse_list(jinja_parser *p, const char *const *ends, jinja_node **out);

/* A body up to one of the names, which is passed; *end gets it. */
static bl_status parse_body(jinja_parser *p, const char *const *ends, jinja_node **out,
                            const char **end)
{
    BL_TRY(expect_block_end(p));
    BL_TRY(parse_list(p, ends, out));
    if (end) *end = p->at->text;
    p->at++;
    return BL_OK;
}

static bl_status parse_if(jinja_parser *p, jinja_node *node)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    const char *end;

    node->kind = NODE_IF;
    BL_TRY(jinja_enter(p));
    BL_TRY(jinja_parse_tuple(p, false, NULL, &node->a));
    BL_TRY(parse_body(p, ends, &node->list, &end));
    if (!strcmp(end, "elif")) {
        BL_TRY(jinja_node_new(p, NODE_BODY, &node->b));
        BL_TRY(jinja_node_new(p, NODE_IF, &node->b->list));
        BL_TRY(parse_if(p, node->b->list));
    } else if (!strcmp(end, "else")) {
        BL_TRY(jinja_node_new(p, NODE_BODY, &node->b));
        BL_TRY(parse_body(p, last, &node->b->list, NULL));
    }
    p->depth--;
    return BL_OK;
}

static bl_status parse_for(jinja_parser *p, jinja_node *node)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    static const char *const last[] = {"endfor", NULL};
    const char *end;

    node->kind = NODE_FOR;
    BL_TRY(jinja_parse_target(p, false, &node->a));
    BL_TRY(expect_name(p, "in"));
    BL_TRY(jinja_parse_tuple(p, false, "recursive", &node->b));
    if (jinja_skip_name(p, "if")) BL_TRY(jinja_parse_expression(p, &node->c));
    if (jinja_at_name(p, "recursive"))
        return jinja_fail_at(p->template, p->at->line, "for ... recursive is not supported");
    BL_TRY(parse_body(p, ends, &node->list, &end));
    if (strcmp(end, "else")) return BL_OK;
    BL_TRY(jinja_node_new(p, NODE_BODY, &node->d));
    return parse_body(p, last, &node->d->list, NULL);
}

static bl_status parse_set(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endset", NULL};

    BL_TRY(jinja_parse_target(p, true, &node->a));
    if (jinja_skip_operator(p, "=")) {
        node->kind = NODE_SET;
        return jinja_parse_tuple(p, true, NULL, &node->b);
    }
    node->kind = NODE_SET_BLOCK;
    BL_TRY(jinja_parse_filters(p, NULL, &node->b));
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_macro(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endmacro", NULL};
    jinja_node **parameter;

    node->kind = NODE_MACRO;
    if (p->at->kind != TOKEN_NAME) return jinja_fail_token(p, "the macro's name");
    BL_TRY(jinja_intern(p->template, p->at++->text, &node->name));
    BL_TRY(jinja_node_new(p, NODE_BODY, &node->a));
    parameter = &node->a->list;
    BL_TRY(jinja_expect_operator(p, "("));
    while (!jinja_at_operator(p, ")")) {
        if (node->a->list) BL_TRY(jinja_expect_operator(p, ","));
        if (jinja_at_operator(p, ")")) break;
        if (p->at->kind != TOKEN_NAME) return jinja_fail_token(p, "a parameter's name");
        BL_TRY(jinja_node_new(p, NODE_NAME, parameter));
        BL_TRY(jinja_intern(p->template, p->at->text, &(*parameter)->name));
        (*parameter)->text = p->at++->text;
        if (jinja_skip_operator(p, "=")) BL_TRY(jinja_parse_expression(p, &(*parameter)->a));
        parameter = &(*parameter)->next;
    }
    p->at++;
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_with(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endwith", NULL};
    jinja_node **set;

    node->kind = NODE_WITH;
    BL_TRY(jinja_node_new(p, NODE_BODY, &node->c));
    set = &node->c->list;
    while (p->at->kind != TOKEN_BLOCK_END) {
        if (node->c->list) BL_TRY(jinja_expect_operator(p, ","));
        BL_TRY(jinja_node_new(p, NODE_SET, set));
        BL_TRY(jinja_parse_target(p, false, &(*set)->a));
        BL_TRY(jinja_expect_operator(p, "="));
        BL_TRY(jinja_parse_expression(p, &(*set)->b));
        set = &(*set)->next;
    }
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_filter_block(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endfilter", NULL};

    node->kind = NODE_FILTER_BLOCK;
    p->at--; /* jinja_parse_filters expects "|" before each filter: the word filter is the first */
    BL_TRY(jinja_parse_filters(p, NULL, &node->b));
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_call_block(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endcall", NULL};

    node->kind = NODE_CALL_BLOCK;
    if (jinja_at_operator(p, "("))
        return jinja_fail_at(p->template, p->at->line, "call with parameters is not supported");
    BL_TRY(jinja_parse_expression(p, &node->b));
    if (node->b->kind != NODE_CALL) return jinja_fail_token(p, "a call");
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_generation(jinja_parser *p, jinja_node *node)
{
    static const char *const last[] = {"endgeneration", NULL};

    node->kind = NODE_GENERATION;
    p->template->has_generation = true;
    return parse_body(p, last, &node->list, NULL);
}

static bl_status parse_break(jinja_parser *p, jinja_node *node)
{
    node->kind = p->at[-1].text[0] == 'b' ? NODE_BREAK : NODE_CONTINUE;
    return BL_OK;
}

static bl_status parse_statement(jinja_parser *p, jinja_node **out)
{
    static const struct {
        const char *name;
        bl_status (*parse)(jinja_parser *p, jinja_node *node);
    } statements[] = {{"if", parse_if},           {"for", parse_for},
                      {"set", parse_set},         {"macro", parse_macro},
                      {"with", parse_with},       {"filter", parse_filter_block},
                      {"call", parse_call_block}, {"generation", parse_generation},
                      {"break", parse_break},     {"continue", parse_break}};

    if (p->at->kind != TOKEN_NAME) return jinja_fail_token(p, "a statement");
    BL_TRY(jinja_node_new(p, NODE_BODY, out));
    for (size_t i = 0; i < BL_COUNT(statements); i++) {
        if (strcmp(p->at->text, statements[i].name)) continue;
        p->at++;
        BL_TRY(statements[i].parse(p, *out));
        return expect_block_end(p);
    }
    return jinja_fail_at(p->template, p->at->line, "statement {%% %.40s %%} is not supported",
                         p->at->text);
}

static bool is_end(const jinja_parser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (jinja_at_name(p, *ends)) return true;
    return false;
}

static bl_status parse_output(jinja_parser *p, jinja_node **out)
{
    BL_TRY(jinja_node_new(p, NODE_OUTPUT, out));
    p->at++;
    BL_TRY(jinja_parse_tuple(p, true, NULL, &(*out)->a));
    if (p->at->kind != TOKEN_PRINT_END) return jinja_fail_token(p, "}}");
    p->at++;
    return BL_OK;
}

/* Statements and texts up to a block that begins with one of `ends`; NULL: the end. */
static bl_status parse_list(jinja_parser *p, const char *const *ends, jinja_node **out)
{
    BL_TRY(jinja_enter(p));
    for (; p->at->kind != TOKEN_END; out = &(*out)->next) {
        if (p->at->kind == TOKEN_TEXT) {
            BL_TRY(jinja_node_new(p, NODE_TEXT, out));
            (*out)->value = jinja_text(p->at->text, p->at->n_bytes);
            p->at++;
        } else if (p->at->kind == TOKEN_PRINT_BEGIN) {
            BL_TRY(parse_output(p, out));
        } else {
            p->at++;
            if (ends && is_end(p, ends)) {
                p->depth--;
                return BL_OK;
            }
            BL_TRY(parse_statement(p, out));
        }
    }
    p->depth--;
    if (!ends) return BL_OK;
    while (ends[1]) ends++;
    return jinja_fail_token(p, *ends);
}

bl_status bl_jinja_parse(const char *name, const char *text, size_t n_bytes, bl_jinja **out)
{
    static const char *const own_names[] = {
        [JINJA_NAME_LOOP] = "loop", [JINJA_NAME_CALLER] = "caller"};
    bl_jinja *template = calloc(1, sizeof *template);
    jinja_parser p = {.template = template};
    jinja_token *tokens;
    bool begun = bl_deadline_begin(n_bytes);
    bl_status st;

    *out = NULL;
    if (!template || !(template->title = strdup(name))) {
        st = BL_FAIL(BL_ENOMEM, "chat template");
        goto done;
    }
    template->arena.limit = BL_JINJA_MAX_MEMORY_BYTES;
    template->arena.title = template->title;
    if (n_bytes > BL_JINJA_MAX_TEMPLATE_BYTES || bl_utf8_valid_prefix(text, n_bytes) < n_bytes) {
        st = BL_FAIL(BL_EINPUT, "%s: %s", name,
                     n_bytes > BL_JINJA_MAX_TEMPLATE_BYTES ? "a template of more than 1 MiB"
                                                           : "not UTF-8");
        goto done;
    }
    for (int i = 0, index; i < (int)BL_COUNT(own_names); i++)
        BL_TRY_GOTO(st, done, jinja_intern(template, own_names[i], &index));
    BL_TRY_GOTO(st, done, jinja_lex(template, text, n_bytes, &tokens));
    p.at = tokens;
    BL_TRY_GOTO(st, done, parse_list(&p, NULL, &template->body));
    *out = template;
    template = NULL;
done:
    bl_deadline_end(begun);
    bl_jinja_destroy(template);
    return st;
}

void bl_jinja_destroy(bl_jinja *template)
{
    if (!template) return;
    jinja_arena_free(&template->arena);
    free(template->title);
    free(template);
}

bool bl_jinja_has_generation(const bl_jinja *template)
{
    return template->has_generation;
}
