/* SPDX-License-Identifier: Apache-2.0 */
/* session.c -- the configurations of a session and of an adapter in it, from "key=value" texts. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "config/internal.h"
#include "config/table_internal.h"

static void free_words(char **words, int n)
{
    for (int i = 0; words && i < n; i++) free(words[i]);
    free(words);
}

/* "--key=value" of each; the caller frees *out, after a failure, too. */
static bl_status make_words(const char *const *keys, int n, char ***out)
{
    *out = calloc((size_t)n + 1, sizeof **out);
    if (!*out) return BL_FAIL(BL_ENOMEM, "%d keys", n);
    for (int i = 0; i < n; i++) {
        if (!strchr(keys[i], '=')) return BL_FAIL(BL_EUSAGE, "'%s': expected key=value", keys[i]);
        BL_TRY(bl_text_format(&(*out)[i], "--%s", keys[i]));
    }
    return BL_OK;
}

static bl_status read_keys(bl_config_command command, const char *const *keys, int n,
                           bl_train_config *config)
{
    bl_options options = config_bind(command, config);
    bl_options_report report = {.given = {0}};
    char **words = NULL;
    int n_words;

    options.report = &report;
    bl_status st = make_words(keys, n, &words);
    if (st == BL_OK) st = bl_options_read_line(&options, n, words, 0, NULL, &n_words);
    if (st == BL_OK) st = bl_options_check_required(&options);
    bl_options_report_clear(&report);
    free_words(words, n);
    return st;
}

static bl_status load_session(const char *const *keys, int n, bl_train_config *c)
{
    bl_options options = config_bind(BL_CONFIG_SESSION, c);

    BL_TRY(bl_options_init(&options));
    c->per_device_train_batch_size = 1;
    BL_TRY(read_keys(BL_CONFIG_SESSION, keys, n, c));
    BL_TRY(config_resolve(BL_CONFIG_SESSION, c));
    if (c->ranks > 1)
        return BL_FAIL(BL_EUSAGE, "ranks: %lld: a session has one rank; several are not supported",
                       (long long)c->ranks);
    if (c->device != BL_CONFIG_DEVICE_CPU)
        return BL_FAIL(BL_EUSAGE, "device cuda is not supported by a session; use device=cpu");
    if (c->visit_tokens == BL_OPTION_AUTO)
        c->visit_tokens =
            BL_SESSION_VISIT_MICRO * c->per_device_train_batch_size * c->max_seq_length;
    c->gradient_accumulation_steps =
        bl_max_i64(1, c->visit_tokens / (c->per_device_train_batch_size * c->max_seq_length));
    return config_validate(BL_CONFIG_SESSION, c);
}

static bl_status begin_adapter(const bl_train_config *session, bl_train_config *c)
{
    bl_options options = config_bind(BL_CONFIG_ADAPTER, c);

    BL_TRY(bl_options_init(&options));
    for (size_t i = 0; i < bl_train_n_options; i++)
        if (bl_train_options[i].commands & BL_CONFIG_SESSION)
            BL_TRY(bl_options_copy(&options, session, i));
    c->gradient_accumulation_steps = session->gradient_accumulation_steps;
    return BL_OK;
}

static bl_status load_adapter(const bl_train_config *session, const char *const *keys, int n,
                              bl_train_config *c)
{
    BL_TRY(begin_adapter(session, c));
    BL_TRY(read_keys(BL_CONFIG_ADAPTER, keys, n, c));
    return config_validate(BL_CONFIG_ADAPTER, c);
}

static bl_status continue_adapter(const bl_train_config *session, const char *yaml_path,
                                  const char *dir, bl_train_config *c)
{
    bl_train_config *before;

    BL_TRY(bl_train_config_read_back(yaml_path, &before));
    bl_status st = begin_adapter(session, c);
    c->seed = before->seed;
    c->lora_dropout = before->lora_dropout;
    bl_train_config_free(before);
    if (st == BL_OK) st = bl_text_format(&c->init_adapter, "%s", dir);
    return st == BL_OK ? config_validate(BL_CONFIG_ADAPTER, c) : st;
}

static bl_status compare_key(const bl_option *option, const bl_train_config *before,
                             const bl_train_config *now, FILE *out, bool *differs)
{
    char *was = NULL, *is = NULL;

    bl_status st = bl_option_format(option, before, &was);
    if (st == BL_OK) st = bl_option_format(option, now, &is);
    if (st == BL_OK && strcmp(was, is) != 0) {
        fprintf(out, "%s: %s -> %s; ", option->key, was, is);
        *differs = true;
    }
    free(was);
    free(is);
    return st;
}

bl_status bl_train_config_compare_session(const bl_train_config *session, const char *yaml_path,
                                          FILE *out, bool *differs)
{
    bl_train_config *before;
    bl_status st = BL_OK;

    *differs = false;
    BL_TRY(bl_train_config_read_back(yaml_path, &before));
    for (size_t i = 0; i < bl_train_n_options && st == BL_OK; i++)
        if (bl_train_options[i].commands & BL_CONFIG_SESSION &&
            bl_train_options[i].effect == BL_EFFECT_RESULT)
            st = compare_key(&bl_train_options[i], before, session, out, differs);
    bl_train_config_free(before);
    return st;
}

static bl_status finish(bl_status st, bl_train_config *config, bl_train_config **out)
{
    if (st == BL_OK)
        *out = config;
    else
        bl_train_config_free(config);
    return st;
}

bl_status bl_train_config_load_session(const char *const *keys, int n, bl_train_config **out)
{
    bl_train_config *config = calloc(1, sizeof *config);

    *out = NULL;
    if (!config) return BL_FAIL(BL_ENOMEM, "configuration of a session");
    return finish(load_session(keys, n, config), config, out);
}

bl_status bl_train_config_load_adapter(const bl_train_config *session, const char *const *keys,
                                       int n, bl_train_config **out)
{
    bl_train_config *config = calloc(1, sizeof *config);

    *out = NULL;
    if (!config) return BL_FAIL(BL_ENOMEM, "configuration of an adapter");
    return finish(load_adapter(session, keys, n, config), config, out);
}

bl_status bl_train_config_continue_adapter(const bl_train_config *session, const char *yaml_path,
                                           const char *dir, bl_train_config **out)
{
    bl_train_config *config = calloc(1, sizeof *config);

    *out = NULL;
    if (!config) return BL_FAIL(BL_ENOMEM, "configuration of an adapter");
    return finish(continue_adapter(session, yaml_path, dir, config), config, out);
}
