/* SPDX-License-Identifier: Apache-2.0 */
/* The instructions of one thread. Arithmetic rounds to nearest, as PTX does. ex2.approx, whose bits
 * NVIDIA does not document, is the C library's exp2f with small results flushed to 0, as in
 * emulator/ops/cuda/mma.cuh; conversions to bf16 and E4M3 and the maximum of floats are those of
 * emulator/fp8/cuda/convert.cuh and fmaxf. So PTX and C++ give the same bits; a GPU's differ in the
 * last bits of 2^x and in the payload of a NaN. */
#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "fp8/element.h"
#include "ptx.h"

static inline float f32(uint64_t bits)
{
    uint32_t low = (uint32_t)bits;
    float value;
    memcpy(&value, &low, sizeof value);
    return value;
}

static inline uint64_t of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double f64(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t of_f64(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The low bytes; from_sign: as a signed number. */
static inline uint64_t low_bytes(uint64_t x, int bytes)
{
    return bytes == 8 ? x : x & ((1ull << 8 * bytes) - 1);
}

static inline int64_t from_sign(uint64_t x, int bytes)
{
    return (int64_t)(x << (64 - 8 * bytes)) >> (64 - 8 * bytes);
}

static inline bool is_signed(ptx_type type)
{
    return type >= PTX_S8 && type <= PTX_S64;
}

static uint64_t add_or_multiply(const ptx_instruction *i, uint64_t a, uint64_t b, uint64_t c)
{
    int bytes = i->bytes;
    bool is_f32 = i->type == PTX_F32, is_f64 = i->type == PTX_F64;
    switch (i->op) {
    case PTX_ADD:
        return is_f32 ? of_f32(f32(a) + f32(b)) : is_f64 ? of_f64(f64(a) + f64(b)) : a + b;
    case PTX_SUB:
        return is_f32 ? of_f32(f32(a) - f32(b)) : a - b;
    case PTX_MUL:
        return is_f32 ? of_f32(f32(a) * f32(b)) : is_f64 ? of_f64(f64(a) * f64(b)) : a * b;
    case PTX_FMA:
        return of_f32(fmaf(f32(a), f32(b), f32(c)));
    case PTX_MUL_HIGH:
        return (uint64_t)(from_sign(a, bytes) * from_sign(b, bytes) >> (8 * bytes));
    case PTX_MUL_WIDE:
        return is_signed(i->type) ? (uint64_t)(from_sign(a, bytes) * from_sign(b, bytes)) : a * b;
    default: /* PTX_MAD */
        return a * b + c;
    }
}

/* Division of integers by 0 gives ones (an unspecified value). */
static uint64_t divide(const ptx_instruction *i, uint64_t a, uint64_t b)
{
    int bytes = i->bytes;
    if (i->type == PTX_F32) return of_f32(f32(a) / f32(b));
    if (i->type == PTX_F64) return of_f64(f64(a) / f64(b));
    if (b == 0) return UINT64_MAX;
    if (i->op == PTX_REM) return a % b;
    if (!is_signed(i->type)) return a / b;
    int64_t x = from_sign(a, bytes), y = from_sign(b, bytes);
    return y == -1 ? 0 - (uint64_t)x : (uint64_t)(x / y);
}

static uint64_t least_or_most(const ptx_instruction *i, uint64_t a, uint64_t b)
{
    int bytes = i->bytes;
    if (i->type == PTX_F32) return of_f32(fmaxf(f32(a), f32(b)));
    bool is_less = is_signed(i->type) ? from_sign(a, bytes) < from_sign(b, bytes) : a < b;
    return is_less == (i->op == PTX_MIN) ? a : b;
}

static uint64_t shift(const ptx_instruction *i, uint64_t a, uint64_t b)
{
    int bytes = i->bytes;
    b = (uint32_t)b;
    bool is_past = b >= 8 * (uint64_t)bytes;
    if (i->op == PTX_SHL) return is_past ? 0 : a << b;
    if (is_signed(i->type)) return (uint64_t)(from_sign(a, bytes) >> (is_past ? 63 : b));
    return is_past ? 0 : a >> b;
}

/* The default mode: bit 3 of a selector repeats its byte's sign. */
static uint64_t permute(uint64_t a, uint64_t b, uint64_t selectors)
{
    uint64_t bytes = b << 32 | a, out = 0;
    for (int k = 0; k < 4; k++) {
        unsigned selector = selectors >> (4 * k) & 0xf, byte = bytes >> (8 * (selector & 7)) & 0xff;
        if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= (uint64_t)byte << (8 * k);
    }
    return out;
}

static uint64_t insert_bits(uint64_t a, uint64_t b, uint64_t at, uint64_t n)
{
    at &= 0xff, n &= 0xff;
    uint64_t mask = at > 31 ? 0 : (n > 31 ? UINT32_MAX : (1ull << n) - 1) << at;
    return (b & ~mask) | (at > 31 ? 0 : a << at & mask);
}

static bool compare(const ptx_instruction *i, uint64_t a, uint64_t b)
{
    int bytes = i->bytes;
    bool is_less = a < b, is_equal = a == b, is_nan = false;
    if (i->type == PTX_F32) {
        is_less = f32(a) < f32(b), is_equal = f32(a) == f32(b);
        is_nan = isnan(f32(a)) || isnan(f32(b));
    } else if (is_signed(i->type)) {
        is_less = from_sign(a, bytes) < from_sign(b, bytes);
    }
    bool is_more = !is_less && !is_equal && !is_nan;
    switch (i->detail) {
    case PTX_EQ:
        return is_equal;
    case PTX_NE:
        return !is_equal;
    case PTX_LT:
        return is_less;
    case PTX_LE:
        return is_less || is_equal;
    case PTX_GT:
        return is_more;
    case PTX_GE:
        return is_more || is_equal;
    case PTX_LTU:
        return is_less || is_nan;
    default: /* PTX_GTU */
        return is_more || is_nan;
    }
}

static uint64_t convert(const ptx_instruction *i, uint64_t a)
{
    int bytes = i->bytes;
    if (i->from == PTX_F16) return of_f32(bl_f16_to_f32((uint16_t)a));
    if (i->from == PTX_F32) return of_f64((double)f32(a));
    if (i->from == PTX_F64) return of_f32((float)f64(a));
    if (is_signed(i->from)) a = (uint64_t)from_sign(a, bytes);
    if (i->type == PTX_F32) return of_f32((float)(int64_t)a);
    if (i->type == PTX_F64) return of_f64((double)(int64_t)a);
    return a;
}

/* Two E4M3 as two F16, which hold them exactly. */
static uint64_t from_e4m3(uint64_t pair)
{
    uint64_t out = 0;
    for (int k = 0; k < 2; k++)
        out |= (uint64_t)bl_f32_to_f16(bl_e4m3_to_f32((uint8_t)(pair >> (8 * k)))) << (16 * k);
    return out;
}

static uint64_t exp2_approximate(uint64_t a)
{
    float y = exp2f(f32(a));
    return of_f32(y < 0x1p-126f ? 0.0f : y);
}

/* mov between a register and the pair or the pieces in braces, low first. */
static void move(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    int bits = 8 * i->bytes / i->n_vector, n = i->n_vector;
    uint64_t whole = 0;
    if (i->is_unpacked) {
        whole = ptx_get(c, t, i->operands[n]);
        for (int k = 0; k < n; k++)
            t->registers[i->operands[k]] = low_bytes(whole >> (bits * k), bits / 8);
        return;
    }
    for (int k = 0; k < n; k++)
        whole |= low_bytes(ptx_get(c, t, i->operands[1 + k]), bits / 8) << (bits % 64 * k);
    t->registers[i->operands[0]] = whole;
}

static uint64_t handle_bits(const ptx_instruction *i, uint64_t a, uint64_t b)
{
    switch (i->op) {
    case PTX_NEG:
        return a ^ 0x80000000u;
    case PTX_COPYSIGN:
        return (a & 0x80000000u) | (b & 0x7fffffffu);
    case PTX_AND:
        return a & b;
    case PTX_OR:
        return a | b;
    case PTX_XOR:
        return a ^ b;
    default: /* PTX_NOT */
        return i->type == PTX_PRED ? a ^ 1 : ~a;
    }
}

static uint64_t evaluate(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    uint64_t a = low_bytes(ptx_get(c, t, i->operands[1]), i->bytes),
             raw_b = ptx_get(c, t, i->operands[2]), b = low_bytes(raw_b, i->bytes),
             d = ptx_get(c, t, i->operands[3]);
    if (i->op <= PTX_MAD_LAST) return add_or_multiply(i, a, b, d);
    if (i->op >= PTX_BITS_FIRST && i->op <= PTX_BITS_LAST) return handle_bits(i, a, b);
    switch (i->op) {
    case PTX_DIV:
    case PTX_REM:
        return divide(i, a, b);
    case PTX_RCP:
        return i->type == PTX_F32 ? of_f32(1.0f / f32(a)) : of_f64(1.0 / f64(a));
    case PTX_SQRT:
        return of_f64(sqrt(f64(a)));
    case PTX_EX2:
        return exp2_approximate(a);
    case PTX_MIN:
    case PTX_MAX:
        return least_or_most(i, a, b);
    case PTX_SHL:
    case PTX_SHR:
        return shift(i, a, raw_b);
    case PTX_BFI:
        return insert_bits(a, b, d, ptx_get(c, t, i->operands[4]));
    case PTX_PRMT:
        return permute(a, b, d);
    case PTX_SETP:
        return compare(i, a, b);
    case PTX_SELP:
        return d & 1 ? a : b;
    case PTX_CVT:
        return convert(i, a);
    case PTX_CVT_BF16X2: /* the first operand is the high half */
        return (uint64_t)bl_f32_to_bf16(f32(a)) << 16 | bl_f32_to_bf16(f32(b));
    case PTX_CVT_E4M3X2:
        return (uint64_t)bl_f32_to_e4m3(f32(a)) << 8 | bl_f32_to_e4m3(f32(b));
    case PTX_CVT_FROM_E4M3X2:
        return from_e4m3(a);
    case PTX_CVTA_SHARED:
        return ptx_generic_shared(t->id / c->grid->n_threads, a);
    case PTX_MAPA:
        return ptx_map_shared(c, t, a, b, i->line);
    default: /* PTX_MOV */
        return a;
    }
}

static void load(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    int each = i->bytes, n = i->n_vector;
    unsigned char raw[32];
    uint64_t address = ptx_get(c, t, i->operands[n]) + (uint64_t)(int64_t)i->offset;
    if (i->detail == PTX_PARAM)
        memcpy(raw, c->grid->parameters + address, (size_t)(each * n));
    else
        ptx_load(c, t, (ptx_space)i->detail, address, each * n, i->line, raw);
    for (int k = 0; k < n; k++) {
        uint64_t value = 0;
        memcpy(&value, raw + k * each, (size_t)each);
        t->registers[i->operands[k]] =
            is_signed(i->type) ? (uint64_t)from_sign(value, each) : value;
    }
}

static void store(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    int each = i->bytes;
    unsigned char raw[32];
    for (int k = 0; k < i->n_vector; k++) {
        uint64_t value = ptx_get(c, t, i->operands[1 + k]);
        memcpy(raw + k * each, &value, (size_t)each);
    }
    ptx_store(c, t, (ptx_space)i->detail,
              ptx_get(c, t, i->operands[0]) + (uint64_t)(int64_t)i->offset, each * i->n_vector,
              i->line, raw);
}

/* Instructions without a result in a register of this thread alone. False: it waits or ends. */
static bool act(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i)
{
    switch (i->op) {
    case PTX_LD:
        load(c, t, i);
        return true;
    case PTX_ST:
        store(c, t, i);
        return true;
    case PTX_BRA:
        t->at = i->target;
        return true;
    case PTX_COPY:
        ptx_copy_begin(c, t, i);
        return true;
    case PTX_COPY_COMMIT:
        t->group++;
        return true;
    case PTX_COPY_WAIT:
        ptx_copy_wait(c, t, (int)ptx_get(c, t, i->operands[0]));
        return true;
    case PTX_CLUSTER_ARRIVE:
        t->has_arrived = true;
        return true;
    case PTX_CLUSTER_WAIT:
        if (!t->has_arrived) ptx_fault(c, t, i->line, "waits for a cluster it did not arrive at");
        t->state = PTX_AT_CLUSTER;
        return false;
    case PTX_RET:
        if (t->n_copies > 0) ptx_fault(c, t, i->line, "ends while its copies are in flight");
        t->state = PTX_ENDED;
        return false;
    case PTX_BAR:
        t->state = PTX_AT_BLOCK;
        return false;
    default: /* of a warp; the instruction is not done */
        t->at--;
        t->state = PTX_AT_WARP;
        return false;
    }
}

void ptx_advance(ptx_cluster *c, ptx_thread *t)
{
    for (;;) {
        const ptx_instruction *i = &c->kernel->instructions[t->at++];
        if (i->predicate >= 0 && (t->registers[i->predicate] & 1) == i->is_negated) continue;
        if (i->op >= PTX_LD) {
            if (!act(c, t, i)) return;
        } else if (i->op == PTX_MOV && i->n_vector > 1) {
            move(c, t, i);
        } else {
            t->registers[i->operands[0]] = evaluate(c, t, i);
        }
    }
}
