/* SPDX-License-Identifier: Apache-2.0 */
/* Options from a YAML file and from a command line. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>

#include "base/file_kind.h"
#include "base/files.h"
#include "options/options.h"
#include "options/internal.h"

enum {
    FILE_MAX_BYTES = 1 << 20,
    WHERE_BYTES = 512,
    MAX_REJECTED = 64,           /* of a file for Ballast: it is another kind of file */
    MAX_REJECTED_FOREIGN = 4096, /* of another program's, which may have all of its keys */
};

typedef struct reader {
    const bl_options *options;
    const char *path;
    yaml_parser_t parser;
    yaml_event_t event; /* the latest; owned */
    int depth;          /* of the mappings and sequences that are open */
    bool took_value;    /* the current pair's value has begun */
    int64_t *lines;     /* of note_given, in this file */
} reader;

void bl_options_report_clear(bl_options_report *report)
{
    bl_string_list_clear(&report->given);
    bl_string_list_clear(&report->rejected);
    bl_string_list_clear(&report->ignored);
    bl_string_list_clear(&report->same);
}

/* ---- keys, each given once ---- */

/* A key is given once, under one name. lines[n_options + n_aliases] has the place of each, 0 = not
 * yet; the caller frees it. NULL: no memory. */
static int64_t *create_lines(const bl_options *options)
{
    return calloc(options->n_options + options->n_aliases, sizeof(int64_t));
}

/* Notes `line` for a name and the row it means; a null's is 0, since another name may still give
 * the row a value. Where either was given before; 0: nowhere, or it may be again. */
static int64_t note_given(const bl_options *options, int64_t *lines,
                          const bl_option_meaning *meaning, int64_t line)
{
    const bl_option_alias *alias = meaning->alias;
    int64_t before = 0;

    if (alias && (alias->joins || strpbrk(alias->name, alias->key ? "*" : ".*"))) return 0;
    if (alias) {
        int64_t *at = &lines[options->n_options + (size_t)(alias - options->aliases)];
        before = *at;
        *at = line;
    }
    if (meaning->index == BL_OPTION_NOTHING) return before;
    if (!before) before = lines[meaning->index];
    lines[meaning->index] = line;
    return before;
}

/* A name that needs another: in a file of Ballast's own, and on a line. BL_EUSAGE: that one is
 * missing. */
static bl_status check_needs(const bl_options *options, const int64_t *lines, const char *path)
{
    for (size_t i = 0; !options->tool && i < options->n_aliases; i++) {
        const bl_option_alias *alias = &options->aliases[i];
        int64_t line = lines[options->n_options + i];
        if (!alias->needs || line == 0) continue;
        const bl_option *needed = bl_options_find(options, alias->needs);
        if (lines[needed - options->table] || bl_options_origin(options, needed->key)) continue;
        if (path)
            return BL_FAIL(BL_EUSAGE, "%s:%lld: %s: give %s, too: %s", path, (long long)line,
                           alias->name, needed->key, alias->hint);
        return BL_FAIL(BL_EUSAGE, "--%s: give --%s, too: %s", alias->name, needed->key,
                       alias->hint);
    }
    return BL_OK;
}

/* ---- a YAML file ---- */

static bl_status next_event(reader *r)
{
    yaml_event_delete(&r->event);
    memset(&r->event, 0, sizeof r->event);
    if (yaml_parser_parse(&r->parser, &r->event)) {
        yaml_event_type_t type = r->event.type;
        r->depth += type == YAML_MAPPING_START_EVENT || type == YAML_SEQUENCE_START_EVENT;
        r->depth -= type == YAML_MAPPING_END_EVENT || type == YAML_SEQUENCE_END_EVENT;
        return BL_OK;
    }
    const yaml_parser_t *p = &r->parser;
    const char *problem = p->problem ? p->problem : "not YAML";
    if (p->error == YAML_MEMORY_ERROR) return BL_FAIL(BL_ENOMEM, "%s: reading YAML", r->path);
    if (p->error == YAML_READER_ERROR) {
        return BL_FAIL(BL_EUSAGE, "%s: byte %zu: %s", r->path, p->problem_offset, problem);
    }
    return BL_FAIL(BL_EUSAGE, "%s:%zu: %s", r->path, p->problem_mark.line + 1, problem);
}

static int64_t event_line(const reader *r)
{
    return (int64_t)r->event.start_mark.line + 1;
}

/* The text of the current scalar, which the caller frees. *is_null: unquoted and a null of
 * YAML's. */
static bl_status take_scalar(const reader *r, const char *where, char **text, bool *is_null)
{
    const char *value = (const char *)r->event.data.scalar.value;
    size_t n_bytes = r->event.data.scalar.length;

    if (r->event.data.scalar.tag) return BL_FAIL(BL_EUSAGE, "%stags are not supported", where);
    if (memchr(value, '\0', n_bytes)) return BL_FAIL(BL_EUSAGE, "%sa NUL in a text", where);
    *is_null = r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
               (n_bytes == 0 || strcmp(value, "~") == 0 || strcasecmp(value, "null") == 0);
    *text = strdup(value);
    return *text ? BL_OK : BL_FAIL(BL_ENOMEM, "%s%zu bytes", where, n_bytes);
}

static bl_status skip_to_depth(reader *r, int depth)
{
    while (r->depth > depth) BL_TRY(next_event(r));
    return BL_OK;
}

/* Adds the current event, which must be a scalar, to the value. items is owned by the caller. */
static bl_status take_item(const reader *r, const char *where, char ***items, size_t *n_items,
                           bool *is_null)
{
    if (r->event.type == YAML_ALIAS_EVENT)
        return BL_FAIL(BL_EUSAGE, "%sYAML aliases are not supported", where);
    char **grown = realloc(*items, (*n_items + 1) * sizeof *grown);
    if (!grown) return BL_FAIL(BL_ENOMEM, "%s%zu items", where, *n_items + 1);
    *items = grown;
    grown[*n_items] = NULL;
    BL_TRY(take_scalar(r, where, &grown[*n_items], is_null));
    (*n_items)++;
    return BL_OK;
}

static bl_status read_mapping(reader *r, const char *prefix);

/* A mapping or a sequence inside the value of `name`: keys below it are read, where some are
 * known. */
static bl_status take_nested(reader *r, const char *where, const char *name, bl_option_value *value)
{
    char key[BL_OPTION_KEY_BYTES], *prefix = NULL;
    int outside = r->depth - 1;

    bl_option_normalize(name, key);
    bool is_known =
        r->event.type == YAML_MAPPING_START_EVENT && bl_options_has_children(r->options, key);
    if (!is_known) {
        bool is_mapping = r->event.type == YAML_MAPPING_START_EVENT;
        BL_TRY(next_event(r));
        value->is_null = is_mapping && r->depth == outside && !value->is_sequence; /* {} */
        value->is_nested = !value->is_null;
        return skip_to_depth(r, outside);
    }
    if (asprintf(&prefix, "%s.", key) < 0) return BL_FAIL(BL_ENOMEM, "%skey", where);
    bl_status st = read_mapping(r, prefix);
    free(prefix);
    return st;
}

/* The value after a key: a scalar, a sequence, or nested keys. */
static bl_status take_value(reader *r, const char *where, const char *name, char ***items,
                            bl_option_value *value, bool *has_keys)
{
    bool is_null = false, is_scalar;
    int outside = r->depth;

    do {
        BL_TRY(next_event(r));
        r->took_value = true;
        if (r->event.type == YAML_SEQUENCE_END_EVENT) break;
        if (r->event.type == YAML_SEQUENCE_START_EVENT && r->depth == outside + 1) {
            value->is_sequence = true;
            continue;
        }
        is_scalar =
            r->event.type != YAML_MAPPING_START_EVENT && r->event.type != YAML_SEQUENCE_START_EVENT;
        if (!is_scalar) {
            BL_TRY(take_nested(r, where, name, value));
            *has_keys |= !value->is_nested;
            continue;
        }
        BL_TRY(take_item(r, where, items, &value->n_items, &is_null));
        if (value->is_sequence && is_null)
            return BL_FAIL(BL_EUSAGE, "%sa null in a sequence", where);
    } while (r->depth > outside);
    value->is_null |= is_null;
    value->items = (const char *const *)*items;
    return BL_OK;
}

static bl_status fail_given(const reader *r, const char *where, const char *name,
                            const bl_option_meaning *meaning, int64_t before)
{
    bool is_row = meaning->index != BL_OPTION_NOTHING;

    return BL_FAIL(BL_EUSAGE, "%s%s: %s is already set in line %lld", where, name,
                   is_row ? r->options->table[meaning->index].key : name, (long long)before);
}

/* The row that a name means, whatever its value; NULL: none. */
static const bl_option *find_row(const bl_options *options, const char *name)
{
    char key[BL_OPTION_KEY_BYTES];

    bl_option_normalize(name, key);
    const bl_option_alias *alias = bl_options_find_alias(options, key);
    return bl_options_find(options, alias && alias->key ? alias->key : key);
}

/* In a sweep: of a sequence where one value is expected, the chosen item. */
static bl_status take_choice(const reader *r, const char *where, const char *name,
                             bl_option_value *value)
{
    bl_options_sweep *sweep = r->options->sweep;
    const bl_option *row = sweep ? find_row(r->options, name) : NULL;
    int64_t taken = 0;

    if (!row || !value->is_sequence || value->is_nested || value->n_items == 0 ||
        row->type == BL_OPTION_LIST || row->type == BL_OPTION_STRING || row->type == BL_OPTION_PATH)
        return BL_OK;
    if (value->n_items > 1 && bl_options_origin(r->options, row->key) != BL_FROM_LINE) {
        if (sweep->n_keys == BL_OPTIONS_MAX_SWEPT)
            return BL_FAIL(BL_EUSAGE, "%s%s: more than %d keys have several values", where, name,
                           BL_OPTIONS_MAX_SWEPT);
        taken = sweep->choice[sweep->n_keys];
        sweep->key[sweep->n_keys] = row;
        sweep->n_values[sweep->n_keys++] = (int64_t)value->n_items;
        BL_TRY(bl_string_list_add(&sweep->chosen, value->items[taken]));
    }
    value->items += taken;
    value->n_items = 1;
    value->is_sequence = false;
    return BL_OK;
}

/* Resolves a name and its value, and sets the option. */
static bl_status set_value(reader *r, const char *where, const char *name, int64_t line,
                           bl_option_value *value)
{
    bl_option_meaning meaning;

    BL_TRY(take_choice(r, where, name, value));
    BL_TRY(bl_options_resolve(r->options, where, name, value, &meaning));
    if (meaning.is_ignored) BL_TRY(bl_string_list_add(&r->options->report->ignored, name));
    bool is_same = meaning.index == BL_OPTION_NOTHING && !meaning.is_ignored && !value->is_null;
    if (is_same) BL_TRY(bl_string_list_add(&r->options->report->same, name));
    int64_t before = note_given(r->options, r->lines, &meaning, value->is_null ? 0 : line);
    if (before) return fail_given(r, where, name, &meaning, before);
    if (meaning.index == BL_OPTION_NOTHING) return BL_OK;
    return bl_options_assign(r->options, where, meaning.index, value, BL_FROM_FILE);
}

/* report.given. */
static bl_status note_value(const reader *r, const char *name, const bl_option_value *value)
{
    bl_status st;
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "%s: text of its value", name);
    fputs(name, out);
    for (size_t i = 0; i < value->n_items && !value->is_null; i++)
        fprintf(out, "%c%s", i ? ',' : '=', value->items[i]);
    st = fclose(out) ? BL_FAIL(BL_ENOMEM, "%s: text of its value", name)
                     : bl_string_list_add(&r->options->report->given, text);
    free(text);
    return st;
}

/* The value of a key, which the current event is. */
static bl_status read_value(reader *r, const char *where, const char *name, int64_t line)
{
    char with_key[WHERE_BYTES + BL_OPTION_KEY_BYTES];
    char **items = NULL;
    bl_option_value value = {0};
    bool has_keys = false;

    snprintf(with_key, sizeof with_key, "%s%.*s: ", where, BL_OPTION_KEY_BYTES - 3, name);
    bl_status st = take_value(r, with_key, name, &items, &value, &has_keys);
    size_t n_items = value.n_items;
    if (st == BL_OK) st = note_value(r, name, &value);
    if (st == BL_OK && !has_keys) st = set_value(r, where, name, line, &value);
    for (size_t i = 0; i < n_items; i++) free(items[i]);
    free(items);
    return st;
}

/* The current event is a key. */
static bl_status read_pair(reader *r, const char *prefix)
{
    bl_status st;
    char where[WHERE_BYTES];
    char *own = NULL, *name = NULL;
    bool is_null;
    int64_t line = event_line(r);

    snprintf(where, sizeof where, "%s:%lld: ", r->path, (long long)line);
    if (r->event.type != YAML_SCALAR_EVENT) return BL_FAIL(BL_EUSAGE, "%sexpected a key", where);
    BL_TRY_GOTO(st, done, take_scalar(r, where, &own, &is_null));
    if (asprintf(&name, "%s%s", prefix, own) < 0) {
        name = NULL;
        st = BL_FAIL(BL_ENOMEM, "%skey", where);
        goto done;
    }
    st = read_value(r, where, name, line);
done:
    free(own);
    free(name);
    return st;
}

static bl_status note_rejected(reader *r)
{
    bl_string_list *rejected = &r->options->report->rejected;

    BL_TRY(bl_string_list_add(rejected, bl_error_text()));
    int most = r->options->tool ? MAX_REJECTED_FOREIGN : MAX_REJECTED;
    if (rejected->n_items <= most) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: more than %d keys cannot be used; the rest is not read", r->path,
                   most);
}

/* The pairs of the mapping that the current event begins. A pair that cannot be used is noted, and
 * passed over. */
static bl_status read_mapping(reader *r, const char *prefix)
{
    int inside = r->depth;

    for (;;) {
        BL_TRY(next_event(r));
        if (r->event.type == YAML_MAPPING_END_EVENT) break;
        r->took_value = false;
        bl_status st = read_pair(r, prefix);
        if (st == BL_OK) continue;
        if (st != BL_EUSAGE || r->parser.error != YAML_NO_ERROR) return st;
        BL_TRY(note_rejected(r));
        BL_TRY(skip_to_depth(r, inside));
        if (r->took_value) continue;
        BL_TRY(next_event(r));
        BL_TRY(skip_to_depth(r, inside));
    }
    r->took_value = true; /* it was the value of a pair further out */
    return BL_OK;
}

static bl_status read_document(reader *r)
{
    BL_TRY(next_event(r)); /* the stream's start */
    BL_TRY(next_event(r));
    if (r->event.type == YAML_STREAM_END_EVENT) return BL_OK; /* an empty file sets nothing */
    BL_TRY(next_event(r));
    bool is_empty = r->event.type == YAML_SCALAR_EVENT && r->event.data.scalar.length == 0;
    if (!is_empty && r->event.type != YAML_MAPPING_START_EVENT) {
        return BL_FAIL(BL_EUSAGE, "%s:%lld: expected lines of \"key: value\"", r->path,
                       (long long)event_line(r));
    }
    if (!is_empty) BL_TRY(read_mapping(r, ""));
    BL_TRY(next_event(r)); /* the document's end */
    BL_TRY(next_event(r));
    if (r->event.type == YAML_STREAM_END_EVENT) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s:%lld: a second document", r->path, (long long)event_line(r));
}

bl_status bl_options_read_yaml(const bl_options *options, const char *path)
{
    bl_status st;
    void *bytes = NULL;
    const char *text;
    size_t n_bytes;
    reader r = {.options = options, .path = path};

    st = bl_file_read_all(path, FILE_MAX_BYTES, &bytes, &n_bytes);
    if (st != BL_OK) return st == BL_EINPUT ? BL_EUSAGE : st;
    text = bytes; /* libyaml passes over a mark only where it guesses the encoding */
    if (bl_text_skip_mark(path, &text, &n_bytes) != BL_OK ||
        bl_file_kind_refuse(path, text, n_bytes, "YAML") != BL_OK) {
        st = BL_EUSAGE;
        goto done;
    }
    if (!(r.lines = create_lines(options)) || !yaml_parser_initialize(&r.parser)) {
        st = BL_FAIL(BL_ENOMEM, "%s: reading YAML", path);
        goto done;
    }
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, n_bytes);
    st = read_document(&r);
    if (st == BL_OK && check_needs(options, r.lines, path) != BL_OK) st = note_rejected(&r);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
done:
    free(r.lines);
    free(bytes);
    return st;
}

/* ---- the command line ---- */

/* Whether the option may have no value, for true: bools, and aliases whose translation begins with
 * one of a bool's words. */
static bool is_switch(const bl_options *options, const char *name)
{
    char key[BL_OPTION_KEY_BYTES];
    bl_option_normalize(name, key);
    const bl_option *option = bl_options_find(options, key);
    if (option) return option->type == BL_OPTION_BOOL;
    const bl_option_alias *alias = bl_options_find_alias(options, key);
    if (!alias) return false;
    if (alias->values) {
        return strncmp(alias->values, "true=", 5) == 0 || strncmp(alias->values, "false=", 6) == 0;
    }
    return alias->key && bl_options_find(options, alias->key)->type == BL_OPTION_BOOL;
}

/* Whether it is an enum in which true is the name of a value: true where no value follows. */
static bool may_be_true(const bl_options *options, const char *name)
{
    char key[BL_OPTION_KEY_BYTES];
    bl_option_normalize(name, key);
    const bl_option *option = bl_options_find(options, key);
    return option && option->true_name && strcmp(option->true_name, "true") == 0;
}

static bl_status add_event(const char *name, const yaml_event_t *event, bool *is_open,
                           bl_string_list *items)
{
    bool was_open = *is_open;

    switch (event->type) {
    case YAML_SEQUENCE_START_EVENT:
        *is_open = true;
        break;
    case YAML_SEQUENCE_END_EVENT:
        *is_open = false;
        return BL_OK;
    case YAML_SCALAR_EVENT:
        if (*is_open) return bl_string_list_add(items, (const char *)event->data.scalar.value);
        break;
    case YAML_MAPPING_START_EVENT:
        was_open = true;
        break;
    default:
        return BL_OK;
    }
    return was_open ? BL_FAIL(BL_EUSAGE, "--%s: expected a list of texts, [a, b]", name) : BL_OK;
}

bl_status bl_options_read_list(const char *name, const char *text, bl_string_list *items)
{
    yaml_parser_t parser;
    bl_status st = BL_OK;
    bool is_open = false, is_over = false;

    if (!yaml_parser_initialize(&parser)) return BL_FAIL(BL_ENOMEM, "--%s: reading a list", name);
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    while (st == BL_OK && !is_over) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            st = BL_FAIL(BL_EUSAGE, "--%s: '%.100s' is not a list as [a, b]: %s", name, text,
                         parser.problem ? parser.problem : "not YAML");
            break;
        }
        st = add_event(name, &event, &is_open, items);
        is_over = event.type == YAML_STREAM_END_EVENT;
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return st;
}

/* Of a list "[a, b]", its items, which the caller frees; else nothing. */
static bl_status take_list(const bl_options *options, const char *name, bl_option_value *value,
                           bl_string_list *items)
{
    const bl_option *row = find_row(options, name);
    const char *text = value->items[0];
    size_t n_bytes = text ? strlen(text) : 0;

    if (!row || row->type != BL_OPTION_LIST || n_bytes < 2 || text[0] != '[' ||
        text[n_bytes - 1] != ']')
        return BL_OK;
    BL_TRY(bl_options_read_list(name, text, items));
    value->items = (const char *const *)items->items;
    value->n_items = (size_t)items->n_items;
    value->is_sequence = true;
    return BL_OK;
}

/* `before` is the word that gave the option first. */
static bl_status fail_twice(const bl_options *options, const char *name, const char *before,
                            const bl_option_meaning *meaning)
{
    bool is_row = meaning->index != BL_OPTION_NOTHING;
    const char *key = is_row ? options->table[meaning->index].key : name;
    int n_before = (int)strcspn(before, "=");
    char written[BL_OPTION_KEY_BYTES], names[2][BL_OPTION_KEY_BYTES];

    snprintf(written, sizeof written, "%.*s", n_before - 2, before + 2);
    bl_option_normalize(written, names[0]);
    bl_option_normalize(name, names[1]);
    if (strcmp(names[0], names[1]) == 0)
        return BL_FAIL(BL_EUSAGE, "--%s: %s is given twice", name, key);
    return BL_FAIL(BL_EUSAGE, "--%s: %s is given twice, as %.*s and as --%s", name, key, n_before,
                   before, name);
}

static bl_status read_option(const bl_options *options, int argc, char *const *argv, int *at,
                             int64_t *lines)
{
    bl_status st;
    bool truth;
    const char *text;
    const char *word = argv[*at] + 2;
    const char *equals = strchr(word, '=');
    const char *next = *at + 1 < argc ? argv[*at + 1] : NULL;
    char *name = strndup(word, equals ? (size_t)(equals - word) : strlen(word));
    bl_option_value value = {.items = &text, .n_items = 1};
    bl_option_meaning meaning;
    bl_string_list list = {0};
    int64_t place = *at + 1;

    if (!name) return BL_FAIL(BL_ENOMEM, "%s", argv[*at]);
    if (equals) {
        text = equals + 1;
    } else if (is_switch(options, name)) {
        bool takes_next = next && bl_text_parse_bool(next, &truth);
        text = takes_next ? next : "true";
        *at += takes_next;
    } else {
        text = next && strncmp(next, "--", 2) != 0 ? next : NULL;
        *at += text != NULL;
        if (!text && may_be_true(options, name)) text = "true";
    }
    value.is_null = !text || strcmp(text, "null") == 0;
    BL_TRY_GOTO(st, done, take_list(options, name, &value, &list));
    BL_TRY_GOTO(st, done, bl_options_resolve(options, "--", name, &value, &meaning));
    if (!text) {
        st = BL_FAIL(BL_EUSAGE, "--%s: a value is missing", name);
        goto done;
    }
    if (meaning.is_ignored && options->report)
        BL_TRY_GOTO(st, done, bl_string_list_add(&options->report->ignored, name));
    int64_t before = note_given(options, lines, &meaning, place);
    if (before) {
        st = fail_twice(options, name, argv[before - 1], &meaning);
        goto done;
    }
    if (meaning.index != BL_OPTION_NOTHING)
        st = bl_options_assign(options, "--", meaning.index, &value, BL_FROM_LINE);
done:
    bl_string_list_clear(&list);
    free(name);
    return st;
}

bl_status bl_options_read_line(const bl_options *options, int argc, char *const *argv,
                               int max_words, const char **words, int *n_words)
{
    bl_status st = BL_OK;
    bool only_words = false;
    int64_t *lines = create_lines(options);

    *n_words = 0;
    if (!lines) return BL_FAIL(BL_ENOMEM, "reading the command line");
    for (int i = 0; i < argc && st == BL_OK; i++) {
        if (!only_words && strcmp(argv[i], "--") == 0) {
            only_words = true;
        } else if (!only_words && strncmp(argv[i], "--", 2) == 0) {
            st = read_option(options, argc, argv, &i, lines);
        } else if (!only_words && argv[i][0] == '-' && argv[i][1]) {
            st = BL_FAIL(BL_EUSAGE, "%s: unknown option; options begin with two dashes", argv[i]);
        } else if (*n_words == max_words) {
            st = BL_FAIL(BL_EUSAGE, "%s: unexpected word", argv[i]);
        } else {
            words[(*n_words)++] = argv[i];
        }
    }
    if (st == BL_OK) st = check_needs(options, lines, NULL);
    free(lines);
    return st;
}
