/* SPDX-License-Identifier: Apache-2.0 */
/* bl_model_quantize writes the weights that loading the source in that format gives, bit for bit,
 * whatever the engine; interrupted, it resumes; and it rejects invalid requests. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "convert/dequantize.h"
#include "convert/quantize.h"
#include "arch/llama.h"
#include "model/rows.h"
#include "model/weights.h"
#include "skip.h"

static char folder[] = "/tmp/ballast-test-quantize.XXXXXX";
static bl_pool *pool;
static bl_device *device;
static bl_stream *stream;
static bl_comm *comm;

enum { N_PATHS = 8 };
static char *path_texts[N_PATHS];

static const char *const golden[] = {"tiny-gqa", "tiny-mha-tied", "tiny-llama3-rope",
                                     "../../families/models/qwen2-window", /* biases */
                                     "../../families/models/qwen3-tied"};
static const char *const stories[] = {"stories260K", "stories260K-bf16",
                                      "stories260K-bf16-sharded"};

static int set_up(void **state)
{
    (void)state;
    return !mkdtemp(folder) || bl_pool_create(2, &pool) != BL_OK ||
           bl_device_create_cpu(2, &device) != BL_OK ||
           bl_stream_create(device, "test", &stream) != BL_OK ||
           bl_comm_create_local(1, 0.0, &comm) != BL_OK;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < N_PATHS; i++) free(path_texts[i]);
    bl_comm_destroy(comm);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    bl_pool_destroy(pool);
    return bl_tree_remove(folder) != BL_OK;
}

/* "dir/name", valid until N_PATHS more have been joined. */
static const char *join(const char *dir, const char *name)
{
    static int next;
    char *text;
    assert_int_equal(bl_path_join(dir, name, &text), BL_OK);
    next = (next + 1) % N_PATHS;
    free(path_texts[next]);
    return path_texts[next] = text;
}

static bl_status quantize(const char *source, const char *target, bl_format format,
                          bl_quantize_result *result)
{
    const bl_quantize_options options = {
        .source = source, .target = target, .format = format, .pool = pool};
    return bl_model_quantize(&options, result);
}

typedef struct loaded {
    bl_model *model;
    bl_model_weights *weights;
} loaded;

static loaded load(const char *dir, bl_base_format format, bl_io_engine engine)
{
    loaded l;
    if (bl_model_open(dir, format, 16, &l.model) != BL_OK) fail_msg("%s", bl_error_text());
    l.model->io_engine = engine;
    if (bl_model_weights_load(l.model, device, comm, stream, NULL, &l.weights) != BL_OK)
        fail_msg("%s", bl_error_text());
    return l;
}

static void unload(loaded *l)
{
    bl_model_weights_free(l->weights);
    bl_model_close(l->model);
}

static size_t scale_bytes(const loaded *l)
{
    return (size_t)l->weights->n_scales * sizeof(float);
}

static void assert_same(const loaded *a, const loaded *b)
{
    assert_int_equal(a->weights->layout.shard_bytes, b->weights->layout.shard_bytes);
    assert_int_equal(scale_bytes(a), scale_bytes(b));
    assert_memory_equal(a->weights->shards, b->weights->shards, a->weights->layout.shard_bytes);
    assert_memory_equal(a->weights->scales, b->weights->scales, scale_bytes(a));
}

static void check_model(const char *source)
{
    static const bl_format formats[] = {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    static const bl_base_format choices[] = {BL_BASE_FP8_ROW, BL_BASE_FP8_BLOCK};
    const char *target = join(folder, "out");
    bl_quantize_result result;

    for (size_t f = 0; f < BL_COUNT(formats); f++) {
        if (quantize(source, target, formats[f], &result) != BL_OK)
            fail_msg("%s: %s", source, bl_error_text());
        assert_int_equal(result.n_kept, 0);
        loaded expected = load(source, choices[f], BL_IO_PREAD);
        loaded other = load(source, choices[f], BL_IO_URING);
        loaded quantized = load(target, BL_BASE_AUTO, BL_IO_AUTO);
        assert_same(&expected, &other);
        assert_same(&expected, &quantized);
        for (size_t i = 0; i < (size_t)expected.model->config.n_layers * BL_PROJECTIONS; i++)
            assert_int_equal(quantized.model->formats[i], formats[f]);
        unload(&expected);
        unload(&other);
        unload(&quantized);
        assert_int_equal(bl_tree_remove(target), BL_OK);
    }
}

static void test_golden_models(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(golden); i++)
        check_model(join("tests/golden/train/models", golden[i]));
}

/* ---- 4 bits ---- */

/* A model whose rows are whole groups of every format, in bf16. */
static const char *wide_model(void)
{
    const char *dir = join(folder, "wide");
    bl_quantize_result unused;

    if (!bl_file_exists(dir) &&
        bl_model_dequantize(
            &(bl_quantize_options){.source = "tests/golden/bits4/models/int4-g128-zero",
                                   .target = dir,
                                   .format = BL_FORMAT_BF16,
                                   .pool = pool},
            &unused) != BL_OK)
        fail_msg("%s", bl_error_text());
    return dir;
}

static float *read_weight(const bl_hf_model *model, const char *name, int64_t *n)
{
    const bl_stored_tensor *t = bl_hf_find(model, name);

    assert_non_null(t);
    *n = t->n_bytes / (int64_t)bl_dtype_bytes(t->dtype);
    float *values = malloc((size_t)*n * sizeof *values);
    assert_non_null(values);
    assert_int_equal(bl_stored_tensor_read_f32(t, values), BL_OK);
    return values;
}

/* The error of q_proj that was reported is that of the dequantized weights. */
static void check_error(const char *source, const char *target, const bl_quantize_result *result)
{
    static const char name[] = "model.layers.0.self_attn.q_proj.weight";
    const char *wide = join(folder, "dequantized");
    bl_quantize_result unused;
    bl_hf_model *models[2];
    int64_t n[2];
    double error = 0, base = 0;

    assert_int_equal(bl_model_dequantize(&(bl_quantize_options){.source = target,
                                                                .target = wide,
                                                                .format = BL_FORMAT_F32,
                                                                .pool = pool},
                                         &unused),
                     BL_OK);
    assert_int_equal(bl_hf_open(source, &models[0]), BL_OK);
    assert_int_equal(bl_hf_open(wide, &models[1]), BL_OK);
    float *w = read_weight(models[0], name, &n[0]), *q = read_weight(models[1], name, &n[1]);
    assert_int_equal(n[0], n[1]);
    for (int64_t i = 0; i < n[0]; i++) {
        error += ((double)q[i] - w[i]) * ((double)q[i] - w[i]);
        base += (double)w[i] * w[i];
    }
    assert_string_equal(result->kinds[0].name, "q_proj");
    assert_int_equal(result->kinds[0].n_matrices, 1);
    assert_true(error > 0);
    assert_true(fabs(result->kinds[0].error / sqrt(error / base) - 1) < 1e-12);
    assert_int_equal(result->n_kinds, BL_PROJECTIONS + 1);
    free(w);
    free(q);
    bl_hf_close(models[0]);
    bl_hf_close(models[1]);
    assert_int_equal(bl_tree_remove(wide), BL_OK);
}

static void check_packed(const char *source, bl_base_format choice, bool largest)
{
    const char *target = join(folder, "packed");
    bl_quantize_result result, again;
    bl_quantize_options options = {
        .source = source, .target = target, .largest_scales = largest, .pool = pool};

    assert_true(bl_format_parse(bl_base_format_name(choice), &options.format));
    if (bl_model_quantize(&options, &result) != BL_OK) fail_msg("%s", bl_error_text());
    check_error(source, target, &result);
    loaded expected = {0}, quantized = load(target, BL_BASE_AUTO, BL_IO_AUTO);
    assert_int_equal(bl_model_open(source, choice, 16, &expected.model), BL_OK);
    expected.model->largest_scales = largest;
    assert_int_equal(
        bl_model_weights_load(expected.model, device, comm, stream, NULL, &expected.weights),
        BL_OK);
    for (size_t i = 0; i < (size_t)expected.model->config.n_layers * BL_PROJECTIONS; i++)
        assert_int_equal(quantized.model->formats[i], options.format);
    assert_same(&expected, &quantized);
    unload(&expected);
    unload(&quantized);
    /* A finished one is kept, with its errors. */
    assert_int_equal(bl_model_quantize(&options, &again), BL_OK);
    assert_int_equal(again.n_kept, 1);
    assert_true(again.kinds[0].error == result.kinds[0].error);
    options.largest_scales = !largest;
    assert_int_equal(bl_model_quantize(&options, &again), BL_EUSAGE);
    assert_int_equal(bl_tree_remove(target), BL_OK);
}

static void test_packed(void **state)
{
    (void)state;
    for (bl_base_format choice = BL_BASE_MXFP4; choice <= BL_BASE_NF4; choice++)
        for (int largest = 0; largest < 2; largest++) check_packed(wide_model(), choice, largest);
}

static void test_packed_rows(void **state)
{
    bl_quantize_result result;

    (void)state;
    assert_int_equal(quantize(join("tests/golden/train/models", golden[0]), join(folder, "cut"),
                              BL_FORMAT_MXFP4, &result),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "down_proj.weight have 132 weights, which are not "
                                            "whole groups of 32; use fp8_row"));
}

static void test_real_models(void **state)
{
    (void)state;
    const char *data = getenv("BALLAST_TEST_DATA");
    TEST_SKIP_WITHOUT_DATA(data);
    for (size_t i = 0; i < BL_COUNT(stories); i++)
        check_model(join(join(data, "models"), stories[i]));
}

static void overwrite(const char *path, int64_t offset, const char *text)
{
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, offset, SEEK_SET), 0);
    assert_int_equal(fputs(text, file) >= 0, 1);
    assert_int_equal(fclose(file), 0);
}

static void put_text(const char *path, const char *text)
{
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
}

static void copy(const char *from, const char *to)
{
    void *bytes;
    size_t n_bytes;
    assert_int_equal(bl_file_read_all(from, 1 << 30, &bytes, &n_bytes), BL_OK);
    assert_int_equal(bl_file_write_atomic(to, bytes, n_bytes), BL_OK);
    free(bytes);
}

/* A target that was begun and then lost a file, or holds a changed byte in one. */
static void test_resume(void **state)
{
    (void)state;
    const char *data = getenv("BALLAST_TEST_DATA");
    bl_quantize_result result;
    char source[512], target[512], shard[2][600], kept[600], tmp[608];
    struct stat before, after;

    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(source, sizeof source, "%s/models/%s", data, stories[2]);
    snprintf(target, sizeof target, "%s/resumed", folder);
    for (int i = 0; i < 2; i++)
        snprintf(shard[i], sizeof shard[i], "%s/model-0000%d-of-00002.safetensors", target, i + 1);
    snprintf(kept, sizeof kept, "%s/kept", folder);
    snprintf(tmp, sizeof tmp, "%s.tmp", shard[1]);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(result.n_files, 2);
    copy(shard[1], kept);

    /* Interrupted inside the second file. */
    assert_int_equal(rename(shard[1], tmp), 0);
    assert_int_equal(unlink(join(target, "config.json")), 0);
    assert_int_equal(stat(shard[0], &before), 0);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(result.n_kept, 1);
    assert_int_equal(stat(shard[0], &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    assert_false(bl_file_exists(tmp));
    assert_true(bl_file_exists(join(target, "config.json")));

    overwrite(shard[1], 140000, "x");
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(result.n_kept, 1);
    void *bytes[2];
    size_t n_bytes[2];
    assert_int_equal(bl_file_read_all(shard[1], 1 << 30, &bytes[0], &n_bytes[0]), BL_OK);
    assert_int_equal(bl_file_read_all(kept, 1 << 30, &bytes[1], &n_bytes[1]), BL_OK);
    assert_int_equal(n_bytes[0], n_bytes[1]);
    assert_memory_equal(bytes[0], bytes[1], n_bytes[0]);
    free(bytes[0]);
    free(bytes[1]);

    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(result.n_kept, 2);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_BLOCK, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "fp8_row"));
    assert_int_equal(
        quantize(join("tests/golden/train/models", golden[0]), target, BL_FORMAT_FP8_ROW, &result),
        BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "other files"));
}

static void set_times(const char *path, const struct stat *info)
{
    struct timespec times[2] = {info->st_atim, info->st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* A source's shard with another byte, but the size and time that it had: the target would be of two
 * models. */
static void test_changed_source(void **state)
{
    static const char *const names[] = {"model.safetensors", "config.json"};
    char source[512], target[512], from[600], path[600];
    bl_quantize_result result;
    struct stat info;

    (void)state;
    snprintf(source, sizeof source, "%s/changing", folder);
    snprintf(target, sizeof target, "%s/of-changing", folder);
    assert_int_equal(mkdir(source, 0700), 0);
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        snprintf(from, sizeof from, "tests/golden/train/models/%s/%s", golden[0], names[i]);
        copy(from, join(source, names[i]));
    }
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    snprintf(path, sizeof path, "%s/model.safetensors", source);
    assert_int_equal(stat(path, &info), 0);
    overwrite(path, (long)info.st_size - 3, "x");
    set_times(path, &info);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "other bytes"));
}

/* The files other than the weights may be edited: a finished quantize that is run again keeps them,
 * and writes the removed ones. */
static void test_edited_files_stay(void **state)
{
    char source[512], target[512], path[600];
    bl_quantize_result result;
    void *bytes;
    size_t n_bytes;

    (void)state;
    snprintf(source, sizeof source, "tests/golden/train/models/%s", golden[0]);
    snprintf(target, sizeof target, "%s/edited", folder);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    snprintf(path, sizeof path, "%s/config.json", target);
    overwrite(path, 0, " ");
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(bl_file_read_all(path, 1 << 20, &bytes, &n_bytes), BL_OK);
    assert_int_equal(*(char *)bytes, ' ');
    free(bytes);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_true(bl_file_exists(path));
}

static void test_refusals(void **state)
{
    (void)state;
    const char *source = join("tests/golden/train/models", golden[0]);
    char target[512], model[512];
    bl_quantize_result result;

    snprintf(target, sizeof target, "%s/refused", folder);
    snprintf(model, sizeof model, "%s/model", folder);
    assert_int_equal(quantize("tests/golden/train/models/tiny-fp8-ct-channel", target,
                              BL_FORMAT_FP8_ROW, &result),
                     BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "quantized already"));
    assert_int_equal(quantize(join(folder, "nothing"), target, BL_FORMAT_FP8_ROW, &result),
                     BL_EINPUT);
    assert_false(bl_file_exists(target));

    assert_int_equal(bl_dir_create(model), BL_OK);
    copy(join(source, "config.json"), join(model, "config.json"));
    copy(join(source, "model.safetensors"), join(model, "model.safetensors"));
    assert_int_equal(quantize(model, join(model, "."), BL_FORMAT_FP8_ROW, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "one folder"));

    assert_int_equal(bl_dir_create(target), BL_OK);
    put_text(join(target, "thesis.txt"), "years of work");
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "thesis.txt"));

    /* In place of the target, or of its parent. */
    snprintf(target, sizeof target, "%s/model/config.json", folder);
    source = join("tests/golden/train/models", golden[0]);
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "/config.json: exists and is not a folder"));
    assert_int_equal(quantize(source, join(target, "x"), BL_FORMAT_FP8_ROW, &result), BL_EUSAGE);

    /* Sparse: a model that no disk here could take. The space is checked before anything is
     * written. */
    put_text(join(model, "huge.dat"), "");
    if (truncate(join(model, "huge.dat"), INT64_C(8) << 40) == 0) {
        const char *other = join(folder, "full");
        assert_int_equal(quantize(model, other, BL_FORMAT_FP8_ROW, &result), BL_ELIMIT);
        assert_non_null(strstr(bl_error_text(), other));
        assert_non_null(strstr(bl_error_text(), "are free"));
        assert_false(bl_file_exists(join(other, "model.safetensors")));
    }
}

/* ---- files that disappear meanwhile (the linker's --wrap) ---- */

/* `removed` is deleted before `lost_target` is listed, or its disk measured. */
static const char *lost_target, *removed;
static enum { NO_LOOK, LISTED, MEASURED } lost_when;

static void lose_before(int look, const char *path)
{
    if ((int)lost_when != look || strcmp(path, lost_target) != 0) return;
    lost_when = NO_LOOK;
    assert_int_equal(bl_tree_remove(removed), BL_OK);
}

bl_status __real_bl_dir_list(const char *path, char ***names, size_t *n_names);
bl_status __wrap_bl_dir_list(const char *path, char ***names, size_t *n_names);
bl_status __wrap_bl_dir_list(const char *path, char ***names, size_t *n_names)
{
    lose_before(LISTED, path);
    return __real_bl_dir_list(path, names, n_names);
}

bl_status __real_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes);
bl_status __wrap_bl_dir_free_bytes(const char *path, int64_t *n_bytes)
{
    lose_before(MEASURED, path);
    return __real_bl_dir_free_bytes(path, n_bytes);
}

static void test_target_removed(void **state)
{
    const char *const source = "tests/golden/train/models/tiny-gqa";
    char target[512];
    bl_quantize_result result;

    (void)state;
    snprintf(target, sizeof target, "%s/lost", folder);
    lost_target = removed = target;
    lost_when = LISTED;
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_EIO);
    assert_non_null(strstr(bl_error_text(), "/lost: No such file or directory"));
    lost_when = MEASURED;
    assert_int_equal(quantize(source, target, BL_FORMAT_FP8_ROW, &result), BL_EIO);
    assert_non_null(strstr(bl_error_text(), "was removed while this process used it"));
    assert_int_equal(lost_when, NO_LOOK);
    assert_false(bl_file_exists(target));
}

/* The model that was opened says whether there is an index. */
static void test_index_removed(void **state)
{
    const char *const source = "tests/golden/train/models/tiny-gqa";
    static const char shard_name[] = "model-00001-of-00001.safetensors",
                      index_name[] = "model.safetensors.index.json";
    char model[512], target[512], index[600], text[8192];
    bl_quantize_result result;
    bl_safetensors *file;
    int used = 0;

    (void)state;
    snprintf(model, sizeof model, "%s/sharded", folder);
    snprintf(target, sizeof target, "%s/indexed", folder);
    snprintf(index, sizeof index, "%s/%s", model, index_name);
    assert_int_equal(bl_dir_create(model), BL_OK);
    copy(join(source, "config.json"), join(model, "config.json"));
    copy(join(source, "model.safetensors"), join(model, shard_name));
    assert_int_equal(bl_safetensors_open(join(model, shard_name), &file), BL_OK);
    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        used +=
            snprintf(text + used, sizeof text - (size_t)used, "%s\"%s\": \"%s\"",
                     i ? ", " : "{\"weight_map\": {", bl_safetensors_at(file, i)->name, shard_name);
        assert_true(used < (int)sizeof text - 8);
    }
    snprintf(text + used, sizeof text - (size_t)used, "}}\n");
    bl_safetensors_close(file);
    put_text(index, text);
    lost_target = target;
    removed = index;
    lost_when = MEASURED;
    assert_int_equal(quantize(model, target, BL_FORMAT_FP8_ROW, &result), BL_OK);
    assert_int_equal(lost_when, NO_LOOK);
    assert_true(bl_file_exists(join(target, index_name)));
    loaded quantized = load(target, BL_BASE_AUTO, BL_IO_AUTO);
    unload(&quantized);
}

/* Its header would be the old one's. */
static void test_shard_replaced(void **state)
{
    const char *const source = "tests/golden/train/models/tiny-gqa";
    char model[512];
    bl_hf_model *opened;
    bl_io_files *files;

    (void)state;
    snprintf(model, sizeof model, "%s/replaced", folder);
    assert_int_equal(bl_dir_create(model), BL_OK);
    copy(join(source, "config.json"), join(model, "config.json"));
    copy(join(source, "model.safetensors"), join(model, "model.safetensors"));
    copy(join(source, "model.safetensors"), join(model, "other"));
    assert_int_equal(bl_hf_open(model, &opened), BL_OK);
    assert_int_equal(bl_model_open_io_files(opened, true, &files), BL_OK);
    bl_io_files_close(files);
    assert_int_equal(rename(join(model, "other"), join(model, "model.safetensors")), 0);
    assert_int_equal(bl_model_open_io_files(opened, true, &files), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "model.safetensors: was replaced"));
    bl_hf_close(opened);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_models),  cmocka_unit_test(test_real_models),
        cmocka_unit_test(test_packed),         cmocka_unit_test(test_packed_rows),
        cmocka_unit_test(test_resume),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_changed_source), cmocka_unit_test(test_edited_files_stay),
        cmocka_unit_test(test_target_removed), cmocka_unit_test(test_index_removed),
        cmocka_unit_test(test_shard_replaced),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
