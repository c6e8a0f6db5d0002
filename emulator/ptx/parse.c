/* SPDX-License-Identifier: Apache-2.0 */
/* The text of a module: entry points with their parameters, registers, shared variables, labels,
 * and the instructions of the table below (PTX ISA 9.0). */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../runtime.h"
#include "ptx.h"

static const struct {
    const char *name;
    int bytes;
} types[] = {{"u8", 1},  {"u16", 2}, {"u32", 4}, {"u64", 8}, {"s8", 1},
             {"s16", 2}, {"s32", 4}, {"s64", 8}, {"b16", 2}, {"b32", 4},
             {"b64", 8}, {"f16", 2}, {"f32", 4}, {"f64", 8}, {"pred", 1}};

/* prefix, followed by one of the words, or by nothing where there are none; n_operands. */
static const struct {
    const char *prefix, *words;
    uint8_t op, detail, n_operands;
} forms[] = {
    {"add.", "s32 s64", PTX_ADD, 0, 3},
    {"add.rn.", "f32 f64", PTX_ADD, 0, 3},
    {"sub.", "s32 s64", PTX_SUB, 0, 3},
    {"sub.rn.", "f32", PTX_SUB, 0, 3},
    {"mul.lo.", "s32 s64", PTX_MUL, 0, 3},
    {"mul.rn.", "f32 f64", PTX_MUL, 0, 3},
    {"mul.hi.", "s32", PTX_MUL_HIGH, 0, 3},
    {"mul.wide.", "u16 u32 s32", PTX_MUL_WIDE, 0, 3},
    {"mad.lo.", "s32", PTX_MAD, 0, 4},
    {"fma.rn.", "f32", PTX_FMA, 0, 4},
    {"div.", "s32 u32 s64 u64", PTX_DIV, 0, 3},
    {"div.rn.", "f32 f64", PTX_DIV, 0, 3},
    {"rem.", "u32", PTX_REM, 0, 3},
    {"rcp.rn.", "f32 f64", PTX_RCP, 0, 2},
    {"sqrt.rn.", "f64", PTX_SQRT, 0, 2},
    {"ex2.approx.ftz.", "f32", PTX_EX2, 0, 2},
    {"min.", "s32 s64", PTX_MIN, 0, 3},
    {"max.", "s32 u32 f32", PTX_MAX, 0, 3},
    {"neg.", "f32", PTX_NEG, 0, 2},
    {"copysign.", "f32", PTX_COPYSIGN, 0, 3},
    {"and.", "b16 b32 b64 pred", PTX_AND, 0, 3},
    {"or.", "b32 b64 pred", PTX_OR, 0, 3},
    {"xor.", "b32", PTX_XOR, 0, 3},
    {"not.", "b32 pred", PTX_NOT, 0, 2},
    {"shl.", "b32 b64", PTX_SHL, 0, 3},
    {"shr.", "u16 u32 u64 s32 s64", PTX_SHR, 0, 3},
    {"bfi.", "b32", PTX_BFI, 0, 5},
    {"prmt.", "b32", PTX_PRMT, 0, 4},
    {"setp.eq.", "s16 s32 s64 f32", PTX_SETP, PTX_EQ, 3},
    {"setp.ne.", "s16 s32 s64", PTX_SETP, PTX_NE, 3},
    {"setp.lt.", "s32 s64 u16 u32 f32", PTX_SETP, PTX_LT, 3},
    {"setp.le.", "s32 s64", PTX_SETP, PTX_LE, 3},
    {"setp.gt.", "s32 s64 u32 f32", PTX_SETP, PTX_GT, 3},
    {"setp.ge.", "s32 s64", PTX_SETP, PTX_GE, 3},
    {"setp.ltu.", "f32", PTX_SETP, PTX_LTU, 3},
    {"setp.gtu.", "f32", PTX_SETP, PTX_GTU, 3},
    {"selp.", "b32 b64 u32 f32", PTX_SELP, 0, 4},
    {"mov.", "u32 u64 b32 b64 f32 f64", PTX_MOV, 0, 2},
    {"cvt.", "s64.s32 u16.u32 u16.u64 u32.u16 u32.u64 u64.u32 f64.f32 f32.f16", PTX_CVT, 0, 2},
    {"cvt.rn.", "f32.s32 f32.u16 f32.f64 f64.s64", PTX_CVT, 0, 2},
    {"cvt.rn.bf16x2.f32", "", PTX_CVT_BF16X2, 0, 3},
    {"cvt.rn.satfinite.e4m3x2.f32", "", PTX_CVT_E4M3X2, 0, 3},
    {"cvt.rn.f16x2.e4m3x2", "", PTX_CVT_FROM_E4M3X2, 0, 2},
    {"cvta.to.global.", "u64", PTX_MOV, 0, 2},
    {"cvta.shared.", "u64", PTX_CVTA_SHARED, 0, 2},
    {"mapa.", "u64", PTX_MAPA, 0, 3},
    {"ld.param.", "s8 u32 u64 f32 f64 v2.u32 v4.u8", PTX_LD, PTX_PARAM, 2},
    {"ld.global.", "u8 u16 u32 s32 f32 v4.u32 v4.f32", PTX_LD, PTX_GLOBAL, 2},
    {"ld.global.cs.", "v2.u32 v4.u32", PTX_LD, PTX_GLOBAL, 2},
    {"ld.shared.", "u8 u32 f32 f64 v2.f32 v4.u32", PTX_LD, PTX_SHARED, 2},
    {"ld.", "u32 v4.f32", PTX_LD, PTX_GENERIC, 2},
    {"st.global.", "u8 u16 f32", PTX_ST, PTX_GLOBAL, 2},
    {"st.global.wb.", "v2.u32 v4.u32", PTX_ST, PTX_GLOBAL, 2},
    {"st.shared.", "u8 u32 f32 f64 v2.f32 v4.u32", PTX_ST, PTX_SHARED, 2},
    {"bra", "", PTX_BRA, 0, 0},
    {"bra.uni", "", PTX_BRA, 0, 0},
    {"ret", "", PTX_RET, 0, 0},
    {"cp.async.ca.shared.global", "", PTX_COPY, 0, 4},
    {"cp.async.cg.shared.global", "", PTX_COPY, 16, 4}, /* detail: the only size; 0: 4, 8, 16 */
    {"cp.async.commit_group", "", PTX_COPY_COMMIT, 0, 0},
    {"cp.async.wait_group", "", PTX_COPY_WAIT, 0, 1},
    {"barrier.cluster.arrive", "", PTX_CLUSTER_ARRIVE, 0, 0},
    {"barrier.cluster.wait", "", PTX_CLUSTER_WAIT, 0, 0},
    {"bar.sync", "", PTX_BAR, 0, 1},
    {"bar.warp.sync", "", PTX_BAR_WARP, 0, 1},
    {"shfl.sync.bfly.", "b32", PTX_SHFL_BFLY, 0, 6},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "", PTX_LDMATRIX, 0, 5},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "", PTX_LDMATRIX, 1, 5},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "", PTX_MMA, 0, 14},
};

enum { COUNT_OF_FORMS = sizeof forms / sizeof forms[0], NAME_MAX_BYTES = 512, BANKS_MAX = 32 };

static const char *const specials[PTX_SPECIALS] = {
    "%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%cluster_ctarank", "%cluster_nctarank"};

/* A name's value: a label's instruction, a parameter's or a shared variable's offset. */
typedef struct symbol {
    char *name;
    int64_t value;
} symbol;

typedef struct symbols {
    symbol *items;
    int n;
} symbols;

/* .reg: names that begin so, and have a number behind, from `first` on. */
typedef struct bank {
    char prefix[16];
    int first, n;
} bank;

typedef struct parser {
    const char *path, *at;
    int line, static_bytes;
    ptx_module *module;
    symbols shared;
    /* of the kernel that is read */
    ptx_kernel *kernel;
    symbols parameters, labels, branches; /* branches: a label's name, the instruction's index */
    bank banks[BANKS_MAX];
    int n_banks, depth;
} parser;

void ptx_fail(const char *path, int line, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    emulated_fatal("PTX: %s:%d: %s", path, line, text);
}

/* The array has room for one more; rooms are powers of 2. */
static void *grow(void *items, int n, size_t item_bytes)
{
    if (n != 0 && (n & (n - 1)) != 0) return items;
    items = realloc(items, (n ? 2 * (size_t)n : 1) * item_bytes);
    if (!items) emulated_fatal("PTX: out of memory");
    return items;
}

static void add_symbol(symbols *set, const char *name, int64_t value)
{
    set->items = grow(set->items, set->n, sizeof *set->items);
    set->items[set->n++] = (symbol){strdup(name), value};
}

static const symbol *find_symbol(const symbols *set, const char *name)
{
    for (int i = 0; i < set->n; i++)
        if (strcmp(set->items[i].name, name) == 0) return &set->items[i];
    return NULL;
}

static void forget_symbols(symbols *set)
{
    for (int i = 0; i < set->n; i++) free(set->items[i].name);
    free(set->items);
    *set = (symbols){NULL, 0};
}

/* ---- text ---- */

static void skip_blanks(parser *p)
{
    for (;;) {
        if (p->at[0] == '/' && p->at[1] == '/') p->at += strcspn(p->at, "\n");
        if (!isspace((unsigned char)*p->at)) return;
        p->line += *p->at++ == '\n';
    }
}

static bool take(parser *p, char c)
{
    skip_blanks(p);
    if (*p->at != c) return false;
    p->at++;
    return true;
}

static void demand(parser *p, char c)
{
    if (!take(p, c)) ptx_fail(p->path, p->line, "'%c' expected before '%.20s'", c, p->at);
}

/* Letters, digits and _ $ % . : -; empty: something else. */
static void take_word(parser *p, char word[NAME_MAX_BYTES])
{
    int n = 0;
    skip_blanks(p);
    while (isalnum((unsigned char)*p->at) || (*p->at && strchr("_$%.-", *p->at))) {
        if (n == NAME_MAX_BYTES - 1) ptx_fail(p->path, p->line, "a name is too long");
        word[n++] = *p->at++;
    }
    word[n] = '\0';
}

static void skip_to(parser *p, char c)
{
    for (; *p->at && *p->at != c; p->at++) p->line += *p->at == '\n';
}

static ptx_type type_of(const char *name, size_t length)
{
    for (int t = 0; t < PTX_NONE; t++)
        if (strlen(types[t].name) == length && memcmp(types[t].name, name, length) == 0)
            return (ptx_type)t;
    return PTX_NONE;
}

/* "[.align N] .type name [N]" of a parameter or a shared variable; b8 is not a register's type. */
static int64_t take_variable(parser *p, char name[NAME_MAX_BYTES], int *align)
{
    int64_t bytes = 0;
    *align = 0;
    for (take_word(p, name); name[0] == '.'; take_word(p, name)) {
        if (strcmp(name, ".align") == 0) {
            take_word(p, name);
            *align = atoi(name);
            continue;
        }
        ptx_type type = type_of(name + 1, strlen(name + 1));
        bytes = strcmp(name, ".b8") == 0 ? 1 : type == PTX_NONE ? 0 : types[type].bytes;
        if (bytes == 0) ptx_fail(p->path, p->line, "a variable of type %s", name);
    }
    if (*align == 0) *align = (int)bytes;
    if (take(p, '[')) {
        char count[NAME_MAX_BYTES];
        take_word(p, count);
        bytes *= atoi(count); /* "": dynamic */
        demand(p, ']');
    }
    return bytes;
}

static void take_shared(parser *p, bool is_extern)
{
    char name[NAME_MAX_BYTES];
    int align;
    int64_t bytes = take_variable(p, name, &align);
    demand(p, ';');
    if (is_extern) {
        add_symbol(&p->shared, name, PTX_DYNAMIC_AT);
        return;
    }
    p->static_bytes = (p->static_bytes + align - 1) / align * align;
    add_symbol(&p->shared, name, p->static_bytes);
    p->static_bytes += (int)bytes;
    if (p->static_bytes > PTX_DYNAMIC_AT) ptx_fail(p->path, p->line, "static memory past 48 KiB");
}

/* ---- registers and operands ---- */

/* ".type %name<N>;" or ".type %name;", which may be declared again. */
static void take_registers(parser *p)
{
    char word[NAME_MAX_BYTES], count[NAME_MAX_BYTES];
    take_word(p, word);
    take_word(p, word);
    int n = 1;
    if (take(p, '<')) {
        take_word(p, count);
        n = atoi(count);
        demand(p, '>');
    }
    demand(p, ';');
    for (int b = 0; b < p->n_banks; b++)
        if (strcmp(p->banks[b].prefix, word) == 0) return;
    if (p->n_banks == BANKS_MAX || strlen(word) >= sizeof p->banks[0].prefix)
        ptx_fail(p->path, p->line, "registers %s", word);
    bank *b = &p->banks[p->n_banks++];
    strcpy(b->prefix, word);
    b->first = p->kernel->n_registers;
    b->n = n;
    p->kernel->n_registers += n;
    if (p->kernel->n_registers > INT16_MAX) ptx_fail(p->path, p->line, "too many registers");
}

static int16_t register_of(const parser *p, const char *name)
{
    for (int s = 0; s < PTX_SPECIALS; s++)
        if (strcmp(name, specials[s]) == 0) return (int16_t)s;
    size_t letters = 1 + strspn(name + 1, "abcdefghijklmnopqrstuvwxyz");
    int number = atoi(name + letters);
    for (int b = 0; b < p->n_banks; b++)
        if (strlen(p->banks[b].prefix) == letters &&
            memcmp(p->banks[b].prefix, name, letters) == 0 && number < p->banks[b].n)
            return (int16_t)(p->banks[b].first + number);
    ptx_fail(p->path, p->line, "register %s", name);
}

static int16_t constant(parser *p, uint64_t value)
{
    ptx_kernel *k = p->kernel;
    for (int i = 0; i < k->n_constants; i++)
        if (k->constants[i] == value) return (int16_t)~i;
    k->constants = grow(k->constants, k->n_constants, sizeof *k->constants);
    k->constants[k->n_constants] = value;
    if (k->n_constants == INT16_MAX) ptx_fail(p->path, p->line, "too many constants");
    return (int16_t) ~(k->n_constants++);
}

static int16_t operand_of(parser *p, const char *word)
{
    const symbol *s;
    char *end;
    if (word[0] == '%') return register_of(p, word);
    if (word[0] == '0' && (word[1] == 'f' || word[1] == 'd'))
        return constant(p, strtoull(word + 2, NULL, 16));
    if ((s = find_symbol(&p->shared, word)) || (s = find_symbol(&p->parameters, word)))
        return constant(p, (uint64_t)s->value);
    int64_t value = strtoll(word, &end, 0);
    if (*word == '\0' || *end) ptx_fail(p->path, p->line, "operand '%s' %.20s", word, p->at);
    return constant(p, (uint64_t)value);
}

/* ---- instructions ---- */

/* Whether `word` is one of the words of a list with blanks. */
static bool is_listed(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; length && (at = strstr(at, word)); at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
    return false;
}

/* The types at the end of the name: [vN.]type[.type]. */
static void take_types(ptx_instruction *i, const char *words)
{
    i->type = i->from = PTX_NONE;
    i->n_vector = 1;
    i->bytes = 8;
    if (*words == 'v') {
        i->n_vector = (uint8_t)(words[1] - '0');
        words += 3;
    }
    size_t length = strcspn(words, ".");
    if (length == 0) return;
    i->type = (uint8_t)type_of(words, length);
    i->from = i->type;
    if (words[length]) i->from = (uint8_t)type_of(words + length + 1, strlen(words + length + 1));
    i->bytes = (uint8_t)types[i->from].bytes;
}

/* The fields that the opcode determines. Returns its number of operands; each element of a vector
 * is one. */
static int take_opcode(parser *p, ptx_instruction *i, const char *name)
{
    for (int f = 0; f < COUNT_OF_FORMS; f++) {
        size_t length = strlen(forms[f].prefix);
        if (strncmp(name, forms[f].prefix, length) != 0) continue;
        const char *rest = name + length;
        if (*forms[f].words ? !is_listed(forms[f].words, rest) : *rest != '\0') continue;
        i->op = forms[f].op;
        i->detail = forms[f].detail;
        take_types(i, rest);
        return forms[f].n_operands + i->n_vector - 1;
    }
    ptx_fail(p->path, p->line, "instruction %s is not supported", name);
}

static void take_operand(parser *p, ptx_instruction *i, const char *word)
{
    if (i->n_operands == PTX_OPERANDS) ptx_fail(p->path, p->line, "too many operands");
    i->operands[i->n_operands++] = operand_of(p, word);
}

/* "[base]", "[base+offset]". */
static void take_address(parser *p, ptx_instruction *i)
{
    char word[NAME_MAX_BYTES];
    take_word(p, word);
    take_operand(p, i, word);
    if (take(p, '+')) {
        take_word(p, word);
        if (i->offset) ptx_fail(p->path, p->line, "two offsets");
        i->offset = atoi(word);
    }
    demand(p, ']');
}

static void take_operands(parser *p, ptx_instruction *i)
{
    char word[NAME_MAX_BYTES];
    int in_braces = 0;
    bool is_in = false;
    while (!take(p, ';')) {
        if (take(p, ',') || take(p, '|')) continue;
        if (take(p, '{')) {
            is_in = true;
            in_braces = 0;
            i->is_unpacked = i->n_operands == 0;
        } else if (take(p, '}')) {
            is_in = false;
            i->n_vector = (uint8_t)in_braces;
        } else if (take(p, '[')) {
            take_address(p, i);
        } else {
            take_word(p, word);
            take_operand(p, i, word);
            in_braces += is_in;
        }
    }
}

static void check_copy(const parser *p, const ptx_instruction *i)
{
    int64_t bytes = i->operands[2] < 0 ? (int64_t)p->kernel->constants[~i->operands[2]] : 0;
    if (bytes != 16 && (i->detail == 16 || (bytes != 4 && bytes != 8)))
        ptx_fail(p->path, p->line, "cp.async of %lld bytes", (long long)bytes);
    if (i->offset) ptx_fail(p->path, p->line, "cp.async with an offset");
}

static void take_instruction(parser *p, char word[NAME_MAX_BYTES])
{
    ptx_kernel *k = p->kernel;
    ptx_instruction i = {.predicate = -1, .line = p->line};
    if (word[0] == '\0' && take(p, '@')) {
        i.is_negated = take(p, '!');
        take_word(p, word);
        i.predicate = register_of(p, word);
        take_word(p, word);
    }
    int n_wanted = take_opcode(p, &i, word), n_elements = i.n_vector;
    if (i.op == PTX_BRA) {
        take_word(p, word);
        add_symbol(&p->branches, word, k->n_instructions);
        demand(p, ';');
    } else {
        take_operands(p, &i);
    }
    bool is_packed = i.op == PTX_MOV && i.n_vector > 1;
    if (i.n_operands != n_wanted + (is_packed ? i.n_vector - 1 : 0) ||
        ((i.op == PTX_LD || i.op == PTX_ST) && i.n_vector != n_elements))
        ptx_fail(p->path, p->line, "%s with %d operands", word, i.n_operands);
    if (i.op == PTX_COPY) check_copy(p, &i);
    k->instructions = grow(k->instructions, k->n_instructions, sizeof i);
    k->instructions[k->n_instructions++] = i;
}

/* ---- kernels ---- */

static void take_statement(parser *p)
{
    char word[NAME_MAX_BYTES];
    if (take(p, '{')) {
        p->depth++;
        return;
    }
    if (take(p, '}')) {
        p->depth--;
        return;
    }
    take_word(p, word);
    if (strcmp(word, ".reg") == 0) {
        take_registers(p);
    } else if (strcmp(word, ".shared") == 0) {
        take_shared(p, false);
    } else if (strcmp(word, ".pragma") == 0) {
        skip_to(p, ';');
        demand(p, ';');
    } else if (word[0] && take(p, ':')) {
        add_symbol(&p->labels, word, p->kernel->n_instructions);
    } else {
        take_instruction(p, word);
    }
}

static void take_parameters(parser *p)
{
    char name[NAME_MAX_BYTES];
    ptx_kernel *k = p->kernel;
    int64_t end = 0;
    int align;
    demand(p, '(');
    for (take_word(p, name); strcmp(name, ".param") == 0; take_word(p, name)) {
        int64_t bytes = take_variable(p, name, &align);
        k->parameters = grow(k->parameters, k->n_parameters, sizeof *k->parameters);
        int64_t at = (end + align - 1) / align * align;
        k->parameters[k->n_parameters++] = (ptx_parameter){at, bytes};
        add_symbol(&p->parameters, name, at);
        end = at + bytes;
        if (!take(p, ',')) break;
    }
    demand(p, ')');
}

static void link_branches(parser *p)
{
    for (int b = 0; b < p->branches.n; b++) {
        ptx_instruction *i = &p->kernel->instructions[p->branches.items[b].value];
        const symbol *label = find_symbol(&p->labels, p->branches.items[b].name);
        if (!label) ptx_fail(p->path, i->line, "label %s", p->branches.items[b].name);
        i->target = (int32_t)label->value;
    }
}

static void take_entry(parser *p)
{
    char word[NAME_MAX_BYTES];
    ptx_module *m = p->module;
    take_word(p, word);
    if (strcmp(word, ".entry") != 0) ptx_fail(p->path, p->line, "%s is not supported", word);
    take_word(p, word);
    m->kernels = grow(m->kernels, m->n_kernels, sizeof *m->kernels);
    p->kernel = &m->kernels[m->n_kernels++];
    *p->kernel = (ptx_kernel){.name = strdup(word), .path = m->path, .n_registers = PTX_SPECIALS};
    p->n_banks = 0;
    take_parameters(p);
    skip_to(p, '{'); /* .maxntid and others */
    demand(p, '{');
    for (p->depth = 1; p->depth > 0;) take_statement(p);
    link_branches(p);
    const ptx_instruction *last = &p->kernel->instructions[p->kernel->n_instructions - 1];
    if (p->kernel->n_instructions == 0 || last->op != PTX_RET || last->predicate >= 0)
        ptx_fail(p->path, p->line, "a kernel without a return at its end");
    forget_symbols(&p->parameters), forget_symbols(&p->labels), forget_symbols(&p->branches);
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = NULL;
    size_t n = 0;
    if (!file || getdelim(&text, &n, '\0', file) < 0) emulated_fatal("PTX: cannot read %s", path);
    fclose(file);
    return text;
}

ptx_module ptx_parse(const char *path)
{
    char word[NAME_MAX_BYTES], *text = read_text(path);
    ptx_module module = {.path = strdup(path)};
    parser p = {.path = module.path, .at = text, .line = 1, .module = &module};
    for (skip_blanks(&p); *p.at; skip_blanks(&p)) {
        take_word(&p, word);
        bool is_extern = strcmp(word, ".extern") == 0;
        if (is_extern) take_word(&p, word);
        if (strcmp(word, ".shared") == 0)
            take_shared(&p, is_extern);
        else if (strcmp(word, ".visible") == 0)
            take_entry(&p);
        else if (is_listed(".version .target .address_size", word))
            skip_to(&p, '\n');
        else
            ptx_fail(p.path, p.line, "'%s' %.20s", word, p.at);
    }
    for (int k = 0; k < module.n_kernels; k++) module.kernels[k].static_bytes = p.static_bytes;
    forget_symbols(&p.shared);
    free(text);
    return module;
}
