/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the parts of the interpreter: memory, values, the tree of a template, and a
 * rendering's state. Functions that fail return bl_status and write through their last pointer. */
#ifndef BALLAST_JINJA_INTERNAL_H
#define BALLAST_JINJA_INTERNAL_H

#include "jinja/jinja.h"

/* ---- memory.c ---- */

/* Memory that is freed as a whole. */
typedef struct jinja_arena {
    struct jinja_chunk *chunk; /* the newest */
    size_t used, limit;        /* bytes of all chunks, and how many there may be */
    const char *title;         /* of errors */
} jinja_arena;

/* Zeroed memory: *(void **)out. BL_EINPUT: the limit; BL_ENOMEM. */
bl_status jinja_new(jinja_arena *arena, size_t n_bytes, void *out);
void jinja_arena_free(jinja_arena *arena);

/* Growing text in an arena. */
typedef struct jinja_buffer {
    char *text;
    size_t n, capacity;
} jinja_buffer;

bl_status jinja_append(jinja_arena *arena, jinja_buffer *buffer, const char *text, size_t n_bytes);
bl_status jinja_append_code(jinja_arena *arena, jinja_buffer *buffer, uint32_t code);

/* ---- values ---- */

typedef enum jinja_kind {
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_REAL,
    JINJA_STRING,
    JINJA_LIST,
    JINJA_TUPLE,
    JINJA_RANGE,    /* a list that Python makes from range() */
    JINJA_VIEW,     /* dict.keys(), values(), items() */
    JINJA_ITERATOR, /* result of a lazy filter: read once, always true, without a length */
    JINJA_DICT,
    JINJA_NAMESPACE,
    JINJA_LOOP,
    JINJA_MACRO,
    JINJA_METHOD, /* of a string or dictionary, before its call */
    JINJA_GLOBAL, /* a function of the environment */
    JINJA_N_KINDS
} jinja_kind;

typedef struct jinja_value {
    jinja_kind kind;
    bool is_markup;   /* a string that `safe` has marked: + escapes the other operand */
    bool is_doubtful; /* a real that may have been an integer of JSON (base/json.h) */
    size_t n_bytes;   /* of text */
    union {
        bool truth;
        int64_t integer;
        double real;
        const char *text; /* JINJA_STRING; the name of an UNDEFINED or a GLOBAL */
        struct jinja_list *list;
        struct jinja_dict *dict; /* DICT, NAMESPACE */
        struct jinja_loop *loop;
        struct jinja_macro *macro;
        struct jinja_method *method;
    };
} jinja_value;

/* The depth of lists and dictionaries is counted when they are built, and limited by
 * BL_JINJA_MAX_DATA_DEPTH: whatever walks over a value may recurse. Namespaces, loops and macros
 * are ends of such a walk. */
typedef struct jinja_list {
    jinja_value *item;
    size_t n, capacity;
    int depth;
    size_t at;             /* ITERATOR: items before it were read */
    const char *view_name; /* VIEW: "dict_keys", ... */
} jinja_list;

typedef struct jinja_entry {
    uint32_t hash;
    jinja_value key, value;
} jinja_entry;

typedef struct jinja_dict {
    jinja_entry *entry; /* in order of insertion */
    size_t n, capacity;
    int depth;
} jinja_dict;

typedef struct jinja_loop {
    jinja_list *items;
    size_t index;
    const jinja_value *changed; /* the last arguments of loop.changed */
    size_t n_changed;
} jinja_loop;

typedef struct jinja_method {
    jinja_value self;
    const char *name;
} jinja_method;

typedef struct jinja_macro {
    const struct jinja_node *node;
    struct jinja_scope *scope; /* where it was defined */
} jinja_macro;

/* ---- the tree ---- */

typedef enum jinja_node_kind {
    /* expressions */
    NODE_CONSTANT,
    NODE_NAME,
    NODE_ATTRIBUTE, /* a.name */
    NODE_SUBSCRIPT, /* a[b] */
    NODE_SLICE,     /* a[b:c:d], parts may be NULL */
    NODE_CALL,      /* a(list) */
    NODE_FILTER,    /* a|text(list); a NULL: a block's text */
    NODE_TEST,      /* a is text(list) */
    NODE_KEYWORD,   /* name=a in an argument list */
    NODE_SPREAD,    /* *a in an argument list */
    NODE_BINARY,    /* a op b */
    NODE_COMPARE,   /* a, then list of NODE_OPERAND */
    NODE_OPERAND,   /* op a */
    NODE_AND,
    NODE_OR,
    NODE_NOT,
    NODE_NEGATE,
    NODE_PLUS,
    NODE_CONCAT,    /* list, joined by ~ */
    NODE_CONDITION, /* a if b else c; c may be NULL */
    NODE_MAKE_LIST,
    NODE_MAKE_TUPLE,
    NODE_MAKE_DICT, /* list of NODE_PAIR */
    NODE_PAIR,
    /* statements */
    NODE_TEXT,         /* a constant */
    NODE_OUTPUT,       /* a */
    NODE_IF,           /* if a: list, else: b's list */
    NODE_BODY,         /* list */
    NODE_FOR,          /* for a in b if c: list, else: d's list */
    NODE_SET,          /* a = b */
    NODE_SET_BLOCK,    /* a = list, through filter b */
    NODE_WITH,         /* c's list of NODE_SET, then list */
    NODE_MACRO,        /* a's list of parameters: NODE_NAME with a default in a; then list */
    NODE_FILTER_BLOCK, /* list through filter b */
    NODE_CALL_BLOCK,   /* list is the caller of call b */
    NODE_BREAK,
    NODE_CONTINUE,
    NODE_GENERATION /* list */
} jinja_node_kind;

typedef enum jinja_operator {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN
} jinja_operator;

typedef struct jinja_node {
    jinja_node_kind kind;
    jinja_operator op;
    int line;
    int name;         /* index into bl_jinja.name */
    const char *text; /* the same as text */
    jinja_value value;
    struct jinja_node *a, *b, *c, *d;
    struct jinja_node *list, *next;
} jinja_node;

/* Names of which the interpreter itself binds values: the first in bl_jinja.name. */
enum { JINJA_NAME_LOOP, JINJA_NAME_CALLER };

struct bl_jinja {
    jinja_arena arena;
    char *title;       /* of errors */
    const char **name; /* every name once */
    int n_names, names_capacity;
    int *slot; /* of their hash table: index + 1, 0 = empty; twice names_capacity */
    int64_t n_nodes;
    jinja_node *body;
    bool has_generation;
};

/* ---- lexer.c ---- */

typedef enum jinja_token_kind {
    TOKEN_TEXT,
    TOKEN_BLOCK_BEGIN,
    TOKEN_BLOCK_END,
    TOKEN_PRINT_BEGIN,
    TOKEN_PRINT_END,
    TOKEN_NAME,
    TOKEN_STRING,
    TOKEN_INT,
    TOKEN_REAL,
    TOKEN_OPERATOR,
    TOKEN_END
} jinja_token_kind;

typedef struct jinja_token {
    jinja_token_kind kind;
    int line;
    const char *text; /* of n_bytes; NUL-terminated, except TOKEN_TEXT */
    size_t n_bytes;
    jinja_value number;
} jinja_token;

/* *out is in the template's arena and ends with TOKEN_END. */
bl_status jinja_lex(bl_jinja *template, const char *text, size_t n_bytes, jinja_token **out);

/* ---- parser.c, parser_expression.c ---- */

typedef struct jinja_parser {
    bl_jinja *template;
    const jinja_token *at;
    int depth;
} jinja_parser;

bl_status jinja_fail_at(const bl_jinja *template, int line, const char *format, ...)
    BL_PRINTF(3, 4);
bl_status jinja_fail_token(const jinja_parser *p, const char *expected);
bool jinja_at_operator(const jinja_parser *p, const char *text);
bool jinja_at_name(const jinja_parser *p, const char *text);
bool jinja_skip_operator(jinja_parser *p, const char *text);
bool jinja_skip_name(jinja_parser *p, const char *text);
bl_status jinja_expect_operator(jinja_parser *p, const char *text);
bl_status jinja_intern(bl_jinja *template, const char *text, int *out);
bl_status jinja_node_new(jinja_parser *p, jinja_node_kind kind, jinja_node **out);
bl_status jinja_enter(jinja_parser *p); /* one level deeper; the caller counts back */

bl_status jinja_parse_expression(jinja_parser *p, jinja_node **out);
/* One expression, or several with commas as a tuple; ends before the name `end`, if given. */
bl_status jinja_parse_tuple(jinja_parser *p, bool with_condition, const char *end,
                            jinja_node **out);
bl_status jinja_parse_target(jinja_parser *p, bool with_namespace, jinja_node **out);
bl_status jinja_parse_filters(jinja_parser *p, jinja_node *first, jinja_node **out);

/* ---- a rendering ---- */

typedef struct jinja_binding {
    int name;
    jinja_value value;
    struct jinja_binding *next;
} jinja_binding;

typedef struct jinja_scope {
    struct jinja_scope *parent;
    jinja_binding *first;
} jinja_scope;

typedef enum jinja_flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE } jinja_flow;

typedef struct jinja_run {
    const bl_jinja *template;
    jinja_arena arena;
    int64_t n_steps, next_look; /* the step at which the deadline is looked at */
    int n_calls, depth, line;
    jinja_scope *scope;
    jinja_value block; /* a block's text, for its filters */
    jinja_buffer root;
    jinja_buffer *out; /* &root, or what captures */
    jinja_flow flow;
    const struct tm *now;
    jinja_list spans; /* pairs of integers */
    bool raised;
} jinja_run;

/* The arguments of a call: `item` in order, keywords with their names. */
typedef struct jinja_arguments {
    jinja_value *item;
    size_t n;
    const char **keyword;
    jinja_value *value;
    size_t n_keywords;
} jinja_arguments;

/* BL_EINPUT "title:line: ...". */
bl_status jinja_fail(const jinja_run *run, const char *format, ...) BL_PRINTF(2, 3);
/* Counts one and the cost of n_bytes that are copied or compared. BL_EINPUT: the limit of steps, or
 * the deadline. */
bl_status jinja_step(jinja_run *run, size_t n_bytes);
bl_status jinja_scan(jinja_run *run, size_t n_bytes); /* the same, of bytes read one by one */
bl_status jinja_walk(jinja_run *run, size_t n_links); /* the same, of links followed */

/* value.c */
jinja_value jinja_undefined(const char *name);
jinja_value jinja_none(void);
jinja_value jinja_bool(bool truth);
jinja_value jinja_int(int64_t integer);
jinja_value jinja_real(double real);
jinja_value jinja_text(const char *text, size_t n_bytes);
jinja_value jinja_literal(const char *text);
bool jinja_is_sequence(const jinja_value *value); /* has a list */
bool jinja_is_literal(const jinja_value *value, const char *text);
bool jinja_is_number(const jinja_value *value); /* int, float or bool */
double jinja_as_real(const jinja_value *number);
int64_t jinja_as_int(const jinja_value *number);       /* of an int or bool */
const char *jinja_type_name(const jinja_value *value); /* Python's */
bool jinja_is_true(const jinja_value *value);
bl_status jinja_list_new(jinja_run *run, jinja_kind kind, size_t capacity, jinja_value *out);
bl_status jinja_list_add(jinja_run *run, jinja_list *list, jinja_value value);
bl_status jinja_dict_new(jinja_run *run, jinja_value *out);
bl_status jinja_dict_set(jinja_run *run, jinja_dict *dict, jinja_value key, jinja_value value);
bl_status jinja_dict_get(jinja_run *run, const jinja_dict *dict, const jinja_value *key,
                         const jinja_value **out); /* NULL: absent */
bl_status jinja_equals(jinja_run *run, const jinja_value *a, const jinja_value *b, bool *out);
/* BL_EINPUT where Python cannot order them. */
bl_status jinja_order(jinja_run *run, const jinja_value *a, const jinja_value *b, int *out);
bl_status jinja_contains(jinja_run *run, const jinja_value *in, const jinja_value *item, bool *out);
/* What `for` reads: a list of the items; an iterator is used up. */
bl_status jinja_iterate(jinja_run *run, const jinja_value *value, jinja_list **out);
bl_status jinja_from_json(jinja_run *run, const json_t *json, int depth, jinja_value *out);
bl_status jinja_length(jinja_run *run, const jinja_value *value, size_t *out);

/* write.c: texts of values. */
typedef struct jinja_json_style {
    bool ascii, sort_keys;
    const char *indent; /* NULL: one line */
    jinja_value item_separator, key_separator;
} jinja_json_style;

bl_status jinja_write(jinja_run *run, const jinja_value *value, jinja_buffer *out); /* str() */
bl_status jinja_write_json(jinja_run *run, const jinja_value *value, const jinja_json_style *style,
                           int depth, jinja_buffer *out);
bl_status jinja_to_text(jinja_run *run, const jinja_value *value, jinja_value *out);

/* text.c: strings as Python has them, by code points. */
bool jinja_is_blank(uint32_t code); /* str.isspace */
size_t jinja_count_codes(const char *text, size_t n_bytes);
size_t jinja_code_offset(const char *text, size_t n_bytes, size_t index); /* bytes before it */
void jinja_strip(jinja_value *text, bool left, bool right);               /* white space */
/* Of `chars`; NULL or none: white space. */
bl_status jinja_strip_chars(jinja_run *run, jinja_value *text, const jinja_value *chars, bool left,
                            bool right);
bl_status jinja_text_call(jinja_run *run, const jinja_value *self, const char *name,
                          const jinja_arguments *args, jinja_value *out);
bool jinja_text_has_method(const char *name);
bl_status jinja_replace(jinja_run *run, const jinja_value *text, const jinja_value *from,
                        const jinja_value *to, int64_t max, jinja_value *out);
bl_status jinja_escape(jinja_run *run, const jinja_value *text, jinja_value *out);
/* case.c: upper, lower, title, capitalize, and the is... methods. */
bl_status jinja_change_case(jinja_run *run, const jinja_value *text, const char *how,
                            jinja_value *out);
/* *known: it is one of these methods. */
bl_status jinja_text_is(jinja_run *run, const jinja_value *text, const char *method, bool *known,
                        bool *out);

/* access.c: attributes, items, slices, and calls of methods and functions. */
bl_status jinja_attribute(jinja_run *run, const jinja_value *object, const char *name,
                          jinja_value *out);
bl_status jinja_subscript(jinja_run *run, const jinja_value *object, const jinja_value *key,
                          jinja_value *out);
bl_status jinja_slice(jinja_run *run, const jinja_value *object, const jinja_value *bound,
                      jinja_value *out); /* bound[3]; JINJA_NONE: left out */

/* call.c */
bl_status jinja_call(jinja_run *run, const jinja_value *function, const jinja_arguments *args,
                     jinja_value *out);
bool jinja_is_global(const char *name);
/* Argument `index`, or keyword `name`; NULL: not given. */
const jinja_value *jinja_argument(const jinja_arguments *args, size_t index, const char *name);

/* operators.c */
bl_status jinja_binary(jinja_run *run, jinja_operator op, const jinja_value *a,
                       const jinja_value *b, jinja_value *out);
bl_status jinja_compare(jinja_run *run, jinja_operator op, const jinja_value *a,
                        const jinja_value *b, bool *out);

/* filters.c, filters_list.c, tests.c */
typedef bl_status jinja_filter(jinja_run *run, const jinja_value *value,
                               const jinja_arguments *args, jinja_value *out);
typedef struct jinja_filter_entry {
    const char *name;
    jinja_filter *apply;
} jinja_filter_entry;
extern const jinja_filter_entry jinja_list_filters[]; /* ends with NULL */
bl_status jinja_apply_filter(jinja_run *run, const char *name, const jinja_value *value,
                             const jinja_arguments *args, jinja_value *out);
bl_status jinja_apply_test(jinja_run *run, const char *name, const jinja_value *value,
                           const jinja_arguments *args, bool *out);

/* evaluate.c, execute.c */
bl_status jinja_evaluate(jinja_run *run, const jinja_node *node, jinja_value *out);
bl_status jinja_evaluate_arguments(jinja_run *run, const jinja_node *list, jinja_arguments *out);
bl_status jinja_call_macro(jinja_run *run, const jinja_macro *macro, const jinja_arguments *args,
                           jinja_value *out);

#endif
