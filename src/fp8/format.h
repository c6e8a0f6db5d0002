/* SPDX-License-Identifier: Apache-2.0 */
/* format.h -- the formats of a frozen matrix, each with its descriptor: what all code except the
 * codecs needs to know of it.
 *
 * A matrix is row-major, rows x cols. Each weight has a code of `bits`; a row's codes are packed,
 * and each row begins at a byte. The weights of a group share a scale and, if the format has them,
 * a zero point. Groups are counted from row 0 and column 0; those at the edges are cut. Scales are
 * row-major, a row of them per row of groups. */
#ifndef BALLAST_FP8_FORMAT_H
#define BALLAST_FP8_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a frozen matrix is stored. */
typedef enum bl_format {
    BL_FORMAT_FP8_ROW,
    BL_FORMAT_FP8_BLOCK,
    BL_FORMAT_F32,
    BL_FORMAT_F16,
    BL_FORMAT_BF16,
    BL_FORMAT_MXFP4,
    BL_FORMAT_INT4_G32,
    BL_FORMAT_INT4_G128,
    BL_FORMAT_NF4,
    BL_FORMAT_NVFP4,
    BL_FORMAT_COUNT
} bl_format;

/* The formats that weights are quantized to, in the enum's order. */
#define BL_FORMATS_MADE "fp8_row|fp8_block|mxfp4|int4_g32|int4_g128|nf4"

/* Rows and columns of a block of fp8_block. */
enum { BL_FP8_BLOCK = 128 };

/* The order of a row's codes. */
typedef enum bl_code_layout {
    BL_CODES_WHOLE,     /* each has whole bytes, little-endian */
    BL_CODES_LOW_FIRST, /* several share a byte, the first has its lowest bits */
    BL_CODES_HIGH_FIRST /* several share a byte, the first has its highest bits */
} bl_code_layout;

/* Where ranks that share a matrix keep its scales. */
typedef enum bl_scale_home {
    BL_SCALES_NONE,  /* there are none: a code is the value */
    BL_SCALES_WHOLE, /* all of them on every rank, in device memory */
    BL_SCALES_PAGED  /* each rank those of its rows: stored, loaded and gathered with the codes */
} bl_scale_home;

typedef struct bl_format_descriptor {
    const char *name;      /* "fp8_row" */
    int bits;              /* of a code */
    bl_dtype dtype;        /* of codes of whole bytes; of packed ones BL_U8 */
    bl_code_layout layout; /* of a row's codes */
    /* A group is group_rows x group_cols weights; group_cols 0: whole rows. No scales: 1 x 1. */
    int64_t group_rows, group_cols;
    bl_scale_home home;
    bl_dtype scale_dtype;
    int zero_point_bits; /* of a group's zero point; 0: none */
    bool has_divisor;    /* a row's scales are divided by an fp32 number, stored after them */
    const float *values; /* of 4-bit codes: [16]; NULL: codes of whole bytes */
} bl_format_descriptor;

/* Sizes of a matrix, in bytes except the two of groups. */
typedef struct bl_format_bytes {
    int64_t row;                    /* a row's codes, rounded up to a byte */
    int64_t scale_rows, scale_cols; /* groups down and across; 0 without scales */
    int64_t scale_row; /* a row of scales, followed by its zero points and by its divisor */
    size_t codes;      /* rows * row */
    size_t scales;     /* scale_rows * scale_row */
} bl_format_bytes;

/* The one place that counts bytes. False: rows or cols are negative, or a size is more than an
 * int64_t can count. */
BL_API bool bl_format_measure(const bl_format_descriptor *format, int64_t rows, int64_t cols,
                              bl_format_bytes *out);

BL_API const bl_format_descriptor *bl_format_describe(bl_format format); /* static memory */

/* Shortcuts to the descriptor and sizes of one of the formats: */

BL_API const char *bl_format_name(bl_format format);           /* "fp8_row" */
BL_API bool bl_format_parse(const char *name, bl_format *out); /* false: unknown name */
/* The format with name `index` of a list such as BL_FORMATS_MADE; BL_FORMAT_COUNT: the name is not
 * a format's. */
BL_API bl_format bl_format_in(const char *names, int index);
/* The format without scales whose values have `dtype`; false: there is none. */
BL_API bool bl_format_from_dtype(bl_dtype dtype, bl_format *out);
BL_API bool bl_format_has_scales(bl_format format);
BL_API bool bl_format_is_packed(bl_format format); /* 4-bit codes */
/* A row's codes. `cols` is few enough to count them. */
BL_API int64_t bl_format_row_bytes(bl_format format, int64_t cols);
/* The index in the matrix's scales of the first one of the row of groups that has `row`; 0 without
 * scales. Of formats whose scales are fp32. */
BL_API int64_t bl_format_scale_index(bl_format format, int64_t row, int64_t cols);
/* Bytes of the codes of a rows x cols matrix, and the number of its scales. False: as
 * bl_format_measure. */
BL_API bool bl_format_sizes(bl_format format, int64_t rows, int64_t cols, size_t *codes_bytes,
                            size_t *n_scales);

#ifdef __cplusplus
}
#endif

#endif
