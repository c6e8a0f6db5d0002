/* SPDX-License-Identifier: Apache-2.0 */
/* hardware.c -- the figures of a machine (memory, rates, watts) by key, and machines from files:
 * what `ballast bench hardware` has measured, or a user's figures. */
#include "plan/hardware.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/sizes.h"

#define FIGURE(field, text)                                                                        \
    {                                                                                              \
#field, offsetof(bl_hardware, field), text                                                 \
    }

const bl_figure_info bl_figures[] = {
    FIGURE(device_memory_bytes, "memory of a device"),
    FIGURE(device_memory_bytes_per_s, "its rate"),
    FIGURE(bf16_peak_flops_per_s, "products of bf16, datasheet"),
    FIGURE(fp8_peak_flops_per_s, "products of FP8, datasheet"),
    FIGURE(bf16_gemm_flops_per_s, "products of bf16, sustained"),
    FIGURE(fp8_gemm_flops_per_s, "products of FP8, sustained"),
    FIGURE(f32_gemm_flops_per_s, "products of fp32 on a CPU"),
    FIGURE(fp8_fast_gemm_flops_per_s, "products of FP8 with fast sums, sustained"),
    FIGURE(attention_forward_flops_per_s, "attention, forward"),
    FIGURE(attention_backward_flops_per_s, "attention, backward"),
    FIGURE(fp8_decode_weights_per_s, "weights decoded from FP8"),
    FIGURE(launch_s, "seconds between short kernels"),
    FIGURE(gather_bytes_per_s, "all-gather in a host, received"),
    FIGURE(gather_latency_s, "seconds of a collective in a host"),
    FIGURE(copy_in_bytes_per_s, "host to device"),
    FIGURE(copy_out_bytes_per_s, "device to host"),
    FIGURE(copy_both_bytes_per_s, "each of them, both at once"),
    FIGURE(pageable_copy_bytes_per_s, "host to device, not pinned"),
    FIGURE(host_memory_bytes, "memory of a host"),
    FIGURE(host_memory_bytes_per_s, "its rate, read and written"),
    FIGURE(pin_bytes_per_s, "memory touched and pinned"),
    FIGURE(disk_bytes, "disks of a host"),
    FIGURE(disk_read_bytes_per_s, "read from them"),
    FIGURE(disk_write_bytes_per_s, "written to them"),
    FIGURE(network_bytes_per_s, "between hosts, each direction"),
    FIGURE(network_latency_s, "seconds of a collective over hosts"),
    FIGURE(device_watts, "a device at work"),
    FIGURE(host_watts, "a host without its devices"),
};
const size_t bl_n_figures = BL_COUNT(bl_figures);

enum { FILE_BYTES_MAX = 16 << 20 };

const bl_figure *bl_hardware_figure(const bl_hardware *hardware, size_t index)
{
    return (const bl_figure *)((const char *)hardware + bl_figures[index].offset);
}

static bl_figure *figure_to_set(bl_hardware *hardware, size_t index)
{
    return (bl_figure *)((char *)hardware + bl_figures[index].offset);
}

/* ---- what `ballast bench hardware` measured ---- */

typedef struct reading {
    const char *path;
    const json_t *root;
    bl_hardware *out;
} reading;

/* Sets a figure whose source is a list of its file. */
static void set_measured(const reading *r, bl_figure *figure, double value, const char *list)
{
    const char *base = strrchr(r->path, '/');
    figure->value = value;
    snprintf(figure->source, sizeof figure->source, "measured: %.60s, %.32s",
             base ? base + 1 : r->path, list);
}

static bool says(const json_t *entry, const char *key, const char *word)
{
    const char *text = bl_json_text(json_object_get(entry, key));
    return text && strcmp(text, word) == 0;
}

/* The largest median of the list among entries whose key is word (NULL: all), of those with the
 * most devices at work: a rate is of one device with all others at work. At most once a figure. */
static bl_status read_rate(reading *r, const char *list, const char *unit, const char *const *match,
                           double factor, bl_figure *figure)
{
    const json_t *entries = NULL;
    char key[64];
    size_t i;
    json_t *entry;

    BL_TRY(bl_json_get_array(r->path, r->root, list, BL_JSON_OPTIONAL, &entries));
    snprintf(key, sizeof key, "median_%s_per_s", unit);
    double best = 0;
    int64_t most = 1;
    json_array_foreach((json_t *)entries, i, entry)
    {
        bool fits = true;
        double rate = 0;
        int64_t n_devices = 1;
        BL_TRY(bl_json_check_object(r->path, entry));
        for (const char *const *m = match; m && m[0]; m += 2)
            fits = fits && says(entry, m[0], m[1]);
        if (!fits || json_object_get(entry, "numa_node")) continue;
        BL_TRY(bl_json_get_real(r->path, entry, key, BL_JSON_REQUIRED, 0, 1e18, &rate));
        BL_TRY(
            bl_json_get_int(r->path, entry, "devices", BL_JSON_OPTIONAL, 1, 1 << 16, &n_devices));
        if (n_devices < most) continue;
        best = n_devices > most || rate > best ? rate : best;
        most = n_devices;
    }
    if (best > 0) set_measured(r, figure, factor * best, list);
    return BL_OK;
}

static bl_status read_device_rates(reading *r)
{
    bl_hardware *h = r->out;
    bool is_gpu = h->kind == BL_DEVICE_CUDA;
    const char *device = is_gpu ? "cuda" : "cpu";
    const char *in[] = {"device", device, "direction", "host_to_device", NULL};
    const char *out[] = {"device", device, "direction", "device_to_host", NULL};
    const char *gemm[] = {"device", device, "dtype", is_gpu ? "bf16" : "f32", NULL};
    const char *decode[] = {"device", device, "direction", "dequantize", NULL};

    BL_TRY(read_rate(r, "device_copy", "bytes", in, 1, &h->copy_in_bytes_per_s));
    BL_TRY(read_rate(r, "device_copy", "bytes", out, 1, &h->copy_out_bytes_per_s));
    const char *bf16[] = {"device", "cpu", "dtype", "bf16", NULL};

    BL_TRY(read_rate(r, "gemm", "flops", gemm, 1,
                     is_gpu ? &h->bf16_gemm_flops_per_s : &h->f32_gemm_flops_per_s));
    if (!is_gpu) { /* measured where the processor has it */
        h->bf16_gemm_flops_per_s = (bl_figure){0};
        BL_TRY(read_rate(r, "gemm", "flops", bf16, 1, &h->bf16_gemm_flops_per_s));
    }
    if (is_gpu && h->bf16_gemm_flops_per_s.value > h->bf16_peak_flops_per_s.value)
        h->bf16_peak_flops_per_s = h->bf16_gemm_flops_per_s; /* clocks above the datasheet's */
    return read_rate(r, "fp8", "weights", decode, 1, &h->fp8_decode_weights_per_s);
}

static bl_status read_amount(reading *r, const char *key, bl_figure *figure)
{
    double value = 0;
    BL_TRY(bl_json_get_real(r->path, r->root, key, BL_JSON_OPTIONAL, 0, 1e18, &value));
    if (value > 0) set_measured(r, figure, value, key);
    return BL_OK;
}

static bl_status read_measured(reading *r)
{
    bl_hardware *h = r->out;
    int64_t n_cores = h->n_cores;
    const char *processor = NULL;

    BL_TRY(
        bl_json_get_int(r->path, r->root, "usable_cores", BL_JSON_OPTIONAL, 1, 1 << 16, &n_cores));
    h->n_cores = (int)n_cores;
    BL_TRY(bl_json_get_string(r->path, r->root, "processor", BL_JSON_OPTIONAL, &processor));
    if (processor && h->kind == BL_DEVICE_CPU)
        snprintf(h->device, sizeof h->device, "%s", processor);
    BL_TRY(read_amount(r, "memory_bytes", &h->host_memory_bytes));
    BL_TRY(read_amount(r, "gpu_memory_bytes", &h->device_memory_bytes));
    BL_TRY(read_amount(r, "free_disk_bytes", &h->disk_bytes));
    /* Bytes copied are read once and written once. */
    BL_TRY(read_rate(r, "memory_copy", "bytes", NULL, 2, &h->host_memory_bytes_per_s));
    BL_TRY(read_rate(r, "disk_read", "bytes", NULL, 1, &h->disk_read_bytes_per_s));
    BL_TRY(read_rate(r, "disk_write", "bytes", NULL, 1, &h->disk_write_bytes_per_s));
    if (h->kind == BL_DEVICE_CPU) /* the list is of ranks that are threads */
        BL_TRY(read_rate(r, "all_gather", "bytes", NULL, 1, &h->gather_bytes_per_s));
    return read_device_rates(r);
}

/* ---- a user's figures ---- */

static bl_status read_figure(const char *path, const json_t *value, size_t index, bl_hardware *out)
{
    const char *source = NULL, *key = bl_figures[index].key;
    bl_figure *figure = figure_to_set(out, index);
    double number;

    BL_TRY(bl_json_check_object(path, value));
    bl_status st = bl_json_get_real(path, value, "value", BL_JSON_REQUIRED, 0, 1e18, &number);
    if (st == BL_OK)
        st = bl_json_get_string(path, value, "source",
                                number > 0 ? BL_JSON_REQUIRED : BL_JSON_OPTIONAL, &source);
    if (st == BL_OK && number > 0 && (!source[0] || strlen(source) >= BL_FIGURE_SOURCE_BYTES))
        st = BL_FAIL(BL_EINPUT, "%s: key source: expected 1..%d bytes", path,
                     BL_FIGURE_SOURCE_BYTES - 1);
    if (st != BL_OK) return bl_error_prefix(st, "figures: %s", key);
    if (bl_hardware_check_figure(key, number) != BL_OK)
        return bl_error_prefix(BL_EINPUT, "%s: figures", path);
    *figure = (bl_figure){.value = number};
    if (number > 0) snprintf(figure->source, sizeof figure->source, "%s", source);
    return BL_OK;
}

static bl_status read_figures(const char *path, const json_t *figures, bl_hardware *out)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)figures, key, value)
    {
        size_t i = 0;
        while (i < bl_n_figures && strcmp(bl_figures[i].key, key) != 0) i++;
        if (i == bl_n_figures)
            return BL_FAIL(BL_EINPUT, "%s: figures: %.64s is no figure; docs/plan.md lists them",
                           path, key);
        BL_TRY(read_figure(path, value, i, out));
    }
    return BL_OK;
}

static bl_status read_name(const char *path, const json_t *root, const char *key,
                           char out[BL_HARDWARE_NAME_BYTES])
{
    const char *text = NULL;
    BL_TRY(bl_json_get_string(path, root, key, BL_JSON_OPTIONAL, &text));
    if (text) snprintf(out, BL_HARDWARE_NAME_BYTES, "%s", text);
    return BL_OK;
}

static bl_status read_count(const char *path, const json_t *root, const char *key, int64_t min,
                            int64_t max, int *out)
{
    int64_t number = *out;
    BL_TRY(bl_json_get_int(path, root, key, BL_JSON_OPTIONAL, min, max, &number));
    *out = (int)number;
    return BL_OK;
}

/* The preset of that GPU: by a word of its name, else by its generation, else an H100. */
static const char *nearest_preset(const bl_gpu_info *gpu)
{
    static const struct {
        const char *word, *preset;
    } names[] = {{"H100 NVL", "h100-nvl"},
                 {"A100-SXM4-40GB", "a100-40g"},
                 {"L40S", "l40s"},
                 {"3090", "rtx3090"},
                 {"GH200", "gh200"},
                 {"H200", "h200"},
                 {"H100", "h100"},
                 {"A100", "a100"},
                 {"B200", "b200"},
                 {"V100", "v100-32g"},
                 {"5090", "rtx5090"},
                 {"4090", "rtx4090"},
                 {"A10", "a10"}}; /* behind A100 */
    static const struct {
        int capability;
        const char *preset;
    } generations[] = {{80, "a100"}, {86, "a10"}, {89, "rtx4090"}, {100, "b200"}, {120, "rtx5090"}};

    for (size_t i = 0; i < BL_COUNT(names); i++)
        if (strstr(gpu->name, names[i].word)) return names[i].preset;
    for (size_t i = 0; i < BL_COUNT(generations); i++)
        if (generations[i].capability == gpu->capability) return generations[i].preset;
    return "h100";
}

/* The machine whose GPUs were measured: as many as that GPU is usually sold with are one host's. */
static bl_status read_gpus(const char *path, const json_t *root, bl_hardware *out)
{
    const char *name = NULL;
    int64_t n = 0, capability = 0;
    bl_gpu_info gpu = {0};

    BL_TRY(bl_json_get_string(path, root, "gpu", BL_JSON_OPTIONAL, &name));
    if (!name) return BL_OK;
    BL_TRY(bl_json_get_int(path, root, "gpus", BL_JSON_REQUIRED, 1, 1024, &n));
    BL_TRY(bl_json_get_int(path, root, "gpu_capability", BL_JSON_REQUIRED, 1, 999, &capability));
    gpu.capability = (int)capability;
    snprintf(gpu.name, sizeof gpu.name, "%.60s", name);
    BL_TRY(bl_hardware_preset(nearest_preset(&gpu), out));
    snprintf(out->device, sizeof out->device, "%.60s", name);
    out->arch = gpu.capability;
    out->n_devices = (int)n;
    return BL_OK;
}

/* Reads the file's keys of the whole machine over those of the machine it is based on. */
static bl_status read_outline(const char *path, const json_t *root, bl_hardware *out)
{
    const char *based_on = NULL, *kind = NULL;

    BL_TRY(bl_json_get_string(path, root, "based_on", BL_JSON_OPTIONAL, &based_on));
    BL_TRY(bl_json_get_string(path, root, "kind", BL_JSON_OPTIONAL, &kind));
    if (kind && strcmp(kind, "cpu") != 0 && strcmp(kind, "cuda") != 0)
        return BL_FAIL(BL_EINPUT, "%s: key kind: expected cpu or cuda, got %.32s", path, kind);
    *out = (bl_hardware){.n_hosts = 1, .n_devices = 1, .n_cores = 1};
    BL_TRY(read_gpus(path, root, out));
    if (based_on) {
        bl_status st = bl_hardware_preset(based_on, out);
        if (st != BL_OK) return bl_error_prefix(BL_EINPUT, "%s: key based_on", path);
    }
    if (kind) out->kind = strcmp(kind, "cuda") == 0 ? BL_DEVICE_CUDA : BL_DEVICE_CPU;
    snprintf(out->name, sizeof out->name, "%s", path);
    BL_TRY(read_name(path, root, "name", out->name));
    BL_TRY(read_name(path, root, "device", out->device));
    BL_TRY(read_count(path, root, "arch", 0, 999, &out->arch));
    BL_TRY(read_count(path, root, "n_hosts", 1, 1024, &out->n_hosts));
    BL_TRY(read_count(path, root, "n_devices", 1, 1024, &out->n_devices));
    return read_count(path, root, "n_cores", 1, 1 << 16, &out->n_cores);
}

/* Checks that the figures are there which a plan requires. */
static bl_status check(const char *path, const bl_hardware *h)
{
    const char *missing = NULL;
    if (h->kind == BL_DEVICE_CUDA && h->device_memory_bytes.value == 0)
        missing = "device_memory_bytes";
    if (h->kind == BL_DEVICE_CUDA && h->bf16_gemm_flops_per_s.value == 0)
        missing = "bf16_gemm_flops_per_s";
    if (h->kind == BL_DEVICE_CPU && h->f32_gemm_flops_per_s.value == 0)
        missing = "f32_gemm_flops_per_s";
    if (h->host_memory_bytes.value == 0) missing = "host_memory_bytes";
    if (missing)
        return BL_FAIL(BL_EINPUT, "%s: no figure %s; give it, or the machine it is based_on", path,
                       missing);
    return bl_hardware_check_peaks(h) == BL_OK ? BL_OK
                                               : bl_error_prefix(BL_EINPUT, "%s: figures", path);
}

static bl_status read_file(const char *path, bl_hardware *out)
{
    json_t *root = NULL;
    const json_t *figures = NULL;
    int64_t version;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_json_load(path, FILE_BYTES_MAX, &root));
    BL_TRY_GOTO(st, done, bl_json_check_object(path, root));
    BL_TRY_GOTO(st, done,
                bl_json_get_int(path, root, "hardware_version", BL_JSON_REQUIRED, 1, 1, &version));
    BL_TRY_GOTO(st, done, read_outline(path, root, out));
    reading r = {.path = path, .root = root, .out = out};
    BL_TRY_GOTO(st, done, read_measured(&r));
    BL_TRY_GOTO(st, done, bl_json_get_object(path, root, "figures", BL_JSON_OPTIONAL, &figures));
    BL_TRY_GOTO(st, done, read_figures(path, figures, out));
    st = check(path, out);
done:
    json_decref(root);
    return st;
}

bl_status bl_hardware_load(const char *name, bl_hardware *out)
{
    size_t n = strlen(name);
    bool is_path = strchr(name, '/') || (n > 5 && strcmp(name + n - 5, ".json") == 0) ||
                   access(name, F_OK) == 0;
    return is_path ? read_file(name, out) : bl_hardware_preset(name, out);
}

/* Ranks that share a GPU gather by copies in its memory. */
static void assume_gathers(bl_hardware *h)
{
    if (h->gather_bytes_per_s.value > 0) return;
    h->gather_bytes_per_s = (bl_figure){h->device_memory_bytes_per_s.value / 2,
                                        "assumed: copies in the memory of a GPU that ranks share"};
    h->gather_latency_s = (bl_figure){30e-6, "assumed: 30 us"};
}

/* The preset's processor has been measured, this one has not: what compute does grows with the
 * cores. */
static void scale_cores(bl_hardware *h, int n_cores)
{
    bl_figure *const rates[] = {&h->f32_gemm_flops_per_s, &h->bf16_gemm_flops_per_s,
                                &h->attention_forward_flops_per_s,
                                &h->attention_backward_flops_per_s, &h->fp8_decode_weights_per_s};

    for (size_t i = 0; i < BL_COUNT(rates); i++) {
        rates[i]->value *= (double)n_cores / h->n_cores;
        snprintf(rates[i]->source, sizeof rates[i]->source,
                 "assumed: %d times a core of bench/results/hardware.json", n_cores);
    }
    h->disk_bytes = (bl_figure){0};
}

bl_status bl_hardware_find(bl_hardware *out)
{
    bl_gpu_info gpu;
    int64_t available = bl_memory_available_bytes();
    bool has_gpu = bl_device_find_cuda(0, &gpu) == BL_OK;

    BL_TRY(bl_hardware_preset(has_gpu ? nearest_preset(&gpu) : "cpu", out));
    snprintf(out->name, sizeof out->name, "this machine");
    if (has_gpu) {
        snprintf(out->device, sizeof out->device, "%.60s", gpu.name);
        out->arch = gpu.capability;
        out->n_devices = gpu.n_gpus;
        assume_gathers(out);
    } else {
        snprintf(out->device, sizeof out->device, "CPU");
    }
    int n_cores = (int)bl_cores_usable();
    if (!has_gpu) scale_cores(out, n_cores);
    out->n_cores = n_cores;
    if (available > 0)
        out->host_memory_bytes = (bl_figure){(double)available, "measured: what is available now"};
    return BL_OK;
}

bl_status bl_hardware_describe(const bl_hardware *h, json_t **out)
{
    bl_json_watch_memory();
    json_t *figures = json_object();
    for (size_t i = 0; i < bl_n_figures; i++) {
        const bl_figure *f = bl_hardware_figure(h, i);
        if (f->value != 0)
            json_object_set_new(figures, bl_figures[i].key,
                                json_pack("{s:f, s:s}", "value", f->value, "source", f->source));
    }
    *out =
        json_pack("{s:i, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:o}", "hardware_version", 1, "name",
                  h->name, "device", h->device, "kind", h->kind == BL_DEVICE_CUDA ? "cuda" : "cpu",
                  "arch", h->arch, "n_hosts", h->n_hosts, "n_devices", h->n_devices, "n_cores",
                  h->n_cores, "figures", figures);
    if (*out && !bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "the description of %s", h->name);
}
