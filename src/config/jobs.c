/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c -- the configuration of a job: a file in the queue of a base. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "config/internal.h"
#include "config/table_internal.h"

/* Keys of one run, for which a base has no defaults. */
static const char *const own_keys[] = {"output_dir",  "overwrite_output_dir",
                                       "logging_dir", "dump_gradients",
                                       "queue",       "resume_from_checkpoint"};

static bool is_own(const bl_option *option)
{
    for (size_t i = 0; i < BL_COUNT(own_keys); i++)
        if (strcmp(option->key, own_keys[i]) == 0) return true;
    return false;
}

bl_status config_check_base(const bl_train_config *config)
{
    if (!config->model_name_or_path)
        return BL_FAIL(BL_EUSAGE, "missing option: model_name_or_path, the base of queue %s",
                       config->queue);
    for (size_t i = 0; i < BL_COUNT(own_keys); i++)
        if (strcmp(own_keys[i], "queue") != 0 && bl_train_config_given(config, own_keys[i]))
            return BL_FAIL(BL_EUSAGE, "%s: not with queue %s: a job has it, in its file",
                           own_keys[i], config->queue);
    if (config->modules_to_save.n_items > 0)
        return BL_FAIL(BL_EUSAGE,
                       "queue %s: modules_to_save replaces modules of the base, which jobs share; "
                       "leave it out",
                       config->queue);
    if (!bl_train_config_is_full(config)) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "queue %s: with finetuning_type full a base is trained, and cannot "
                   "serve jobs",
                   config->queue);
}

static bl_status copy_defaults(const bl_train_config *base, const bl_options *options)
{
    for (size_t i = 0; i < bl_train_n_options; i++) {
        const bl_option *option = &bl_train_options[i];
        bool is_given = base->source.origins[i] != BL_FROM_DEFAULT;
        if (!is_own(option) && (is_given || config_is_common(option)))
            BL_TRY(bl_options_copy(options, base, i));
    }
    return BL_OK;
}

/* A common key of the job has the base's value, or auto, which becomes the base's value. */
static bl_status take_common(const bl_train_config *base, const bl_options *options, size_t index)
{
    const bl_option *option = &bl_train_options[index];
    char *common = NULL, *own = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_option_format(option, base, &common));
    BL_TRY_GOTO(st, done, bl_option_format(option, options->values, &own));
    if (strcmp(common, own) == 0) goto done;
    if (strcmp(own, "auto") == 0)
        st = bl_options_copy(options, base, index);
    else
        st = BL_FAIL(BL_EUSAGE,
                     "%s: %s, but the base of this queue has %s: leave the key out, or "
                     "start another queue",
                     option->key, own, common);
done:
    free(common);
    free(own);
    return st;
}

static bl_status load_job(const bl_train_config *base, const char *yaml_path, bl_train_config *job)
{
    bl_options options = config_bind(BL_CONFIG_TRAIN, job);

    BL_TRY(bl_options_init(&options));
    BL_TRY(copy_defaults(base, &options));
    BL_TRY(config_read_file(yaml_path, job));
    BL_TRY(bl_options_check_required(&options));
    for (size_t i = 0; i < bl_train_n_options; i++)
        if (config_is_common(&bl_train_options[i])) BL_TRY(take_common(base, &options, i));
    if (job->queue) return BL_FAIL(BL_EUSAGE, "queue: a job has none");
    if (bl_train_config_is_full(job))
        return BL_FAIL(BL_EUSAGE, "finetuning_type full: a run that trains every weight cannot be "
                                  "a job of a queue, whose base is frozen");
    config_resolve_saving(job);
    return config_validate(BL_CONFIG_TRAIN, job);
}

bl_status bl_train_config_load_job(const bl_train_config *base, const char *yaml_path,
                                   bl_train_config **out)
{
    bl_train_config *job = calloc(1, sizeof *job);

    *out = NULL;
    if (!job) return BL_FAIL(BL_ENOMEM, "configuration: %zu bytes", sizeof *job);
    bl_status st = load_job(base, yaml_path, job);
    if (st == BL_OK)
        *out = job;
    else
        bl_train_config_free(job);
    return st;
}
