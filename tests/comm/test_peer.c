/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends of a connection, and the rings of a mailbox, in one thread: messages arrive in their
 * buffers, whatever the order of the receives; an invalid or damaged message is an error that names
 * the sender. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sizes.h"
#include "base/xxh3.h"
#include "comm/wire/peer.h"

enum { N_LARGE = 1 << 20 };

/* a is rank 3 as b sees it. */
static comm_peer a, b;

static int open_both(void **state)
{
    int pair[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_int_equal(comm_peer_open(&a, 4, pair[0]), BL_OK);
    assert_int_equal(comm_peer_open(&b, 3, pair[1]), BL_OK);
    return 0;
}

static int close_both(void **state)
{
    (void)state;
    comm_peer_close(&a);
    comm_peer_close(&b);
    return 0;
}

/* A few rounds of the wire's thread at both ends. Returns b's first error. */
static bl_status pump(int n_rounds)
{
    bl_status st = BL_OK;
    bool has_moved;

    for (int i = 0; i < n_rounds && st == BL_OK; i++) {
        a.is_full = b.is_full = false;
        comm_peer_write(&a);
        st = comm_peer_read(&b);
        if (st == BL_OK) st = comm_peer_move_mail(&b, &has_moved);
        comm_peer_write(&b);
        assert_int_equal(comm_peer_read(&a), BL_OK);
        assert_int_equal(comm_peer_move_mail(&a, &has_moved), BL_OK);
    }
    return st;
}

static bool moved;

static comm_piece piece_of(int tag, void *bytes, size_t n_bytes)
{
    return (comm_piece){.tag = tag, .has_moved = &moved, .bytes = bytes, .n_bytes = n_bytes};
}

static unsigned char *make_bytes(size_t n_bytes, unsigned seed)
{
    unsigned char *bytes = malloc(n_bytes);
    assert_non_null(bytes);
    for (size_t i = 0; i < n_bytes; i++) bytes[i] = (unsigned char)(seed + i * 7 + i / 251);
    return bytes;
}

/* A small piece waits for its receive, and of two with a tag the first one is the first. */
static void test_early_messages(void **state)
{
    char first[] = "first", second[] = "second", got_first[6], got_second[7];
    comm_piece out[] = {piece_of(5, first, 6), piece_of(5, second, 7)},
               in[] = {piece_of(5, got_first, 6), piece_of(5, got_second, 7)};

    (void)state;
    for (int i = 0; i < 2; i++) assert_int_equal(comm_peer_begin_send(&a, &out[i]), BL_OK);
    assert_true(out[0].is_finished && out[1].is_finished);
    assert_int_equal(pump(2), BL_OK);
    assert_int_equal(b.n_early, 2);
    for (int i = 0; i < 2; i++) assert_int_equal(comm_peer_begin_receive(&b, &in[i]), BL_OK);
    assert_true(in[0].is_finished && in[1].is_finished);
    assert_string_equal(got_first, "first");
    assert_string_equal(got_second, "second");
    assert_int_equal(b.n_early, 0);
}

/* Data go when their receiver is ready, and long pieces of two channels take turns: neither waits
 * for the other's end. */
static void send_two_large(void)
{
    unsigned char *sent[2], *got[2];
    comm_piece out[2], in[2];
    bool took_turns = false;

    for (int i = 0; i < 2; i++) {
        sent[i] = make_bytes(N_LARGE, (unsigned)i);
        got[i] = calloc(1, N_LARGE);
        out[i] = piece_of(i, sent[i], N_LARGE);
        in[i] = piece_of(i, got[i], N_LARGE);
        assert_int_equal(comm_peer_begin_send(&a, &out[i]), BL_OK);
    }
    assert_int_equal(pump(3), BL_OK);
    assert_true(out[0].n_moved == 0 && out[1].n_moved == 0);
    for (int i = 1; i >= 0; i--) assert_int_equal(comm_peer_begin_receive(&b, &in[i]), BL_OK);
    for (int i = 0; i < 10000 && !(in[0].is_finished && in[1].is_finished); i++) {
        assert_int_equal(pump(1), BL_OK);
        took_turns |=
            in[0].n_moved > 0 && in[1].n_moved > 0 && !in[0].is_finished && !in[1].is_finished;
    }
    assert_true(took_turns);
    for (int i = 0; i < 2; i++) {
        assert_true(out[i].is_finished);
        assert_memory_equal(got[i], sent[i], N_LARGE);
        free(sent[i]);
        free(got[i]);
    }
}

static void test_large_pieces(void **state)
{
    (void)state;
    send_two_large();
}

/* ---- through the mailbox ---- */

static void open_mail(comm_mail *mail[2])
{
    int fd = memfd_create("test", MFD_CLOEXEC), again = dup(fd);

    assert_true(fd >= 0 && again >= 0);
    assert_int_equal(comm_mail_open(fd, 0, 2, &mail[0]), BL_OK);
    assert_int_equal(comm_mail_open(again, 1, 2, &mail[1]), BL_OK);
}

static void test_large_pieces_by_mail(void **state)
{
    comm_mail *mail[2];

    (void)state;
    open_mail(mail);
    a.mail_out = comm_mail_ring_of(mail[0], 0, 1);
    a.mail_in = comm_mail_ring_of(mail[0], 1, 0);
    b.mail_out = comm_mail_ring_of(mail[1], 1, 0);
    b.mail_in = comm_mail_ring_of(mail[1], 0, 1);
    send_two_large();
    for (int i = 0; i < 2; i++) comm_mail_close(mail[i]);
}

static void test_rings(void **state)
{
    comm_mail *mail[2];
    char bytes[COMM_MAIL_SLOT_BYTES + 1] = "";
    size_t n_bytes;
    int tag;

    (void)state;
    open_mail(mail);
    comm_mail_ring *out = comm_mail_ring_of(mail[0], 0, 1), *in = comm_mail_ring_of(mail[1], 0, 1);
    assert_null(comm_mail_look(in, &tag, &n_bytes));
    assert_int_equal(comm_mail_put(out, 0, bytes, sizeof bytes), COMM_MAIL_SLOT_BYTES); /* a slot */
    assert_non_null(comm_mail_look(in, &tag, &n_bytes));
    assert_int_equal(n_bytes, COMM_MAIL_SLOT_BYTES);
    comm_mail_drop(in);
    /* Full and empty, at every place of the ring, in order. */
    for (int round = 0; round < 3 * COMM_MAIL_SLOTS; round++) {
        for (int i = 0; i < COMM_MAIL_SLOTS; i++) {
            assert_true(comm_mail_has_room(out));
            assert_int_equal(comm_mail_put(out, round + i, &i, sizeof i), sizeof i);
        }
        assert_false(comm_mail_has_room(out));
        assert_int_equal(comm_mail_put(out, 0, bytes, 1), 0);
        for (int i = 0; i < COMM_MAIL_SLOTS; i++) {
            const void *slot = comm_mail_look(in, &tag, &n_bytes);
            assert_non_null(slot);
            assert_int_equal(tag, round + i);
            assert_memory_equal(slot, &i, sizeof i);
            comm_mail_drop(in);
        }
        assert_null(comm_mail_look(in, &tag, &n_bytes));
        assert_int_equal(comm_mail_put(out, 0, bytes, 1),
                         1); /* the next round begins a slot later */
        comm_mail_drop(in);
    }
    for (int i = 0; i < 2; i++) comm_mail_close(mail[i]);
}

/* A sleeping end is woken once. */
static void test_sleepers(void **state)
{
    comm_mail *mail[2];

    (void)state;
    open_mail(mail);
    assert_false(comm_mail_must_wake(mail[0], 1));
    comm_mail_set_asleep(mail[1], true);
    assert_false(comm_mail_must_wake(mail[1], 0));
    assert_true(comm_mail_must_wake(mail[0], 1));
    assert_false(comm_mail_must_wake(mail[0], 1));
    comm_mail_set_asleep(mail[1], true);
    comm_mail_set_asleep(mail[1], false);
    assert_false(comm_mail_must_wake(mail[0], 1));
    for (int i = 0; i < 2; i++) comm_mail_close(mail[i]);
}

/* ---- errors ---- */

static void send_raw(const void *bytes, size_t n_bytes)
{
    assert_int_equal(send(a.fd, bytes, n_bytes, 0), n_bytes);
}

static comm_frame frame_of(uint32_t kind, size_t n_bytes)
{
    comm_frame frame = {.kind = kind, .tag = 1, .n_bytes = n_bytes};
    frame.head_sum = XXH3_64bits(&frame, offsetof(comm_frame, head_sum));
    return frame;
}

static void assert_refused(comm_frame frame, bl_status st, const char *text)
{
    send_raw(&frame, sizeof frame);
    assert_int_equal(comm_peer_read(&b), st);
    if (!strstr(bl_error_text(), text)) fail_msg("%s, not %s", bl_error_text(), text);
}

static void test_frames_without_sense(void **state)
{
    const comm_frame frames[] = {
        frame_of(0, 0),
        frame_of(COMM_FRAME_BELL + 1, 0),
        frame_of(COMM_FRAME_MESSAGE, COMM_SMALL_BYTES + 1),
        frame_of(COMM_FRAME_READY, 1),
        frame_of(COMM_FRAME_WORD, sizeof(comm_word) - 1),
        frame_of(COMM_FRAME_DATA, 0),
        frame_of(COMM_FRAME_DATA, 4096), /* without a receiver */
    };

    for (size_t i = 0; i < BL_COUNT(frames); i++) {
        assert_refused(frames[i], BL_EINTERNAL, "rank 3 sent a frame of kind");
        close_both(state);
        open_both(state);
    }
}

static void test_damaged_head(void **state)
{
    comm_frame frame = frame_of(COMM_FRAME_CLOSED, 0);

    (void)state;
    frame.tag ^= 1;
    assert_refused(frame, BL_ERANK, "what rank 3 sent was damaged");
    assert_false(b.has_closed);
}

/* A piece of another size than the one that is received. */
static void test_wrong_size(void **state)
{
    char bytes[4] = "abc", got[8];
    comm_piece out = piece_of(1, bytes, 4), in = piece_of(1, got, 8);

    (void)state;
    assert_int_equal(comm_peer_begin_receive(&b, &in), BL_OK);
    assert_int_equal(comm_peer_begin_send(&a, &out), BL_OK);
    assert_int_equal(pump(2), BL_EINTERNAL);
    assert_string_equal(bl_error_text(), "rank 3 sent 4 bytes, not 8");
}

static void test_too_many_early(void **state)
{
    comm_piece out = piece_of(1, "", 1);
    bl_status st = BL_OK;
    int n = 0;

    (void)state;
    for (; st == BL_OK && n < 5000; n++) {
        assert_int_equal(comm_peer_begin_send(&a, &out), BL_OK);
        st = pump(1);
    }
    assert_int_equal(st, BL_EINTERNAL);
    assert_int_equal(n, 4097);
    assert_string_equal(bl_error_text(), "rank 3 sent 4096 messages that nobody asked for");
}

/* ---- the end ---- */

static void test_death(void **state)
{
    bl_error error;

    (void)state;
    comm_peer_close(&a);
    a = (comm_peer){.fd = -1};
    bl_error_save(&error, comm_peer_read(&b));
    assert_int_equal(error.status, BL_ERANK);
    assert_string_equal(error.text, "rank 3 has died");
    assert_true(bl_wire_is_loss(&error));
    assert_int_equal(b.fd, -1);
}

static void test_end_in_good_order(void **state)
{
    (void)state;
    assert_int_equal(comm_peer_send_frame(&a, COMM_FRAME_CLOSED, 0, NULL, 0), BL_OK);
    comm_peer_close(&a);
    a = (comm_peer){.fd = -1};
    assert_int_equal(comm_peer_read(&b), BL_OK);
    assert_int_equal(comm_peer_read(&b), BL_OK);
    assert_true(b.has_closed && b.fd == -1);
}

static void test_word_before_the_end(void **state)
{
    comm_word word = {.origin = 3, .error = {.status = BL_EIO, .text = "a disk"}};

    (void)state;
    assert_int_equal(comm_peer_send_frame(&a, COMM_FRAME_WORD, 0, &word, sizeof word), BL_OK);
    comm_peer_close(&a);
    a = (comm_peer){.fd = -1};
    for (int i = 0; i < 2; i++) assert_int_equal(comm_peer_read(&b), BL_OK);
    assert_true(b.has_word && b.fd == -1);
    assert_string_equal(b.word.error.text, "a disk");
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, open_both, close_both)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_early_messages),       CASE(test_large_pieces),
        CASE(test_large_pieces_by_mail), cmocka_unit_test(test_rings),
        cmocka_unit_test(test_sleepers), CASE(test_frames_without_sense),
        CASE(test_damaged_head),         CASE(test_wrong_size),
        CASE(test_too_many_early),       CASE(test_death),
        CASE(test_end_in_good_order),    CASE(test_word_before_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
