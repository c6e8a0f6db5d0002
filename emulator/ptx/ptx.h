/* SPDX-License-Identifier: Apache-2.0 */
/* ptx.h -- an interpreter of the PTX that nvcc makes of the kernels. Internal to this directory.
 *
 * parse.c reads a module, run.c runs the threads of a grid, evaluate.c has the instructions of one
 * thread, warp.c those of a warp, memory.c checks accesses, launch.c compares the results with
 * those of the C++. An instruction that is not in parse.c's table, or a form of it that is not,
 * ends the program with its name. */
#ifndef BALLAST_EMULATOR_PTX_H
#define BALLAST_EMULATOR_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PTX_WARP = 32,
    PTX_OPERANDS = 14, /* mma.sync */
    PTX_CLUSTER_MAX = 8,
    PTX_DYNAMIC_AT = 48 << 10 /* dynamic shared memory is behind the most static that there is */
};

typedef enum ptx_type {
    PTX_U8, /* the order of parse.c's names */
    PTX_U16,
    PTX_U32,
    PTX_U64,
    PTX_S8,
    PTX_S16,
    PTX_S32,
    PTX_S64,
    PTX_B16,
    PTX_B32,
    PTX_B64,
    PTX_F16,
    PTX_F32,
    PTX_F64,
    PTX_PRED,
    PTX_NONE
} ptx_type;

typedef enum ptx_op {
    PTX_ADD,
    PTX_SUB,
    PTX_MUL,
    PTX_MUL_HIGH,
    PTX_MUL_WIDE,
    PTX_MAD,
    PTX_FMA,
    PTX_MAD_LAST = PTX_FMA,
    PTX_DIV,
    PTX_REM,
    PTX_RCP,
    PTX_SQRT,
    PTX_EX2,
    PTX_MIN,
    PTX_MAX,
    PTX_NEG,
    PTX_BITS_FIRST = PTX_NEG,
    PTX_COPYSIGN,
    PTX_AND,
    PTX_OR,
    PTX_XOR,
    PTX_NOT,
    PTX_BITS_LAST = PTX_NOT,
    PTX_SHL,
    PTX_SHR,
    PTX_BFI,
    PTX_PRMT,
    PTX_SETP,
    PTX_SELP,
    PTX_MOV,
    PTX_CVT,
    PTX_CVT_BF16X2,
    PTX_CVT_E4M3X2,
    PTX_CVT_FROM_E4M3X2,
    PTX_CVTA_SHARED,
    PTX_MAPA,
    PTX_LD,
    PTX_ST,
    PTX_BRA,
    PTX_RET,
    PTX_COPY,
    PTX_COPY_COMMIT,
    PTX_COPY_WAIT,
    PTX_CLUSTER_ARRIVE,
    PTX_CLUSTER_WAIT,
    PTX_BAR,
    PTX_WARP_FIRST, /* from here on a warp's threads meet */
    PTX_BAR_WARP = PTX_WARP_FIRST,
    PTX_SHFL_BFLY,
    PTX_LDMATRIX,
    PTX_MMA
} ptx_op;

/* Of PTX_SETP; the last two are true for NaN, too. */
typedef enum ptx_comparison {
    PTX_EQ,
    PTX_NE,
    PTX_LT,
    PTX_LE,
    PTX_GT,
    PTX_GE,
    PTX_LTU,
    PTX_GTU
} ptx_comparison;

typedef enum ptx_space { PTX_GENERIC, PTX_GLOBAL, PTX_SHARED, PTX_PARAM } ptx_space;

/* The first registers of every thread. */
enum {
    PTX_TID,
    PTX_NTID,
    PTX_CTAID,
    PTX_NCTAID,
    PTX_CLUSTER_RANK,
    PTX_CLUSTER_BLOCKS,
    PTX_SPECIALS
};

typedef struct ptx_instruction {
    uint8_t op, type, from;       /* from: of a conversion, the operand's; else as type */
    uint8_t bytes;                /* of `from`; 8 without a type */
    uint8_t detail;               /* comparison, space, or bytes, by op */
    uint8_t n_operands, n_vector; /* n_vector: of the operand in braces, else 1 */
    bool is_unpacked;             /* mov: the first operand is in braces */
    bool is_negated;              /* the predicate */
    int16_t predicate;            /* a register; -1: none */
    /* Registers, or ~k for constant k, in the order of the text, braces and brackets opened. */
    int16_t operands[PTX_OPERANDS];
    int32_t offset; /* of the address in brackets */
    int32_t target; /* of a branch: an instruction's index */
    int32_t line;
} ptx_instruction;

typedef struct ptx_parameter {
    int64_t at, bytes;
} ptx_parameter;

typedef struct ptx_kernel {
    char *name; /* mangled */
    const char *path;
    ptx_parameter *parameters;
    int n_parameters, n_registers, n_constants, n_instructions, static_bytes;
    uint64_t *constants;
    ptx_instruction *instructions;
} ptx_kernel;

typedef struct ptx_module {
    char *path;
    ptx_kernel *kernels;
    int n_kernels;
} ptx_module;

/* Ends the program with a line: fatal with the place in the text. */
_Noreturn void ptx_fail(const char *path, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- parse.c ---- */

/* The kernels of a file. They live as long as the program. */
ptx_module ptx_parse(const char *path);

/* ---- run.c ---- */

/* Memory that a kernel may access. */
typedef struct ptx_region {
    uintptr_t begin, end;
} ptx_region;

/* A grid along x. parameters: the bytes of the kernel's. */
typedef struct ptx_grid {
    unsigned n_blocks, n_threads, n_clustered;
    size_t shared_bytes; /* dynamic */
    const unsigned char *parameters;
    const ptx_region *regions;
    int n_regions;
} ptx_grid;

/* Runs all blocks, cluster after cluster. A fault ends the program with a line that has kernel,
 * block, thread and line of the text. */
void ptx_run(const ptx_kernel *kernel, const ptx_grid *grid);

/* An asynchronous copy that has not arrived. */
typedef struct ptx_copy {
    uint32_t at; /* in the block's shared memory */
    int bytes, group, line;
    unsigned char data[16];
} ptx_copy;

typedef enum ptx_state { PTX_RUNS, PTX_AT_WARP, PTX_AT_BLOCK, PTX_AT_CLUSTER, PTX_ENDED } ptx_state;

typedef struct ptx_thread {
    uint64_t *registers;
    int at; /* the next instruction */
    ptx_state state;
    unsigned id; /* in the cluster: rank * n_threads + thread */
    bool has_arrived;
    ptx_copy *copies;
    int n_copies, copies_room, group; /* group: of the next copy */
} ptx_thread;

/* Of a byte of shared memory. A stamp is the clock's time: what came before the last barrier of two
 * threads is below its time. */
typedef struct ptx_shadow {
    uint32_t written_at, read_at; /* stamps; 0: never */
    int32_t write_line, read_line;
    uint16_t writer, reader; /* thread ids; reader: the last */
    uint8_t readers;         /* who else read: 0 none, 1 of its warp, 2 of its block, 3 of others */
    bool is_in_flight;       /* a copy of the writer's */
} ptx_shadow;

/* The cluster that runs. */
typedef struct ptx_cluster {
    const ptx_kernel *kernel;
    const ptx_grid *grid;
    unsigned n_ranks, n_warps, index; /* n_warps: of a block */
    size_t shared_bytes;              /* of a block */
    unsigned char *shared;            /* n_ranks times */
    ptx_shadow *shadow;
    ptx_thread *threads;
    uint32_t clock, cluster_synced, block_synced[PTX_CLUSTER_MAX];
    uint32_t *warp_synced; /* n_ranks * n_warps */
} ptx_cluster;

_Noreturn void ptx_fault(const ptx_cluster *c, const ptx_thread *t, int line, const char *format,
                         ...) __attribute__((format(printf, 4, 5)));

static inline uint64_t ptx_get(const ptx_cluster *c, const ptx_thread *t, int operand)
{
    return operand >= 0 ? t->registers[operand] : c->kernel->constants[~operand];
}

/* ---- evaluate.c ---- */

/* Runs instructions until the thread ends, or waits at one that it does not run alone. */
void ptx_advance(ptx_cluster *c, ptx_thread *t);

/* ---- warp.c ---- */

/* The warp's threads are all at this instruction. */
void ptx_together(ptx_cluster *c, ptx_thread *warp, const ptx_instruction *i);

/* ---- memory.c ---- */

/* The address of rank's shared memory in the generic space. */
uint64_t ptx_generic_shared(unsigned rank, uint64_t offset);
uint64_t ptx_map_shared(const ptx_cluster *c, const ptx_thread *t, uint64_t address, uint64_t rank,
                        int line);

/* bytes: of the whole access, to which the address must be aligned. */
void ptx_load(ptx_cluster *c, ptx_thread *t, ptx_space space, uint64_t address, int bytes, int line,
              void *out);
void ptx_store(ptx_cluster *c, ptx_thread *t, ptx_space space, uint64_t address, int bytes,
               int line, const void *in);

/* cp.async: reads the source now; the destination has the bytes, and zeros after those that the
 * source has, when the thread has waited for the copy's group. */
void ptx_copy_begin(ptx_cluster *c, ptx_thread *t, const ptx_instruction *i);
/* Until at most n_left groups are in flight. */
void ptx_copy_wait(ptx_cluster *c, ptx_thread *t, int n_left);

#endif
