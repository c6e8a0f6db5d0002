/* SPDX-License-Identifier: Apache-2.0 */
/* ballast inspect: the content of a safetensors file, a model, an adapter or a checkpoint, after
 * the same checks that training does before it reads one. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "arch/table.h"
#include "base/files.h"
#include "base/hub.h"
#include "base/json.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "model/weights.h"
#include "store/checkpoint.h"
#include "store/hf_model.h"
#include "store/peft.h"
#include "store/safetensors.h"

enum { CONFIG_MAX_BYTES = 1 << 20, N_SCALE_KINDS = BL_SCALE_COUNT };

typedef struct inspect_options {
    bool json;
} inspect_options;

static const bl_option table[] = {
    {.key = "json",
     .group = "Options",
     .type = BL_OPTION_BOOL,
     .offset = offsetof(inspect_options, json),
     .commands = BL_CLI_ANY,
     .default_text = "false",
     .help = "print one JSON document"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

/* Adds `value`, whose reference it takes, to the object. */
static bl_status put(json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0)
        return BL_FAIL(BL_ENOMEM, "the report's key %s", key);
    return BL_OK;
}

/* ---- the report: a JSON document, from which the text is printed too ---- */

static json_t *describe_tensor(const bl_stored_tensor *tensor, int64_t *n_elements)
{
    json_t *shape = json_array();
    *n_elements = tensor->n_bytes / (int64_t)bl_dtype_bytes(tensor->dtype);
    for (int i = 0; i < tensor->n_dims; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    return json_pack("{s:s, s:s, s:o, s:I}", "name", tensor->name, "dtype",
                     bl_dtype_name(tensor->dtype), "shape", shape, "n_bytes",
                     (json_int_t)tensor->n_bytes);
}

typedef struct totals {
    int64_t n_tensors, n_elements, n_bytes;
} totals;

static bl_status put_totals(json_t *object, const totals *sum)
{
    BL_TRY(put(object, "n_tensors", json_integer(sum->n_tensors)));
    BL_TRY(put(object, "n_elements", json_integer(sum->n_elements)));
    return put(object, "n_bytes", json_integer(sum->n_bytes));
}

/* Adds "tensors", the totals and "dtypes" for tensors at(source, 0 <= i < n). */
static bl_status report_tensors(json_t *report,
                                const bl_stored_tensor *(*at)(const void *source, size_t index),
                                const void *source, size_t n)
{
    totals all = {0}, by_dtype[BL_DTYPE_COUNT] = {0};

    bl_json_watch_memory();
    json_t *tensors = json_array();
    BL_TRY(put(report, "tensors", tensors));
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *tensor = at(source, i);
        int64_t n_elements;
        totals *sums[] = {&all, &by_dtype[tensor->dtype]};
        if (json_array_append_new(tensors, describe_tensor(tensor, &n_elements)) != 0 ||
            bl_json_ran_out()) {
            return BL_FAIL(BL_ENOMEM, "the report of %zu tensors", n);
        }
        for (size_t k = 0; k < BL_COUNT(sums); k++) {
            sums[k]->n_tensors++;
            sums[k]->n_elements += n_elements;
            sums[k]->n_bytes += tensor->n_bytes;
        }
    }
    BL_TRY(put_totals(report, &all));
    json_t *dtypes = json_object();
    BL_TRY(put(report, "dtypes", dtypes));
    for (int dtype = 0; dtype < BL_DTYPE_COUNT; dtype++) {
        if (by_dtype[dtype].n_tensors == 0) continue;
        json_t *entry = json_object();
        BL_TRY(put(dtypes, bl_dtype_name((bl_dtype)dtype), entry));
        BL_TRY(put_totals(entry, &by_dtype[dtype]));
    }
    return BL_OK;
}

static const bl_stored_tensor *file_tensor(const void *source, size_t index)
{
    return bl_safetensors_at(source, index);
}

static const bl_stored_tensor *model_tensor(const void *source, size_t index)
{
    return bl_hf_at(source, index);
}

static bl_status report_file(json_t *report, const char *path)
{
    bl_safetensors *file;
    BL_TRY(bl_safetensors_open(path, &file));
    bl_status st = report_tensors(report, file_tensor, file, bl_safetensors_count(file));
    bl_safetensors_close(file);
    return st;
}

/* Checks every quantized weight with its scales and adds "fp8", the number of weights by how fine
 * their scales are, and "bits4", by format. */
static bl_status report_quantized(json_t *report, const bl_hf_model *model, const char *dir)
{
    static const char *const names[N_SCALE_KINDS] = {"none", "tensor", "row",   "block", "grid",
                                                     "mx",   "int4",   "mxfp4", "nvfp4", "nf4"};
    int64_t counts[N_SCALE_KINDS] = {0};

    for (size_t i = 0; i < bl_hf_count(model); i++) {
        const bl_stored_tensor *tensor = bl_hf_quantized_at(model, i);
        bl_hf_weight weight;
        if (!tensor) continue;
        bl_status st = bl_hf_get_weight(model, tensor->name, &weight);
        if (st != BL_OK) return bl_error_prefix(st, "%s", dir);
        counts[weight.scale_kind]++;
    }
    for (int kind = BL_SCALE_TENSOR; kind < N_SCALE_KINDS; kind++) {
        const char *key = kind < BL_SCALE_INT4 ? "fp8" : "bits4";
        if (counts[kind] == 0) continue;
        if (!json_object_get(report, key)) BL_TRY(put(report, key, json_object()));
        BL_TRY(put(json_object_get(report, key), names[kind], json_integer(counts[kind])));
    }
    return BL_OK;
}

/* Reports all that it can read, then does the checks of training before it reads weights, in their
 * order. */
static bl_status report_model(json_t *report, const char *dir)
{
    bl_model_config config;
    bl_error of_config;
    bl_hf_model *model;

    bl_error_save(&of_config, bl_model_config_load(dir, &config));
    bl_status st = bl_hf_open(dir, &model);
    if (st == BL_OK) st = put(report, "n_files", json_integer((json_int_t)bl_hf_file_count(model)));
    if (st == BL_OK) st = report_tensors(report, model_tensor, model, bl_hf_count(model));
    if (st == BL_OK) st = report_quantized(report, model, dir);
    if (st == BL_OK && of_config.status == BL_OK) st = bl_model_check(&config, model);
    bl_hf_close(model);
    return of_config.status == BL_OK ? st : bl_error_restore(&of_config);
}

/* The same for an adapter, whose base is not at hand. */
static bl_status report_adapter(json_t *report, const char *dir, const char *config_path)
{
    static const char *const keys[][2] = {
        {"lora_r", "r"}, {"lora_alpha", "lora_alpha"}, {"lora_target_modules", "target_modules"}};
    bl_status st;
    json_t *config = NULL;
    char *path = NULL;

    BL_TRY_GOTO(st, done, bl_path_join(dir, "adapter_model.safetensors", &path));
    BL_TRY_GOTO(st, done, bl_json_load(config_path, CONFIG_MAX_BYTES, &config));
    BL_TRY_GOTO(st, done, bl_json_check_object(config_path, config));
    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        const json_t *value = json_object_get(config, keys[i][1]);
        if (value) BL_TRY_GOTO(st, done, put(report, keys[i][0], json_deep_copy(value)));
    }
    BL_TRY_GOTO(st, done, report_file(report, path));
    /* Of which architecture its model is, nothing says: one must fit, and Llama's error counts. */
    const bl_arch *arch;
    bl_error of_first;
    for (size_t i = 0; (arch = bl_arch_at(i)); i++) {
        bl_peft_modules modules = bl_arch_peft_modules(arch);
        if ((st = bl_peft_check(dir, &modules)) == BL_OK) break;
        if (i == 0) bl_error_save(&of_first, st);
    }
    if (st != BL_OK) st = bl_error_restore(&of_first);
done:
    json_decref(config);
    free(path);
    return st;
}

/* The tensor files of a checkpoint. */
typedef struct file_set {
    bl_safetensors **files;
    size_t n_files, n_tensors;
} file_set;

static const bl_stored_tensor *set_tensor(const void *source, size_t index)
{
    const file_set *set = source;
    size_t i = 0;
    for (; index >= bl_safetensors_count(set->files[i]); i++)
        index -= bl_safetensors_count(set->files[i]);
    return bl_safetensors_at(set->files[i], index);
}

static bl_status open_set(const char *dir, char *const *names, size_t n_names, file_set *set)
{
    static const char suffix[] = ".safetensors";

    if (!(set->files = calloc(n_names + 1, sizeof *set->files)))
        return BL_FAIL(BL_ENOMEM, "%s: %zu names", dir, n_names);
    for (size_t i = 0; i < n_names; i++) {
        size_t length = strlen(names[i]);
        char *path;
        if (length < sizeof suffix || strcmp(names[i] + length - (sizeof suffix - 1), suffix) != 0)
            continue;
        BL_TRY(bl_path_join(dir, names[i], &path));
        bl_status st = bl_safetensors_open(path, &set->files[set->n_files]);
        free(path);
        if (st != BL_OK) return st;
        set->n_tensors += bl_safetensors_count(set->files[set->n_files++]);
    }
    return BL_OK;
}

/* Reads every byte back against the manifest. */
static bl_status report_checkpoint(json_t *report, const char *dir)
{
    bl_status st;
    int64_t step;
    json_t *state = NULL;
    char **names = NULL;
    size_t n_names = 0;
    file_set set = {0};

    BL_TRY_GOTO(st, done, bl_checkpoint_verify(dir, &step, &state));
    BL_TRY_GOTO(st, done, put(report, "step", json_integer(step)));
    BL_TRY_GOTO(st, done, put(report, "state", json_incref(state)));
    BL_TRY_GOTO(st, done, bl_dir_list(dir, &names, &n_names));
    BL_TRY_GOTO(st, done, open_set(dir, names, n_names, &set));
    BL_TRY_GOTO(st, done, put(report, "n_files", json_integer((json_int_t)n_names)));
    st = report_tensors(report, set_tensor, &set, set.n_tensors);
done:
    for (size_t i = 0; i < set.n_files; i++) bl_safetensors_close(set.files[i]);
    free(set.files);
    bl_names_free(names, n_names);
    json_decref(state);
    return st;
}

static bl_status report_folder(json_t *report, const char *dir)
{
    bl_status st;
    char *manifest = NULL, *adapter = NULL;

    BL_TRY_GOTO(st, done, bl_path_join(dir, "manifest.json", &manifest));
    BL_TRY_GOTO(st, done, bl_path_join(dir, "adapter_config.json", &adapter));
    if (bl_file_exists(manifest)) {
        BL_TRY_GOTO(st, done, put(report, "kind", json_string("checkpoint")));
        st = report_checkpoint(report, dir);
    } else if (bl_file_exists(adapter)) {
        BL_TRY_GOTO(st, done, put(report, "kind", json_string("adapter")));
        st = report_adapter(report, dir, adapter);
    } else {
        BL_TRY_GOTO(st, done, put(report, "kind", json_string("model")));
        st = report_model(report, dir);
    }
done:
    free(adapter);
    free(manifest);
    return st;
}

/* ---- the text ---- */

static void print_totals(const char *name, const json_t *sum)
{
    printf("%-10s %8lld tensors %18lld elements %18lld bytes\n", name,
           (long long)json_integer_value(json_object_get(sum, "n_tensors")),
           (long long)json_integer_value(json_object_get(sum, "n_elements")),
           (long long)json_integer_value(json_object_get(sum, "n_bytes")));
}

static void print_text(const json_t *report)
{
    size_t index;
    const char *key;
    json_t *value;

    json_array_foreach(json_object_get(report, "tensors"), index, value)
    {
        const json_t *dims = json_object_get(value, "shape");
        char shape[BL_SHAPE_TEXT_BYTES];
        int64_t sizes[BL_TENSOR_MAX_DIMS] = {0};
        for (size_t i = 0; i < json_array_size(dims); i++)
            sizes[i] = json_integer_value(json_array_get(dims, i));
        bl_shape_text((int)json_array_size(dims), sizes, shape);
        printf("%-8s %-20s %s\n", json_string_value(json_object_get(value, "dtype")), shape,
               json_string_value(json_object_get(value, "name")));
    }
    printf("\n%s, %s\n", json_string_value(json_object_get(report, "kind")),
           json_string_value(json_object_get(report, "path")));
    json_object_foreach((json_t *)report, key, value)
    {
        bool is_shown_elsewhere = strcmp(key, "kind") == 0 || strcmp(key, "path") == 0 ||
                                  strcmp(key, "tensors") == 0 || strcmp(key, "dtypes") == 0 ||
                                  strcmp(key, "n_tensors") == 0 || strcmp(key, "n_elements") == 0 ||
                                  strcmp(key, "n_bytes") == 0;
        if (is_shown_elsewhere) continue;
        char *text = json_dumps(value, JSON_ENCODE_ANY);
        if (text) printf("%-10s %s\n", key, text);
        free(text);
    }
    json_object_foreach(json_object_get(report, "dtypes"), key, value) print_totals(key, value);
    print_totals("total", report);
}

static bl_status inspect(const char *path, bool as_json)
{
    bl_status st;
    struct stat info;

    bl_json_watch_memory();
    json_t *report = json_object();
    BL_TRY_GOTO(st, done, bl_hub_check_path(path));
    if (stat(path, &info) != 0) {
        st = bl_fail_errno(BL_EINPUT, "%s", path);
        goto done;
    }
    json_t *name = json_string(path);
    if (!name && !bl_json_ran_out()) {
        st = BL_FAIL(BL_EUSAGE, "%s: the name is not UTF-8", path);
        goto done;
    }
    BL_TRY_GOTO(st, done, put(report, "path", name));
    if (S_ISDIR(info.st_mode)) {
        st = report_folder(report, path);
    } else {
        BL_TRY_GOTO(st, done, put(report, "kind", json_string("safetensors")));
        st = report_file(report, path);
    }
    /* An unusable model or file may have tensors to list. */
    if (st != BL_OK && (st != BL_EINPUT || !json_object_get(report, "dtypes"))) goto done;
    if (as_json) {
        json_dumpf(report, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        print_text(report);
    }
done:
    json_decref(report);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    inspect_options values;
    uint8_t origins[BL_COUNT(table)];
    const char *path = NULL;
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 1, &path, &n_words));
    if (!path) {
        st = BL_FAIL(BL_EUSAGE, "inspect: missing path; usage: ballast inspect FILE|DIR");
        goto done;
    }
    st = inspect(path, values.json);
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_inspect = {
    .name = "inspect",
    .arguments = "FILE|DIR [--json]",
    .summary = "check a safetensors file, a model, an adapter or a checkpoint and list its tensors",
    .details =
        "Prints type, shape and name of each tensor, and totals by type; for a model also "
        "how its FP8\n"
        "weights are scaled and which have 4 bits, and for a checkpoint its step and state, "
        "after every\n"
        "byte was checked. A model or an adapter is then checked as training checks it by keys, "
        "names,\n"
        "shapes and dtypes; values are not read. What cannot be used ends it with the reason and "
        "exit\n"
        "code 3, or 5 for a checkpoint.\n",
    .print_options = print_options,
    .run = run,
};
