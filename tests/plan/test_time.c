/* SPDX-License-Identifier: Apache-2.0 */
/* The time of a step: against sums by hand, and against an independent model of one node. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "plan/time_case.h"

static bl_time_estimate predict(const bl_time_input *input)
{
    bl_time_estimate e;
    if (bl_time_predict(input, &e) != BL_OK) fail_msg("%s", bl_error_text());
    return e;
}

static void assert_near(double value, double expected, double part)
{
    if (fabs(value - expected) > part * fabs(expected))
        fail_msg("%g, expected %g within %g %%", value, expected, 100 * part);
}

/* Of Llama 3.1 405B; P: weights of a layer; again: those whose products are recomputed. */
static const double H = 16384, I = 53248, V = 128256,
                    P = 16384.0 * (2 * 16384 + 2 * 1024) + 3 * 16384.0 * 53248,
                    again = 16384.0 * (2 * 16384 + 2 * 1024) + 2 * 16384.0 * 53248;

/* That model with products of the base alone: nothing else takes time. */
static void only_products(time_case *c)
{
    time_case_init(c, "llama3.1-405b");
    c->input.mode = BL_MATMUL_BF16;
    bl_rates *r = &c->input.rates;
    r->attention_forward_flops_per_s = r->attention_backward_flops_per_s = INFINITY;
    r->memory_bytes_per_s = r->decode_weights_per_s = r->gather_bytes_per_s = INFINITY;
    /* Nor copies of embeddings and of log-probabilities. */
    r->lora_flops_per_s = r->copy_in_bytes_per_s = r->copy_out_bytes_per_s = INFINITY;
    r->launch_s = r->gather_latency_s = 0;
}

/* Only products cost anything: forward 2 P T, recomputation of all but down, backward 2 P T, head 4
 * V H T. */
static void products_alone(void **state)
{
    time_case c;
    (void)state;
    only_products(&c);
    double T = 4096, R = c.input.rates.gemm_flops_per_s;
    bl_time_estimate e = predict(&c.input);
    assert_near(e.part[BL_TIME_FORWARD].seconds, 126 * 2 * P * T / R, 1e-9);
    /* The last layer's workspace still holds its forward's tensors. The first needs no gradient of
     * its input: one product less. */
    const double products = 126 * 2 * P - 2 * H * (H + 2 * 1024);
    assert_near(e.part[BL_TIME_BACKWARD].seconds, (products + 125 * 2 * again) * T / R, 1e-9);
    assert_near(e.part[BL_TIME_HEAD].seconds, 4 * V * H * T / R, 1e-9);
    double lora = (double)c.lora.n_floats;
    assert_near(e.model_flops, 8 * T * (126 * (4 * P + 6 * lora + 3 * 2 * H * T) + 4 * V * H),
                1e-9);
    assert_near(e.mfu, e.model_flops / (8 * 989.4e12 * e.step_s), 1e-9);
    assert_near(e.tokens_per_s, 8 * T / e.step_s, 1e-9);

    c.run.save = BL_SAVE_S3;
    assert_near(predict(&c.input).part[BL_TIME_BACKWARD].seconds,
                (products + 125 * 4 * H * I) * T / R, 1e-9);
    c.run.save = BL_SAVE_S4;
    assert_near(predict(&c.input).part[BL_TIME_BACKWARD].seconds, products * T / R, 1e-9);
}

/* Where compute costs next to nothing each visit waits for its transfer: the slowest lane sets the
 * pace, and is named. */
static void the_slowest_lane_binds(void **state)
{
    const double layer_bytes = 3187671040.0;
    time_case c;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.rates.gemm_flops_per_s = c.input.rates.fp8_gemm_flops_per_s = 1e18;
    c.input.rates.attention_forward_flops_per_s = c.input.rates.attention_backward_flops_per_s =
        1e18;
    c.input.rates.memory_bytes_per_s = c.input.rates.decode_weights_per_s = 1e18;
    c.input.rates.launch_s = c.input.rates.gather_latency_s = 0;

    bl_time_estimate gather = predict(&c.input);
    assert_int_equal(gather.part[BL_TIME_FORWARD].bound, BL_LANE_GATHER);
    /* layer 0 is there already */
    assert_near(gather.part[BL_TIME_FORWARD].seconds, 125 * layer_bytes * 7 / 8 / 343e9, 0.01);
    assert_near(gather.part[BL_TIME_BACKWARD].seconds, 126 * layer_bytes * 7 / 8 / 343e9, 0.01);

    c.input.offload_ratio = 1;
    c.input.rates.copy_in_bytes_per_s = 10e9;
    bl_time_estimate copy = predict(&c.input);
    assert_int_equal(copy.part[BL_TIME_FORWARD].bound, BL_LANE_COPY);
    assert_near(copy.part[BL_TIME_BACKWARD].seconds, 126 * layer_bytes / 8 / 10e9, 0.02);

    c.input.tier = BL_TIER_DISK;
    c.input.rates.disk_bytes_per_s = 2e9;
    bl_time_estimate disk = predict(&c.input);
    assert_int_equal(disk.part[BL_TIME_BACKWARD].bound, BL_LANE_DISK);
    /* The ring's next unit is not read before this one's copies have been queued through: the tail
     * of each copy is added. */
    assert_in_range(
        (int)(1000 * disk.part[BL_TIME_BACKWARD].seconds / (126 * layer_bytes / 8 / 2e9)), 1000,
        1000 * 1.25);
}

/* offload.md: of m micro-batches that share a visit, each waits max(0, D / m - C). */
static void micro_batches_share_a_transfer(void **state)
{
    time_case c;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.offload_ratio = 1;
    c.input.n_micro = 8;
    bl_time_estimate alone = predict(&c.input);
    double C = alone.part[BL_TIME_FORWARD].compute_s / (126 * 8);
    double D = 4 * C; /* seconds of transfer a visit */
    c.input.rates.copy_in_bytes_per_s = 3187671040.0 / 8 / D;
    for (int m = 1; m <= 8; m *= 2) {
        c.input.group = m;
        bl_time_part forward = predict(&c.input).part[BL_TIME_FORWARD];
        double waited = forward.seconds - forward.compute_s; /* copies, and gathers behind them */
        double expected = 126 * 8 * fmax(0, D / m - C);
        /* layer 0 stays from pass to pass, and the head is brought beside the layers */
        if (fabs(waited - expected) > 0.05 * 126 * 8 * C)
            fail_msg("m %d: waited %g, expected %g", m, waited, expected);
    }
}

/* Every weight of Llama 2 70B, on one GPU; nothing but the tiers takes time worth counting. */
static void train_in_tiers(time_case *c, bl_tier tier)
{
    time_case_init(c, "llama2-70b");
    bl_lora_layout_init(&c->model, NULL, &c->lora);
    for (int p = 0; p < BL_PROJECTIONS; p++) c->run.format[p] = BL_FORMAT_BF16;
    c->input.is_trained = true;
    c->input.n_ranks = c->input.n_shards = 1;
    c->input.mode = BL_MATMUL_BF16;
    c->input.optimizer_ratio = c->input.offload_ratio = 1;
    c->input.optimizer_tier = c->input.tier = tier;
    c->input.rates.host_memory_bytes_per_s = 1e15;
    c->input.rates.copy_in_bytes_per_s = c->input.rates.copy_out_bytes_per_s = 1e15;
}

/* An update reads 16 bytes per weight and writes 12; a visit's gradients, 4, are written, and of
 * all but the first micro-batch read before. */
static void trained_weights_on_a_disk(void **state)
{
    const double read = 2e8, write = 1e8;
    time_case c;

    (void)state;
    train_in_tiers(&c, BL_TIER_DISK);
    double n_weights = (double)bl_model_config_n_params(&c.model);
    c.input.rates.disk_bytes_per_s = read;
    c.input.rates.disk_write_bytes_per_s = write;
    for (int n = 1; n <= 4; n++) {
        c.input.n_micro = n;
        double gradients_s = 4 * n_weights * (n / write + (n - 1) / read),
               update_s = 16 * n_weights / read + 12 * n_weights / write;
        bl_time_estimate e = predict(&c.input);
        assert_near(e.step_s, gradients_s + update_s, 0.01);
        /* Gradients that move between two passes count as the later one's: those of a layer and a
         * table per border. 0.20 % is the most, at n = 4. */
        assert_near(e.bytes[BL_LANE_DISK], (28 + 4 * (2 * n - 1)) * n_weights, 0.0021);
        assert_int_equal(e.part[BL_TIME_FORWARD].bound, BL_LANE_DISK);
        assert_int_equal(e.part[BL_TIME_BACKWARD].bound, BL_LANE_DISK);
    }
}

/* Gradients leave the GPU, 4 bytes per weight, and weights rounded to bf16 return; 28 bytes of host
 * memory, 6 for rounding, 2 for the copy. With fast links a step takes as long as with everything
 * on the GPU, without AdamW there. */
static void trained_weights_in_host_memory(void **state)
{
    const double link = 1e9;
    time_case c;

    (void)state;
    train_in_tiers(&c, BL_TIER_HOST);
    double n_weights = (double)bl_model_config_n_params(&c.model),
           fast_s = predict(&c.input).step_s;
    c.input.rates.copy_in_bytes_per_s = c.input.rates.copy_out_bytes_per_s = link;
    bl_time_estimate e = predict(&c.input);
    assert_near(e.step_s, 6 * n_weights / link, 0.03);
    assert_near(e.bytes[BL_LANE_COPY], 6 * n_weights, 0.001);
    c.input.rates.copy_in_bytes_per_s = c.input.rates.copy_out_bytes_per_s = 1e15;
    c.input.rates.host_memory_bytes_per_s = link;
    assert_near(predict(&c.input).part[BL_TIME_FORWARD].seconds, 36 * n_weights / link, 0.03);
    c.input.optimizer_ratio = c.input.offload_ratio = 0;
    bl_time_estimate resident = predict(&c.input);
    assert_true(fast_s < resident.step_s);
    assert_true(fast_s > resident.step_s - resident.part[BL_TIME_OPTIMIZER].seconds);
}

/* Weights in host memory, moments on the GPU: an update copies moments and gradients out, and
 * moments and the rounded weights back. */
static void trained_weights_in_host_memory_alone(void **state)
{
    const double link = 1e9;
    time_case c;

    (void)state;
    train_in_tiers(&c, BL_TIER_HOST);
    double n_weights = (double)bl_model_config_n_params(&c.model);
    c.input.optimizer_ratio = 0;
    c.input.optimizer_tier = BL_TIER_DEVICE;
    c.input.rates.copy_out_bytes_per_s = link;
    bl_time_estimate e = predict(&c.input);
    assert_near(e.part[BL_TIME_FORWARD].seconds, 12 * n_weights / link, 0.03);
    assert_near(e.bytes[BL_LANE_COPY], 22 * n_weights, 0.001);
    c.input.rates.copy_out_bytes_per_s = 0;
    assert_int_equal(bl_time_predict(&c.input, &e), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "rate of copies from the device"));
}

/* One node of eight H100, an independent hand model: tokens per second at T = 1k, 2k, 4k, 8k, 16k,
 * with bf16 and FP8 products, and the same derated to 600 and 950 TFLOP/s, 280 GB/s and 12 % of
 * stalls. It dequantizes weights for each product and leaves out the head's gather and
 * latencies. */
static void the_table_of_one_node(void **state)
{
    static const double table[4][5] = {{1745, 1984, 2107, 2190, 2234},
                                       {3015, 3599, 3646, 3716, 3752},
                                       {1377, 1544, 1629, 1685, 1715},
                                       {2146, 2471, 2497, 2535, 2555}};
    (void)state;
    for (int row = 0; row < 4; row++)
        for (int i = 0; i < 5; i++) {
            time_case c;
            bool is_derated = row >= 2;
            time_case_init(&c, "llama3.1-405b");
            time_case_set_tokens(&c, 1024 << i);
            c.input.decodes_each_use = true;
            c.input.mode = row % 2 ? BL_MATMUL_FP8 : BL_MATMUL_BF16;
            if (is_derated) {
                c.input.rates.gemm_flops_per_s = 600e12;
                c.input.rates.fp8_gemm_flops_per_s = 950e12;
                c.input.rates.gather_bytes_per_s = 280e9;
            }
            double stalls = is_derated ? 1.12 : 1;
            assert_near(predict(&c.input).tokens_per_s / stalls, table[row][i], 0.05);
        }
}

/* The same hand model: 405B on one GPU with all weights in host memory, T = 8192; and everything
 * saved, in host memory, instead of recomputed, on eight. */
static void other_figures_of_that_model(void **state)
{
    time_case c;
    (void)state;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        time_case_init(&c, "llama3.1-405b");
        time_case_set_tokens(&c, 8192);
        c.input.decodes_each_use = true;
        c.input.mode = fp8 ? BL_MATMUL_FP8 : BL_MATMUL_BF16;
        c.input.n_ranks = c.input.n_shards = 1;
        c.input.offload_ratio = 1;
        assert_near(predict(&c.input).tokens_per_s, fp8 ? 413 : 273, 0.05);
    }
    time_case_init(&c, "llama3.1-405b");
    c.run.save = BL_SAVE_S4;
    c.input.offload_activations = true;
    assert_near(predict(&c.input).tokens_per_s, 4388, 0.05);
}

/* Layers of two kinds: time adds up between those of each kind alone. */
static void runs_of_layers_add_up(void **state)
{
    time_case c;
    (void)state;
    time_case_init(&c, "llama3.1-70b");
    double s0 = predict(&c.input).step_s;
    c.run.save = BL_SAVE_S4;
    double s4 = predict(&c.input).step_s;
    bl_time_run runs[2] = {c.run, c.run};
    runs[0].n_layers = 60, runs[1].n_layers = 20;
    runs[0].save = BL_SAVE_S0;
    c.input.runs = runs, c.input.n_runs = 2;
    assert_near(predict(&c.input).step_s, 0.75 * s0 + 0.25 * s4, 0.02);
}

static void more_of_anything_is_not_slower(void **state)
{
    time_case c;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.offload_ratio = 1;
    double before = INFINITY;
    for (double rate = 2e9; rate < 100e9; rate *= 1.5) {
        c.input.rates.copy_in_bytes_per_s = rate;
        double step_s = predict(&c.input).step_s;
        /* A faster copy takes more of the GPU memory's rate: 0.17 % from 51 to 77 GB/s. */
        assert_true(step_s <= before * 1.002);
        before = step_s;
    }
}

static int count(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) n++;
    return n;
}

/* Three visits in each direction, and boxes for the operations in flight meanwhile. */
static void a_picture_of_the_streams(void **state)
{
    time_case c;
    char path[] = "/tmp/ballast-streams-XXXXXX", *text = NULL;
    size_t n_bytes;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.offload_ratio = 1;
    c.input.rates.copy_in_bytes_per_s = 10e9;
    close(mkstemp(path));
    assert_int_equal(bl_time_draw(&c.input, "a & b", path), BL_OK);
    assert_int_equal(bl_file_read_all(path, 1 << 20, (void **)&text, &n_bytes), BL_OK);
    text[n_bytes - 1] = '\0'; /* a newline */
    assert_int_equal(count(text, "</svg>"), 1);
    assert_int_equal(count(text, "a &amp; b: the streams"), 1);
    assert_int_equal(count(text, ">layer 63<"), 2);
    assert_int_equal(count(text, ">copy</text>"), 2);
    assert_int_equal(count(text, ">disk</text>"), 0);
    assert_in_range(count(text, "waits for copy"), 3, 30);
    assert_true(count(text, "63 gate|up") >= 4);
    free(text);
    unlink(path);
}

/* Ranks of a CPU share its cores: two with all threads each are as fast together as one. */
static void ranks_share_a_cpu(void **state)
{
    bl_hardware cpu;
    time_case c;
    (void)state;
    assert_int_equal(bl_hardware_preset("cpu", &cpu), BL_OK);
    time_case_init(&c, "llama3.2-1b");
    c.input.kind = BL_DEVICE_CPU;
    c.input.act = BL_F32;
    c.input.n_ranks = c.input.n_shards = 1;
    c.input.rates = bl_time_rates_of(&cpu, 1, cpu.n_cores, BL_F32);
    double alone = predict(&c.input).tokens_per_s;
    c.input.n_ranks = c.input.n_shards = 2;
    c.input.rates = bl_time_rates_of(&cpu, 2, cpu.n_cores, BL_F32);
    assert_near(predict(&c.input).tokens_per_s, alone, 0.15);
    c.input.rates = bl_time_rates_of(&cpu, 2, cpu.n_cores / 2, BL_F32);
    assert_near(predict(&c.input).tokens_per_s, alone, 0.15);
}

/* ---- rounds ---- */

/* Of T tokens: the layers, and log-probabilities. */
static double forward_s(double T, double R)
{
    return (126 * 2 * P + 2 * V * H) * T / R;
}

/* The policy's log-probabilities take a head more. With more than one micro-batch the workspace
 * has lost the last layer's tensors: they are recomputed, too. */
static void references_are_forward_passes(void **state)
{
    time_case c;
    (void)state;
    only_products(&c);
    double T = 4096, R = c.input.rates.gemm_flops_per_s, alone = predict(&c.input).step_s;
    c.input.preference.is_weighed = true;
    assert_near(predict(&c.input).step_s, alone + 2 * V * H * T / R, 1e-9);
    c.input.preference.has_reference = true;
    double with = alone + 2 * V * H * T / R + 2 * again * T / R + forward_s(T, R);
    assert_near(predict(&c.input).step_s, with, 1e-9);
    c.input.preference.has_mismatched = true;
    assert_near(predict(&c.input).step_s, with + 2 * forward_s(T, R), 1e-9);
}

static bl_time_evaluation_estimate evaluate(const bl_time_input *input, int training)
{
    bl_time_evaluation_estimate e;
    if (bl_time_predict_evaluation(input, training, &e) != BL_OK) fail_msg("%s", bl_error_text());
    return e;
}

static void evaluations_cost_their_micro_batches(void **state)
{
    time_case c;
    (void)state;
    only_products(&c);
    double T = 4096, R = c.input.rates.gemm_flops_per_s;
    assert_true(evaluate(&c.input, 0).seconds == 0);
    for (int n = 1; n <= 9; n += 4) {
        c.input.evaluation = (bl_time_evaluation){
            .n_micro = n, .micro_tokens = 4096, .document_tokens = 4096, .is_overlapped = false};
        c.input.n_overlapped = 4;
        assert_near(evaluate(&c.input, 0).apart_s, n * forward_s(T, R), 1e-9);
        assert_near(evaluate(&c.input, 0).seconds, n * forward_s(T, R), 1e-9);
        c.input.evaluation.is_overlapped = true; /* the last layer's tensors, as above */
        assert_near(evaluate(&c.input, 0).seconds, n * forward_s(T, R) + 2 * again * T / R, 1e-9);
    }
    c.input.evaluation.micro_tokens = 1920; /* in tiles: nothing is padded */
    assert_near(evaluate(&c.input, 0).apart_s, 9 * forward_s(1920, R), 1e-9);
}

/* Separate passes bring the base each; in a step's visits it is there. */
static void riders_cost_no_transfers(void **state)
{
    const double copy_s = 126 * 3187671040.0 / 8 / 5e9;
    time_case c;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.offload_ratio = 1;
    c.input.rates.copy_in_bytes_per_s = 5e9;
    c.input.n_overlapped = 4;
    c.input.evaluation = (bl_time_evaluation){
        .n_micro = 4, .micro_tokens = 512, .document_tokens = 512, .is_overlapped = true};
    bl_time_evaluation_estimate e = evaluate(&c.input, 0);
    assert_near(e.apart_s, 4 * copy_s, 0.05);
    assert_true(e.seconds < 0.2 * e.apart_s);
    /* One is overlapped, four have a separate pass. */
    c.input.evaluation.n_micro = 5;
    e = evaluate(&c.input, 0);
    assert_true(e.seconds > 0.9 * copy_s && e.seconds < 1.5 * copy_s);
}

/* A round's compute is that of its steps; a visit serves all. */
static void trainings_share_visits(void **state)
{
    time_case c;
    (void)state;
    only_products(&c);
    double T = 4096, R = c.input.rates.gemm_flops_per_s;
    bl_time_training other = {.lora = &c.lora,
                              .micro_tokens = 1920, /* in tiles: nothing is padded */
                              .document_tokens = 1920,
                              .label_part = 1,
                              .useful_part = 1,
                              .n_micro = 3};
    bl_time_estimate alone = predict(&c.input);
    c.input.others = &other, c.input.n_others = 1;
    bl_time_estimate both = predict(&c.input);
    assert_near(both.part[BL_TIME_FORWARD].seconds, 126 * 2 * P * (T + 3 * 1920) / R, 1e-9);
    assert_near(both.tokens_per_s * both.step_s,
                (T + 3 * 1920) / T * alone.tokens_per_s * alone.step_s, 1e-9);
    other.evaluation =
        (bl_time_evaluation){.n_micro = 2, .micro_tokens = 768, .document_tokens = 768};
    assert_near(evaluate(&c.input, 1).seconds, 2 * forward_s(768, R), 1e-9);

    time_case_init(&c, "llama3.1-405b"); /* bound by copies */
    c.input.offload_ratio = 1;
    c.input.rates.copy_in_bytes_per_s = 2e9;
    double step_s = predict(&c.input).step_s;
    other.n_micro = 1;
    c.input.others = &other, c.input.n_others = 1;
    assert_near(predict(&c.input).step_s, 2 * step_s, 0.03);
    c.input.group = 2;
    assert_near(predict(&c.input).step_s, step_s, 0.03);
}

static void a_missing_rate_is_named(void **state)
{
    time_case c;
    bl_time_estimate e;
    (void)state;
    time_case_init(&c, "llama3.1-405b");
    c.input.rates.gather_bytes_per_s = 0;
    assert_int_equal(bl_time_predict(&c.input, &e), BL_EUSAGE);
    assert_string_equal(
        bl_error_text(),
        "the hardware's rate of gathers is not known: give gather_bytes_per_s among "
        "the figures of its hardware.json (docs/plan.md)");
    c.input.n_hosts = 8; /* of one GPU: nothing is gathered within them */
    c.input.rates.network_bytes_per_s = 50e9;
    double step_s = predict(&c.input).step_s;
    c.input.rates.gather_bytes_per_s = 343e9;
    assert_near(predict(&c.input).step_s, step_s, 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_alone),
        cmocka_unit_test(the_slowest_lane_binds),
        cmocka_unit_test(micro_batches_share_a_transfer),
        cmocka_unit_test(trained_weights_on_a_disk),
        cmocka_unit_test(trained_weights_in_host_memory),
        cmocka_unit_test(trained_weights_in_host_memory_alone),
        cmocka_unit_test(the_table_of_one_node),
        cmocka_unit_test(other_figures_of_that_model),
        cmocka_unit_test(runs_of_layers_add_up),
        cmocka_unit_test(more_of_anything_is_not_slower),
        cmocka_unit_test(a_picture_of_the_streams),
        cmocka_unit_test(ranks_share_a_cpu),
        cmocka_unit_test(references_are_forward_passes),
        cmocka_unit_test(evaluations_cost_their_micro_batches),
        cmocka_unit_test(riders_cost_no_transfers),
        cmocka_unit_test(trainings_share_visits),
        cmocka_unit_test(a_missing_rate_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
