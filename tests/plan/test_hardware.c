/* SPDX-License-Identifier: Apache-2.0 */
/* test_hardware.c -- every figure of every machine has a source; machines from names, from what
 * `ballast bench hardware` wrote, and from a user's file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"
#include "plan/hardware.h"

static const char *const kinds_of_source[] = {"datasheet: ", "measured: ", "seen: ", "assumed: "};

static void check_sources(const bl_hardware *h)
{
    for (size_t i = 0; i < bl_n_figures; i++) {
        const bl_figure *f = bl_hardware_figure(h, i);
        bool is_known = false;
        for (size_t k = 0; k < 4; k++)
            is_known |= strncmp(f->source, kinds_of_source[k], strlen(kinds_of_source[k])) == 0;
        if ((f->value > 0) != is_known)
            fail_msg("%s: %s is %g, from \"%s\"", h->name, bl_figures[i].key, f->value, f->source);
        assert_true(strlen(f->source) + 1 < BL_FIGURE_SOURCE_BYTES); /* not cut off */
    }
}

/* The table has every figure of the struct: no other bytes of it change when all of them are
 * set. */
static void test_figures_are_all_listed(void **state)
{
    (void)state;
    size_t n = 0, begin = offsetof(bl_hardware, device_memory_bytes);
    for (size_t i = 0; i < bl_n_figures; i++) {
        assert_true(bl_figures[i].offset >= begin);
        assert_int_equal(bl_figures[i].offset, begin + i * sizeof(bl_figure));
        n++;
    }
    assert_int_equal(begin + n * sizeof(bl_figure), sizeof(bl_hardware));
}

static void test_presets_have_sources(void **state)
{
    (void)state;
    const char *device, *name;
    char host[64];
    bl_hardware h;

    for (size_t i = 0; (name = bl_hardware_gpu_name(i, &device)); i++) {
        assert_int_equal(bl_hardware_preset(name, &h), BL_OK);
        check_sources(&h);
        assert_int_equal(h.n_devices, 1);
        assert_true(h.host_memory_bytes.value > 0);
        snprintf(host, sizeof host, "4x1x%s", name);
        assert_int_equal(bl_hardware_preset(host, &h), BL_OK);
        check_sources(&h);
        assert_int_equal(h.n_hosts, 4);
    }
    static const char *const promised[] = {"8xh100",     "2x8xh100",  "8xh200",    "1xh200",
                                           "1xh100",     "1xgh200",   "8xa100",    "8xb200",
                                           "8xv100-32g", "1xrtx5090", "4xrtx4090", "cpu"};
    for (size_t i = 0; i < sizeof promised / sizeof promised[0]; i++) {
        assert_int_equal(bl_hardware_load(promised[i], &h), BL_OK);
        assert_string_equal(h.name, promised[i]);
    }
}

static void test_part_of_a_host(void **state)
{
    (void)state;
    bl_hardware whole, quarter, two;

    assert_int_equal(bl_hardware_preset("8xh100", &whole), BL_OK);
    assert_int_equal(bl_hardware_preset("2xh100", &quarter), BL_OK);
    assert_int_equal(bl_hardware_preset("2x8xh100", &two), BL_OK);
    assert_true(quarter.host_memory_bytes.value == whole.host_memory_bytes.value / 4);
    assert_non_null(strstr(quarter.host_memory_bytes.source, "2/8 of that"));
    assert_true(quarter.device_memory_bytes.value == whole.device_memory_bytes.value);
    assert_true(two.host_memory_bytes.value == whole.host_memory_bytes.value);
    assert_int_equal(two.n_hosts * two.n_devices, 16);
}

static void refuses(const char *name, bl_status status, const char *words)
{
    bl_hardware h;
    assert_int_equal(bl_hardware_load(name, &h), status);
    if (!strstr(bl_error_text(), words))
        fail_msg("%s: \"%s\" lacks \"%s\"", name, bl_error_text(), words);
}

static void test_wrong_names(void **state)
{
    (void)state;
    refuses("8xh10", BL_EUSAGE, "did you mean 8xh100?");
    refuses("8xgaudi", BL_EUSAGE, "gh200, a100");
    refuses("16xh100", BL_EUSAGE, "2x8xh100 are 16");
    refuses("0xh100", BL_EUSAGE, "no such machine");
    refuses("2x2x2xh100", BL_EUSAGE, "no such machine");
    refuses("/nowhere/hardware.json", BL_EINPUT, "/nowhere/hardware.json");
}

/* By whatever case, with the lanes that they have there. */
static void test_cards(void **state)
{
    static const struct {
        const char *name;
        double device_gib; /* of the maker, of which the driver offers 90 to 100 % */
        int arch, n_devices;
    } cards[] = {
        {"1xA100-40G", 40, 80, 1}, {"8xa100-40g", 40, 80, 8}, {"8xL40S", 48, 89, 8},
        {"4xa10", 24, 86, 4},      {"2xRTX3090", 24, 86, 2},  {"2xh100-NVL", 94, 90, 2},
        {"2x8xH100", 80, 90, 8},
    };
    bl_hardware h, one;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cards); i++) {
        if (bl_hardware_load(cards[i].name, &h) != BL_OK) fail_msg("%s", bl_error_text());
        double part = h.device_memory_bytes.value / (cards[i].device_gib * 1073741824.0);
        assert_true(part > 0.9 && part <= 1);
        assert_int_equal(h.arch, cards[i].arch);
        assert_int_equal(h.n_devices, cards[i].n_devices);
        assert_int_equal(bl_hardware_check_peaks(&h), BL_OK);
    }
    assert_int_equal(bl_hardware_load("rtx3090", &one), BL_OK);
    assert_int_equal(bl_hardware_load("2xrtx3090", &h), BL_OK);
    assert_true(h.copy_in_bytes_per_s.value == one.copy_in_bytes_per_s.value / 2);
    assert_true(h.gather_bytes_per_s.value == one.gather_bytes_per_s.value / 2);
    assert_non_null(strstr(h.copy_in_bytes_per_s.source, "8 of 16 lanes"));
    assert_int_equal(bl_hardware_set_lanes(&h, 16), BL_OK);
    assert_true(h.copy_in_bytes_per_s.value == one.copy_in_bytes_per_s.value);
    assert_int_equal(bl_hardware_load("8xh100", &h), BL_OK);
    double gather = h.gather_bytes_per_s.value;
    assert_int_equal(bl_hardware_set_lanes(&h, 8), BL_OK);
    assert_true(h.gather_bytes_per_s.value == gather); /* by NVLink */
    assert_int_equal(bl_hardware_load("gh200", &h), BL_OK);
    assert_int_equal(bl_hardware_set_lanes(&h, 8), BL_EUSAGE);
    assert_int_equal(bl_hardware_load("CPU-2x64-Zen5", &h), BL_OK);
    assert_int_equal(h.n_cores, 128);
    assert_int_equal(bl_hardware_load("cpu-2x60-amx", &h), BL_OK);
    assert_int_equal(h.kind, BL_DEVICE_CPU);
}

static void write_text(char path[64], const char *text)
{
    strcpy(path, "/tmp/ballast_hardware_XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static void load_text(const char *text, bl_hardware *out)
{
    char path[64];
    write_text(path, text);
    bl_status st = bl_hardware_load(path, out);
    unlink(path);
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static void test_measured_file(void **state)
{
    (void)state;
    bl_hardware h;

    assert_int_equal(bl_hardware_load("bench/results/hardware.json", &h), BL_OK);
    check_sources(&h);
    assert_int_equal(h.kind, BL_DEVICE_CPU);
    assert_int_equal(h.n_cores, 2);
    assert_true(h.f32_gemm_flops_per_s.value == 7.31146e10); /* the larger median */
    assert_string_equal(h.f32_gemm_flops_per_s.source, "measured: hardware.json, gemm");
    assert_true(h.host_memory_bytes_per_s.value == 2 * 1.25072e10);
    assert_true(h.copy_in_bytes_per_s.value == 1.35743e10);
    assert_true(h.fp8_decode_weights_per_s.value == 6.32084e9);
    assert_true(h.host_watts.value == 0); /* not measured */
}

/* Measured rates take the place of the preset's; the rest of the preset stays. */
static void test_gpu_file(void **state)
{
    (void)state;
    bl_hardware h, preset;

    load_text("{\"hardware_version\": 1, \"based_on\": \"4xh100\", \"memory_bytes\": 1000000000000,"
              "\"all_gather\": [{\"ranks\": 2, \"median_bytes_per_s\": 1e9}],"
              "\"disk_read\": [{\"dir\": \".\", \"median_bytes_per_s\": 7e9}],"
              "\"disk_write\": [{\"dir\": \".\", \"median_bytes_per_s\": 3e9}],"
              "\"device_copy\": [{\"device\": \"cuda\", \"direction\": \"host_to_device\","
              "                   \"median_bytes_per_s\": 5.4e10},"
              "                  {\"device\": \"cuda\", \"devices\": 4,"
              "                   \"direction\": \"host_to_device\", \"median_bytes_per_s\": 5e10},"
              "                  {\"device\": \"cpu\", \"direction\": \"device_to_host\","
              "                   \"median_bytes_per_s\": 1e10}],"
              "\"figures\": {\"gather_bytes_per_s\": {\"value\": 3e11, \"source\": \"mine\"},"
              "              \"device_watts\": {\"value\": 0}}}",
              &h);
    assert_int_equal(bl_hardware_preset("4xh100", &preset), BL_OK);
    assert_int_equal(h.n_devices, 4);
    assert_true(h.host_memory_bytes.value == 1e12);
    assert_true(h.disk_read_bytes_per_s.value == 7e9);
    assert_true(h.disk_write_bytes_per_s.value == 3e9);
    assert_true(h.copy_in_bytes_per_s.value == 5e10);
    assert_true(h.copy_out_bytes_per_s.value == preset.copy_out_bytes_per_s.value);
    assert_true(h.gather_bytes_per_s.value == 3e11);
    assert_string_equal(h.gather_bytes_per_s.source, "mine");
    assert_true(h.device_watts.value == 0);
    assert_true(h.bf16_gemm_flops_per_s.value == preset.bf16_gemm_flops_per_s.value);
}

/* What `ballast bench hardware` says of GPUs picks the machine whose other figures are taken. */
static void test_measured_gpus(void **state)
{
    (void)state;
    bl_hardware h, preset;

    load_text(
        "{\"hardware_version\": 1, \"gpus\": 4, \"gpu\": \"NVIDIA H200\", \"gpu_capability\": 90,"
        "\"gpu_memory_bytes\": 150000000000, \"memory_bytes\": 128000000000,"
        "\"gemm\": [{\"device\": \"cuda\", \"dtype\": \"bf16\", \"median_flops_per_s\": 6e14}]}",
        &h);
    assert_int_equal(bl_hardware_preset("1xh200", &preset), BL_OK);
    assert_int_equal(h.kind, BL_DEVICE_CUDA);
    assert_int_equal(h.n_devices, 4);
    assert_string_equal(h.device, "NVIDIA H200");
    assert_true(h.device_memory_bytes.value == 150e9);
    assert_true(h.bf16_gemm_flops_per_s.value == 6e14);
    assert_true(h.gather_bytes_per_s.value == preset.gather_bytes_per_s.value);
    load_text(
        "{\"hardware_version\": 1, \"gpus\": 1, \"gpu\": \"Unheard of\", \"gpu_capability\": 89,"
        "\"gpu_memory_bytes\": 48000000000, \"memory_bytes\": 128000000000}",
        &h);
    assert_int_equal(h.arch, 89);
    double fp8_flops_per_s = h.fp8_gemm_flops_per_s.value;
    assert_true(fp8_flops_per_s > 2e14 && fp8_flops_per_s < 3e14);
    /* Clocks above the datasheet's: what was measured is the peak. */
    load_text(
        "{\"hardware_version\": 1, \"gpus\": 1, \"gpu\": \"RTX 4090\", \"gpu_capability\": 89,"
        "\"memory_bytes\": 128000000000,"
        "\"gemm\": [{\"device\": \"cuda\", \"dtype\": \"bf16\", \"median_flops_per_s\": 1.7e14}]}",
        &h);
    assert_true(h.bf16_peak_flops_per_s.value == 1.7e14);
}

/* On any machine all values that a plan needs are found. */
static void test_this_machine(void **state)
{
    (void)state;
    bl_hardware h;

    assert_int_equal(bl_hardware_find(&h), BL_OK);
    check_sources(&h);
    assert_true(h.n_cores >= 1 && h.n_devices >= 1 && h.n_hosts == 1);
    assert_true(h.host_memory_bytes.value > 0);
    assert_true(h.f32_gemm_flops_per_s.value > 0 || h.bf16_gemm_flops_per_s.value > 0);
    assert_true(h.gather_bytes_per_s.value > 0);
}

static void refuses_text(const char *text, const char *words)
{
    char path[64];
    bl_hardware h;

    write_text(path, text);
    bl_status st = bl_hardware_load(path, &h);
    unlink(path);
    assert_int_equal(st, BL_EINPUT);
    if (!strstr(bl_error_text(), words)) fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), words);
}

static void test_wrong_files(void **state)
{
    (void)state;
    refuses_text("{}", "key hardware_version");
    refuses_text("{\"hardware_version\": 2}", "key hardware_version");
    refuses_text("{\"hardware_version\": 1}", "no figure host_memory_bytes");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh10\"}", "key based_on");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh100\","
                 " \"figures\": {\"gather\": {\"value\": 1, \"source\": \"x\"}}}",
                 "gather is no figure");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh100\","
                 " \"figures\": {\"gather_bytes_per_s\": {\"value\": 1}}}",
                 "figures: gather_bytes_per_s");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh100\","
                 " \"figures\": {\"gather_bytes_per_s\": {\"value\": 1, \"source\": \"\"}}}",
                 "key source");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh100\","
                 " \"figures\": {\"gather_bytes_per_s\": {\"value\": 1e-300, \"source\": \"x\"}}}",
                 "figures: gather_bytes_per_s: expected 1000 to 1e+18");
    refuses_text("{\"hardware_version\": 1, \"based_on\": \"8xh100\","
                 " \"figures\": {\"bf16_gemm_flops_per_s\": {\"value\": 1e15, \"source\": \"x\"}}}",
                 "figures: bf16_gemm_flops_per_s 1e+15 is above bf16_peak_flops_per_s 9.894e+14");
    refuses_text("{\"hardware_version\": 1, \"kind\": \"cuda\", \"memory_bytes\": 1}",
                 "no figure bf16_gemm_flops_per_s");
}

/* The output of describe is read back as the same machine. */
static void test_description_reads_back(void **state)
{
    (void)state;
    bl_hardware before, after;
    json_t *described;

    assert_int_equal(bl_hardware_preset("2x8xh100", &before), BL_OK);
    assert_int_equal(bl_hardware_describe(&before, &described), BL_OK);
    char *text = json_dumps(described, JSON_INDENT(1));
    load_text(text, &after);
    assert_string_equal(after.name, before.name);
    assert_string_equal(after.device, before.device);
    assert_int_equal(after.kind, before.kind);
    assert_int_equal(after.arch, before.arch);
    assert_int_equal(after.n_hosts, 2);
    assert_int_equal(after.n_devices, 8);
    assert_int_equal(after.n_cores, before.n_cores);
    for (size_t i = 0; i < bl_n_figures; i++) {
        const bl_figure *b = bl_hardware_figure(&before, i), *a = bl_hardware_figure(&after, i);
        assert_true(a->value == b->value);
        assert_string_equal(a->source, b->source);
    }
    free(text);
    json_decref(described);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_figures_are_all_listed),
        cmocka_unit_test(test_presets_have_sources),
        cmocka_unit_test(test_part_of_a_host),
        cmocka_unit_test(test_cards),
        cmocka_unit_test(test_wrong_names),
        cmocka_unit_test(test_measured_file),
        cmocka_unit_test(test_gpu_file),
        cmocka_unit_test(test_measured_gpus),
        cmocka_unit_test(test_this_machine),
        cmocka_unit_test(test_wrong_files),
        cmocka_unit_test(test_description_reads_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
