/* SPDX-License-Identifier: Apache-2.0 */
/* text.c -- a session's tokenizer, read when it is first needed. Its functions are const: any
 * thread may use it. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "train/session/session_internal.h"

static bl_status load(bl_session *s)
{
    const char *dir = s->config->model_name_or_path;
    char *path;
    bool exists;

    BL_TRY(bl_path_join(dir, "tokenizer.json", &path));
    bl_status st = bl_path_exists(path, &exists);
    free(path);
    if (st != BL_OK || !exists) return st;
    return bl_tokenizer_load(dir, &s->tokenizer);
}

bl_status train_session_tokenizer(bl_session *s, const bl_tokenizer **out)
{
    pthread_mutex_lock(&s->mutex);
    bl_status st = s->tokenizer ? BL_OK : load(s);
    *out = s->tokenizer;
    pthread_mutex_unlock(&s->mutex);
    return st;
}

static bl_status need_tokenizer(bl_session *s, const bl_tokenizer **out)
{
    BL_TRY(train_session_check_caller(s));
    BL_TRY(train_session_tokenizer(s, out));
    if (*out) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: has no tokenizer.json: give token ids",
                   s->config->model_name_or_path);
}

bl_status bl_session_encode(bl_session *s, const char *text, size_t n_bytes, int32_t *ids,
                            int64_t room, int64_t *n)
{
    const bl_tokenizer *tokenizer;
    bl_ids found = {0};

    *n = 0;
    BL_TRY(need_tokenizer(s, &tokenizer));
    bl_status st = bl_tokenizer_encode(tokenizer, text, n_bytes, BL_ADD_SPECIAL, &found);
    if (st == BL_OK) {
        *n = (int64_t)found.n;
        size_t n_copied = *n < room ? found.n : (size_t)room;
        if (n_copied > 0) memcpy(ids, found.id, n_copied * sizeof *ids);
    }
    bl_ids_free(&found);
    return st;
}

bl_status bl_session_decode(bl_session *s, const int32_t *ids, int64_t n_ids, char *text,
                            int64_t room, int64_t *n_bytes)
{
    const bl_tokenizer *tokenizer;
    char *found;
    size_t n;

    *n_bytes = 0;
    BL_TRY(need_tokenizer(s, &tokenizer));
    for (int64_t i = 0; i < n_ids; i++)
        if (ids[i] < 0 || ids[i] >= s->job.model->config.vocab_size)
            return BL_FAIL(BL_EUSAGE, "ids[%lld]: %d is not in [0, %lld)", (long long)i, ids[i],
                           (long long)s->job.model->config.vocab_size);
    BL_TRY(bl_tokenizer_decode(tokenizer, ids, (size_t)n_ids, true, &found, &n));
    *n_bytes = (int64_t)n;
    size_t n_copied = *n_bytes < room ? n : (size_t)room;
    if (n_copied > 0) memcpy(text, found, n_copied);
    free(found);
    return BL_OK;
}
