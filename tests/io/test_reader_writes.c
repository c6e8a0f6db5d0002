/* SPDX-License-Identifier: Apache-2.0 */
/* Whole blocks are written and read back by each engine, with and without O_DIRECT, registered
 * memory or not, whatever is cut short; failures name the file. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "io/reader.h"

enum { CHUNK = 64 << 10, DEPTH = 4 };

static const struct {
    bl_io_engine engine;
    bool direct;
} kinds[] = {{BL_IO_URING, true}, {BL_IO_URING, false}, {BL_IO_PREAD, true}, {BL_IO_PREAD, false}};

enum { BLOCKS_BYTES = 5 * CHUNK + 3 * BL_IO_ALIGN_BYTES };

typedef struct write_faults {
    atomic_int n;
    int64_t result; /* of every write; 0: every other one is cut to one block, or interrupted */
} write_faults;

static int64_t disturb_writes(void *arg, const bl_io_completion *c)
{
    write_faults *faults = arg;
    int n = atomic_fetch_add(&faults->n, 1);
    if (!c->is_write) return c->result;
    if (faults->result != 0) return faults->result;
    if (n % 3 == 1) return -EINTR;
    return n % 3 == 2 && c->result > BL_IO_ALIGN_BYTES ? BL_IO_ALIGN_BYTES : c->result;
}

static bl_io_files *adopt_file(bool direct)
{
    bl_io_files *files;
    int fd = open("/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, BLOCKS_BYTES) != 0) return NULL;
    assert_int_equal(bl_io_files_adopt("the pages", fd, direct, &files), BL_OK);
    return files;
}

static void fill_blocks(unsigned char *bytes, int round)
{
    for (int64_t i = 0; i < BLOCKS_BYTES; i++)
        bytes[i] = (unsigned char)(i >> 9 ^ i * 7 ^ round * 31);
}

/* Reads return the written bytes, repeatedly, also after short reads and writes. */
static void test_writes(void **state)
{
    enum { ROUNDS = 3 };
    unsigned char *memory = aligned_alloc(BL_IO_ALIGN_BYTES, 2 * BLOCKS_BYTES),
                  *back = memory + BLOCKS_BYTES;

    (void)state;
    for (size_t k = 0; k < BL_COUNT(kinds); k++)
        for (int is_registered = 0; is_registered < 2; is_registered++) {
            write_faults faults = {0};
            bl_reader_options options = {.engine = kinds[k].engine,
                                         .queue_depth = DEPTH,
                                         .chunk_bytes = CHUNK,
                                         .memory = is_registered ? memory : NULL,
                                         .memory_bytes = is_registered ? 2 * BLOCKS_BYTES : 0,
                                         .hook = disturb_writes,
                                         .hook_arg = &faults};
            bl_io_files *files = adopt_file(kinds[k].direct);
            bl_reader *reader;
            assert_non_null(files);
            assert_int_equal(bl_reader_create(&options, files, &reader), BL_OK);
            for (int round = 0; round < ROUNDS; round++) {
                bl_io_read write = {.n_bytes = BLOCKS_BYTES, .dst = memory},
                           read = {.n_bytes = BLOCKS_BYTES, .dst = back};
                fill_blocks(memory, round);
                assert_int_equal(bl_reader_submit_write(reader, &write), BL_OK);
                assert_int_equal(bl_reader_wait(reader, &write), BL_OK);
                assert_int_equal(bl_reader_submit(reader, &read), BL_OK);
                assert_int_equal(bl_reader_wait(reader, &read), BL_OK);
                assert_memory_equal(memory, back, BLOCKS_BYTES);
            }
            bl_reader_destroy(reader);
            bl_io_files_close(files);
        }
    free(memory);
}

static void test_write_errors(void **state)
{
    static const struct {
        int64_t result;
        bl_status status;
        const char *reason;
    } cases[] = {{-ENOSPC, BL_ELIMIT, "No space left on device"},
                 {-EDQUOT, BL_ELIMIT, "Disk quota exceeded"},
                 {-EIO, BL_EIO, "Input/output error"}};
    unsigned char *memory = aligned_alloc(BL_IO_ALIGN_BYTES, BLOCKS_BYTES);

    (void)state;
    memset(memory, 7, BLOCKS_BYTES);
    for (size_t k = 0; k < BL_COUNT(kinds); k++)
        for (size_t i = 0; i < BL_COUNT(cases); i++) {
            write_faults faults = {.result = cases[i].result};
            bl_reader_options options = {.engine = kinds[k].engine,
                                         .queue_depth = DEPTH,
                                         .chunk_bytes = CHUNK,
                                         .hook = disturb_writes,
                                         .hook_arg = &faults};
            bl_io_read write = {.n_bytes = BLOCKS_BYTES, .dst = memory};
            bl_io_files *files = adopt_file(kinds[k].direct);
            bl_reader *reader;
            assert_int_equal(bl_reader_create(&options, files, &reader), BL_OK);
            assert_int_equal(bl_reader_submit_write(reader, &write), BL_OK);
            assert_int_equal(bl_reader_wait(reader, &write), cases[i].status);
            assert_non_null(strstr(bl_error_text(), "the pages: writing"));
            assert_non_null(strstr(bl_error_text(), cases[i].reason));
            write.offset_bytes = 1;
            assert_int_equal(bl_reader_submit_write(reader, &write), BL_EINTERNAL);
            bl_reader_destroy(reader);
            bl_io_files_close(files);
        }
    free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_writes),
                                       cmocka_unit_test(test_write_errors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
