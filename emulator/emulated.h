/* SPDX-License-Identifier: Apache-2.0 */
/* emulated.h -- functions with which a test controls and inspects the emulated GPU: builds with
 * BALLAST_CUDA_EMULATED only. */
#ifndef BALLAST_TESTS_EMULATE_EMULATED_H
#define BALLAST_TESTS_EMULATE_EMULATED_H

#include <stdbool.h>
#include <stddef.h>

/* ---- the runtime ---- */

void emulated_cuda_break(void); /* from now on every call fails, and no host function runs */
void emulated_cuda_mend(void);
void emulated_cuda_set_machine(int driver_version, int n_devices);
/* Whether BALLAST_EMULATED_GPUS allows so many; if not, prints the reason to skip. */
bool emulated_cuda_have_devices(int n);
int emulated_cuda_registrations(void); /* of host memory, alive */
/* Peak of registered host memory in bytes since the last call. */
size_t emulated_cuda_registered_peak(void);
/* Said in a stream's order: what was queued before took so much longer. */
void emulated_cuda_pretend_ms(int ms);

/* ---- cuBLASLt ---- */

void emulated_cublaslt_refuse_fp8(bool refuse);
/* Products with beta != 0 in FP8 are offered, and refused when they are called. */
void emulated_cublaslt_refuse_fp8_sums(bool refuse);
/* FP8 calls return this cublasStatus_t, whatever beta is; 0: they compute. */
void emulated_cublaslt_refuse_fp8_calls(int status);
/* FP8 products are served or not by chance, as the seed, mode of scaling, beta != 0 and columns
 * modulo 16 have it: two fifths are refused when they are searched for, or when they are called,
 * with one of the statuses that a refusal may have. 0: all are served. */
void emulated_cublaslt_refuse_at_random(unsigned seed);
/* So are those of candidates below n, of any type. */
void emulated_cublaslt_refuse_candidates(int n);
void emulated_cublaslt_fail_heuristics(int n); /* the next n searches for algorithms fail */
int emulated_cublaslt_heuristics(void);        /* searches for algorithms, so far */
int emulated_cublaslt_products(void);          /* so far */
int emulated_cublaslt_fp8_products(void);      /* of those, in FP8 */
int emulated_cublaslt_split_products(void);    /* in bf16, with sums in parts */
int emulated_cublaslt_fast_sums(void);         /* with fast sums */
int emulated_cublaslt_multiprocessors(void);   /* that the last product was for; 0: all */
void emulated_cublaslt_slow_first(bool slow);  /* the first of three candidates pretends to be */
int emulated_cublaslt_last_candidate(void);
/* From now on the toolkit's own library makes every descriptor, layout and preference too, and ends
 * the test when it rejects one; this needs no GPU. False where the library is missing. */
bool emulated_cublaslt_ask_real(void);

/* ---- host memory ---- */

/* Registrations of more bytes fail, as where a container limits its memory; SIZE_MAX: none. */
void emulated_limit_registrations(size_t bytes);

/* ---- NCCL ---- */

/* A communicator that lives: whether a thread is in a call on it, and whether a launch has not
 * ended. A launch is several short calls. */
struct ncclComm;
bool emulated_nccl_is_in_call(struct ncclComm *comm);
bool emulated_nccl_has_work(struct ncclComm *comm);

/* ---- kernels ---- */

/* Of the bytes in the sectors that warps loaded and stored since they were forgotten, the share
 * that they asked for. No kernel may be running. */
void emulated_forget_accesses(void);
double emulated_share_of_sectors(void);
/* Of checked kernels (CMake's ballast_checked_kernels), since then: how often warps went to shared
 * memory's banks, over the fewest times that accesses of their sizes take; and that of the worst
 * access. 1: no conflicts. */
double emulated_bank_passes(void);
double emulated_worst_bank_passes(void);

#endif
