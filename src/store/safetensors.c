/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.c -- header parsing that trusts nothing (sizes, overlaps, names), reads at offsets,
 * and a writer that commits by rename. */
#include "store/safetensors.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_kind.h"
#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "store/problems_internal.h"

enum { LENGTH_BYTES = 8, SNIFF_BYTES = BL_FILE_KIND_BYTES, CONVERT_BYTES = 1 << 16 };

static const char METADATA_KEY[] = "__metadata__";

struct bl_safetensors {
    char *path;
    json_t *header; /* owns the names */
    bl_stored_tensor *tensors;
    const bl_stored_tensor **by_name;
    size_t n_tensors;
    int fd;
};

char *bl_shape_text(int n_dims, const int64_t *shape, char text[BL_SHAPE_TEXT_BYTES])
{
    size_t length = 0;

    text[length++] = '[';
    for (int i = 0; i < n_dims; i++)
        length += (size_t)snprintf(text + length, BL_SHAPE_TEXT_BYTES - length, "%s%" PRId64,
                                   i ? ", " : "", shape[i]);
    snprintf(text + length, BL_SHAPE_TEXT_BYTES - length, "]");
    return text;
}

static_assert(BL_SHAPE_TEXT_BYTES > BL_TENSOR_MAX_DIMS * (20 + 2) + 3, "eight int64 fit");

static uint64_t load_u64_le(const void *bytes)
{
    const unsigned char *b = bytes;
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | b[i];
    return value;
}

/* The length of the JSON header, checked against the file. */
static bl_status read_header_length(int fd, const char *path, int64_t file_bytes,
                                    int64_t *header_bytes)
{
    char start[SNIFF_BYTES + 1] = "";

    size_t n_start = (size_t)bl_min_i64(SNIFF_BYTES, file_bytes);
    BL_TRY(bl_file_read_full(fd, path, start, n_start, 0));
    if (start[LENGTH_BYTES] != '{') /* any length may precede a header */
        BL_TRY(bl_file_kind_refuse(path, start, n_start, "a safetensors file"));
    if (file_bytes < LENGTH_BYTES)
        return BL_FAIL(BL_EINPUT, "%s: %" PRId64 " bytes, too short for a safetensors file", path,
                       file_bytes);
    uint64_t length = load_u64_le(start);
    if (length > BL_SAFETENSORS_MAX_HEADER_BYTES)
        return BL_FAIL(BL_EINPUT,
                       "%s: header length %" PRIu64
                       " is more than %d bytes: not a safetensors file",
                       path, length, BL_SAFETENSORS_MAX_HEADER_BYTES);
    if ((int64_t)length > file_bytes - LENGTH_BYTES)
        return BL_FAIL(BL_EINPUT,
                       "%s: header of %" PRIu64 " bytes is cut short: the file has %" PRId64
                       " bytes",
                       path, length, file_bytes);
    *header_bytes = (int64_t)length;
    return BL_OK;
}

static bl_status load_header(bl_safetensors *file, int64_t header_bytes)
{
    bl_status st = BL_OK;
    char *text = NULL, *where = NULL;

    if (!(text = malloc((size_t)header_bytes + 1)))
        return BL_FAIL(BL_ENOMEM, "%s: a header of %" PRId64 " bytes", file->path, header_bytes);
    BL_TRY_GOTO(st, done, bl_text_format(&where, "%s: header", file->path));
    BL_TRY_GOTO(st, done,
                bl_file_read_full(file->fd, file->path, text, (size_t)header_bytes, LENGTH_BYTES));
    BL_TRY_GOTO(st, done, bl_json_parse(where, 1, text, (size_t)header_bytes, &file->header));
    BL_TRY_GOTO(st, done, bl_json_check_object(where, file->header));
done:
    free(where);
    free(text);
    return st;
}

static bl_status check_metadata(const bl_safetensors *file)
{
    json_t *metadata = json_object_get(file->header, METADATA_KEY);
    const char *key;
    json_t *value;

    if (!metadata || json_is_null(metadata)) return BL_OK;
    if (!json_is_object(metadata))
        return bl_json_fail(file->path, METADATA_KEY, "an object of strings", metadata);
    json_object_foreach(metadata, key, value) if (!json_is_string(value)) return bl_json_fail(
        file->path, METADATA_KEY, "an object of strings", value);
    return BL_OK;
}

static bl_status fail_tensor(const bl_safetensors *file, const bl_stored_tensor *tensor,
                             const char *reason)
{
    return BL_FAIL(BL_EINPUT, "%s: tensor %s: %s", file->path, tensor->name, reason);
}

static bl_status fail_value(const bl_safetensors *file, const bl_stored_tensor *tensor,
                            const char *key, const char *expected, const json_t *value)
{
    char *where = NULL;

    BL_TRY(bl_text_format(&where, "%s: tensor %s", file->path, tensor->name));
    bl_status st = bl_json_fail(where, key, expected, value);
    free(where);
    return st;
}

static bl_status parse_shape(const bl_safetensors *file, bl_stored_tensor *tensor,
                             const json_t *shape)
{
    if (!json_is_array(shape)) return fail_tensor(file, tensor, "shape is not an array");
    if (json_array_size(shape) > BL_TENSOR_MAX_DIMS)
        return fail_tensor(file, tensor, "more than 8 dimensions");
    tensor->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < tensor->n_dims; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return fail_value(file, tensor, "shape", "sizes", size);
        tensor->shape[i] = json_integer_value(size);
    }
    return BL_OK;
}

/* Fills in everything but the order and the tiling, which need all tensors. offset_bytes is the
 * stored begin here. */
static bl_status parse_tensor(const bl_safetensors *file, const char *name, const json_t *entry,
                              bl_stored_tensor *tensor)
{
    tensor->name = name;
    tensor->file = file;
    if (bl_has_controls(name))
        return BL_FAIL(BL_EINPUT, "%s: a tensor name has a control character", file->path);
    if (!json_is_object(entry)) return fail_tensor(file, tensor, "is not an object");
    const json_t *type = json_object_get(entry, "dtype");
    const char *dtype = bl_json_text(type);
    if (!json_is_string(type)) return fail_tensor(file, tensor, "has no dtype");
    if (!dtype) return fail_value(file, tensor, "dtype", "a string without NUL", type);
    if (!bl_dtype_parse(dtype, &tensor->dtype))
        return BL_FAIL(BL_EINPUT, "%s: tensor %s: unknown dtype %.32s", file->path, name, dtype);
    BL_TRY(parse_shape(file, tensor, json_object_get(entry, "shape")));
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < 0)
        return fail_value(file, tensor, "data_offsets", "[begin, end]", offsets);
    tensor->offset_bytes = json_integer_value(begin);
    if (json_integer_value(end) < tensor->offset_bytes)
        return fail_tensor(file, tensor, "ends before it begins");
    tensor->n_bytes = json_integer_value(end) - tensor->offset_bytes;
    return BL_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const bl_stored_tensor *x = a, *y = b;
    if (x->offset_bytes != y->offset_bytes) return x->offset_bytes < y->offset_bytes ? -1 : 1;
    if (x->n_bytes != y->n_bytes) return x->n_bytes < y->n_bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare_tensor_names(const void *a, const void *b)
{
    return strcmp((*(const bl_stored_tensor *const *)a)->name,
                  (*(const bl_stored_tensor *const *)b)->name);
}

/* Bytes of a tensor of this shape; false for a negative size or when the product overflows. */
static bool shape_bytes(bl_dtype dtype, int n_dims, const int64_t *shape, int64_t *n_bytes)
{
    *n_bytes = 1;
    for (int i = 0; i < n_dims; i++)
        if (shape[i] < 0 || bl_mul_i64_overflows(*n_bytes, shape[i], n_bytes)) return false;
    return !bl_mul_i64_overflows(*n_bytes, (int64_t)bl_dtype_bytes(dtype), n_bytes);
}

/* The tensors in data order must tile the data without holes or overlaps, each with the bytes of
 * its shape. */
static bl_status check_tiling(bl_safetensors *file, int64_t data_start, int64_t file_bytes)
{
    int64_t expected = 0, n_bytes;
    char shape[BL_SHAPE_TEXT_BYTES];

    for (size_t i = 0; i < file->n_tensors; i++) {
        bl_stored_tensor *tensor = &file->tensors[i];
        if (tensor->offset_bytes != expected)
            return BL_FAIL(BL_EINPUT,
                           "%s: tensor %s: begins at data byte %" PRId64
                           ", the one before ends at %" PRId64 " (%s)",
                           file->path, tensor->name, tensor->offset_bytes, expected,
                           tensor->offset_bytes < expected ? "overlap" : "hole");
        if (!shape_bytes(tensor->dtype, tensor->n_dims, tensor->shape, &n_bytes))
            return BL_FAIL(BL_EINPUT, "%s: tensor %s: shape %s overflows", file->path, tensor->name,
                           bl_shape_text(tensor->n_dims, tensor->shape, shape));
        if (n_bytes != tensor->n_bytes)
            return BL_FAIL(
                BL_EINPUT, "%s: tensor %s: %s %s is %" PRId64 " bytes, data_offsets say %" PRId64,
                file->path, tensor->name, bl_dtype_name(tensor->dtype),
                bl_shape_text(tensor->n_dims, tensor->shape, shape), n_bytes, tensor->n_bytes);
        expected += n_bytes;
    }
    if (expected != file_bytes - data_start)
        return BL_FAIL(
            BL_EINPUT,
            "%s: the tensors take %" PRId64 " bytes, the file has %" PRId64 " for them (%s)",
            file->path, expected, file_bytes - data_start,
            expected > file_bytes - data_start ? "truncated" : "bytes after the last tensor");
    for (size_t i = 0; i < file->n_tensors; i++) file->tensors[i].offset_bytes += data_start;
    return BL_OK;
}

static bl_status index_tensors(bl_safetensors *file, int64_t data_start, int64_t file_bytes)
{
    const char *name;
    json_t *entry;
    size_t n_entries = json_object_size(file->header);

    BL_TRY(check_metadata(file));
    file->tensors = calloc(n_entries + 1, sizeof *file->tensors);
    file->by_name = calloc(n_entries + 1, sizeof *file->by_name);
    if (!file->tensors || !file->by_name)
        return BL_FAIL(BL_ENOMEM, "%s: %zu tensors", file->path, n_entries);
    json_object_foreach(file->header, name, entry) if (strcmp(name, METADATA_KEY) != 0)
        BL_TRY(parse_tensor(file, name, entry, &file->tensors[file->n_tensors++]));
    qsort(file->tensors, file->n_tensors, sizeof *file->tensors, compare_offsets);
    BL_TRY(check_tiling(file, data_start, file_bytes));
    for (size_t i = 0; i < file->n_tensors; i++) file->by_name[i] = &file->tensors[i];
    qsort(file->by_name, file->n_tensors, sizeof(bl_stored_tensor *), compare_tensor_names);
    return BL_OK;
}

bl_status bl_safetensors_open(const char *path, bl_safetensors **out)
{
    bl_status st = BL_OK;
    int64_t file_bytes = 0, header_bytes = 0;
    bl_safetensors *file = calloc(1, sizeof *file);

    *out = NULL;
    if (!file) return BL_FAIL(BL_ENOMEM, "%s: opening it", path);
    file->fd = -1;
    BL_TRY_GOTO(st, done, bl_text_format(&file->path, "%s", path));
    BL_TRY_GOTO(st, done, bl_file_open(path, &file->fd, &file_bytes));
    BL_TRY_GOTO(st, done, read_header_length(file->fd, path, file_bytes, &header_bytes));
    BL_TRY_GOTO(st, done, load_header(file, header_bytes));
    BL_TRY_GOTO(st, done, index_tensors(file, LENGTH_BYTES + header_bytes, file_bytes));
    *out = file;
    file = NULL;
done:
    bl_safetensors_close(file);
    return st;
}

void bl_safetensors_close(bl_safetensors *file)
{
    if (!file) return;
    if (file->fd >= 0) close(file->fd);
    json_decref(file->header);
    free(file->by_name);
    free(file->tensors);
    free(file->path);
    free(file);
}

bl_status bl_safetensors_check_same(const bl_safetensors *file, int fd)
{
    struct stat opened, other;

    if (fstat(file->fd, &opened) != 0 || fstat(fd, &other) != 0)
        return bl_fail_errno(BL_EIO, "stat %s", file->path);
    if (opened.st_dev == other.st_dev && opened.st_ino == other.st_ino) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: was replaced while the model was opened", file->path);
}

const char *bl_safetensors_path(const bl_safetensors *file)
{
    return file->path;
}

size_t bl_safetensors_count(const bl_safetensors *file)
{
    return file->n_tensors;
}

const bl_stored_tensor *bl_safetensors_at(const bl_safetensors *file, size_t index)
{
    return &file->tensors[index];
}

const bl_stored_tensor *bl_safetensors_find(const bl_safetensors *file, const char *name)
{
    const bl_stored_tensor wanted = {.name = name}, *key = &wanted;
    const bl_stored_tensor **found = bsearch(&key, file->by_name, file->n_tensors,
                                             sizeof(bl_stored_tensor *), compare_tensor_names);
    return found ? *found : NULL;
}

bl_status bl_stored_tensor_read(const bl_stored_tensor *tensor, int64_t offset_bytes,
                                size_t n_bytes, void *dst)
{
    if (offset_bytes < 0 || offset_bytes > tensor->n_bytes ||
        n_bytes > (uint64_t)(tensor->n_bytes - offset_bytes))
        return BL_FAIL(BL_EINTERNAL, "tensor %s: %zu bytes at %" PRId64 " of %" PRId64,
                       tensor->name, n_bytes, offset_bytes, tensor->n_bytes);
    bl_status st = bl_file_read_full(tensor->file->fd, tensor->file->path, dst, n_bytes,
                                     tensor->offset_bytes + offset_bytes);
    return st == BL_OK ? st : bl_error_prefix(st, "tensor %s", tensor->name);
}

bl_status bl_stored_tensor_read_rows(void *tensor, int64_t begin, int64_t end, void *out)
{
    const bl_stored_tensor *t = tensor;

    if (t->n_dims != 2 || begin < 0 || begin > end || end > t->shape[0])
        return BL_FAIL(BL_EINTERNAL, "tensor %s of %d dimensions: rows %" PRId64 " to %" PRId64,
                       t->name, t->n_dims, begin, end);
    int64_t row_bytes = t->shape[1] * (int64_t)bl_dtype_bytes(t->dtype);
    return bl_stored_tensor_read(t, begin * row_bytes, (size_t)((end - begin) * row_bytes), out);
}

bl_status bl_stored_tensor_read_floats(const bl_stored_tensor *tensor, int64_t begin, int64_t n,
                                       float *dst)
{
    char bytes[CONVERT_BYTES];
    int64_t element_bytes = (int64_t)bl_dtype_bytes(tensor->dtype), most = CONVERT_BYTES;

    if (element_bytes > 0) most /= element_bytes;
    for (int64_t i = 0, piece; i < n; i += piece) {
        piece = bl_min_i64(n - i, most);
        BL_TRY(bl_stored_tensor_read(tensor, (begin + i) * element_bytes,
                                     (size_t)(piece * element_bytes), bytes));
        if (!bl_dtype_to_f32(tensor->dtype, bytes, dst + i, (size_t)piece))
            return BL_FAIL(BL_EINPUT, "%s: tensor %s: %s cannot be read as float",
                           tensor->file->path, tensor->name, bl_dtype_name(tensor->dtype));
    }
    return BL_OK;
}

bl_status bl_stored_tensor_read_f32(const bl_stored_tensor *tensor, float *dst)
{
    int64_t n = 1;

    for (int i = 0; i < tensor->n_dims; i++) n *= tensor->shape[i];
    return bl_stored_tensor_read_floats(tensor, 0, n, dst);
}

/* ---- writing ---- */

struct bl_safetensors_writer {
    bl_writer *writer;
    size_t *order;
    int64_t *offsets;    /* in the file, of each spec's data */
    int64_t total_bytes; /* the finished file */
};

typedef struct ordered_spec {
    const bl_stored_tensor_spec *spec;
    size_t index;
} ordered_spec;

/* bl_dtype lists the types by width as the reference does, so that its descending order is the
 * widest first. */
static int compare_specs(const void *a, const void *b)
{
    const bl_stored_tensor_spec *x = ((const ordered_spec *)a)->spec,
                                *y = ((const ordered_spec *)b)->spec;
    if (x->dtype != y->dtype) return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Adds one tensor to the header and moves *data_bytes past it. */
static bl_status declare_tensor(const char *path, json_t *header, const bl_stored_tensor_spec *spec,
                                int64_t *data_bytes)
{
    int64_t begin = *data_bytes, n_bytes;

    if (spec->n_dims < 0 || spec->n_dims > BL_TENSOR_MAX_DIMS ||
        !shape_bytes(spec->dtype, spec->n_dims, spec->shape, &n_bytes) ||
        __builtin_add_overflow(begin, n_bytes, data_bytes))
        return BL_FAIL(BL_EINTERNAL, "%s: tensor %s: no valid shape", path, spec->name);
    if (!strcmp(spec->name, METADATA_KEY) || json_object_get(header, spec->name))
        return BL_FAIL(BL_EINTERNAL, "%s: tensor %s: declared twice", path, spec->name);
    json_t *shape = json_array();
    for (int i = 0; i < spec->n_dims; i++)
        json_array_append_new(shape, json_integer(spec->shape[i]));
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", bl_dtype_name(spec->dtype), "shape",
                              shape, "data_offsets", (json_int_t)begin, (json_int_t)*data_bytes);
    bool is_set = json_object_set_new(header, spec->name, entry) == 0;
    if (bl_json_ran_out()) return BL_FAIL(BL_ENOMEM, "%s: its header", path);
    if (!is_set) return BL_FAIL(BL_EINTERNAL, "%s: tensor %s: no valid name", path, spec->name);
    return BL_OK;
}

/* The header's JSON text in *text (the caller frees it), and the bytes of the data. */
static bl_status build_header(const char *path, const ordered_spec *specs, size_t n_specs,
                              const char *const *metadata, size_t n_metadata, char **text,
                              int64_t *data_bytes)
{
    bl_status st = BL_OK;

    *data_bytes = 0;
    bl_json_watch_memory();
    json_t *header = json_object();
    if (n_metadata) {
        json_t *pairs = json_object();
        for (size_t i = 0; i < n_metadata; i++)
            json_object_set_new(pairs, metadata[2 * i], json_string(metadata[2 * i + 1]));
        json_object_set_new(header, METADATA_KEY, pairs);
    }
    for (size_t i = 0; i < n_specs; i++)
        BL_TRY_GOTO(st, done, declare_tensor(path, header, specs[i].spec, data_bytes));
    *text = json_dumps(header, JSON_COMPACT);
    if (!*text || bl_json_ran_out()) st = BL_FAIL(BL_ENOMEM, "%s: its header", path);
done:
    json_decref(header);
    return st;
}

static bl_status write_header(bl_writer *writer, const char *text)
{
    static const char spaces[LENGTH_BYTES] = "        ";
    size_t text_bytes = strlen(text);
    size_t n_spaces = (LENGTH_BYTES - text_bytes % LENGTH_BYTES) % LENGTH_BYTES;
    unsigned char length[LENGTH_BYTES];

    for (int i = 0; i < LENGTH_BYTES; i++)
        length[i] = (unsigned char)((text_bytes + n_spaces) >> (8 * i));
    BL_TRY(bl_writer_append(writer, length, sizeof length));
    BL_TRY(bl_writer_append(writer, text, text_bytes));
    return bl_writer_append(writer, spaces, n_spaces);
}

bl_status bl_safetensors_create(const char *path, const bl_stored_tensor_spec *specs,
                                size_t n_specs, const char *const *metadata, size_t n_metadata,
                                bl_safetensors_writer **out)
{
    bl_status st = BL_OK;
    int64_t data_bytes;
    char *text = NULL;
    ordered_spec *ordered = calloc(n_specs + 1, sizeof *ordered);
    bl_safetensors_writer *writer = calloc(1, sizeof *writer);

    *out = NULL;
    if (!ordered || !writer || !(writer->order = calloc(n_specs + 1, sizeof *writer->order)) ||
        !(writer->offsets = calloc(n_specs + 1, sizeof *writer->offsets))) {
        st = BL_FAIL(BL_ENOMEM, "%s: %zu tensors", path, n_specs);
        goto done;
    }
    for (size_t i = 0; i < n_specs; i++) ordered[i] = (ordered_spec){&specs[i], i};
    qsort(ordered, n_specs, sizeof *ordered, compare_specs);
    for (size_t i = 0; i < n_specs; i++) writer->order[i] = ordered[i].index;
    BL_TRY_GOTO(st, done,
                build_header(path, ordered, n_specs, metadata, n_metadata, &text, &data_bytes));
    BL_TRY_GOTO(st, done, bl_writer_open(path, &writer->writer));
    BL_TRY_GOTO(st, done, write_header(writer->writer, text));
    writer->total_bytes = bl_writer_bytes(writer->writer) + data_bytes;
    int64_t at = bl_writer_bytes(writer->writer), n_bytes;
    for (size_t i = 0; i < n_specs; i++) { /* none overflows: build_header has seen them all */
        writer->offsets[ordered[i].index] = at;
        if (shape_bytes(ordered[i].spec->dtype, ordered[i].spec->n_dims, ordered[i].spec->shape,
                        &n_bytes))
            at += n_bytes;
    }
    *out = writer;
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    free(ordered);
    free(text);
    return st;
}

const size_t *bl_safetensors_writer_order(const bl_safetensors_writer *writer)
{
    return writer->order;
}

bl_status bl_safetensors_writer_append(bl_safetensors_writer *writer, const void *bytes,
                                       size_t n_bytes)
{
    return bl_writer_append(writer->writer, bytes, n_bytes);
}

bl_status bl_safetensors_writer_put(bl_safetensors_writer *writer, size_t index,
                                    int64_t offset_bytes, const void *bytes, size_t n_bytes)
{
    return bl_writer_put(writer->writer, writer->offsets[index] + offset_bytes, bytes, n_bytes);
}

bl_status bl_safetensors_writer_commit(bl_safetensors_writer *writer)
{
    bl_status st;
    int64_t n_bytes = bl_writer_bytes(writer->writer);

    if (n_bytes == writer->total_bytes) {
        st = bl_writer_commit(writer->writer);
        writer->writer = NULL;
    } else {
        st = BL_FAIL(BL_EINTERNAL,
                     "safetensors writer: %" PRId64 " bytes, %" PRId64 " were declared", n_bytes,
                     writer->total_bytes);
    }
    bl_safetensors_writer_abort(writer);
    return st;
}

void bl_safetensors_writer_abort(bl_safetensors_writer *writer)
{
    if (!writer) return;
    bl_writer_abort(writer->writer);
    free(writer->order);
    free(writer->offsets);
    free(writer);
}
