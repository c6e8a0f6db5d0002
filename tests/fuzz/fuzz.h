/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz.h -- shared by the fuzz targets: one input becomes the parts of a file set in a scratch
 * directory.
 *
 * The readers under test take paths, as a user gives them, so an input is written to files first
 * (TMPDIR, best on a tmpfs). An input of several files is one text whose parts are separated by a
 * line "%%": a mutation that copies between parts stays possible, and seeds are readable. */
#ifndef BALLAST_TESTS_FUZZ_H
#define BALLAST_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* libFuzzer's entry point, which each target defines. Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

typedef struct fuzz_input {
    const uint8_t *bytes;
    size_t n_bytes;
    bool is_over; /* the last part was taken */
} fuzz_input;

typedef struct fuzz_part {
    const uint8_t *bytes; /* NULL: the part is missing */
    size_t n_bytes;
} fuzz_part;

fuzz_part fuzz_next(fuzz_input *input); /* up to the next "\n%%\n" or the end */
uint8_t fuzz_byte(fuzz_input *input);   /* the first byte, taken off; 0 when there is none */

const char *fuzz_folder(void); /* the scratch folder; made at the first call, removed at exit */
const char *fuzz_path(const char *name); /* of a file in it; valid until the next call */
/* Replaces the file; a part that is not there removes it. */
void fuzz_write(const char *name, fuzz_part part);

/* A safetensors file from a part that is its header's JSON and one that is its data: the length in
 * front is made right, which mutations would rarely achieve, and the data is repeated up to the
 * last of data_offsets. */
void fuzz_write_safetensors(const char *name, fuzz_part header, fuzz_part data);

/* What every failure must be: a status that a bad file may lead to, and one text that says
 * something. Aborts otherwise. With FUZZ_SHOW in the environment the text is printed. */
void fuzz_check(bl_status st);

#endif
