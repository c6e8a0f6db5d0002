/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "shfl.sync"). A
 * product's sums are those of emulator/ops/cuda/mma.cuh: fp32, in the order of the columns of A,
 * each rounded. */
#include <string.h>

#include "ptx.h"

enum { ALL = 0xffffffff };

static void demand_all(const ptx_cluster *c, const ptx_thread *t, int operand, int line)
{
    if ((uint32_t)ptx_get(c, t, operand) != (uint32_t)ALL)
        ptx_fault(c, t, line, "some lanes of a warp alone are not supported");
}

static void shuffle(ptx_cluster *c, ptx_thread *warp, const ptx_instruction *i)
{
    uint64_t before[PTX_WARP];
    for (int lane = 0; lane < PTX_WARP; lane++) {
        demand_all(c, warp + lane, i->operands[5], i->line);
        before[lane] = ptx_get(c, warp + lane, i->operands[2]);
    }
    for (unsigned lane = 0; lane < PTX_WARP; lane++) {
        ptx_thread *t = warp + lane;
        unsigned clamp = (unsigned)ptx_get(c, t, i->operands[4]), segment = clamp >> 8 & 0x1f,
                 last = (lane & segment) | (clamp & 0x1f & ~segment),
                 source = lane ^ ((unsigned)ptx_get(c, t, i->operands[3]) & 0x1f);
        bool is_there = source <= last;
        t->registers[i->operands[0]] = before[is_there ? source : lane];
        t->registers[i->operands[1]] = is_there;
    }
}

/* Lane 8 m + r has the address of row r of matrix m, and reads it. */
static void load_matrices(ptx_cluster *c, ptx_thread *warp, const ptx_instruction *i)
{
    uint16_t matrices[4][8][8];
    for (int lane = 0; lane < PTX_WARP; lane++)
        ptx_load(c, warp + lane, PTX_SHARED,
                 ptx_get(c, warp + lane, i->operands[4]) + (uint64_t)(int64_t)i->offset, 16,
                 i->line, matrices[lane / 8][lane % 8]);
    for (int lane = 0; lane < PTX_WARP; lane++)
        for (int m = 0; m < 4; m++) {
            int g = lane / 4, t = lane % 4 * 2;
            const uint16_t(*of)[8] = (const uint16_t(*)[8])matrices[m];
            uint32_t low = i->detail ? of[t][g] : of[g][t],
                     high = i->detail ? of[t + 1][g] : of[g][t + 1];
            warp[lane].registers[i->operands[m]] = low | high << 16;
        }
}

static float high_half(uint64_t bits, int shift)
{
    uint32_t word = (uint32_t)bits << shift & 0xffff0000u;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Operands: 4 of D, 4 of A, 2 of B, 4 of C. */
static void multiply(ptx_cluster *c, ptx_thread *warp, const ptx_instruction *i)
{
    float a[16][16], b[16][8], sums[16][8];
    for (int lane = 0; lane < PTX_WARP; lane++) {
        int g = lane / 4, t = lane % 4 * 2;
        for (int k = 0; k < 4; k++) {
            uint64_t pair = ptx_get(c, warp + lane, i->operands[4 + k]);
            uint32_t sum = (uint32_t)ptx_get(c, warp + lane, i->operands[10 + k]);
            for (int e = 0; e < 2; e++)
                a[g + k % 2 * 8][t + k / 2 * 8 + e] = high_half(pair, e ? 0 : 16);
            memcpy(&sums[g + k / 2 * 8][t + k % 2], &sum, sizeof sum);
        }
        for (int k = 0; k < 4; k++)
            b[t + k / 2 * 8 + k % 2][g] =
                high_half(ptx_get(c, warp + lane, i->operands[8 + k / 2]), k % 2 ? 0 : 16);
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++)
                sums[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < PTX_WARP; lane++)
        for (int k = 0; k < 4; k++) {
            uint32_t sum;
            memcpy(&sum, &sums[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2], sizeof sum);
            warp[lane].registers[i->operands[k]] = sum;
        }
}

void ptx_together(ptx_cluster *c, ptx_thread *warp, const ptx_instruction *i)
{
    switch (i->op) {
    case PTX_BAR_WARP:
        demand_all(c, warp, i->operands[0], i->line);
        c->warp_synced[warp->id / PTX_WARP] = ++c->clock;
        return;
    case PTX_SHFL_BFLY:
        shuffle(c, warp, i);
        return;
    case PTX_LDMATRIX:
        load_matrices(c, warp, i);
        return;
    default: /* PTX_MMA */
        multiply(c, warp, i);
    }
}
