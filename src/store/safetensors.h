/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.h -- reading and writing one safetensors file.
 *
 * Layout: u64 little-endian N, N bytes of JSON, data in C order (huggingface/safetensors,
 * safetensors/src/tensor.rs). The reader trusts nothing: it rejects the same files as the
 * reference, in the same order of checks, before it allocates more than the header's bytes. It
 * assumes no alignment. */
#ifndef BALLAST_STORE_SAFETENSORS_H
#define BALLAST_STORE_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of the reader: a larger file is an error, not an allocation. */
enum { BL_TENSOR_MAX_DIMS = 8, BL_SAFETENSORS_MAX_HEADER_BYTES = 100000000 };

typedef struct bl_safetensors bl_safetensors;

/* One tensor of an open file; belongs to the file and lives as long. */
typedef struct bl_stored_tensor {
    const char *name;
    bl_dtype dtype;
    int n_dims;                        /* 0 for a scalar */
    int64_t shape[BL_TENSOR_MAX_DIMS]; /* the first n_dims; zero is legal */
    int64_t n_bytes;
    int64_t offset_bytes; /* from the start of the file */
    const bl_safetensors *file;
} bl_stored_tensor;

/* Opens and checks `path`. BL_EINPUT with "path: [tensor T:] reason": not a regular file, a Git LFS
 * pointer, an HTML page, truncated, header too long or not JSON, unknown dtype, more than 8
 * dimensions, overflow, sizes that disagree, holes or overlaps, bytes after the last tensor,
 * control characters in a name. *out is closed with bl_safetensors_close. */
BL_API bl_status bl_safetensors_open(const char *path, bl_safetensors **out);
BL_API void bl_safetensors_close(bl_safetensors *file); /* NULL is fine */

/* BL_EINPUT when fd, opened by the same name, is another file: it was replaced meanwhile, and
 * offsets are not its own. */
bl_status bl_safetensors_check_same(const bl_safetensors *file, int fd);

/* The path of open; how many tensors there are; the tensors, borrowed until close. */
const char *bl_safetensors_path(const bl_safetensors *file);
BL_API size_t bl_safetensors_count(const bl_safetensors *file);
BL_API const bl_stored_tensor *
bl_safetensors_at(const bl_safetensors *file,
                  size_t index); /* index < count, in the order of the data */
BL_API const bl_stored_tensor *bl_safetensors_find(const bl_safetensors *file,
                                                   const char *name); /* NULL: no such tensor */

/* dst = bytes [offset_bytes, offset_bytes + n_bytes) of the tensor, which must be inside it
 * (BL_EINTERNAL). Any number of threads at a time. */
BL_API bl_status bl_stored_tensor_read(const bl_stored_tensor *tensor, int64_t offset_bytes,
                                       size_t n_bytes, void *dst);

/* Rows [begin, end) of a matrix, as stored, to `out` (host memory): what bl_linear_spec.read_rows
 * of linear/layer.h asks for, with the tensor (const bl_stored_tensor *) as `user`. BL_EINTERNAL:
 * no matrix, or rows outside it; else as bl_stored_tensor_read. */
BL_API bl_status bl_stored_tensor_read_rows(void *tensor, int64_t begin, int64_t end, void *out);

/* The whole tensor as float, one value an element; F32, F16, BF16 and F64 (BL_EINPUT for
 * others). */
BL_API bl_status bl_stored_tensor_read_f32(const bl_stored_tensor *tensor, float *dst);

/* Elements [begin, begin + n) of it. */
BL_API bl_status bl_stored_tensor_read_floats(const bl_stored_tensor *tensor, int64_t begin,
                                              int64_t n, float *dst);

/* "[2, 3]" into text, which is returned; for messages. */
enum { BL_SHAPE_TEXT_BYTES = 192 };
char *bl_shape_text(int n_dims, const int64_t *shape, char text[BL_SHAPE_TEXT_BYTES]);

/* ---- writing ---- */

/* A tensor of a file that is written. */
typedef struct bl_stored_tensor_spec {
    const char *name;
    bl_dtype dtype;
    int n_dims;
    int64_t shape[BL_TENSOR_MAX_DIMS];
} bl_stored_tensor_spec;

/* A file under construction; appears under its name at commit (base/files.h, bl_writer). The order
 * of the data is fixed by the format's custom: the widest dtype first, then by name. */
typedef struct bl_safetensors_writer bl_safetensors_writer;

/* Declares all tensors and writes the header. `metadata` is n_metadata key/value pairs: {"format",
 * "pt", ...}. Everything is copied. BL_EINTERNAL for an invalid spec (duplicate name,
 * overflow). */
BL_API bl_status bl_safetensors_create(const char *path, const bl_stored_tensor_spec *specs,
                                       size_t n_specs, const char *const *metadata,
                                       size_t n_metadata, bl_safetensors_writer **out);
/* order[i] is the index into `specs` of the i-th tensor of the file; n_specs entries, the
 * writer's. */
BL_API const size_t *bl_safetensors_writer_order(const bl_safetensors_writer *writer);
/* Appends data: all tensors' bytes in that order, in pieces of any size. */
BL_API bl_status bl_safetensors_writer_append(bl_safetensors_writer *writer, const void *bytes,
                                              size_t n_bytes);
/* Or, instead of appending: bytes from offset_bytes on of tensor specs[index], in any order, each
 * byte once. */
bl_status bl_safetensors_writer_put(bl_safetensors_writer *writer, size_t index,
                                    int64_t offset_bytes, const void *bytes, size_t n_bytes);
/* Makes the file durable. BL_EINTERNAL when not exactly the declared bytes were written. Frees the
 * writer in any case. */
BL_API bl_status bl_safetensors_writer_commit(bl_safetensors_writer *writer);
BL_API void bl_safetensors_writer_abort(bl_safetensors_writer *writer); /* NULL is fine */

#ifdef __cplusplus
}
#endif

#endif
