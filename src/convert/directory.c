/* SPDX-License-Identifier: Apache-2.0 */
/* directory.c -- the directories: rejected ones, finished files, copied files, and the order of
 * work. */
#include "convert/internal.h"

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
#include "model/rows.h"
#include "store/checkpoint.h"
#include "tokenizer/tokenizer.h"

enum { MAX_JSON_BYTES = 64 << 20, HEADER_BYTES_PER_TENSOR = 256, SPACE_SLACK_BYTES = 1 << 20 };

static const char LOCK[] = ".ballast.lock", CONFIG[] = "config.json", README[] = "README.md",
                  INDEX[] = "model.safetensors.index.json", SINGLE[] = "model.safetensors";

/* A shard's name: its path's last part. */
static const char *shard_name(const bl_conversion *c, size_t index)
{
    const char *path = bl_safetensors_path(bl_hf_file(c->model, index)),
               *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* ---- the manifest: the target's source and format, and its finished shards ---- */

static bl_status save_json(const bl_conversion *c, const char *name, const json_t *value)
{
    bl_status st;
    char *path = NULL, *text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(17));

    if (!text) return BL_FAIL(BL_ENOMEM, "%s", name);
    BL_TRY_GOTO(st, done, bl_path_join(c->target, name, &path));
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    free(path);
    free(text);
    return st;
}

/* Distinguishes this source from others: size and time of change of its shards. Where their bytes
 * are not compared, the time of the last status change. */
static bl_status describe_source(const bl_conversion *c, json_t **out)
{
    struct stat info;
    json_t *shards = json_object();

    *out = shards;
    for (size_t i = 0; i < c->n_shards; i++) {
        const char *path = bl_safetensors_path(bl_hf_file(c->model, i));
        if (stat(path, &info) != 0) return bl_fail_errno(BL_EIO, "%s", path);
        struct timespec time = c->hashes_source ? info.st_mtim : info.st_ctim;
        json_object_set_new(shards, shard_name(c, i),
                            json_pack("{s:I, s:I, s:I}", "n_bytes", (json_int_t)info.st_size,
                                      "changed_s", (json_int_t)time.tv_sec, "changed_ns",
                                      (json_int_t)time.tv_nsec));
    }
    return BL_OK;
}

/* A value of the manifest for a message: a text without its quotes. */
static bl_status setting_fail(const bl_conversion *c, const char *key, const json_t *begun)
{
    char *text = json_dumps(begun, JSON_ENCODE_ANY | JSON_COMPACT);
    const char *shown = json_is_string(begun) ? json_string_value(begun) : text ? text : "nothing";
    bl_status st =
        BL_FAIL(BL_EUSAGE, "%s: was begun with %s %s: go on with that, or choose another folder",
                c->target, key, shown);
    free(text);
    return st;
}

static bl_status compare_manifest(const bl_conversion *c, const char *path, const json_t *source)
{
    const char *key;
    json_t *value;

    BL_TRY(bl_json_check_object(path, c->manifest));
    json_object_foreach(c->settings, key, value)
    {
        const json_t *begun = json_object_get(c->manifest, key);
        if (!begun) return bl_json_fail(path, key, "a value", NULL);
        if (!json_equal(begun, value)) return setting_fail(c, key, begun);
    }
    if (!json_equal(json_object_get(c->manifest, "source"), source))
        return BL_FAIL(BL_EUSAGE,
                       "%s: was begun from other files than those of %s: remove it to begin anew",
                       c->target, c->source);
    return json_is_object(json_object_get(c->manifest, "finished"))
               ? BL_OK
               : bl_json_fail(path, "finished", "an object", NULL);
}

/* Takes the manifest of an interrupted run, or begins one. */
static bl_status open_manifest(bl_conversion *c)
{
    bl_status st;
    json_t *source = NULL;
    char *path = NULL;

    BL_TRY_GOTO(st, done, describe_source(c, &source));
    BL_TRY_GOTO(st, done, bl_path_join(c->target, c->manifest_name, &path));
    if (bl_file_exists(path)) {
        BL_TRY_GOTO(st, done, bl_json_load(path, MAX_JSON_BYTES, &c->manifest));
        st = compare_manifest(c, path, source);
    } else {
        json_t *rest = json_pack("{s:O, s:{}}", "source", source, "finished");
        c->manifest = json_copy(c->settings);
        int failed = json_object_update(c->manifest, rest);
        json_decref(rest);
        st = failed ? BL_FAIL(BL_ENOMEM, "%s", path) : save_json(c, c->manifest_name, c->manifest);
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

/* entry: of the manifest, taken over; the conversion's own notes are in it. */
static bl_status note_finished(bl_conversion *c, size_t index, const char *path, json_t *entry)
{
    int64_t n_bytes = 0, n_source;
    char hash[HASH_CHARS] = "", source[HASH_CHARS];
    bl_status st;

    BL_TRY_GOTO(st, done, bl_dir_lock_check(c->lock));
    BL_TRY_GOTO(st, done, hash_file(path, &n_bytes, hash));
    json_object_set_new(entry, "n_bytes", json_integer((json_int_t)n_bytes));
    json_object_set_new(entry, "xxh3_64", json_string(hash));
    if (c->hashes_source) {
        BL_TRY_GOTO(st, done,
                    hash_file(bl_safetensors_path(bl_hf_file(c->model, index)), &n_source, source));
        json_object_set_new(entry, "source_xxh3_64", json_string(source));
    }
    json_object_set(json_object_get(c->manifest, "finished"), shard_name(c, index), entry);
    st = save_json(c, c->manifest_name, c->manifest);
done:
    json_decref(entry);
    return st;
}

/* A finished shard was made of the bytes that its source has now: size and time of change do not
 * show all. */
static bl_status check_source(const bl_conversion *c, size_t index)
{
    const char *path = bl_safetensors_path(bl_hf_file(c->model, index));
    const json_t *entry =
        json_object_get(json_object_get(c->manifest, "finished"), shard_name(c, index));
    const char *expected = bl_json_text(json_object_get(entry, "source_xxh3_64"));
    int64_t n_bytes;
    char hash[HASH_CHARS];

    if (!c->hashes_source) return BL_OK;
    BL_TRY(hash_file(path, &n_bytes, hash));
    if (expected && strcmp(hash, expected) == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: was begun from other bytes than those of %s: remove it to begin anew",
                   c->target, path);
}

/* Whether the shard is there as the manifest says. */
static bool is_finished(const bl_conversion *c, size_t index, const char *path)
{
    const json_t *entry =
        json_object_get(json_object_get(c->manifest, "finished"), shard_name(c, index));
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
static bl_status target_failure(const bl_conversion *c, bl_status st)
{
    bl_error error;

    if (st == BL_OK) return BL_OK;
    bl_error_save(&error, st);
    bl_status lost = bl_dir_lock_check(c->lock);
    return lost == BL_OK ? bl_error_restore(&error) : lost;
}

static bl_status refuse_same_folder(const bl_conversion *c)
{
    struct stat source, target;
    const char *from = c->source, *to = c->target;

    if (stat(from, &source) != 0) return bl_fail_errno(BL_EINPUT, "%s", from);
    if (stat(to, &target) != 0) return bl_fail_errno(BL_EIO, "%s", to);
    if (source.st_dev == target.st_dev && source.st_ino == target.st_ino)
        return BL_FAIL(BL_EUSAGE, "%s and %s are one folder: a model is not %s in place", from, to,
                       c->done);
    return BL_OK;
}

static bool is_manifest_tmp(const bl_conversion *c, const char *name)
{
    size_t n = strlen(c->manifest_name);
    return strncmp(name, c->manifest_name, n) == 0 && strcmp(name + n, ".tmp") == 0;
}

/* A directory without our manifest must be empty, except for the lock and temporary manifest of a
 * run that was killed before it had one. */
static bl_status refuse_other_content(const bl_conversion *c)
{
    char **names;
    size_t n_names;
    const char *other = NULL;
    bool is_ours = false;

    BL_TRY(of_target(bl_dir_list(c->target, &names, &n_names)));
    for (size_t i = 0; i < n_names; i++) {
        is_ours = is_ours || strcmp(names[i], c->manifest_name) == 0;
        if (strcmp(names[i], LOCK) != 0 && !is_manifest_tmp(c, names[i])) other = names[i];
    }
    bl_status st = BL_OK;
    if (other && !is_ours)
        st = BL_FAIL(BL_EUSAGE, "%s: holds %s already: choose an empty or new folder", c->target,
                     other);
    bl_names_free(names, n_names);
    return st;
}

/* Copied files: all except weights in any form, rewritten files, Model Optimizer's description of
 * the source's weights, and hidden files. */
static bool is_copied(const bl_conversion *c, const char *name)
{
    static const char *const rewritten[] = {"config.json",          "hf_quant_config.json",
                                            BL_QUANTIZE_MANIFEST,   BL_MERGE_MANIFEST,
                                            BL_DEQUANTIZE_MANIFEST, BL_TRAIN_MANIFEST};
    static const char *const weights[] = {".safetensors", ".safetensors.index.json",
                                          ".bin",         ".bin.index.json",
                                          ".pth",         ".pt",
                                          ".gguf",        ".h5",
                                          ".msgpack",     ".onnx",
                                          ".tmp"};
    for (size_t i = 0; i < BL_COUNT(weights); i++)
        if (bl_text_ends_with(name, weights[i])) return false;
    for (size_t i = 0; i < BL_COUNT(rewritten); i++)
        if (strcmp(name, rewritten[i]) == 0) return false;
    return name[0] != '.' && !(c->write_readme && strcmp(name, README) == 0);
}

/* Files besides the weights that a finished run wrote: those that still exist may have been edited
 * since. */
static const char BESIDE[] = "beside";

static bool is_kept(const bl_conversion *c, const char *name)
{
    bool kept = false;
    char *path = NULL;

    if (json_object_get(json_object_get(c->manifest, BESIDE), name) &&
        bl_path_join(c->target, name, &path) == BL_OK)
        kept = bl_file_exists(path);
    free(path);
    return kept;
}

static bl_status note_beside(const bl_conversion *c, const char *name)
{
    json_t *beside = json_object_get(c->manifest, BESIDE);

    if (!beside) {
        beside = json_object();
        json_object_set_new(c->manifest, BESIDE, beside);
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

/* A file of the source, by its path there. With `n_bytes`, only adds its size. */
static bl_status copy_other(const bl_conversion *c, const char *name, int64_t *n_bytes)
{
    char *from = NULL, *to = NULL;
    struct stat info;
    int64_t size;
    bl_status st;
    int fd = -1;

    BL_TRY_GOTO(st, done, bl_path_join(c->source, name, &from));
    BL_TRY_GOTO(st, done, bl_path_join(c->target, name, &to));
    if (stat(from, &info) != 0 || !S_ISREG(info.st_mode)) goto done;
    if (n_bytes) {
        *n_bytes += info.st_size;
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_file_open(from, &fd, &size));
    BL_TRY_GOTO(st, done, copy_file(from, to, size, fd));
    st = note_beside(c, name);
done:
    if (fd >= 0) close(fd);
    free(from);
    free(to);
    return st;
}

/* The chat templates besides the default one, the only directory that is copied. */
static bl_status copy_templates(const bl_conversion *c, int64_t *n_bytes)
{
    char **names = NULL, *from = NULL, *to = NULL, *name = NULL;
    size_t n_names = 0;
    struct stat info;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_path_join(c->source, BL_TOKENIZER_TEMPLATE_FOLDER, &from));
    if (stat(from, &info) != 0 || !S_ISDIR(info.st_mode)) goto done;
    BL_TRY_GOTO(st, done, bl_dir_list(from, &names, &n_names));
    BL_TRY_GOTO(st, done, bl_path_join(c->target, BL_TOKENIZER_TEMPLATE_FOLDER, &to));
    if (!n_bytes) BL_TRY_GOTO(st, done, bl_dir_create(to));
    for (size_t i = 0; st == BL_OK && i < n_names; i++) {
        if (!bl_text_ends_with(names[i], ".jinja")) continue;
        BL_TRY_GOTO(st, done, bl_path_join(BL_TOKENIZER_TEMPLATE_FOLDER, names[i], &name));
        if (!is_kept(c, name)) st = copy_other(c, name, n_bytes);
        free(name);
        name = NULL;
    }
done:
    free(from);
    free(to);
    bl_names_free(names, n_names);
    return st;
}

/* Copies the other files of the source, or, with `n_bytes`, only adds up how large they are. */
static bl_status copy_others(const bl_conversion *c, int64_t *n_bytes)
{
    char **names;
    size_t n_names;
    bl_status st = BL_OK;

    BL_TRY(bl_dir_list(c->source, &names, &n_names));
    for (size_t i = 0; st == BL_OK && i < n_names; i++)
        if (is_copied(c, names[i]) && !is_kept(c, names[i])) st = copy_other(c, names[i], n_bytes);
    bl_names_free(names, n_names);
    return st == BL_OK ? copy_templates(c, n_bytes) : st;
}

static bl_status check_space(const bl_conversion *c, const bool *finished)
{
    int64_t needed = SPACE_SLACK_BYTES, available;

    for (size_t i = 0; i < c->n_shards; i++)
        if (!finished[i])
            needed += c->plans[i].n_bytes + (int64_t)c->plans[i].n_specs * HEADER_BYTES_PER_TENSOR;
    BL_TRY(copy_others(c, &needed));
    BL_TRY(of_target(bl_dir_free_bytes(c->target, &available)));
    if (needed <= available) return BL_OK;
    return BL_FAIL(BL_ELIMIT,
                   "%s: the model needs %" PRId64 " more bytes there, %" PRId64 " are free",
                   c->target, needed, available);
}

/* ---- output ---- */

static bl_status write_shards(bl_conversion *c)
{
    bl_status st = BL_OK;
    bool *finished = calloc(c->n_shards + 1, sizeof *finished);
    char *path = NULL;

    if (!finished) return BL_FAIL(BL_ENOMEM, "a list of %zu files", c->n_shards);
    c->result.n_files = (int64_t)c->n_shards;
    for (size_t i = 0; i < c->n_shards; i++) {
        BL_TRY_GOTO(st, done, bl_path_join(c->target, shard_name(c, i), &path));
        finished[i] = is_finished(c, i, path);
        c->result.n_kept += finished[i];
        if (finished[i]) BL_TRY_GOTO(st, done, check_source(c, i));
        free(path);
        path = NULL;
    }
    BL_TRY_GOTO(st, done, check_space(c, finished));
    for (size_t i = 0; i < c->n_shards; i++) {
        if (finished[i]) continue;
        BL_TRY_GOTO(st, done, bl_dir_lock_check(c->lock));
        BL_TRY_GOTO(st, done, bl_path_join(c->target, shard_name(c, i), &path));
        json_t *entry = json_object();
        st = c->write_shard(c->user, i, path, entry);
        if (st == BL_OK)
            st = note_finished(c, i, path, entry);
        else
            json_decref(entry);
        if (st != BL_OK) goto done;
        for (size_t t = 0; t < bl_safetensors_count(c->plans[i].source); t++)
            c->result.n_bytes_read += bl_safetensors_at(c->plans[i].source, t)->n_bytes;
        c->result.n_bytes_written += c->plans[i].n_bytes;
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
static bl_status write_index(const bl_conversion *c)
{
    json_int_t total = 0;

    if (c->n_shards == 1 && strcmp(shard_name(c, 0), SINGLE) == 0) return BL_OK;
    json_t *map = json_object();
    for (size_t i = 0; i < c->n_shards; i++) {
        for (size_t s = 0; s < c->plans[i].n_specs; s++)
            json_object_set_new(map, c->plans[i].specs[s].name, json_string(shard_name(c, i)));
        total += c->plans[i].n_bytes;
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map);
    bl_status st = index ? save_json(c, INDEX, index) : BL_FAIL(BL_ENOMEM, "%s", INDEX);
    json_decref(index);
    return st;
}

static bl_status write_config(const bl_conversion *c)
{
    char *path = NULL;
    json_t *config = NULL;
    bl_status st;

    if (is_kept(c, CONFIG)) return BL_OK;
    BL_TRY(bl_path_join(c->source, CONFIG, &path));
    BL_TRY_GOTO(st, done, bl_json_load(path, MAX_JSON_BYTES, &config));
    BL_TRY_GOTO(st, done, c->change_config(c->user, path, config));
    /* Programs that tie without looking must not lose the head. */
    if (c->config.is_head_apart) json_object_set_new(config, "tie_word_embeddings", json_false());
    st = save_json(c, CONFIG, config);
    if (st == BL_OK) st = note_beside(c, CONFIG);
done:
    json_decref(config);
    free(path);
    return st;
}

/* Before config.json: without that the directory is not a model. */
static bl_status write_readme(const bl_conversion *c)
{
    bl_status st;
    char *path = NULL, *text = NULL;

    if (!c->write_readme || is_kept(c, README)) return BL_OK;
    BL_TRY_GOTO(st, done, bl_path_join(c->target, README, &path));
    BL_TRY_GOTO(st, done, c->write_readme(c->user, c->manifest, &text));
    BL_TRY_GOTO(st, done, bl_file_write_atomic(path, text, strlen(text)));
    st = note_beside(c, README);
done:
    free(path);
    free(text);
    return st;
}

static bl_status convert(bl_conversion *c)
{
    BL_TRY(open_manifest(c));
    BL_TRY(write_shards(c));
    BL_TRY(bl_dir_lock_check(c->lock));
    BL_TRY(copy_others(c, NULL));
    BL_TRY(bl_dir_lock_check(c->lock));
    BL_TRY(write_index(c));
    BL_TRY(write_readme(c));
    BL_TRY(write_config(c));
    return save_json(c, c->manifest_name, c->manifest); /* with the files besides the weights */
}

bl_status bl_conversion_open(bl_conversion *c, bl_shard_plan_fn plan)
{
    bl_model_config config;

    BL_TRY(bl_model_config_load(c->source, &config));
    BL_TRY(bl_hf_open(c->source, &c->model));
    BL_TRY(bl_model_config_fit(&config, c->model));
    BL_TRY(bl_model_check_tensors(&config, c->model));
    c->config = config;
    BL_TRY(bl_model_open_io_files(c->model, true, &c->files));
    c->n_shards = bl_hf_file_count(c->model);
    c->plans = calloc(c->n_shards + 1, sizeof *c->plans);
    if (!c->plans) return BL_FAIL(BL_ENOMEM, "a plan of %zu files", c->n_shards);
    for (size_t i = 0; i < c->n_shards; i++)
        BL_TRY(plan(c->user, bl_hf_file(c->model, i), &c->plans[i]));
    return BL_OK;
}

bl_status bl_conversion_run(bl_conversion *c)
{
    BL_TRY(create_target(c->target));
    BL_TRY(refuse_same_folder(c));
    BL_TRY(refuse_other_content(c));
    BL_TRY(bl_dir_lock_acquire(c->target, &c->lock));
    return target_failure(c, convert(c));
}

void bl_conversion_close(bl_conversion *c)
{
    bl_dir_lock_remove(c->lock);
    json_decref(c->manifest);
    json_decref(c->settings);
    for (size_t i = 0; c->plans && i < c->n_shards; i++) bl_shard_plan_free(&c->plans[i]);
    free(c->plans);
    bl_io_files_close(c->files);
    bl_hf_close(c->model);
}
