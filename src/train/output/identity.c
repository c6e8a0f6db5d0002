/* SPDX-License-Identifier: Apache-2.0 */
/* identity.c -- inputs of a result besides the run's own keys: the model's configuration and
 * weights, the data. A checkpoint records them. When a resumed run has others, it names the
 * differences. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "train/training_internal.h"

enum { HASH_TEXT_BYTES = 17 };

static const char *hash_text(uint64_t hash, char text[HASH_TEXT_BYTES])
{
    snprintf(text, HASH_TEXT_BYTES, "%016" PRIx64, hash);
    return text;
}

bl_status bl_job_fingerprint(const bl_job *job, int64_t probe_bytes, uint64_t *fingerprint)
{
    if (bl_host_memory_rank(job->host_memory) == 0)
        BL_TRY(bl_model_fingerprint(job->model, probe_bytes, fingerprint));
    return bl_host_memory_tell(job->host_memory, fingerprint, sizeof *fingerprint);
}

void bl_job_identify_data(bl_job *job)
{
    job->identity.train = job->data.train.set ? bl_dataset_fingerprint(job->data.train.set) : 0;
    job->identity.validation =
        job->data.validation.set ? bl_dataset_fingerprint(job->data.validation.set) : 0;
}

bl_status bl_job_identify(bl_job *job)
{
    bl_job_identify_data(job);
    return bl_job_fingerprint(job, 0, &job->identity.model);
}

bl_status bl_job_describe_identity(const bl_job *job, uint64_t weights, json_t *state)
{
    char model[HASH_TEXT_BYTES], base[HASH_TEXT_BYTES], data[HASH_TEXT_BYTES],
        validation[HASH_TEXT_BYTES];
    json_t *config;

    BL_TRY(bl_model_config_describe(&job->model->config, &config));
    json_t *own = json_pack("{s:o, s:s, s:s, s:s, s:s}", "model_config", config, "model",
                            hash_text(job->identity.model, model), "weights",
                            hash_text(weights, base), "data", hash_text(job->identity.train, data),
                            "validation_data", hash_text(job->identity.validation, validation));
    bool is_done = own && json_object_update(state, own) == 0;
    json_decref(own);
    return is_done ? BL_OK : BL_FAIL(BL_ENOMEM, "description of a checkpoint");
}

/* ---- differences ---- */

void bl_differences_add(bl_differences *d, const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vfprintf(d->all, format, args);
    va_end(args);
    fputs("; ", d->all);
    if (bl_train_config_allows(d->config, name)) return;
    fprintf(d->refused, "%s%s", d->is_refused ? ", " : "", name);
    d->is_refused = true;
}

static char *value_text(const json_t *value)
{
    return value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17))
                 : NULL;
}

/* Key by key, as one difference; whether any differs. */
static bool list_config(const json_t *before, const json_t *now, bl_differences *d)
{
    const char *key;
    json_t *value;
    bool differ = false;

    json_object_foreach((json_t *)now, key, value)
    {
        const json_t *old = json_object_get(before, key);
        if (old && json_equal(old, value)) continue;
        char *is = value_text(value), *was = value_text(old);
        if (differ)
            fprintf(d->all, "%s of the model's config.json is %s, was %s; ", key,
                    is ? is : "absent", was ? was : "absent");
        else
            bl_differences_add(d, BL_DIFFERENCE_MODEL,
                               "%s of the model's config.json is %s, was %s", key,
                               is ? is : "absent", was ? was : "absent");
        free(is);
        free(was);
        differ = true;
    }
    return differ;
}

/* Whether state[key] is that number; false where there is none. */
static bool is_same(const json_t *state, const char *key, uint64_t hash)
{
    char text[HASH_TEXT_BYTES];
    const char *old = json_string_value(json_object_get(state, key));
    return old && !strcmp(old, hash_text(hash, text));
}

bl_status bl_job_list_identity(const bl_job *job, const json_t *state, bl_start *start,
                               bl_differences *d)
{
    const char *weights = json_string_value(json_object_get(state, "weights"));
    json_t *config;

    start->has_weights = weights != NULL;
    start->weights = weights ? strtoull(weights, NULL, 16) : 0;
    if (!weights) { /* an earlier build's */
        bl_differences_add(d, BL_DIFFERENCE_MODEL,
                           "it does not say which model and data it was made with");
        return BL_OK;
    }
    BL_TRY(bl_model_config_describe(&job->model->config, &config));
    bool differ = list_config(json_object_get(state, "model_config"), config, d);
    json_decref(config);
    if (!differ && !is_same(state, "model", job->identity.model))
        bl_differences_add(d, BL_DIFFERENCE_MODEL, "the model's tensors differ");
    if (!is_same(state, "data", job->identity.train))
        bl_differences_add(d, "train_file", "the training data differ");
    /* Changes no bit of the adapter, only the reported losses. */
    start->other_validation = !is_same(state, "validation_data", job->identity.validation);
    return BL_OK;
}

/* ---- the adapter that a run starts from ---- */

/* *hash: of the file's bytes, with the hash so far. A run that is resumed needs no weights of the
 * adapter: a missing file has no bytes. */
static bl_status hash_file(const char *dir, const char *name, uint64_t *hash)
{
    enum { PIECE_BYTES = 1 << 18 };
    char *path = NULL, *piece = malloc(PIECE_BYTES);
    int64_t n_bytes = 0;
    int fd = -1;
    bl_status st = piece ? BL_OK : BL_FAIL(BL_ENOMEM, "the bytes of an adapter");

    if (st == BL_OK) st = bl_path_join(dir, name, &path);
    if (st == BL_OK && bl_file_exists(path)) st = bl_file_open(path, &fd, &n_bytes);
    for (int64_t at = 0; st == BL_OK && fd >= 0 && at < n_bytes; at += PIECE_BYTES) {
        size_t n = (size_t)bl_min_i64(PIECE_BYTES, n_bytes - at);
        st = bl_file_read_full(fd, path, piece, n, at);
        if (st == BL_OK) *hash = XXH3_64bits_withSeed(piece, n, *hash);
    }
    if (fd >= 0) close(fd);
    free(path);
    free(piece);
    return st;
}

bl_status bl_job_hash_adapter(const bl_train_config *c, uint64_t *hash)
{
    *hash = 0;
    if (!c->init_adapter) return BL_OK;
    *hash = 1;
    BL_TRY(hash_file(c->init_adapter, BL_OUTPUT_ADAPTER_CONFIG, hash));
    return hash_file(c->init_adapter, BL_OUTPUT_ADAPTER, hash);
}
