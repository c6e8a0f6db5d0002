/* SPDX-License-Identifier: Apache-2.0 */
/* Statements of the tree: scopes, loops, macros, and the text that they write. A pass of a loop, a
 * macro, a block that is captured and {% generation %} have scopes; an if has none. */
#include <stdlib.h>
#include <string.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "jinja/internal.h"

static bl_status execute_list(jinja_run *run, const jinja_node *list);

static bl_status bind(jinja_run *run, int name, jinja_value value)
{
    jinja_binding *binding;
    size_t n = 0;

    for (binding = run->scope->first; binding; binding = binding->next, n++)
        if (binding->name == name) {
            binding->value = value;
            return jinja_walk(run, n);
        }
    BL_TRY(jinja_walk(run, n));
    BL_TRY(jinja_new(&run->arena, sizeof *binding, &binding));
    *binding = (jinja_binding){.name = name, .value = value, .next = run->scope->first};
    run->scope->first = binding;
    return BL_OK;
}

static bl_status push_scope(jinja_run *run, jinja_scope *parent)
{
    jinja_scope *scope;

    BL_TRY(jinja_new(&run->arena, sizeof *scope, &scope));
    scope->parent = parent;
    run->scope = scope;
    return BL_OK;
}

/* Executes in a scope inside `parent`; the caller's scope comes back. With `text`, captures the
 * output. */
static bl_status execute_inside(jinja_run *run, jinja_scope *parent, const jinja_node *list,
                                jinja_value *text)
{
    jinja_scope *scope = run->scope;
    jinja_buffer *out = run->out, captured = {0};

    BL_TRY(push_scope(run, parent));
    if (text) run->out = &captured;
    bl_status st = execute_list(run, list);
    run->out = out;
    run->scope = scope;
    if (text) *text = jinja_text(captured.n ? captured.text : "", captured.n);
    return st;
}

/* ---- assignments ---- */

static bl_status assign_attribute(jinja_run *run, const jinja_node *target, jinja_value value)
{
    jinja_value object;

    BL_TRY(jinja_evaluate(run, target->a, &object));
    if (object.kind != JINJA_NAMESPACE)
        return jinja_fail(run, "%.60s is not a namespace", target->a->text);
    if (target->text[0] == '_')
        return jinja_fail(run, "%.60s: a namespace's attribute may not begin with _", target->text);
    return jinja_dict_set(run, object.dict, jinja_literal(target->text), value);
}

static bl_status assign(jinja_run *run, const jinja_node *target, jinja_value value)
{
    jinja_list *items;
    size_t i = 0;

    if (target->kind == NODE_NAME) return bind(run, target->name, value);
    if (target->kind == NODE_ATTRIBUTE) return assign_attribute(run, target, value);
    BL_TRY(jinja_iterate(run, &value, &items));
    for (const jinja_node *part = target->list; part; part = part->next, i++) {
        if (i >= items->n) return jinja_fail(run, "%zu values for more names", items->n);
        BL_TRY(assign(run, part, items->item[i]));
    }
    return i == items->n ? BL_OK : jinja_fail(run, "%zu values for %zu names", items->n, i);
}

static bl_status execute_set(jinja_run *run, const jinja_node *node)
{
    jinja_value value;

    BL_TRY(jinja_evaluate(run, node->b, &value));
    return assign(run, node->a, value);
}

/* What a block writes, through its filters. */
static bl_status capture(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    jinja_value before = run->block;

    BL_TRY(execute_inside(run, run->scope, node->list, out));
    if (!node->b) return BL_OK;
    run->block = *out;
    bl_status st = jinja_evaluate(run, node->b, out);
    run->block = before;
    return st;
}

static bl_status execute_set_block(jinja_run *run, const jinja_node *node)
{
    jinja_value value;

    BL_TRY(capture(run, node, &value));
    return assign(run, node->a, value);
}

static bl_status execute_filter_block(jinja_run *run, const jinja_node *node)
{
    jinja_value value;

    BL_TRY(capture(run, node, &value));
    return jinja_write(run, &value, run->out);
}

static bl_status execute_with(jinja_run *run, const jinja_node *node)
{
    jinja_scope *scope = run->scope, *inner;
    jinja_value value;

    BL_TRY(push_scope(run, scope));
    inner = run->scope;
    for (const jinja_node *set = node->c->list; set; set = set->next) {
        run->scope = scope; /* values do not see one another */
        BL_TRY(jinja_evaluate(run, set->b, &value));
        run->scope = inner;
        BL_TRY(assign(run, set->a, value));
    }
    bl_status st = execute_list(run, node->list);
    run->scope = scope;
    return st;
}

/* ---- control ---- */

static bl_status execute_if(jinja_run *run, const jinja_node *node)
{
    jinja_value condition;

    BL_TRY(jinja_evaluate(run, node->a, &condition));
    if (jinja_is_true(&condition)) return execute_list(run, node->list);
    return node->b ? execute_list(run, node->b->list) : BL_OK;
}

/* The items that the loop's condition takes. */
static bl_status choose_items(jinja_run *run, const jinja_node *node, jinja_list *all,
                              jinja_list **out)
{
    jinja_scope *scope = run->scope;
    jinja_value chosen, condition;

    *out = all;
    if (!node->c) return BL_OK;
    BL_TRY(jinja_list_new(run, JINJA_LIST, 0, &chosen));
    for (size_t i = 0; i < all->n; i++) {
        BL_TRY(push_scope(run, scope));
        BL_TRY(assign(run, node->a, all->item[i]));
        BL_TRY(jinja_evaluate(run, node->c, &condition));
        if (jinja_is_true(&condition)) BL_TRY(jinja_list_add(run, chosen.list, all->item[i]));
        run->scope = scope;
    }
    *out = chosen.list;
    return BL_OK;
}

static bl_status execute_for(jinja_run *run, const jinja_node *node)
{
    jinja_scope *scope = run->scope;
    jinja_value items, loop = {.kind = JINJA_LOOP};
    jinja_list *list;

    BL_TRY(jinja_evaluate(run, node->b, &items));
    BL_TRY(jinja_iterate(run, &items, &list));
    BL_TRY(choose_items(run, node, list, &list));
    BL_TRY(jinja_new(&run->arena, sizeof *loop.loop, &loop.loop));
    loop.loop->items = list;
    for (size_t i = 0; i < list->n && run->flow != FLOW_BREAK; i++) {
        run->flow = FLOW_NEXT;
        loop.loop->index = i;
        BL_TRY(jinja_step(run, 0));
        BL_TRY(push_scope(run, scope));
        BL_TRY(assign(run, node->a, list->item[i]));
        BL_TRY(bind(run, JINJA_NAME_LOOP, loop));
        BL_TRY(execute_list(run, node->list));
        run->scope = scope;
    }
    run->flow = FLOW_NEXT;
    return list->n || !node->d ? BL_OK : execute_list(run, node->d->list);
}

static bl_status execute_flow(jinja_run *run, const jinja_node *node)
{
    run->flow = node->kind == NODE_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
    return BL_OK;
}

/* ---- macros ---- */

static bl_status new_macro(jinja_run *run, const jinja_node *node, jinja_value *out)
{
    *out = (jinja_value){.kind = JINJA_MACRO};
    BL_TRY(jinja_new(&run->arena, sizeof *out->macro, &out->macro));
    *out->macro = (jinja_macro){.node = node, .scope = run->scope};
    return BL_OK;
}

static bl_status execute_macro(jinja_run *run, const jinja_node *node)
{
    jinja_value macro;

    BL_TRY(new_macro(run, node, &macro));
    return bind(run, node->name, macro);
}

static bl_status bind_parameters(jinja_run *run, const jinja_node *parameter,
                                 const jinja_arguments *args, size_t *n_keywords)
{
    for (size_t i = 0; parameter; parameter = parameter->next, i++) {
        const jinja_value *given = jinja_argument(args, i, parameter->text);
        jinja_value value = jinja_undefined(parameter->text);
        if (given)
            value = *given;
        else if (parameter->a)
            BL_TRY(jinja_evaluate(run, parameter->a, &value));
        *n_keywords += given && i >= args->n;
        BL_TRY(jinja_walk(run, args->n_keywords));
        BL_TRY(bind(run, parameter->name, value));
    }
    return BL_OK;
}

static size_t count_parameters(const jinja_node *parameter)
{
    size_t n = 0;
    for (; parameter; parameter = parameter->next) n++;
    return n;
}

static bl_status bind_arguments(jinja_run *run, const jinja_node *node, const jinja_arguments *args)
{
    const jinja_node *parameters = node->a ? node->a->list : NULL;
    const jinja_value *caller = jinja_argument(args, SIZE_MAX, "caller");
    size_t n_keywords = 0;
    const char *name = node->kind == NODE_MACRO ? run->template->name[node->name] : "caller";

    BL_TRY(bind_parameters(run, parameters, args, &n_keywords));
    if (caller && node->kind == NODE_MACRO) {
        BL_TRY(bind(run, JINJA_NAME_CALLER, *caller));
        n_keywords++;
    }
    if (args->n > count_parameters(parameters) || n_keywords < args->n_keywords)
        return jinja_fail(run, "macro %.60s does not take these arguments", name);
    return BL_OK;
}

bl_status jinja_call_macro(jinja_run *run, const jinja_macro *macro, const jinja_arguments *args,
                           jinja_value *out)
{
    jinja_scope *scope = run->scope;
    jinja_buffer *before = run->out, captured = {0};
    bl_status st;

    if (run->n_calls >= BL_JINJA_MAX_CALLS)
        return jinja_fail(run, "macros called more than %d deep", BL_JINJA_MAX_CALLS);
    BL_TRY(push_scope(run, macro->scope));
    run->n_calls++;
    run->out = &captured;
    BL_TRY_GOTO(st, done, bind_arguments(run, macro->node, args));
    st = execute_list(run, macro->node->list);
    *out = jinja_text(captured.n ? captured.text : "", captured.n);
done:
    run->flow = FLOW_NEXT;
    run->out = before;
    run->n_calls--;
    run->scope = scope;
    return st;
}

static bl_status execute_call_block(jinja_run *run, const jinja_node *node)
{
    const jinja_node *call = node->b;
    jinja_value callee, macro, text;
    jinja_arguments given, args;

    BL_TRY(jinja_evaluate(run, call->a, &callee));
    BL_TRY(jinja_evaluate_arguments(run, call->list, &given));
    args = given;
    BL_TRY(new_macro(run, node, &macro));
    BL_TRY(jinja_new(&run->arena, (given.n_keywords + 1) * sizeof *args.value, &args.value));
    BL_TRY(jinja_new(&run->arena, (given.n_keywords + 1) * sizeof *args.keyword, &args.keyword));
    for (size_t i = 0; i < given.n_keywords; i++) {
        args.value[i] = given.value[i];
        args.keyword[i] = given.keyword[i];
    }
    args.keyword[args.n_keywords] = "caller";
    args.value[args.n_keywords++] = macro;
    BL_TRY(jinja_call(run, &callee, &args, &text));
    return jinja_write(run, &text, run->out);
}

/* ---- output ---- */

static bl_status execute_text(jinja_run *run, const jinja_node *node)
{
    return jinja_write(run, &node->value, run->out);
}

static bl_status execute_output(jinja_run *run, const jinja_node *node)
{
    jinja_value value;

    BL_TRY(jinja_evaluate(run, node->a, &value));
    return jinja_write(run, &value, run->out);
}

static bl_status execute_generation(jinja_run *run, const jinja_node *node)
{
    size_t begin = run->root.n;
    jinja_value text;

    if (run->out != &run->root) /* transformers counts from a wrong place there */
        return jinja_fail(run, "{%% generation %%} in a macro or a captured block is not "
                               "supported");
    BL_TRY(execute_inside(run, run->scope, node->list, &text));
    BL_TRY(jinja_write(run, &text, run->out));
    BL_TRY(jinja_list_add(run, &run->spans, jinja_int((int64_t)begin)));
    return jinja_list_add(run, &run->spans, jinja_int((int64_t)run->root.n));
}

static bl_status execute_list(jinja_run *run, const jinja_node *list)
{
    static bl_status (*const executors[])(jinja_run *, const jinja_node *) = {
        [NODE_TEXT] = execute_text,
        [NODE_OUTPUT] = execute_output,
        [NODE_IF] = execute_if,
        [NODE_FOR] = execute_for,
        [NODE_SET] = execute_set,
        [NODE_SET_BLOCK] = execute_set_block,
        [NODE_WITH] = execute_with,
        [NODE_MACRO] = execute_macro,
        [NODE_FILTER_BLOCK] = execute_filter_block,
        [NODE_CALL_BLOCK] = execute_call_block,
        [NODE_BREAK] = execute_flow,
        [NODE_CONTINUE] = execute_flow,
        [NODE_GENERATION] = execute_generation};

    if (run->depth >= BL_JINJA_MAX_DEPTH)
        return jinja_fail(run, "statements and calls more than %d deep", BL_JINJA_MAX_DEPTH);
    run->depth++;
    for (; list && run->flow == FLOW_NEXT; list = list->next) {
        run->line = list->line;
        BL_TRY(jinja_step(run, 0));
        BL_TRY(executors[list->kind](run, list));
    }
    run->depth--;
    return BL_OK;
}

/* ---- a rendering ---- */

static bl_status bind_variables(jinja_run *run, const json_t *variables)
{
    for (int i = 0; i < run->template->n_names; i++) {
        const char *name = run->template->name[i];
        const json_t *json = json_object_get(variables, name);
        jinja_value value = {.kind = JINJA_GLOBAL, .text = name};
        if (!json && !jinja_is_global(name)) continue;
        if (json) BL_TRY(jinja_from_json(run, json, 0, &value));
        BL_TRY(bind(run, i, value));
    }
    return BL_OK;
}

static bl_status hand_over(const jinja_run *run, bl_jinja_output *out)
{
    size_t n_spans = run->spans.n / 2;

    if (!(out->text = malloc(run->root.n + 1)) ||
        !(out->span = malloc((n_spans + 1) * sizeof *out->span))) {
        bl_jinja_output_free(out);
        return BL_FAIL(BL_ENOMEM, "chat template: rendered text");
    }
    if (run->root.n) memcpy(out->text, run->root.text, run->root.n);
    out->text[run->root.n] = '\0';
    out->n_bytes = run->root.n;
    out->n_spans = n_spans;
    for (size_t i = 0; i < n_spans; i++)
        out->span[i] = (bl_jinja_span){(size_t)run->spans.item[2 * i].integer,
                                       (size_t)run->spans.item[2 * i + 1].integer};
    return BL_OK;
}

bl_status bl_jinja_render(const bl_jinja *template, const json_t *variables, const struct tm *now,
                          bl_jinja_output *out)
{
    jinja_run run = {.template = template,
                     .arena = {.limit = BL_JINJA_MAX_MEMORY_BYTES, .title = template->title},
                     .line = 1,
                     .now = now};
    bl_status st;

    bool begun = bl_deadline_begin(0);
    *out = (bl_jinja_output){0};
    run.out = &run.root;
    BL_TRY_GOTO(st, done, push_scope(&run, NULL));
    BL_TRY_GOTO(st, done, bind_variables(&run, variables));
    BL_TRY_GOTO(st, done, push_scope(&run, run.scope));
    BL_TRY_GOTO(st, done, execute_list(&run, template->body));
    st = hand_over(&run, out);
done:
    bl_deadline_end(begun);
    out->raised = run.raised;
    jinja_arena_free(&run.arena);
    return st;
}

void bl_jinja_output_free(bl_jinja_output *output)
{
    free(output->text);
    free(output->span);
    *output = (bl_jinja_output){0};
}
