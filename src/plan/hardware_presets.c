/* SPDX-License-Identifier: Apache-2.0 */
/* hardware_presets.c -- machines by name: GPUs in the host that they are usually sold in. A name
 * with fewer devices than that host gets its share of the host's shared resources. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/nearest.h"
#include "base/sizes.h"
#include "plan/hardware.h"

#define GIB    (1024.0 * 1024 * 1024)
#define GB     1e9
#define TB     1e12
#define TFLOPS 1e12
#define DATASHEET(number, what)                                                                    \
    {                                                                                              \
        (number), "datasheet: " what                                                               \
    }
#define ASSUMED(number, why)                                                                       \
    {                                                                                              \
        (number), "assumed: " why                                                                  \
    }
#define SEEN(number, where)                                                                        \
    {                                                                                              \
        (number), "seen: " where                                                                   \
    }

/* Of a host with eight PCIe cards; host_gb: memory per GPU. */
#define SERVER_PCIE(host_gb)                                                                       \
    .host_memory_bytes = ASSUMED(8 * (host_gb)*GB, #host_gb " GB per GPU"),                        \
    .host_memory_bytes_per_s = SHORT_OF_PEAK(8 * 25.6 * GB),                                       \
    .disk_bytes = ASSUMED(16 * TB, "a drive of 2 TB per GPU"),                                     \
    .disk_read_bytes_per_s = ASSUMED(48 * GB, "a PCIe 4 drive of 6 GB/s per GPU"),                 \
    .disk_write_bytes_per_s = ASSUMED(24 * GB, "half of the reads'"),                              \
    .network_bytes_per_s = ASSUMED(1.1 * GB, "10 Gb/s Ethernet"),                                  \
    .network_latency_s = ASSUMED(100e-6, "100 us"), .host_watts = ASSUMED(1200, "150 W per GPU")

/* Products: the best shape of ml-engineering's table of achievable matrix products (stas00, 2026),
 * less what long runs lose to clocks and to shapes. FP8 with full sums loses more: fast sums are
 * worth 1.1 to 1.2 (torchao 2377). */
#define GEMM_16(best) ASSUMED(0.88 * (best), "88 % of the best product in ml-engineering's table")
#define GEMM_8(best)                                                                               \
    ASSUMED(0.94 * (best) / 1.2, "94 % of ml-engineering's best product, 1.2 less for full sums")

#define FAST_GEMM_8(best) ASSUMED(0.94 * (best), "94 % of ml-engineering's best product")

/* Codes go through shared memory to be transposed: 70 to 80 % of a copy's rate by their
 * instructions. */
#define DECODE(memory_rate)                                                                        \
    ASSUMED(0.75 * (memory_rate) / 3, "75 % of the memory's rate, 3 bytes a weight")
#define LAUNCH                ASSUMED(3e-6, "3 us between short kernels in one stream")
#define LATENCY               ASSUMED(30e-6, "30 us")
#define SHORT_OF_PEAK(number) ASSUMED(0.8 * (number), "80 % of the datasheet's")
#define PAGEABLE(number)      ASSUMED((number), "a tenth of pinned memory's, by staging")

/* Of a whole host: eight GPUs of the H100's generation. */
#define HGX_HOPPER                                                                                 \
    .n_cores = 112, .host_memory_bytes = DATASHEET(2 * TB, "DGX H100, 2 TB"),                      \
    .host_memory_bytes_per_s = SHORT_OF_PEAK(16 * 38.4 * GB),                                      \
    .disk_bytes = DATASHEET(8 * 3.84 * TB, "DGX H100, 8 x 3.84 TB NVMe"),                          \
    .disk_read_bytes_per_s = SEEN(48 * GB, "DeepNVMe, 8 drives"),                                  \
    .disk_write_bytes_per_s = ASSUMED(24 * GB, "half of the reads'"),                              \
    .network_bytes_per_s = SHORT_OF_PEAK(8 * 50 * GB), .network_latency_s = LATENCY,               \
    .host_watts = DATASHEET(4600, "DGX H100, 10.2 kW less 8 x 700 W")

#define PCIE_5                                                                                     \
    .pcie_lanes = 16, .copy_in_bytes_per_s = SEEN(54.8 * GB, "pinned, PCIe 5 x16 (Voltage Park)"), \
    .copy_out_bytes_per_s = ASSUMED(54.8 * GB, "as the way in"),                                   \
    .copy_both_bytes_per_s = ASSUMED(45 * GB, "both ways at once, PCIe 5 x16"),                    \
    .pageable_copy_bytes_per_s = PAGEABLE(5.5 * GB)
#define PCIE_4                                                                                     \
    .pcie_lanes = 16, .copy_in_bytes_per_s = ASSUMED(25 * GB, "80 % of PCIe 4 x16"),               \
    .copy_out_bytes_per_s = ASSUMED(25 * GB, "80 % of PCIe 4 x16"),                                \
    .copy_both_bytes_per_s = ASSUMED(20 * GB, "both ways at once, PCIe 4 x16"),                    \
    .pageable_copy_bytes_per_s = PAGEABLE(2.5 * GB)

#define HOPPER_ATTENTION                                                                           \
    .kind = BL_DEVICE_CUDA, .arch = 90,                                                            \
    .attention_forward_flops_per_s =                                                               \
        ASSUMED(290 * TFLOPS, "the kernels' instructions; FA-2 at 8k: 306 (#1893)"),               \
    .attention_backward_flops_per_s =                                                              \
        ASSUMED(150 * TFLOPS, "the kernels' instructions; FA-2 at 8k: 166 (#1893)"),               \
    .launch_s = LAUNCH, .gather_latency_s = LATENCY
#define HOPPER                                                                                     \
    HOPPER_ATTENTION, .bf16_peak_flops_per_s = DATASHEET(989.4 * TFLOPS, "H100, dense"),           \
                      .fp8_peak_flops_per_s = DATASHEET(1978.9 * TFLOPS, "H100, dense")

/* n_devices: of the whole host, and the most of a name. */
static const struct {
    const char *name;
    bl_hardware hardware;
} presets[] = {
    {"h100",
     {.device = "NVIDIA H100 SXM5 80 GB",
      .n_devices = 8,
      .device_memory_bytes = SEEN(79.1 * GIB, "total_memory on an H100 SXM5"),
      .device_memory_bytes_per_s = DATASHEET(3.35 * TB, "H100 SXM5"),
      HOPPER,
      .bf16_gemm_flops_per_s = GEMM_16(794.5 * TFLOPS),
      .fp8_gemm_flops_per_s = GEMM_8(1402.6 * TFLOPS),
      .fp8_fast_gemm_flops_per_s = FAST_GEMM_8(1402.6 * TFLOPS),
      .fp8_decode_weights_per_s = DECODE(3.35 * TB),
      .gather_bytes_per_s = SEEN(361 * GB, "NCCL bus bandwidth on 8 H200 (ml-engineering)"),
      PCIE_5,
      HGX_HOPPER,
      .device_watts = DATASHEET(700, "H100 SXM5")}},
    {"h200",
     {.device = "NVIDIA H200 SXM 141 GB",
      .n_devices = 8,
      .device_memory_bytes = SEEN(139.7 * GIB, "total_memory on an H200"),
      .device_memory_bytes_per_s = DATASHEET(4.8 * TB, "H200 SXM"),
      HOPPER,
      .bf16_gemm_flops_per_s = GEMM_16(794.5 * TFLOPS),
      .fp8_gemm_flops_per_s = GEMM_8(1453.4 * TFLOPS),
      .fp8_fast_gemm_flops_per_s = FAST_GEMM_8(1453.4 * TFLOPS),
      .fp8_decode_weights_per_s = DECODE(4.8 * TB),
      .gather_bytes_per_s = SEEN(361 * GB, "NCCL bus bandwidth on 8 H200 (ml-engineering)"),
      PCIE_5,
      HGX_HOPPER,
      .device_watts = DATASHEET(700, "H200 SXM")}},
    {"h100-nvl",
     {.device = "NVIDIA H100 NVL 94 GB",
      .n_devices = 8,
      .n_cores = 112,
      .device_memory_bytes = ASSUMED(93.1 * GIB, "94 GB less 1 %, as seen on an H100 SXM5"),
      .device_memory_bytes_per_s = DATASHEET(3.9 * TB, "H100 NVL"),
      HOPPER_ATTENTION,
      .bf16_peak_flops_per_s = DATASHEET(835.5 * TFLOPS, "H100 NVL, dense"),
      .fp8_peak_flops_per_s = DATASHEET(1671 * TFLOPS, "H100 NVL, dense"),
      .bf16_gemm_flops_per_s = ASSUMED(0.6 * 835.5 * TFLOPS, "60 % of the datasheet's, at 400 W"),
      .fp8_gemm_flops_per_s = ASSUMED(0.5 * 1671 * TFLOPS, "50 % of the datasheet's, at 400 W"),
      .fp8_decode_weights_per_s = DECODE(3.9 * TB),
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(45 * GB, "PCIe 5 x16: NVLink joins pairs only"),
      PCIE_5,
      .host_memory_bytes = ASSUMED(1024 * GB, "128 GB per GPU"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(16 * 38.4 * GB),
      .disk_bytes = ASSUMED(16 * TB, "a drive of 2 TB per GPU"),
      .disk_read_bytes_per_s = ASSUMED(48 * GB, "a PCIe 4 drive of 6 GB/s per GPU"),
      .disk_write_bytes_per_s = ASSUMED(24 * GB, "half of the reads'"),
      .network_bytes_per_s = SHORT_OF_PEAK(2 * 50 * GB),
      .network_latency_s = LATENCY,
      .device_watts = DATASHEET(400, "H100 NVL"),
      .host_watts = ASSUMED(1600, "200 W per GPU")}},
    {"gh200",
     {.device = "NVIDIA GH200 96 GB, 480 GB LPDDR5X",
      .n_devices = 1,
      .n_cores = 72,
      .device_memory_bytes = SEEN(94.5 * GIB, "total_memory on a GH200 480GB"),
      .device_memory_bytes_per_s = DATASHEET(4.0 * TB, "GH200, HBM3"),
      HOPPER,
      .bf16_gemm_flops_per_s = GEMM_16(794.5 * TFLOPS),
      .fp8_gemm_flops_per_s = GEMM_8(1402.6 * TFLOPS),
      .fp8_fast_gemm_flops_per_s = FAST_GEMM_8(1402.6 * TFLOPS),
      .fp8_decode_weights_per_s = DECODE(4.0 * TB),
      .copy_in_bytes_per_s = SEEN(375 * GB, "NVLink-C2C to the GPU (arXiv:2407.07850)"),
      .copy_out_bytes_per_s = SEEN(297 * GB, "NVLink-C2C to the CPU (arXiv:2407.07850)"),
      .copy_both_bytes_per_s = ASSUMED(200 * GB, "both ways at once, bound by LPDDR5X"),
      .pageable_copy_bytes_per_s = PAGEABLE(37 * GB),
      .host_memory_bytes = DATASHEET(480 * GB, "GH200, 480 GB LPDDR5X"),
      .host_memory_bytes_per_s = SEEN(486 * GB, "STREAM on LPDDR5X (arXiv:2407.07850)"),
      .disk_bytes = ASSUMED(4 * TB, "one NVMe drive"),
      .disk_read_bytes_per_s = ASSUMED(6 * GB, "one PCIe 4 NVMe drive"),
      .disk_write_bytes_per_s = ASSUMED(4 * GB, "one PCIe 4 NVMe drive"),
      .network_bytes_per_s = SHORT_OF_PEAK(50 * GB),
      .network_latency_s = LATENCY,
      .device_watts = ASSUMED(700, "of the module's 1,000 W"),
      .host_watts = ASSUMED(300, "of the module's 1,000 W")}},
    {"a100",
     {.device = "NVIDIA A100 SXM4 80 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 80,
      .n_devices = 8,
      .n_cores = 128,
      .device_memory_bytes = SEEN(79.15 * GIB, "total_memory on an A100 SXM4 80 GB"),
      .device_memory_bytes_per_s = DATASHEET(2.039 * TB, "A100 SXM4 80 GB"),
      .bf16_peak_flops_per_s = DATASHEET(312 * TFLOPS, "A100, dense"),
      .bf16_gemm_flops_per_s = GEMM_16(271.2 * TFLOPS),
      .attention_forward_flops_per_s = ASSUMED(180 * TFLOPS, "FlashAttention-2's, 8k"),
      .attention_backward_flops_per_s = ASSUMED(120 * TFLOPS, "two thirds of the forward's"),
      .fp8_decode_weights_per_s = DECODE(2.039 * TB),
      .launch_s = LAUNCH,
      .gather_bytes_per_s = SHORT_OF_PEAK(300 * GB),
      .gather_latency_s = LATENCY,
      PCIE_4,
      .host_memory_bytes = DATASHEET(2 * TB, "DGX A100 640 GB, 2 TB"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(16 * 25.6 * GB),
      .disk_bytes = DATASHEET(8 * 3.84 * TB, "DGX A100 640 GB, 8 x 3.84 TB NVMe"),
      .disk_read_bytes_per_s = ASSUMED(40 * GB, "8 PCIe 4 drives of 5 GB/s"),
      .disk_write_bytes_per_s = ASSUMED(20 * GB, "half of the reads'"),
      .network_bytes_per_s = SHORT_OF_PEAK(8 * 25 * GB),
      .network_latency_s = LATENCY,
      .device_watts = DATASHEET(400, "A100 SXM4"),
      .host_watts = DATASHEET(3300, "DGX A100, 6.5 kW less 8 x 400 W")}},
    {"a100-40g",
     {.device = "NVIDIA A100 SXM4 40 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 80,
      .n_devices = 8,
      .n_cores = 128,
      .device_memory_bytes = SEEN(39.39 * GIB, "total capacity in out-of-memory errors"),
      .device_memory_bytes_per_s = DATASHEET(1.555 * TB, "A100 SXM4 40 GB"),
      .bf16_peak_flops_per_s = DATASHEET(312 * TFLOPS, "A100, dense"),
      .bf16_gemm_flops_per_s = GEMM_16(271.2 * TFLOPS),
      .attention_forward_flops_per_s = ASSUMED(180 * TFLOPS, "FlashAttention-2's, 8k"),
      .attention_backward_flops_per_s = ASSUMED(120 * TFLOPS, "two thirds of the forward's"),
      .fp8_decode_weights_per_s = DECODE(1.555 * TB),
      .launch_s = LAUNCH,
      .gather_bytes_per_s = SHORT_OF_PEAK(300 * GB),
      .gather_latency_s = LATENCY,
      PCIE_4,
      .host_memory_bytes = DATASHEET(1 * TB, "DGX A100 320 GB, 1 TB"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(16 * 25.6 * GB),
      .disk_bytes = DATASHEET(4 * 3.84 * TB, "DGX A100 320 GB, 4 x 3.84 TB NVMe"),
      .disk_read_bytes_per_s = ASSUMED(20 * GB, "4 PCIe 4 drives of 5 GB/s"),
      .disk_write_bytes_per_s = ASSUMED(10 * GB, "half of the reads'"),
      .network_bytes_per_s = SHORT_OF_PEAK(8 * 25 * GB),
      .network_latency_s = LATENCY,
      .device_watts = DATASHEET(400, "A100 SXM4"),
      .host_watts = DATASHEET(3300, "DGX A100, 6.5 kW less 8 x 400 W")}},
    {"b200",
     {.device = "NVIDIA B200 SXM 180 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 100,
      .n_devices = 8,
      .n_cores = 112,
      .device_memory_bytes = SEEN(178.3 * GIB, "total_memory on a B200"),
      .device_memory_bytes_per_s = DATASHEET(8 * TB, "DGX B200, 64 TB/s of 8 GPUs"),
      .bf16_peak_flops_per_s = DATASHEET(2250 * TFLOPS, "B200, dense"),
      .fp8_peak_flops_per_s = DATASHEET(4500 * TFLOPS, "B200, dense"),
      .bf16_gemm_flops_per_s = GEMM_16(1745 * TFLOPS),
      .fp8_gemm_flops_per_s = GEMM_8(3432.5 * TFLOPS),
      .attention_forward_flops_per_s = ASSUMED(340 * TFLOPS, "1.1 x an H100's, by multiprocessors"),
      .attention_backward_flops_per_s = ASSUMED(185 * TFLOPS, "1.1 x an H100's"),
      .fp8_decode_weights_per_s = DECODE(8 * TB),
      .launch_s = LAUNCH,
      .gather_bytes_per_s = SHORT_OF_PEAK(900 * GB),
      .gather_latency_s = LATENCY,
      PCIE_5,
      .host_memory_bytes = DATASHEET(2 * TB, "DGX B200, 2 TB"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(16 * 44.8 * GB),
      .disk_bytes = DATASHEET(8 * 3.84 * TB, "DGX B200, 8 x 3.84 TB NVMe"),
      .disk_read_bytes_per_s = ASSUMED(48 * GB, "as 8 drives in a DGX H100"),
      .disk_write_bytes_per_s = ASSUMED(24 * GB, "half of the reads'"),
      .network_bytes_per_s = SHORT_OF_PEAK(8 * 50 * GB),
      .network_latency_s = LATENCY,
      .device_watts = DATASHEET(1000, "B200 SXM"),
      .host_watts = DATASHEET(6300, "DGX B200, 14.3 kW less 8 x 1,000 W")}},
    /* No bf16 and below the compute capability that Ballast's GPU code needs: for tables of
     * strategies. */
    {"v100-32g",
     {.device = "NVIDIA V100 SXM2 32 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 70,
      .n_devices = 8,
      .n_cores = 40,
      .device_memory_bytes = SEEN(31.74 * GIB, "total_memory on a V100 SXM2 32 GB"),
      .device_memory_bytes_per_s = DATASHEET(0.9 * TB, "V100 SXM2"),
      .bf16_peak_flops_per_s = DATASHEET(125 * TFLOPS, "V100 SXM2, fp16: it has no bf16"),
      .bf16_gemm_flops_per_s = ASSUMED(90 * TFLOPS, "72 % of the datasheet's, fp16"),
      .attention_forward_flops_per_s = ASSUMED(45 * TFLOPS, "half of the products'"),
      .attention_backward_flops_per_s = ASSUMED(30 * TFLOPS, "a third of the products'"),
      .fp8_decode_weights_per_s = DECODE(0.9 * TB),
      .launch_s = LAUNCH,
      .gather_bytes_per_s = SHORT_OF_PEAK(150 * GB),
      .gather_latency_s = LATENCY,
      .copy_in_bytes_per_s = ASSUMED(6 * GB, "PCIe 3 x16, shared by two GPUs"),
      .copy_out_bytes_per_s = ASSUMED(6 * GB, "PCIe 3 x16, shared by two GPUs"),
      .copy_both_bytes_per_s = ASSUMED(5 * GB, "both ways at once"),
      .pageable_copy_bytes_per_s = ASSUMED(1.5 * GB, "a quarter of pinned memory's, by staging"),
      .host_memory_bytes = DATASHEET(512 * GB, "DGX-1, 512 GB"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(8 * 17.0 * GB),
      .disk_bytes = DATASHEET(4 * 1.92 * TB, "DGX-1, 4 x 1.92 TB SSD"),
      .disk_read_bytes_per_s = ASSUMED(2 * GB, "4 SATA SSDs of 0.5 GB/s"),
      .disk_write_bytes_per_s = ASSUMED(1.8 * GB, "4 SATA SSDs"),
      .network_bytes_per_s = SHORT_OF_PEAK(4 * 12.5 * GB),
      .network_latency_s = LATENCY,
      .device_watts = DATASHEET(300, "V100 SXM2"),
      .host_watts = DATASHEET(1100, "DGX-1, 3.5 kW less 8 x 300 W")}},
    {"rtx5090",
     {.device = "NVIDIA GeForce RTX 5090 32 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 120,
      .n_devices = 8,
      .n_cores = 96,
      .device_memory_bytes = SEEN(31.36 * GIB, "total capacity in an out-of-memory error"),
      .device_memory_bytes_per_s = DATASHEET(1.792 * TB, "RTX 5090"),
      .bf16_peak_flops_per_s = DATASHEET(209.5 * TFLOPS, "RTX Blackwell, dense, fp32 sums"),
      .fp8_peak_flops_per_s = DATASHEET(419 * TFLOPS, "RTX Blackwell, dense, fp32 sums"),
      .bf16_gemm_flops_per_s = SHORT_OF_PEAK(209.5 * TFLOPS),
      .fp8_gemm_flops_per_s = SHORT_OF_PEAK(419 * TFLOPS),
      .attention_forward_flops_per_s = ASSUMED(125 * TFLOPS, "60 % of the datasheet's products"),
      .attention_backward_flops_per_s = ASSUMED(70 * TFLOPS, "a third of the datasheet's products"),
      .fp8_decode_weights_per_s = DECODE(1.792 * TB),
      .launch_s = LAUNCH,
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(25 * GB, "through host memory: no peer access"),
      .gather_latency_s = ASSUMED(60e-6, "60 us, through host memory"),
      PCIE_5,
      .host_memory_bytes = ASSUMED(1024 * GB, "128 GB a GPU"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(12 * 38.4 * GB),
      .disk_bytes = ASSUMED(16 * TB, "a drive of 2 TB a GPU"),
      .disk_read_bytes_per_s = ASSUMED(80 * GB, "a PCIe 5 drive of 10 GB/s a GPU"),
      .disk_write_bytes_per_s = ASSUMED(40 * GB, "half of the reads'"),
      .network_bytes_per_s = ASSUMED(1.1 * GB, "10 Gb/s Ethernet"),
      .network_latency_s = ASSUMED(100e-6, "100 us"),
      .device_watts = DATASHEET(575, "RTX 5090"),
      .host_watts = ASSUMED(1200, "150 W a GPU")}},
    {"rtx4090",
     {.device = "NVIDIA GeForce RTX 4090 24 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 89,
      .n_devices = 8,
      .n_cores = 64,
      .device_memory_bytes = SEEN(23.64 * GIB, "total capacity in out-of-memory errors"),
      .device_memory_bytes_per_s = DATASHEET(1.008 * TB, "RTX 4090"),
      .bf16_peak_flops_per_s = DATASHEET(165.2 * TFLOPS, "Ada, dense, fp32 sums"),
      .fp8_peak_flops_per_s = DATASHEET(330.3 * TFLOPS, "Ada, dense, fp32 sums"),
      .bf16_gemm_flops_per_s = SHORT_OF_PEAK(165.2 * TFLOPS),
      .fp8_gemm_flops_per_s = SHORT_OF_PEAK(330.3 * TFLOPS),
      .attention_forward_flops_per_s = ASSUMED(100 * TFLOPS, "60 % of the datasheet's products"),
      .attention_backward_flops_per_s = ASSUMED(55 * TFLOPS, "a third of the datasheet's products"),
      .fp8_decode_weights_per_s = DECODE(1.008 * TB),
      .launch_s = LAUNCH,
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(12 * GB, "through host memory: no peer access"),
      .gather_latency_s = ASSUMED(60e-6, "60 us, through host memory"),
      PCIE_4,
      .host_memory_bytes = ASSUMED(512 * GB, "64 GB a GPU"),
      .host_memory_bytes_per_s = SHORT_OF_PEAK(8 * 25.6 * GB),
      .disk_bytes = ASSUMED(16 * TB, "a drive of 2 TB a GPU"),
      .disk_read_bytes_per_s = ASSUMED(48 * GB, "a PCIe 4 drive of 6 GB/s a GPU"),
      .disk_write_bytes_per_s = ASSUMED(24 * GB, "half of the reads'"),
      .network_bytes_per_s = ASSUMED(1.1 * GB, "10 Gb/s Ethernet"),
      .network_latency_s = ASSUMED(100e-6, "100 us"),
      .device_watts = DATASHEET(450, "RTX 4090"),
      .host_watts = ASSUMED(1200, "150 W a GPU")}},
    {"l40s",
     {.device = "NVIDIA L40S 48 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 89,
      .n_devices = 8,
      .n_cores = 64,
      .device_memory_bytes = ASSUMED(44.4 * GIB, "48 GB less the error correction's part"),
      .device_memory_bytes_per_s = DATASHEET(0.864 * TB, "L40S 48 GB"),
      .bf16_peak_flops_per_s = DATASHEET(362.05 * TFLOPS, "L40S, dense"),
      .fp8_peak_flops_per_s = DATASHEET(733 * TFLOPS, "L40S, dense"),
      .fp8_gemm_flops_per_s = SHORT_OF_PEAK(733 * TFLOPS),
      .bf16_gemm_flops_per_s =
          ASSUMED(0.65 * 362.05 * TFLOPS, "65 % of the datasheet's: its clocks are bound by 350 W"),
      .attention_forward_flops_per_s = ASSUMED(0.5 * 362.05 * TFLOPS, "half of the datasheet's"),
      .attention_backward_flops_per_s =
          ASSUMED(0.33 * 362.05 * TFLOPS, "a third of the datasheet's"),
      .fp8_decode_weights_per_s = DECODE(0.864 * TB),
      .launch_s = LAUNCH,
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(12 * GB, "PCIe 4 through host memory"),
      .gather_latency_s = ASSUMED(60e-6, "60 us, through host memory"),
      PCIE_4,
      SERVER_PCIE(64),
      .device_watts = DATASHEET(350, "L40S 48 GB")}},
    {"a10",
     {.device = "NVIDIA A10 24 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 86,
      .n_devices = 8,
      .n_cores = 48,
      .device_memory_bytes = ASSUMED(22.2 * GIB, "24 GB less the error correction's part"),
      .device_memory_bytes_per_s = DATASHEET(0.6 * TB, "A10 24 GB"),
      .bf16_peak_flops_per_s = DATASHEET(125 * TFLOPS, "A10, dense"),
      .bf16_gemm_flops_per_s = ASSUMED(0.65 * 125 * TFLOPS, "65 % of the datasheet's: clocks"),
      .attention_forward_flops_per_s = ASSUMED(0.5 * 125 * TFLOPS, "half of the datasheet's"),
      .attention_backward_flops_per_s = ASSUMED(0.33 * 125 * TFLOPS, "a third of the datasheet's"),
      .fp8_decode_weights_per_s = DECODE(0.6 * TB),
      .launch_s = LAUNCH,
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(12 * GB, "PCIe 4 through host memory"),
      .gather_latency_s = ASSUMED(60e-6, "60 us, through host memory"),
      PCIE_4,
      SERVER_PCIE(32),
      .device_watts = DATASHEET(150, "A10 24 GB")}},
    {"rtx3090",
     {.device = "NVIDIA GeForce RTX 3090 24 GB",
      .kind = BL_DEVICE_CUDA,
      .arch = 86,
      .n_devices = 8,
      .n_cores = 32,
      .device_memory_bytes = SEEN(23.69 * GIB, "total capacity in out-of-memory errors"),
      .device_memory_bytes_per_s = DATASHEET(0.936 * TB, "GeForce RTX 3090 24 GB"),
      .bf16_peak_flops_per_s = DATASHEET(71 * TFLOPS, "GA102, dense, fp32 sums"),
      .bf16_gemm_flops_per_s = ASSUMED(0.85 * 71 * TFLOPS, "85 % of the datasheet's"),
      .attention_forward_flops_per_s = ASSUMED(0.5 * 71 * TFLOPS, "half of the datasheet's"),
      .attention_backward_flops_per_s = ASSUMED(0.33 * 71 * TFLOPS, "a third of the datasheet's"),
      .fp8_decode_weights_per_s = DECODE(0.936 * TB),
      .launch_s = LAUNCH,
      .gathers_by_pcie = true,
      .gather_bytes_per_s = ASSUMED(12 * GB, "PCIe 4 through host memory"),
      .gather_latency_s = ASSUMED(60e-6, "60 us, through host memory"),
      PCIE_4,
      SERVER_PCIE(64),
      .device_watts = DATASHEET(350, "GeForce RTX 3090 24 GB")}},
/* The machine of bench/results. */
#define MEASURED(number, key)                                                                      \
    {                                                                                              \
        (number), "measured: bench/results/hardware.json, " key                                    \
    }
    {"cpu",
     {.device = "AMD EPYC, 2 cores",
      .kind = BL_DEVICE_CPU,
      .n_devices = 1,
      .n_cores = 2,
      .f32_gemm_flops_per_s = MEASURED(7.31e10, "gemm"),
      .bf16_gemm_flops_per_s = ASSUMED(2 * 7.31e10, "twice fp32's, with AVX512-BF16"),
      .attention_forward_flops_per_s = ASSUMED(3.6e10, "half of the products'"),
      .attention_backward_flops_per_s = ASSUMED(3.6e10, "half of the products'"),
      .fp8_decode_weights_per_s = MEASURED(6.32e9, "fp8"),
      .gather_bytes_per_s = MEASURED(3.79e9, "all_gather"),
      .gather_latency_s = LATENCY,
      .copy_in_bytes_per_s = MEASURED(1.36e10, "device_copy"),
      .copy_out_bytes_per_s = MEASURED(1.37e10, "device_copy"),
      .copy_both_bytes_per_s = ASSUMED(6.8e9, "half of one way"),
      .pageable_copy_bytes_per_s = MEASURED(1.36e10, "device_copy: all memory is alike"),
      .host_memory_bytes = MEASURED(25276514304.0, "memory_bytes"),
      .host_memory_bytes_per_s = MEASURED(2 * 1.25e10, "memory_copy"),
      .disk_bytes = MEASURED(72925868032.0, "free_disk_bytes"),
      .disk_read_bytes_per_s = MEASURED(1.48e9, "disk_read"),
      .disk_write_bytes_per_s = ASSUMED(1e9, "two thirds of the reads'"),
      .network_bytes_per_s = ASSUMED(1.1 * GB, "10 Gb/s Ethernet"),
      .network_latency_s = ASSUMED(100e-6, "100 us"),
      .host_watts = ASSUMED(50, "50 W")}},
#define BIG_CPU_HOST(memory_rate)                                                                  \
    .kind = BL_DEVICE_CPU, .n_devices = 1,                                                         \
    .fp8_decode_weights_per_s = ASSUMED((memory_rate) / 5, "memory's rate, 5 bytes per weight"),   \
    .gather_bytes_per_s = ASSUMED((memory_rate) / 4, "a quarter of memory's rate"),                \
    .gather_latency_s = LATENCY,                                                                   \
    .copy_in_bytes_per_s = ASSUMED((memory_rate) / 2, "memory's rate, read and written"),          \
    .copy_out_bytes_per_s = ASSUMED((memory_rate) / 2, "memory's rate, read and written"),         \
    .copy_both_bytes_per_s = ASSUMED((memory_rate) / 4, "half of one way"),                        \
    .pageable_copy_bytes_per_s = ASSUMED((memory_rate) / 2, "all memory is alike"),                \
    .host_memory_bytes_per_s = ASSUMED((memory_rate), "80 % of the datasheet's"),                  \
    .disk_bytes = ASSUMED(4 * TB, "one NVMe drive"),                                               \
    .disk_read_bytes_per_s = ASSUMED(6 * GB, "one PCIe 4 NVMe drive"),                             \
    .disk_write_bytes_per_s = ASSUMED(4 * GB, "one PCIe 4 NVMe drive"),                            \
    .network_bytes_per_s = ASSUMED(1.1 * GB, "10 Gb/s Ethernet"),                                  \
    .network_latency_s = ASSUMED(100e-6, "100 us")
    {"cpu-2x64-zen5",
     {.device = "AMD EPYC 9575F, 2 x 64 cores",
      BIG_CPU_HOST(0.8 * 24 * 48.0 * GB),
      .n_cores = 128,
      /* 64 fp32 operations per cycle and core: two FMA of 512 bits; vdpbf16ps does twice as
       * many. */
      .f32_gemm_flops_per_s =
          ASSUMED(0.6 * 128 * 64 * 3.3e9, "60 % of 128 cores x 64 per cycle x 3.3 GHz"),
      .bf16_gemm_flops_per_s =
          ASSUMED(0.6 * 128 * 128 * 3.3e9, "60 % of 128 cores x 128 per cycle x 3.3 GHz"),
      .attention_forward_flops_per_s = ASSUMED(0.3 * 128 * 64 * 3.3e9, "half of the products'"),
      .attention_backward_flops_per_s = ASSUMED(0.3 * 128 * 64 * 3.3e9, "half of the products'"),
      .host_memory_bytes = ASSUMED(768 * GB, "24 x 32 GB"),
      .host_watts = ASSUMED(1100, "2 x 400 W and the rest")}},
    {"cpu-2x60-amx",
     {.device = "Intel Xeon 8490H, 2 x 60 cores",
      BIG_CPU_HOST(0.8 * 16 * 38.4 * GB),
      .n_cores = 120,
      /* 64 fp32 operations per cycle and core, 1024 of bf16 by AMX, whose products pack in about
       * half of their time (src/ops/cpu/gemm_bf16.c, cost_of_tiles). No AMX was measured. */
      .f32_gemm_flops_per_s =
          ASSUMED(0.6 * 120 * 64 * 2.3e9, "60 % of 120 cores x 64 per cycle x 2.3 GHz"),
      .bf16_gemm_flops_per_s =
          ASSUMED(0.3 * 120 * 1024 * 1.9e9, "30 % of 120 cores x 1024 per cycle x 1.9 GHz, AMX"),
      .attention_forward_flops_per_s = ASSUMED(0.3 * 120 * 64 * 2.3e9, "half of fp32 products'"),
      .attention_backward_flops_per_s = ASSUMED(0.3 * 120 * 64 * 2.3e9, "half of fp32 products'"),
      .host_memory_bytes = ASSUMED(512 * GB, "16 x 32 GB"),
      .host_watts = ASSUMED(1000, "2 x 350 W and the rest")}},
};

const char *bl_hardware_gpu_name(size_t i, const char **device)
{
    if (i >= BL_COUNT(presets)) return NULL;
    *device = presets[i].hardware.device;
    return presets[i].name;
}

/* Up to two counts, each with an x behind it: "2x8xh100" -> 2, 8, "h100". */
static const char *read_counts(const char *name, int64_t count[2], int *n_counts)
{
    enum { MAX_COUNT = 1024 };
    for (*n_counts = 0; *n_counts < 2; (*n_counts)++) {
        char *end;
        long number = strtol(name, &end, 10);
        if (end == name || *name < '1' || *name > '9' || *end != 'x' || number > MAX_COUNT) break;
        count[*n_counts] = number;
        name = end + 1;
    }
    return name;
}

static bl_status unknown(const char *name, const char *gpu)
{
    const char *names[BL_COUNT(presets)];
    char list[512] = "";

    for (size_t i = 0; i < BL_COUNT(presets); i++) {
        names[i] = presets[i].name;
        size_t at = strlen(list);
        snprintf(list + at, sizeof list - at, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    const char *nearest = bl_text_nearest(gpu, names, BL_COUNT(names));
    if (nearest)
        return BL_FAIL(BL_EUSAGE, "hardware %s: no such machine or file; did you mean %.*s%s?",
                       name, (int)(gpu - name), name, nearest);
    return BL_FAIL(BL_EUSAGE,
                   "hardware %s: no such machine or file; known are 8xGPU and HOSTSx8xGPU of %s",
                   name, list);
}

/* What the devices of a host share, of n among whole. */
static void take_share(bl_hardware *h, int n, int whole)
{
    bl_figure *const shared[] = {
        &h->host_memory_bytes,
        &h->host_memory_bytes_per_s,
        &h->disk_bytes,
        &h->disk_read_bytes_per_s,
        &h->disk_write_bytes_per_s,
        &h->network_bytes_per_s,
        &h->host_watts,
    };
    if (n == whole) return;
    h->n_cores = (int)bl_max_i64(1, (int64_t)h->n_cores * n / whole);
    for (size_t i = 0; i < BL_COUNT(shared); i++) {
        size_t at = strlen(shared[i]->source);
        shared[i]->value *= (double)n / whole;
        snprintf(shared[i]->source + at, sizeof shared[i]->source - at, "; %d/%d of that", n,
                 whole);
    }
}

bl_status bl_hardware_set_lanes(bl_hardware *h, int lanes)
{
    bl_figure *const rates[] = {&h->copy_in_bytes_per_s, &h->copy_out_bytes_per_s,
                                &h->copy_both_bytes_per_s, &h->pageable_copy_bytes_per_s,
                                &h->gather_bytes_per_s};

    if (h->pcie_lanes == 0)
        return BL_FAIL(BL_EUSAGE, "pcie_lanes: the copies of %s are not known by lanes", h->name);
    for (size_t i = 0; i < BL_COUNT(rates) - !h->gathers_by_pcie; i++) {
        size_t at = strlen(rates[i]->source);
        rates[i]->value *= (double)lanes / h->pcie_lanes;
        snprintf(rates[i]->source + at, sizeof rates[i]->source - at, "; %d of %d lanes", lanes,
                 h->pcie_lanes);
    }
    h->pcie_lanes = lanes;
    return BL_OK;
}

bl_status bl_hardware_preset(const char *name, bl_hardware *out)
{
    int64_t count[2] = {1, 1};
    int n_counts;
    char small[BL_HARDWARE_NAME_BYTES];
    size_t i = 0;

    if (strlen(name) >= sizeof small) return unknown(name, name);
    do small[i] = (char)tolower((unsigned char)name[i]);
    while (name[i++]);
    name = small;
    const char *gpu = read_counts(name, count, &n_counts);
    i = 0;
    while (i < BL_COUNT(presets) && strcmp(presets[i].name, gpu) != 0) i++;
    if (i == BL_COUNT(presets)) return unknown(name, gpu);
    int64_t n_hosts = n_counts == 2 ? count[0] : 1, n = count[n_counts == 2];
    int whole = presets[i].hardware.n_devices;
    if (n > whole)
        return BL_FAIL(BL_EUSAGE, "hardware %s: a host has at most %d of them; %dx%dx%s are %lld",
                       name, whole, (int)bl_ceil_div(n, whole), whole, gpu,
                       (long long)bl_round_up(n, whole));
    *out = presets[i].hardware;
    snprintf(out->name, sizeof out->name, "%s", name);
    out->n_hosts = (int)n_hosts;
    out->n_devices = (int)n;
    take_share(out, (int)n, whole);
    /* A consumer's board divides the processor's 16 lanes. */
    if (n == 2 && strstr(out->device, "GeForce")) BL_TRY(bl_hardware_set_lanes(out, 8));
    if (out->kind == BL_DEVICE_CUDA)
        out->pin_bytes_per_s = (bl_figure)ASSUMED(3 * GB * (double)n, "3 GB/s per process");
    return BL_OK;
}
