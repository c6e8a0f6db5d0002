/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.c -- the directories: rejected ones, finished files, copied files, and the order of
 * work. */
#include "convert/quantize.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "arch/config.h"
#include "convert/internal.h"
#include "model/rows.h"
#include "store/checkpoint.h"

enum { MAX_JSON_BYTES = 64 << 20, HEADER_BYTES_PER_TENSOR = 256, SPACE_SLACK_BYTES = 1 << 20 };

static const char MANIFEST[] = "ballast_quantize.json",
                  MANIFEST_TMP[] = "ballast_quantize.json.tmp", LOCK[] = ".ballast.lock",
                  CONFIG[] = "config.json", INDEX[] = "model.safetensors.index.json",
                  SINGLE[] = "model.safetensors";

typedef struct quantization {
    const bl_quantize_options *options;
    const bl_arch *arch; /* of the source */
    bl_hf_model *model;
    bl_io_files *files;
    size_t n_shards;
    bl_shard_plan *plans;
    json_t *manifest;
    bl_quantize_result *result;
    bl_dir_lock *lock; /* of the target */
} quantization;

/* A shard's name: its path's last part. */
static const char *shard_name(const quantization *q, size_t index)
{
    const char *path = bl_safetensors_path(bl_hf_file(q->model, index)),
               *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* ---- the source ---- */

static bl_status open_source(quantization *q)
{
    const char *dir = q->options->source;
    bl_model_config config;

    BL_TRY(bl_model_config_load(dir, &config));
    q->arch = config.arch;
    BL_TRY(bl_hf_open(dir, &q->model));
    BL_TRY(bl_model_config_fit_kv_heads(&config, q->model));
    for (size_t i = 0; i < bl_hf_count(q->model); i++) {
        const bl_stored_tensor *tensor = bl_hf_at(q->model, i);
        if (bl_dtype_bytes(tensor->dtype) == 1)
            return BL_FAIL(BL_EINPUT, "%s: is quantized already: tensor %s is %s", dir,
                           tensor->name, bl_dtype_name(tensor->dtype));
    }
    BL_TRY(bl_model_check_tensors(&config, q->model));
    BL_TRY(bl_model_open_io_files(q->model, true, &q->files));
    q->n_shards = bl_hf_file_count(q->model);
    q->plans = calloc(q->n_shards + 1, sizeof *q->plans);
    if (!q->plans) return BL_FAIL(BL_ENOMEM, "a plan of %zu files", q->n_shards);
    for (size_t i = 0; i < q->n_shards; i++)
        BL_TRY(
            bl_shard_plan_make(q->arch, bl_hf_file(q->model, i), q->options->format, &q->plans[i]));
    return BL_OK;
}

/* ---- the manifest: the target's source and format, and its finished shards ---- */

static bl_status save_json(const quantization *q, const char *name, const json_t *value)
{
    bl_status st;
    char *path = NULL, *text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(17));

    if (!text) return BL_FAIL(BL_ENOMEM, "%s", name);
    BL_TRY_GOTO(st, done, bl_path_join(q->options->target, name, &path));
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    free(path);
    free(text);
    return st;
}

/* Distinguishes this source from others: size and time of change of its shards. */
static bl_status describe_source(const quantization *q, json_t **out)
{
    struct stat info;
    json_t *shards = json_object();

    *out = shards;
    for (size_t i = 0; i < q->n_shards; i++) {
        const char *path = bl_safetensors_path(bl_hf_file(q->model, i));
        if (stat(path, &info) != 0) return bl_fail_errno(BL_EIO, "%s", path);
        json_object_set_new(shards, shard_name(q, i),
                            json_pack("{s:I, s:I, s:I}", "n_bytes", (json_int_t)info.st_size,
                                      "changed_s", (json_int_t)info.st_mtim.tv_sec, "changed_ns",
                                      (json_int_t)info.st_mtim.tv_nsec));
    }
    return BL_OK;
}

static bl_status compare_manifest(const quantization *q, const char *path, const json_t *source)
{
    const char *format;

    BL_TRY(bl_json_get_string(path, q->manifest, "base_format", BL_JSON_REQUIRED, &format));
    if (strcmp(format, bl_format_name(q->options->format)) != 0)
        return BL_FAIL(
            BL_EUSAGE,
            "%s: was begun with base_format %s: go on with that, or choose another folder",
            q->options->target, format);
    if (!json_equal(json_object_get(q->manifest, "source"), source))
        return BL_FAIL(BL_EUSAGE,
                       "%s: was begun from other files than those of %s: remove it to begin anew",
                       q->options->target, q->options->source);
    return json_is_object(json_object_get(q->manifest, "finished"))
               ? BL_OK
               : bl_json_fail(path, "finished", "an object", NULL);
}

/* Takes the manifest of an interrupted run, or begins one. */
static bl_status open_manifest(quantization *q)
{
    bl_status st;
    json_t *source = NULL;
    char *path = NULL;

    BL_TRY_GOTO(st, done, describe_source(q, &source));
    BL_TRY_GOTO(st, done, bl_path_join(q->options->target, MANIFEST, &path));
    if (bl_file_exists(path)) {
        BL_TRY_GOTO(st, done, bl_json_load(path, MAX_JSON_BYTES, &q->manifest));
        st = compare_manifest(q, path, source);
    } else {
        q->manifest = json_pack("{s:s, s:O, s:{}}", "base_format",
                                bl_format_name(q->options->format), "source", source, "finished");
        st = q->manifest ? save_json(q, MANIFEST, q->manifest) : BL_FAIL(BL_ENOMEM, "%s", path);
    }
done:
    json_decref(source);
    free(path);
    return st;
}

enum { HASH_CHARS = 17 };

static bl_status hash_file(const char *path, int64_t *n_bytes, char *hash)
{
    bl_checkpoint_file file;

    BL_TRY(bl_checkpoint_describe_file(path, &file));
    *n_bytes = file.n_bytes;
    snprintf(hash, HASH_CHARS, "%016" PRIx64, file.xxh3_64);
    return BL_OK;
}

static bl_status note_finished(quantization *q, size_t index, const char *path)
{
    int64_t n_bytes, n_source;
    char hash[HASH_CHARS], source[HASH_CHARS];

    BL_TRY(bl_dir_lock_check(q->lock));
    BL_TRY(hash_file(path, &n_bytes, hash));
    BL_TRY(hash_file(bl_safetensors_path(bl_hf_file(q->model, index)), &n_source, source));
    json_object_set_new(json_object_get(q->manifest, "finished"), shard_name(q, index),
                        json_pack("{s:I, s:s, s:s}", "n_bytes", (json_int_t)n_bytes, "xxh3_64",
                                  hash, "source_xxh3_64", source));
    return save_json(q, MANIFEST, q->manifest);
}

/* A finished shard was made of the bytes that its source has now: size and time of change do not
 * show all. */
static bl_status check_source(const quantization *q, size_t index)
{
    const char *path = bl_safetensors_path(bl_hf_file(q->model, index));
    const json_t *entry =
        json_object_get(json_object_get(q->manifest, "finished"), shard_name(q, index));
    const char *expected = bl_json_text(json_object_get(entry, "source_xxh3_64"));
    int64_t n_bytes;
    char hash[HASH_CHARS];

    BL_TRY(hash_file(path, &n_bytes, hash));
    if (expected && strcmp(hash, expected) == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: was begun from other bytes than those of %s: remove it to begin anew",
                   q->options->target, path);
}

/* Whether the shard is there as the manifest says. */
static bool is_finished(const quantization *q, size_t index, const char *path)
{
    const json_t *entry =
        json_object_get(json_object_get(q->manifest, "finished"), shard_name(q, index));
    const char *expected = bl_json_text(json_object_get(entry, "xxh3_64"));
    int64_t n_bytes;
    char hash[HASH_CHARS];

    if (!expected || !bl_file_exists(path)) return false;
    if (hash_file(path, &n_bytes, hash) == BL_OK &&
        n_bytes == json_integer_value(json_object_get(entry, "n_bytes")) &&
        strcmp(hash, expected) == 0)
        return true;
    bl_log_warning("%s: checksum mismatch; rewriting", path);
    return false;
}

/* ---- the target ---- */

static bl_status create_target(const char *path)
{
    bl_status st = bl_dir_create(path);
    return st == BL_EINPUT ? BL_EUSAGE : st; /* an argument, not the model */
}

/* Once the target is made, an unreadable file there is an I/O error, not bad input. */
static bl_status of_target(bl_status st)
{
    return st == BL_EINPUT ? BL_EIO : st;
}

/* `st`, or, when the target was removed or replaced meanwhile, that error. */
static bl_status target_failure(const quantization *q, bl_status st)
{
    bl_error error;

    if (st == BL_OK) return BL_OK;
    bl_error_save(&error, st);
    bl_status lost = bl_dir_lock_check(q->lock);
    return lost == BL_OK ? bl_error_restore(&error) : lost;
}

static bl_status refuse_same_folder(const quantization *q)
{
    struct stat source, target;
    const char *from = q->options->source, *to = q->options->target;

    if (stat(from, &source) != 0) return bl_fail_errno(BL_EINPUT, "%s", from);
    if (stat(to, &target) != 0) return bl_fail_errno(BL_EIO, "%s", to);
    if (source.st_dev == target.st_dev && source.st_ino == target.st_ino)
        return BL_FAIL(BL_EUSAGE, "%s and %s are one folder: a model is not quantized in place",
                       from, to);
    return BL_OK;
}

/* A directory without our manifest must be empty, except for the lock and temporary manifest of a
 * run that was killed before it had one. */
static bl_status refuse_other_content(const quantization *q)
{
    char **names;
    size_t n_names;
    const char *other = NULL;
    bool is_ours = false;

    BL_TRY(of_target(bl_dir_list(q->options->target, &names, &n_names)));
    for (size_t i = 0; i < n_names; i++) {
        is_ours = is_ours || strcmp(names[i], MANIFEST) == 0;
        if (strcmp(names[i], LOCK) != 0 && strcmp(names[i], MANIFEST_TMP) != 0) other = names[i];
    }
    bl_status st = BL_OK;
    if (other && !is_ours)
        st = BL_FAIL(BL_EUSAGE, "%s: holds %s already: choose an empty or new folder",
                     q->options->target, other);
    bl_names_free(names, n_names);
    return st;
}

/* Copied files: all except weights in any form, rewritten files, and hidden files. */
static bool is_copied(const char *name)
{
    static const char *const weights[] = {".safetensors", ".safetensors.index.json",
                                          ".bin",         ".bin.index.json",
                                          ".pth",         ".pt",
                                          ".gguf",        ".h5",
                                          ".msgpack",     ".onnx",
                                          ".tmp"};
    for (size_t i = 0; i < BL_COUNT(weights); i++)
        if (bl_text_ends_with(name, weights[i])) return false;
    return name[0] != '.' && strcmp(name, CONFIG) != 0 && strcmp(name, MANIFEST) != 0;
}

/* Files besides the weights that a finished run wrote: those that still exist may have been edited
 * since. */
static const char BESIDE[] = "beside";

static bool is_kept(const quantization *q, const char *name)
{
    bool kept = false;
    char *path = NULL;

    if (json_object_get(json_object_get(q->manifest, BESIDE), name) &&
        bl_path_join(q->options->target, name, &path) == BL_OK)
        kept = bl_file_exists(path);
    free(path);
    return kept;
}

static bl_status note_beside(const quantization *q, const char *name)
{
    json_t *beside = json_object_get(q->manifest, BESIDE);

    if (!beside) {
        beside = json_object();
        json_object_set_new(q->manifest, BESIDE, beside);
    }
    return json_object_set_new(beside, name, json_true()) == 0 ? BL_OK
                                                               : BL_FAIL(BL_ENOMEM, "%s", name);
}

static bl_status copy_file(const char *from, const char *to, int64_t n_bytes, int fd)
{
    enum { COPY_BYTES = 1 << 20 };
    bl_writer *writer = NULL;
    bl_status st;
    void *piece = malloc(COPY_BYTES);

    if (!piece) return BL_FAIL(BL_ENOMEM, "copying %s", from);
    BL_TRY_GOTO(st, done, bl_writer_open(to, &writer));
    for (int64_t at = 0; at < n_bytes; at += COPY_BYTES) {
        size_t n = (size_t)bl_min_i64(COPY_BYTES, n_bytes - at);
        BL_TRY_GOTO(st, done, bl_file_read_full(fd, from, piece, n, at));
        BL_TRY_GOTO(st, done, bl_writer_append(writer, piece, n));
    }
    st = bl_writer_commit(writer);
    writer = NULL;
done:
    bl_writer_abort(writer);
    free(piece);
    return st;
}

/* Copies the other files of the source, or, with `n_bytes`, only adds up how large they are.
 * Does not copy directories. */
static bl_status copy_others(const quantization *q, int64_t *n_bytes)
{
    char **names, *from = NULL, *to = NULL;
    size_t n_names;
    struct stat info;
    bl_status st = BL_OK;
    int fd = -1;

    BL_TRY(bl_dir_list(q->options->source, &names, &n_names));
    for (size_t i = 0; st == BL_OK && i < n_names; i++) {
        if (!is_copied(names[i]) || is_kept(q, names[i])) continue;
        BL_TRY_GOTO(st, done, bl_path_join(q->options->source, names[i], &from));
        BL_TRY_GOTO(st, done, bl_path_join(q->options->target, names[i], &to));
        bool is_file = stat(from, &info) == 0 && S_ISREG(info.st_mode);
        if (is_file && n_bytes) {
            *n_bytes += info.st_size;
        } else if (is_file) {
            int64_t size;
            st = bl_file_open(from, &fd, &size);
            if (st == BL_OK) st = copy_file(from, to, size, fd);
            if (fd >= 0) close(fd);
            fd = -1;
            if (st == BL_OK) st = note_beside(q, names[i]);
        }
        free(from);
        free(to);
        from = to = NULL;
    }
done:
    free(from);
    free(to);
    bl_names_free(names, n_names);
    return st;
}

static bl_status check_space(const quantization *q, const bool *finished)
{
    int64_t needed = SPACE_SLACK_BYTES, available;

    for (size_t i = 0; i < q->n_shards; i++)
        if (!finished[i])
            needed += q->plans[i].n_bytes + (int64_t)q->plans[i].n_specs * HEADER_BYTES_PER_TENSOR;
    BL_TRY(copy_others(q, &needed));
    BL_TRY(of_target(bl_dir_free_bytes(q->options->target, &available)));
    if (needed <= available) return BL_OK;
    return BL_FAIL(BL_ELIMIT,
                   "%s: the model needs %" PRId64 " more bytes there, %" PRId64 " are free",
                   q->options->target, needed, available);
}

/* ---- output ---- */

static bl_status write_shards(quantization *q)
{
    bl_status st = BL_OK;
    bool *finished = calloc(q->n_shards + 1, sizeof *finished);
    char *path = NULL;

    if (!finished) return BL_FAIL(BL_ENOMEM, "a list of %zu files", q->n_shards);
    q->result->n_files = (int64_t)q->n_shards;
    for (size_t i = 0; i < q->n_shards; i++) {
        BL_TRY_GOTO(st, done, bl_path_join(q->options->target, shard_name(q, i), &path));
        finished[i] = is_finished(q, i, path);
        q->result->n_kept += finished[i];
        if (finished[i]) BL_TRY_GOTO(st, done, check_source(q, i));
        free(path);
        path = NULL;
    }
    BL_TRY_GOTO(st, done, check_space(q, finished));
    for (size_t i = 0; i < q->n_shards; i++) {
        if (finished[i]) continue;
        BL_TRY_GOTO(st, done, bl_dir_lock_check(q->lock));
        BL_TRY_GOTO(st, done, bl_path_join(q->options->target, shard_name(q, i), &path));
        BL_TRY_GOTO(st, done,
                    bl_shard_quantize(q->options, q->model, q->files, &q->plans[i], path));
        BL_TRY_GOTO(st, done, note_finished(q, i, path));
        for (size_t t = 0; t < bl_safetensors_count(q->plans[i].source); t++)
            q->result->n_bytes_read += bl_safetensors_at(q->plans[i].source, t)->n_bytes;
        q->result->n_bytes_written += q->plans[i].n_bytes;
        free(path);
        path = NULL;
    }
done:
    free(path);
    free(finished);
    return st;
}

/* Only a model in several files, or in one of another name, has an index. The source's may be gone
 * by now. */
static bl_status write_index(const quantization *q)
{
    json_int_t total = 0;

    if (q->n_shards == 1 && strcmp(shard_name(q, 0), SINGLE) == 0) return BL_OK;
    json_t *map = json_object();
    for (size_t i = 0; i < q->n_shards; i++) {
        for (size_t s = 0; s < q->plans[i].n_specs; s++)
            json_object_set_new(map, q->plans[i].specs[s].name, json_string(shard_name(q, i)));
        total += q->plans[i].n_bytes;
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map);
    bl_status st = index ? save_json(q, INDEX, index) : BL_FAIL(BL_ENOMEM, "%s", INDEX);
    json_decref(index);
    return st;
}

/* As llm-compressor writes FP8_DYNAMIC and FP8_BLOCK. */
/* head: the module that stays as it is. */
static json_t *quantization_config(bl_format format, const char *head)
{
    bool is_block = format == BL_FORMAT_FP8_BLOCK;
    json_t *weights = json_pack("{s:n, s:n, s:b, s:n, s:i, s:s, s:{}, s:s, s:b, s:s}", "actorder",
                                "block_structure", "dynamic", 0, "group_size", "num_bits", 8,
                                "observer", "minmax", "observer_kwargs", "strategy",
                                is_block ? "block" : "channel", "symmetric", 1, "type", "float");
    json_t *inputs = json_pack("{s:n, s:n, s:b, s:n, s:i, s:n, s:{}, s:s, s:b, s:s}", "actorder",
                               "block_structure", "dynamic", 1, "group_size", "num_bits", 8,
                               "observer", "observer_kwargs", "strategy",
                               is_block ? "group" : "token", "symmetric", 1, "type", "float");
    if (is_block) {
        json_object_set_new(weights, "block_structure",
                            json_pack("[i, i]", BL_FP8_BLOCK, BL_FP8_BLOCK));
        json_object_set_new(inputs, "group_size", json_integer(BL_FP8_BLOCK));
    }
    return json_pack("{s:{s:{s:o, s:n, s:[s], s:o}}, s:s, s:[s], s:n, s:s, s:s}", "config_groups",
                     "group_0", "input_activations", inputs, "output_activations", "targets",
                     "Linear", "weights", weights, "format", "float-quantized", "ignore", head,
                     "kv_cache_scheme", "quant_method", "compressed-tensors", "quantization_status",
                     "compressed");
}

static bl_status write_config(const quantization *q)
{
    char *path = NULL;
    json_t *config = NULL;
    bl_status st;

    if (is_kept(q, CONFIG)) return BL_OK;
    BL_TRY(bl_path_join(q->options->source, CONFIG, &path));
    BL_TRY_GOTO(st, done, bl_json_load(path, MAX_JSON_BYTES, &config));
    json_t *added = quantization_config(q->options->format, q->arch->head);
    if (!added || json_object_set_new(config, "quantization_config", added) != 0)
        st = BL_FAIL(BL_ENOMEM, "%s", path);
    else
        st = save_json(q, CONFIG, config);
    if (st == BL_OK) st = note_beside(q, CONFIG);
done:
    json_decref(config);
    free(path);
    return st;
}

static bl_status quantize(quantization *q)
{
    BL_TRY(open_manifest(q));
    BL_TRY(write_shards(q));
    BL_TRY(bl_dir_lock_check(q->lock));
    BL_TRY(copy_others(q, NULL));
    BL_TRY(bl_dir_lock_check(q->lock));
    BL_TRY(write_index(q));
    BL_TRY(write_config(q));
    return save_json(q, MANIFEST, q->manifest); /* with the files besides the weights */
}

bl_status bl_model_quantize(const bl_quantize_options *options, bl_quantize_result *out)
{
    quantization q = {.options = options, .result = out};
    bl_status st;

    *out = (bl_quantize_result){0};
    BL_TRY_GOTO(st, done, open_source(&q));
    BL_TRY_GOTO(st, done, create_target(options->target));
    BL_TRY_GOTO(st, done, refuse_same_folder(&q));
    BL_TRY_GOTO(st, done, refuse_other_content(&q));
    BL_TRY_GOTO(st, done, bl_dir_lock_acquire(options->target, &q.lock));
    st = target_failure(&q, quantize(&q));
done:
    bl_dir_lock_release(q.lock);
    json_decref(q.manifest);
    for (size_t i = 0; q.plans && i < q.n_shards; i++) bl_shard_plan_free(&q.plans[i]);
    free(q.plans);
    bl_io_files_close(q.files);
    bl_hf_close(q.model);
    return st;
}
