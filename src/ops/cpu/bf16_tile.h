/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_tile.h -- products of small bf16 tiles with fp32 sums, on the calling thread: what attention
 * is made of. Internal to ops/.
 *
 * B is packed: word [p * ldb + n] has B[2p][n] in its low half and B[2p + 1][n] in its high half,
 * as vdpbf16ps takes them. Rows of words are padded with zeros to OPS_TILE_COLUMNS. */
#ifndef BALLAST_OPS_CPU_BF16_TILE_H
#define BALLAST_OPS_CPU_BF16_TILE_H

#include <stdbool.h>
#include <stdint.h>

enum { OPS_TILE_COLUMNS = 16 };

/* C (M,N) = alpha A B, or += : A (M, 2 n_pairs) bf16, B packed with ldb >= N rounded up to
 * OPS_TILE_COLUMNS, C fp32. The sum over pairs has one order, whatever M and N are. */
void ops_bf16_tile(int64_t M, int64_t N, int64_t n_pairs, float alpha, const uint16_t *A,
                   int64_t lda, const uint32_t *B, int64_t ldb, bool accumulate, float *C,
                   int64_t ldc);

/* Packs B (K,N) from its transpose x (N,K), K even. */
void ops_bf16_pack_transposed(int64_t N, int64_t K, const uint16_t *x, int64_t ldx,
                              uint32_t *packed, int64_t ld_packed);

/* Packs B (K,N) = x; an odd K is padded with a row of zeros. */
void ops_bf16_pack(int64_t K, int64_t N, const uint16_t *x, int64_t ldx, uint32_t *packed,
                   int64_t ld_packed);

#endif
