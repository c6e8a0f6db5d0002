/* SPDX-License-Identifier: Apache-2.0 */
/* data.c -- opens tokenizer and data sets, splits and packs them, and measures row lengths for
 * buffer sizes. */
#include "train/data.h"

#include <stdlib.h>

#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "train/data/sampler.h"

typedef struct opening {
    const bl_train_config *config;
    const bl_model_config *model;
    bl_host_memory *host;
    int n_here;
    bl_run_data *data;
    int64_t before_bytes; /* anonymous memory */
} opening;

/* Losses and rows go together. */
static bl_status check_rows(const bl_losses *losses, const char *path, bl_data_format format)
{
    bool is_pair = format == BL_DATA_PREFERENCE,
         is_unpaired = format == BL_DATA_UNPAIRED_PREFERENCE;

    if (!losses->is_preference && (is_pair || is_unpaired))
        return BL_FAIL(BL_EUSAGE,
                       "%s: rows of preferences need a loss of preferences: loss_type %s, for "
                       "example (docs/preference.md)",
                       path, is_pair ? "sigmoid" : "kto");
    if (losses->is_preference && (losses->is_unpaired ? !is_unpaired : !is_pair))
        return BL_FAIL(BL_EUSAGE, "%s: loss_type %s needs rows of data_format %s, not %s", path,
                       bl_loss_name(losses->term[0].loss),
                       bl_data_format_name(losses->is_unpaired ? BL_DATA_UNPAIRED_PREFERENCE
                                                               : BL_DATA_PREFERENCE),
                       bl_data_format_name(format));
    return BL_OK;
}

static bl_status open_dataset(const opening *o, bl_dataset_options options, bl_rows *out)
{
    const bl_train_config *c = o->config;
    const bl_run_data *data = o->data;
    bl_dataset_stats stats;
    bl_losses losses;

    BL_TRY(bl_train_config_losses(c, &losses));
    options.format = bl_losses_data_format(&losses, c->data_format);
    options.max_seq_length = c->max_seq_length;
    options.overlong = c->overlong;
    options.train_on_inputs = c->train_on_inputs;
    options.skip_bad = c->skip_bad;
    options.vocab_size = (int32_t)o->model->vocab_size;
    options.text_key = c->dataset_text_field;
    options.chat_template = c->chat_template;
    options.template_date = c->template_date;
    options.no_tokenizer = data->tokenizer_error.status == BL_OK ? NULL : &data->tokenizer_error;
    /* Those of all ranks that wait for this one. */
    options.n_threads = (int)c->threads * o->n_here * bl_host_memory_size(o->host);
    options.host = o->host;
    BL_TRY(bl_dataset_open(&options, data->tokenizer, &out->set));
    BL_TRY(check_rows(&losses, options.path, bl_dataset_format(out->set)));
    bl_dataset_get_stats(out->set, &stats);
    out->n = bl_dataset_count(out->set);
    bl_log_info("%s: %lld samples, %lld tokens, %lld of them labels", options.path,
                (long long)out->n, (long long)stats.n_tokens, (long long)stats.n_label_tokens);
    return BL_OK;
}

static bl_status open_training_set(const opening *o, bl_rows *out)
{
    const bl_train_config *c = o->config;
    bl_dataset_options options = bl_dataset_default_options(c->train_file);
    double *shares = calloc(1 + (size_t)c->more_train_files.n_items, sizeof *shares);

    if (!shares) return BL_FAIL(BL_ENOMEM, "list of data files");
    for (int64_t i = 0; i <= c->more_train_files.n_items; i++)
        shares[i] = bl_train_config_share(c, i);
    options.more_paths = (const char *const *)c->more_train_files.items;
    options.n_more_paths = (size_t)c->more_train_files.n_items;
    options.shares = shares;
    bl_status st = open_dataset(o, options, out);
    free(shares);
    return st;
}

static bl_status open_validation_set(const opening *o, bl_rows *out)
{
    return open_dataset(o, bl_dataset_default_options(o->config->validation_file), out);
}

/* Whether a tokenizer is needed is known once a data set's format is; one that cannot be used stops
 * nothing before. */
static bl_status open_tokenizer(const opening *o)
{
    const bl_train_config *c = o->config;
    bl_run_data *data = o->data;
    char *path = NULL;
    bool present;

    BL_TRY(bl_path_join(c->model_name_or_path, "tokenizer.json", &path));
    bl_status st = bl_path_exists(path, &present);
    free(path);
    if (st != BL_OK) return st;
    if (!present && c->data_format == BL_DATA_TOKENS) return BL_OK;
    st = bl_tokenizer_load(c->model_name_or_path, &data->tokenizer);
    if (st == BL_EINPUT) {
        bl_error_save(&data->tokenizer_error, st);
        return BL_OK;
    }
    BL_TRY(st);
    int64_t tokens = bl_tokenizer_vocab_size(data->tokenizer);
    if (tokens > o->model->vocab_size && c->data_format != BL_DATA_TOKENS)
        bl_log_warning("the tokenizer has %lld tokens, the model's embedding %lld rows",
                       (long long)tokens, (long long)o->model->vocab_size);
    return BL_OK;
}

/* The longest row sets the size of buffers: max_seq_length may be far above every row. */
static void measure(bl_rows *rows)
{
    double sum = 0, squares = 0;

    for (int64_t row = rows->first; rows->set && row < rows->first + rows->n; row++) {
        int64_t n = bl_dataset_n_tokens(rows->set, row);
        rows->longest = bl_max_i64(rows->longest, n);
        sum += (double)n;
        squares += (double)n * (double)n;
    }
    if (rows->document_tokens == 0 && sum > 0) rows->document_tokens = squares / sum;
}

/* Of the rows alone that are used: a split was made before, of samples. */
static bl_status pack(const bl_train_config *c, bl_rows *rows)
{
    bl_dataset *packed;
    bl_rows samples = *rows;

    measure(&samples); /* with pack they stay separate documents */
    BL_TRY(
        bl_dataset_pack(rows->set, c->packing, c->max_seq_length, rows->first, rows->n, &packed));
    *rows = (bl_rows){.set = packed, .n = bl_dataset_count(packed)};
    if (c->packing == BL_PACKING_PACK) rows->document_tokens = samples.document_tokens;
    return BL_OK;
}

/* From here on the rows of both data sets are packed ones. */
static bl_status pack_data(const bl_train_config *c, bl_run_data *data)
{
    bl_dataset *train = data->train.set, *validation = data->validation.set;

    if (validation) {
        BL_TRY(pack(c, &data->validation));
        if (validation != train) bl_dataset_close(validation);
    }
    if (train) {
        BL_TRY(pack(c, &data->train));
        bl_dataset_close(train);
    }
    return BL_OK;
}

/* Tokens of the rows at positions [first, end) of the sequence. */
static int64_t count_tokens(const bl_rows *rows, const bl_sampler *sampler, int64_t first,
                            int64_t end)
{
    int64_t n = 0;

    for (int64_t at = first; at < end; at++)
        n += bl_dataset_n_tokens(rows->set, rows->first + bl_sampler_row(sampler, at));
    return n;
}

/* Micro-batches are a step's positions in pieces. A long run is much like its beginning: two
 * epochs, or MIN_ROWS of a small data set, are enough. */
/* Those of steps 1 to last that are multiples of `every`. */
static int64_t times(bool is_on, int64_t every, int64_t last)
{
    return is_on && every > 0 ? last / every : 0;
}

/* As the trainer has them: evaluations also before the first step and after the last, checkpoints
 * after the last. */
static void count_events(const bl_train_config *c, int64_t n_validation, bl_plan_rows *out)
{
    int64_t last = out->n_steps - 1,
            n_epochs = bl_train_position(c, out->n_rows, last) / out->n_rows;

    out->n_evaluations = n_validation == 0
                             ? 0
                             : 2 + times(c->eval_strategy == BL_EVAL_STEPS, c->eval_steps, last) +
                                   times(c->eval_strategy == BL_EVAL_EPOCH, 1, n_epochs);
    out->n_checkpoints = 1 + times(c->save_strategy == BL_SAVE_STEPS, c->save_steps, last) +
                         times(c->save_strategy == BL_SAVE_EPOCH, 1, n_epochs);
}

bl_plan_rows bl_run_data_measure(const bl_train_config *c, const bl_run_data *data)
{
    enum { MIN_ROWS = 1 << 16, MAX_ROWS = 1 << 22 };
    const bl_rows *rows = &data->train;
    const int64_t limit = bl_min_i64(bl_max_i64(2 * rows->n, MIN_ROWS), MAX_ROWS);
    bl_sampler sampler = {rows->n, (uint64_t)c->seed, c->shuffle};
    int64_t b = c->per_device_train_batch_size, n_tokens = 0, first = 0;
    bl_plan_rows out = {0};
    bl_dataset_stats stats;

    if (rows->n < 1) return out;
    int64_t n_steps = bl_train_total_steps(c, rows->n);
    for (int64_t step = 0; step < n_steps && first < limit; step++) {
        int64_t end = bl_train_position(c, rows->n, step + 1);
        for (; first < end; first = bl_min_i64(first + b, end)) {
            int64_t n = count_tokens(rows, &sampler, first, bl_min_i64(first + b, end));
            out.largest = bl_max_i64(out.largest, n);
            n_tokens += n;
            out.n_micro++;
        }
    }
    bl_dataset_get_stats(rows->set, &stats);
    out.mean = (double)n_tokens / (double)out.n_micro;
    out.document_tokens = rows->document_tokens;
    out.n_steps = n_steps;
    out.n_rows = rows->n;
    out.n_used = bl_train_position(c, rows->n, n_steps);
    count_events(c, data->validation.n, &out);
    if (stats.n_tokens > 0) out.label_part = (double)stats.n_label_tokens / (double)stats.n_tokens;
    return out;
}

static bl_status finish(const opening *o)
{
    bl_run_data *data = o->data;

    if (data->tokenizer_error.status != BL_OK)
        bl_log_warning("%s; rows of tokens need no tokenizer", data->tokenizer_error.text);
    if (o->config->packing != BL_PACKING_NONE) BL_TRY(pack_data(o->config, data));
    measure(&data->train);
    measure(&data->validation);
    int64_t own_bytes = o->host ? 0 : bl_run_data_bytes(data);
    data->tokenizer_bytes =
        bl_max_i64(0, bl_memory_anonymous_bytes() - o->before_bytes - own_bytes);
    return BL_OK;
}

/* The first rows of the training data are validated on, the others trained on. */
static bl_status split(const bl_train_config *c, bl_run_data *data)
{
    int64_t n;

    BL_TRY(bl_dataset_split(data->train.n, c->validation_split_percentage, &n));
    data->validation = (bl_rows){.set = data->train.set, .n = n};
    data->train.first = n;
    data->train.n -= n;
    return BL_OK;
}

bl_status bl_run_data_open_training(const bl_train_config *c, const bl_model_config *model,
                                    bl_host_memory *host, int n_here, bl_run_data *data)
{
    opening o = {c, model, host, n_here, data, bl_memory_anonymous_bytes()};

    BL_TRY(open_tokenizer(&o));
    if (c->train_file) BL_TRY(open_training_set(&o, &data->train));
    if (c->validation_file)
        BL_TRY(open_validation_set(&o, &data->validation));
    else if (data->train.set && c->validation_split_percentage > 0)
        BL_TRY(split(c, data));
    return finish(&o);
}

bl_status bl_run_data_open_evaluation(const bl_train_config *c, const bl_model_config *model,
                                      bl_host_memory *host, int n_here, bl_run_data *data)
{
    opening o = {c, model, host, n_here, data, bl_memory_anonymous_bytes()};

    BL_TRY(open_tokenizer(&o));
    if (c->validation_file) BL_TRY(open_validation_set(&o, &data->validation));
    return finish(&o);
}

int64_t bl_run_data_positions(const bl_train_config *config, const bl_run_data *data)
{
    int64_t longest = bl_max_i64(data->train.longest, data->validation.longest);
    bl_losses losses = {0};

    (void)bl_train_config_losses(config, &losses); /* was validated */
    return losses.is_unpaired ? bl_min_i64(config->max_seq_length, 2 * longest) : longest;
}

int64_t bl_run_data_bytes(const bl_run_data *data)
{
    bl_dataset *train = data->train.set, *validation = data->validation.set;

    return (train ? bl_dataset_index_bytes(train) : 0) +
           (validation && validation != train ? bl_dataset_index_bytes(validation) : 0);
}

void bl_run_data_close(bl_run_data *data)
{
    if (data->validation.set != data->train.set) bl_dataset_close(data->validation.set);
    bl_dataset_close(data->train.set);
    bl_tokenizer_destroy(data->tokenizer);
    *data = (bl_run_data){0};
}
