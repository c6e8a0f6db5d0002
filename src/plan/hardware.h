/* SPDX-License-Identifier: Apache-2.0 */
/* hardware.h -- the machine that a plan is for: how much there is of each thing, how fast it is,
 * and from where each of these figures is known. Plain data: a bl_hardware is copied by assignment
 * and owns nothing. */
#ifndef BALLAST_PLAN_HARDWARE_H
#define BALLAST_PLAN_HARDWARE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "device/device.h"

enum { BL_FIGURE_SOURCE_BYTES = 112, BL_HARDWARE_NAME_BYTES = 64 };

/* A number with its source: "datasheet: H100 SXM", "measured: hardware.json, gemm", "assumed: ...".
 * value 0: the machine has no such thing, or nothing is known of it; only then is source empty. */
typedef struct bl_figure {
    double value;
    char source[BL_FIGURE_SOURCE_BYTES];
} bl_figure;

/* n_hosts equal hosts with n_devices devices each. A GPU is one rank's device. The host of kind
 * BL_DEVICE_CPU is one device: its ranks share its cores and its memory, which is the host's
 * (device_memory_bytes is 0, copies go at the speed of memory).
 *
 * Rates are per second and, unless noted, of one device with all others at work. */
typedef struct bl_hardware {
    char name[BL_HARDWARE_NAME_BYTES];   /* "2x8xh100", or the file */
    char device[BL_HARDWARE_NAME_BYTES]; /* "NVIDIA H100 SXM5 80 GB", "AMD EPYC" */
    bl_device_kind kind;
    int arch; /* compute capability, 10 x major + minor: 90; CPU: 0 */
    int n_hosts, n_devices;
    int n_cores; /* of a host */
    /* of a device's link to the host, which the rates of copies are for; 0: no PCIe, or not
     * known */
    int pcie_lanes;
    bool gathers_by_pcie; /* between devices, too */

    /* ---- a device ---- */
    bl_figure device_memory_bytes; /* as its driver offers them to programs */
    bl_figure device_memory_bytes_per_s;
    /* Dense products, floating-point operations: the datasheet's, and what long runs of large
     * products sustain. CPU: f32 alone, of all cores of the host. */
    bl_figure bf16_peak_flops_per_s, fp8_peak_flops_per_s;
    bl_figure bf16_gemm_flops_per_s, fp8_gemm_flops_per_s, f32_gemm_flops_per_s;
    bl_figure fp8_fast_gemm_flops_per_s; /* with fp8_fast_accumulation; 0: as without */
    /* Causal attention, of the half of the products that is computed. */
    bl_figure attention_forward_flops_per_s, attention_backward_flops_per_s;
    bl_figure fp8_decode_weights_per_s; /* FP8 codes to the type of products */
    bl_figure launch_s;                 /* seconds between short kernels that follow each other */

    /* ---- links of a device ---- */
    /* Bytes that it receives from the other devices of its host in an all-gather; through host
     * memory without a direct link. */
    bl_figure gather_bytes_per_s;
    bl_figure gather_latency_s; /* seconds, of one collective besides its bytes */
    /* Pinned host memory to the device, back, and each of them while both go on. */
    bl_figure copy_in_bytes_per_s, copy_out_bytes_per_s, copy_both_bytes_per_s;
    bl_figure pageable_copy_bytes_per_s; /* cudaMemcpy stages pageable memory */

    /* ---- a host: shared by its devices ---- */
    bl_figure host_memory_bytes;
    bl_figure host_memory_bytes_per_s; /* bytes read plus bytes written */
    bl_figure pin_bytes_per_s;         /* touched and pinned, by all processes at once */
    bl_figure disk_bytes, disk_read_bytes_per_s, disk_write_bytes_per_s;
    bl_figure network_bytes_per_s; /* to the other hosts, each direction */
    bl_figure network_latency_s;   /* seconds, of one collective over hosts besides its bytes */

    /* ---- power, watts ---- */
    bl_figure device_watts; /* of a device at work */
    bl_figure host_watts;   /* of a host at work, without its devices */
} bl_hardware;

/* The figures by key, to print, read and check them: "gather_bytes_per_s", at `offset` in
 * bl_hardware. The key tells the unit. */
typedef struct bl_figure_info {
    const char *key;
    size_t offset;
    const char *meaning; /* a few words */
} bl_figure_info;
extern const bl_figure_info bl_figures[];
extern const size_t bl_n_figures;
const bl_figure *bl_hardware_figure(const bl_hardware *hardware, size_t index);

/* hardware_check.c. BL_EUSAGE: the value is outside of the figure's range, which the text has (0 is
 * in all of them: none); a sustained rate is above the peak of its kind. */
bl_status bl_hardware_check_figure(const char *key, double value);
bl_status bl_hardware_check_peaks(const bl_hardware *hardware);

/* [HOSTSx]DEVICESxGPU: "8xh100", "2x8xh100", "1xgh200"; GPU alone is one; "cpu": a small CPU host.
 * Case does not count. Any counts of 1..1024. BL_EUSAGE lists the GPUs and names the nearest. */
bl_status bl_hardware_preset(const char *name, bl_hardware *out);

/* Rates of the link, as for another number of lanes. BL_EUSAGE: pcie_lanes is 0. */
bl_status bl_hardware_set_lanes(bl_hardware *hardware, int lanes);

/* `name` is a preset, or a file: hardware.json as `ballast bench hardware` writes it, or the same
 * with figures of the user's own (docs/plan.md). BL_EINPUT names file and key. */
bl_status bl_hardware_load(const char *name, bl_hardware *out);

/* This machine: its GPUs, or its processor where this build finds none, with the figures of the
 * nearest preset, and its memory and cores from the system. */
bl_status bl_hardware_find(bl_hardware *out);

/* The same as a document that bl_hardware_load reads back. The caller's to json_decref;
 * BL_ENOMEM. */
bl_status bl_hardware_describe(const bl_hardware *hardware, json_t **out);

/* The names to choose from, one per line: "h100  NVIDIA H100 SXM5 80 GB". i from 0; NULL: end. */
const char *bl_hardware_gpu_name(size_t i, const char **device);

#endif
