/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator made of rates: seconds of collectives, computed by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

#include "comm/model.h"

static const bl_rates rates = {.memory_bytes_per_s = 1000,
                               .gather_bytes_per_s = 100,
                               .gather_latency_s = 1,
                               .network_bytes_per_s = 20,
                               .network_latency_s = 3};

static void must(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

/* Seconds of an all-gather of 100 bytes per rank, and of a reduce-scatter of 25 floats per rank. */
static void measure(bl_comm *comm, bl_device_kind kind, double seconds[2])
{
    static float values[1000];
    bl_model_device_options options = {.kind = kind, .rates = rates};
    bl_device *device;
    bl_stream *stream;
    bl_stamp *stamp[3];

    must(bl_device_create_model(&options, &device));
    must(bl_stream_create(device, "comm", &stream));
    for (int i = 0; i < 3; i++) must(bl_stamp_create(device, &stamp[i]));
    must(bl_stamp_record(stamp[0], stream));
    must(bl_comm_all_gather(comm, stream, values, values, 100));
    must(bl_stamp_record(stamp[1], stream));
    must(bl_comm_reduce_scatter_f32(comm, stream, values, values, 25));
    must(bl_stamp_record(stamp[2], stream));
    must(bl_stream_synchronize(stream));
    for (int i = 0; i < 2; i++) seconds[i] = bl_stamp_elapsed_s(stamp[i], stamp[i + 1]);
    for (int i = 0; i < 3; i++) bl_stamp_destroy(stamp[i]);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
}

/* Two hosts of four GPUs: pieces are sent over the network one after the other, each while the
 * previous one is distributed within the hosts. The slower of the two counts. */
static void gathers_by_hosts(void)
{
    bl_exchange e = {
        .size = 8, .n_on_host = 4, .bytes = 8 << 20, .kind = BL_EXCHANGE_BLOCKS, .block = 4};
    bl_rates r = {.gather_bytes_per_s = 1 << 20,
                  .gather_latency_s = 1,
                  .network_bytes_per_s = 1 << 19,
                  .network_latency_s = 2};

    /* Four pieces of 2 MiB: a rank receives six parts from its host, the host four from the
     * other. */
    double within = 1 + 6 * 2, between = 2 + 4 * 2 * 2;
    bl_work work = bl_exchange_work(&e, BL_DEVICE_CUDA, &r);
    assert_float_equal(work.seconds, between + 3 * fmax(within, between) + within, 1e-9);
    assert_float_equal(work.use[BL_RESOURCE_NETWORK] * work.seconds, 4 * 8 * 2, 1e-9);
    r.network_bytes_per_s = 1 << 21;
    between = 2 + 4 * 2 / 2.0;
    work = bl_exchange_work(&e, BL_DEVICE_CUDA, &r);
    assert_float_equal(work.seconds, between + 3 * fmax(within, between) + within, 1e-9);
    work = bl_exchange_work(&e, BL_DEVICE_CPU, &r); /* in one piece */
    assert_float_equal(work.seconds, 2 + 4 * 8 / 2.0 + 1 + 6 * 8, 1e-9);
}

/* The figures of docs/design/0029: two hosts of eight GPUs, 64 MiB per rank. */
static void ring_against_hosts(void **state)
{
    static const struct {
        double gather, network, ring_ms, hosts_ms, one_piece_ms;
    } rows[] = {{240e9, 10e9, 100.7, 54.5, 57.7}, {240e9, 40e9, 25.2, 14.2, 17.4},
                {240e9, 160e9, 6.3, 4.6, 7.3},    {361e9, 10e9, 100.7, 54.3, 56.4},
                {361e9, 160e9, 6.3, 4.0, 6.0},    {361e9, 320e9, 3.2, 3.1, 4.3}};

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bl_rates r = {.gather_bytes_per_s = rows[i].gather,
                      .gather_latency_s = 30e-6,
                      .network_bytes_per_s = rows[i].network,
                      .network_latency_s = 30e-6};
        bl_exchange e = {.size = 16, .n_on_host = 8, .bytes = 64 << 20, .block = 8};
        assert_float_equal(1e3 * bl_exchange_work(&e, BL_DEVICE_CUDA, &r).seconds, rows[i].ring_ms,
                           0.06);
        e.kind = BL_EXCHANGE_BLOCKS;
        assert_float_equal(1e3 * bl_exchange_work(&e, BL_DEVICE_CUDA, &r).seconds, rows[i].hosts_ms,
                           0.06);
        assert_float_equal(1e3 * bl_exchange_work(&e, BL_DEVICE_CPU, &r).seconds,
                           rows[i].one_piece_ms, 0.06);
    }
}

static void collectives_take_their_time(void **state)
{
    bl_comm *comm, *part;
    double seconds[2];

    (void)state;
    must(bl_comm_create_model(0, 4, 4, 2, &comm)); /* one host */
    must(bl_comm_split(comm, 0, &part));
    assert_int_equal(bl_comm_size(part), 2);
    measure(comm, BL_DEVICE_CUDA, seconds);
    assert_float_equal(seconds[0], 1 + 3 * 100 / 100.0, 1e-9);
    assert_float_equal(seconds[1], 1 + 3 * 100 / 100.0 + 5 * 100 / 1000.0, 1e-9); /* and the sum */
    measure(part, BL_DEVICE_CUDA, seconds);
    assert_float_equal(seconds[0], 1 + 1 * 100 / 100.0, 1e-9);
    bl_comm_destroy(part);
    bl_comm_destroy(comm);
    must(bl_comm_create_model(0, 4, 2, 4, &comm)); /* two hosts: the network is slower */
    measure(comm, BL_DEVICE_CUDA, seconds);
    assert_float_equal(seconds[0], 3 + 3 * 100 / 20.0, 1e-9); /* a ring */
    assert_float_equal(seconds[1], 3 + 2 * 2 * 100 / 20.0 + 5 * 100 / 1000.0, 1e-9);
    bl_comm_destroy(comm);
    must(bl_comm_create_model(0, 4, 2, 4, &comm)); /* and a block per host */
    must(bl_comm_set_sum_block(comm, 2));
    measure(comm, BL_DEVICE_CUDA, seconds);
    assert_float_equal(seconds[0], 3 + 3 * 100 / 20.0, 1e-9);
    /* Two parts from the other member of the block; over the network one sum for each of the host's
     * two ranks; the additions: two sums of two parts, and one of two blocks. */
    assert_float_equal(
        seconds[1], 1 + 2 * 100 / 100.0 + (3 + 2 * 100 / 20.0) + (2 * 3 + 3) * 100 / 1000.0, 1e-9);
    measure(comm, BL_DEVICE_CPU,
            seconds); /* by blocks: two parts into a host, then one to the host's other rank */
    assert_float_equal(seconds[0], 3 + 2 * 100 / 20.0 + 1 + 2 * 100 / 100.0, 1e-9);
    bl_comm_destroy(comm);
    gathers_by_hosts();
    must(bl_comm_create_model(0, 1, 1, 1, &comm));
    measure(comm, BL_DEVICE_CUDA, seconds);
    assert_float_equal(seconds[0], 0, 0);
    bl_comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(collectives_take_their_time),
                                       cmocka_unit_test(ring_against_hosts)};
    return cmocka_run_group_tests_name("comm model", tests, NULL, NULL);
}
