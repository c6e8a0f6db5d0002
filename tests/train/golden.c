/* SPDX-License-Identifier: Apache-2.0 */
/* golden.c -- runs a golden case and compares losses, gradients and adapter with the float64
 * reference. */
#include "golden.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "store/safetensors.h"

static void require(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "golden: %s (%s)\n", what, bl_error_text());
    abort();
}

void golden_args_add(golden_args *args, const char *key, const char *format, ...)
{
    char value[GOLDEN_PATH_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(value, sizeof value, format, list);
    va_end(list);
    for (int i = 0; i + 1 < args->n; i++) { /* a file may come first */
        const char *text = args->text[i];
        if (strncmp(text, "--", 2) != 0 || strcmp(text + 2, key) != 0) continue;
        free(args->text[i + 1]);
        require((args->text[i + 1] = strdup(value)) != NULL, "memory");
        return;
    }
    require(args->n + 2 <= GOLDEN_MAX_ARGS, "too many arguments");
    require(bl_text_format(&args->text[args->n++], "--%s", key) == BL_OK, "memory");
    require(bl_text_format(&args->text[args->n++], "%s", value) == BL_OK, "memory");
}

void golden_args_free(golden_args *args)
{
    for (int i = 0; i < args->n; i++) free(args->text[i]);
    args->n = 0;
}

json_t *golden_load_case(const char *name)
{
    char path[GOLDEN_PATH_BYTES];
    json_error_t error;
    snprintf(path, sizeof path, GOLDEN_DIR "/cases/%s/case.json", name);
    json_t *golden = json_load_file(path, 0, &error);
    require(golden != NULL, path);
    return golden;
}

static bool grow_model(const json_t *model, const char *data, char path[GOLDEN_PATH_BYTES])
{
    const char *tool = getenv("BALLAST_GROW_MODEL"), *python = getenv("BALLAST_PYTHON");
    char command[4 * GOLDEN_PATH_BYTES], config[GOLDEN_PATH_BYTES + 16];
    size_t used;

    if (!python) python = "/usr/bin/python3"; /* where Debian's python3-numpy is */
    snprintf(command, sizeof command, "%s -c 'import numpy' 2>/dev/null", python);
    if (!tool || system(command) != 0) {
        printf(
            "skipped: a grown model needs BALLAST_GROW_MODEL, and numpy in BALLAST_PYTHON (%s)\n",
            python);
        return false;
    }
    snprintf(path, GOLDEN_PATH_BYTES, "/tmp/ballast-golden-%s",
             json_string_value(json_object_get(model, "path")));
    snprintf(config, sizeof config, "%s/config.json", path);
    if (bl_file_exists(config)) return true;
    used = (size_t)snprintf(command, sizeof command, "%s %s %s/%s %s.making-%d", python, tool, data,
                            json_string_value(json_object_get(model, "grow_source")), path,
                            (int)getpid());
    size_t i;
    json_t *word;
    json_array_foreach(json_object_get(model, "grow_arguments"), i, word) used +=
        (size_t)snprintf(command + used, sizeof command - used, " %s", json_string_value(word));
    snprintf(command + used, sizeof command - used,
             " >/dev/null && { mv -T %s.making-%d %s || rm -r %s.making-%d; }", path, (int)getpid(),
             path, path, (int)getpid()); /* another test may make it, too */
    require(system(command) == 0 && bl_file_exists(config), command);
    return true;
}

bool golden_model(const json_t *golden, char path[GOLDEN_PATH_BYTES])
{
    const json_t *model = json_object_get(golden, "model");
    const char *root = json_string_value(json_object_get(model, "root")),
               *data = getenv("BALLAST_TEST_DATA");

    if (strcmp(root, "golden") == 0) {
        snprintf(path, GOLDEN_PATH_BYTES, GOLDEN_DIR "/%s",
                 json_string_value(json_object_get(model, "path")));
        return true;
    }
    if (!data) {
        printf("skipped: %s needs BALLAST_TEST_DATA\n",
               json_string_value(json_object_get(golden, "name")));
        return false;
    }
    if (strcmp(root, "grown") == 0) return grow_model(model, data, path);
    snprintf(path, GOLDEN_PATH_BYTES, "%s/%s", data,
             json_string_value(json_object_get(model, "path")));
    return true;
}

static bool is_path_key(const char *key)
{
    return strcmp(key, "init_adapter") == 0 || strcmp(key, "train_file") == 0 ||
           strcmp(key, "validation_file") == 0;
}

static void add_value(golden_args *args, const char *key, const json_t *value)
{
    if (json_is_string(value)) {
        golden_args_add(args, key, "%s%s", is_path_key(key) ? GOLDEN_DIR "/" : "",
                        json_string_value(value));
    } else if (json_is_integer(value)) {
        golden_args_add(args, key, "%lld", (long long)json_integer_value(value));
    } else if (json_is_boolean(value)) {
        golden_args_add(args, key, "%s", json_is_true(value) ? "true" : "false");
    } else if (json_is_array(value)) {
        char list[256] = "";
        for (size_t i = 0; i < json_array_size(value); i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? "," : "",
                     json_string_value(json_array_get(value, i)));
        golden_args_add(args, key, "%s", list);
    } else {
        golden_args_add(args, key, "%.17g", json_number_value(value));
    }
}

void golden_config(const json_t *golden, const json_t *topology, golden_args *args)
{
    const char *key;
    json_t *value;
    golden_args_add(args, "device", "cpu"); /* whatever this machine has */
    /* The reference makes every step of the same number of rows. */
    golden_args_add(args, "epoch_end", "continue");
    json_object_foreach(json_object_get(golden, "config"), key,
                        value) if (!topology || !json_object_get(topology, key))
        add_value(args, key, value);
    if (!topology) return;
    json_object_foreach((json_t *)topology, key, value) add_value(args, key, value);
}

bl_status golden_train(const golden_args *args)
{
    return golden_train_hooked(args, NULL);
}

bl_status golden_train_hooked(const golden_args *args, const struct bl_pager_hooks *hooks)
{
    bl_train_config *config = NULL;
    bl_status st = bl_train_config_load(BL_CONFIG_TRAIN, NULL, args->n, args->text, &config);
    if (st == BL_OK) st = bl_train_run(config, NULL, hooks);
    bl_train_config_free(config);
    if (st != BL_OK) printf("train: %s\n", bl_error_text());
    return st;
}

double golden_evaluate(const char *model, const char *device, const char *adapter)
{
    golden_args args = {0};
    bl_train_config *config = NULL;
    bl_eval_result result = {0};

    golden_args_add(&args, "model", "%s", model);
    golden_args_add(&args, "base_format", "stored");
    golden_args_add(&args, "device", "%s", device);
    golden_args_add(&args, "data_format", "tokens");
    golden_args_add(&args, "max_seq_length", "64");
    golden_args_add(&args, "validation_file", GOLDEN_VALIDATION);
    if (adapter) golden_args_add(&args, "adapter", "%s", adapter);
    bl_status st = bl_train_config_load(BL_CONFIG_EVAL, NULL, args.n, args.text, &config);
    if (st == BL_OK) st = bl_eval_run(config, NULL, &result);
    bl_train_config_free(config);
    golden_args_free(&args);
    require(st == BL_OK, bl_error_text());
    return result.loss;
}

json_t *golden_metrics(const char *output_dir)
{
    char path[GOLDEN_PATH_BYTES + 16], *line = NULL;
    size_t capacity = 0;
    json_t *lines = json_array();

    snprintf(path, sizeof path, "%s/metrics.jsonl", output_dir);
    FILE *file = fopen(path, "r");
    require(file != NULL, path);
    while (getline(&line, &capacity, file) > 0) {
        json_t *row = json_loads(line, 0, NULL);
        require(row != NULL, line);
        json_array_append_new(lines, row);
    }
    free(line);
    fclose(file);
    return lines;
}

static const json_t *metrics_of_step(const json_t *metrics, size_t step, const char *key)
{
    size_t i;
    json_t *row;
    json_array_foreach((json_t *)metrics, i,
                       row) if ((size_t)json_integer_value(json_object_get(row, "step")) == step &&
                                json_object_get(row, key)) return json_object_get(row, key);
    require(false, "a step is missing in metrics.jsonl");
    return NULL;
}

double golden_compare_losses(const json_t *metrics, const json_t *steps, size_t n, double limit)
{
    static const char *const keys[] = {"loss", "learning_rate"};
    double worst = 0.0;
    for (size_t i = 0; i < n && i < json_array_size(steps); i++)
        for (size_t k = 0; k < 2; k++) {
            double expected = json_number_value(json_object_get(json_array_get(steps, i), keys[k]));
            double value = json_number_value(metrics_of_step(metrics, i + 1, keys[k]));
            double error = fabs(value - expected) / (fabs(expected) > 0.0 ? fabs(expected) : 1.0);
            if (!(error <= limit))
                printf("step %zu: %s %.12g, expected %.12g\n", i + 1, keys[k], value, expected);
            if (!(error <= worst)) worst = error;
        }
    return worst;
}

/* Norm and two projections, as tools/golden/train/reference.py defines them. */
static void summarize(const float *x, int64_t n, double out[3])
{
    out[0] = out[1] = out[2] = 0.0;
    for (int64_t i = 0; i < n; i++) {
        out[0] += (double)x[i] * (double)x[i];
        for (uint32_t k = 1; k <= 2; k++) {
            uint32_t h = (uint32_t)(i + 1) * 2654435761u + k * 2246822519u;
            h ^= h >> 15;
            h *= 2246822519u;
            h ^= h >> 13;
            out[k] += (double)x[i] * ((double)h * 0x1p-31 - 1.0);
        }
    }
    out[0] = sqrt(out[0]);
}

double golden_compare_tensors(const char *path, const json_t *expected, double scale, double limit)
{
    bl_safetensors *file = NULL;
    double worst = 0.0;
    const char *name;
    json_t *values;

    require(bl_safetensors_open(path, &file) == BL_OK, path);
    require(bl_safetensors_count(file) == json_object_size(expected), "another number of tensors");
    json_object_foreach((json_t *)expected, name, values)
    {
        const bl_stored_tensor *t = bl_safetensors_find(file, name);
        double summary[3];
        require(t != NULL, name);
        int64_t n = t->n_bytes / (int64_t)sizeof(float);
        float *x = malloc((size_t)t->n_bytes + 1);
        require(x && bl_stored_tensor_read_f32(t, x) == BL_OK, name);
        summarize(x, n, summary);
        free(x);
        double norm = json_number_value(json_array_get(values, 0));
        for (size_t k = 0; k < 3; k++) {
            double error = fabs(summary[k] - json_number_value(json_array_get(values, k))) /
                           (scale > 0.0  ? scale
                            : norm > 0.0 ? norm
                                         : 1.0);
            if (!(error <= limit)) printf("%s: figure %zu off by %.3g\n", name, k, error);
            if (!(error <= worst)) worst = error;
        }
    }
    bl_safetensors_close(file);
    return worst;
}

double golden_last_eval_loss(const char *output)
{
    json_t *metrics = golden_metrics(output), *row;
    double loss = 0;
    size_t i;

    json_array_foreach(metrics, i, row)
    {
        const json_t *value = json_object_get(row, "eval_loss");
        if (value) loss = json_number_value(value);
    }
    json_decref(metrics);
    return loss;
}
