/* SPDX-License-Identifier: Apache-2.0 */
/* Every case runs with each engine, with and without O_DIRECT; the content of a file is a function
 * of the offset, so that each byte is checked for its place. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "io/reader.h"
#include "refusals.h"
#include "skip.h"

enum { N_FILES = 6, CHUNK = 64 << 10, DEPTH = 4, SPARSE = 5 };

/* The last file is sparse: its bytes from SPARSE_BEGIN on. */
static const int64_t SPARSE_BEGIN = (INT64_C(3) << 40) + 4321;
static const int64_t file_bytes[N_FILES] = {1, 4095, 4096, 4097, (5 << 20) + 777, 300000};

static char folder[] = "/tmp/ballast-test-io.XXXXXX";
static char path[N_FILES][64];
static const char *paths[N_FILES];

static unsigned char expected_byte(int file, int64_t offset)
{
    uint64_t x = (uint64_t)offset * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)file * 977;
    return (unsigned char)(x >> 56 ^ x >> 33);
}

static int64_t file_begin(int file)
{
    return file == SPARSE ? SPARSE_BEGIN : 0;
}

static int make_files(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    for (int f = 0; f < N_FILES; f++) {
        snprintf(path[f], sizeof path[f], "%s/file%d", folder, f);
        paths[f] = path[f];
        unsigned char *bytes = malloc((size_t)file_bytes[f]);
        for (int64_t i = 0; i < file_bytes[f]; i++) bytes[i] = expected_byte(f, file_begin(f) + i);
        int fd = open(path[f], O_WRONLY | O_CREAT, 0600);
        if (fd < 0 || pwrite(fd, bytes, (size_t)file_bytes[f], file_begin(f)) != file_bytes[f])
            return -1;
        close(fd);
        free(bytes);
    }
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    for (int f = 0; f < N_FILES; f++) unlink(path[f]);
    return rmdir(folder);
}

static void assert_bytes(const void *bytes, int file, int64_t offset, size_t n)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < n; i++)
        if (at[i] != expected_byte(file, offset + (int64_t)i))
            fail_msg("file %d: byte %lld is %d, expected %d", file,
                     (long long)(offset + (int64_t)i), at[i],
                     expected_byte(file, offset + (int64_t)i));
}

/* ---- one engine and way of opening ---- */

typedef struct setup {
    bl_io_engine engine;
    bool direct;
    bl_io_files *files;
    bl_reader *reader;
    bl_reader_options options;
} setup;

static const setup kinds[] = {{.engine = BL_IO_URING, .direct = true},
                              {.engine = BL_IO_URING, .direct = false},
                              {.engine = BL_IO_PREAD, .direct = true},
                              {.engine = BL_IO_PREAD, .direct = false}};

static setup open_setup(const setup *kind, bl_io_hook hook, void *arg)
{
    setup s = *kind;
    s.options.engine = s.engine;
    s.options.queue_depth = DEPTH;
    s.options.chunk_bytes = CHUNK;
    s.options.hook = hook;
    s.options.hook_arg = arg;
    assert_int_equal(bl_io_files_open(paths, N_FILES, s.direct, &s.files), BL_OK);
    assert_int_equal(bl_reader_create(&s.options, s.files, &s.reader), BL_OK);
    return s;
}

static void close_setup(setup *s)
{
    bl_reader_destroy(s->reader);
    bl_io_files_close(s->files);
}

static bool uring_is_here(void)
{
    setup s = open_setup(&kinds[0], NULL, NULL);
    bool here = strcmp(bl_reader_engine_name(s.reader), "uring") == 0;
    close_setup(&s);
    return here;
}

/* Where there is none, the cases of all other tests that ask for it run with pread. */
static void test_uring_is_used(void **state)
{
    (void)state;
    if (!uring_is_here()) TEST_SKIP("no io_uring here: pread runs its cases");
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

enum { N_RANGES = 120 };

/* Ranges of every size and alignment, some empty, some of several chunks, some to the end of their
 * file. */
static void make_ranges(bl_io_range *ranges)
{
    uint32_t random = 7;
    for (int i = 0; i < N_RANGES; i++) {
        int f = (int)(next_random(&random) % N_FILES);
        int64_t limit = i % 3 == 0 ? 5 * CHUNK : i % 3 == 1 ? CHUNK : 100;
        int64_t begin = (int64_t)(next_random(&random) % (uint32_t)file_bytes[f]);
        int64_t n = (int64_t)(next_random(&random) % (uint32_t)(limit + 1));
        if (i % 10 == 0) begin = begin / BL_IO_ALIGN_BYTES * BL_IO_ALIGN_BYTES;
        if (i % 7 == 0 || n > file_bytes[f] - begin) n = file_bytes[f] - begin;
        ranges[i] = (bl_io_range){f, file_begin(f) + begin, n};
    }
}

/* Streams the ranges and checks each byte, place and order. */
static void check_stream(bl_reader *reader, const bl_io_range *ranges, size_t n_ranges)
{
    bl_io_chunk chunk;
    size_t range = 0;
    int64_t offset = 0;

    assert_int_equal(bl_reader_stream(reader, ranges, n_ranges), BL_OK);
    for (;;) {
        bl_status st = bl_reader_next(reader, &chunk);
        if (st != BL_OK) fail_msg("%s", bl_error_text());
        while (range < n_ranges && offset == ranges[range].n_bytes) range++, offset = 0;
        if (!chunk.bytes) break;
        assert_int_equal(chunk.range, range);
        assert_int_equal(chunk.offset_bytes, offset);
        if (ranges[range].n_bytes <= CHUNK) assert_int_equal(chunk.n_bytes, ranges[range].n_bytes);
        assert_bytes(chunk.bytes, ranges[range].file, ranges[range].offset_bytes + offset,
                     chunk.n_bytes);
        offset += (int64_t)chunk.n_bytes;
    }
    assert_int_equal(range, n_ranges);
    bl_reader_stream_end(reader);
}

static void test_stream(void **state)
{
    (void)state;
    bl_io_range ranges[N_RANGES];
    bl_reader_stats stats;
    int64_t n_bytes = 0;

    make_ranges(ranges);
    for (int i = 0; i < N_RANGES; i++) n_bytes += ranges[i].n_bytes;
    for (size_t k = 0; k < BL_COUNT(kinds); k++) {
        setup s = open_setup(&kinds[k], NULL, NULL);
        check_stream(s.reader, ranges, N_RANGES);
        bl_reader_get_stats(s.reader, &stats);
        assert_int_equal(stats.n_bytes, n_bytes);
        check_stream(s.reader, ranges, 1); /* and again with the same reader */
        check_stream(s.reader, ranges, 0);
        close_setup(&s);
    }
}

static void assert_untouched(const char *begin, const char *end)
{
    while (begin < end)
        if (*begin++ != 0x5a) fail_msg("a byte beside the ranges was written");
}

/* Reads of all the ranges at once, each into memory of another alignment; nothing beside them is
 * written. */
static void check_reads(bl_reader *reader, char *memory, size_t memory_bytes)
{
    bl_io_range ranges[N_RANGES];
    bl_io_read reads[N_RANGES];
    char *dst[N_RANGES];
    size_t used = 0;

    make_ranges(ranges);
    memset(memory, 0x5a, memory_bytes);
    for (int i = 0; i < N_RANGES; i++) {
        size_t align = i % 2 ? BL_IO_ALIGN_BYTES : 1;
        used = (used + 1 + align - 1) / align * align;
        dst[i] = memory + used;
        used += (size_t)ranges[i].n_bytes;
        assert_true(used < memory_bytes);
        reads[i] = (bl_io_read){.file = ranges[i].file,
                                .offset_bytes = ranges[i].offset_bytes,
                                .n_bytes = (size_t)ranges[i].n_bytes,
                                .dst = dst[i]};
        assert_int_equal(bl_reader_submit(reader, &reads[i]), BL_OK);
    }
    for (int i = N_RANGES - 1; i >= 0; i--)
        assert_int_equal(bl_reader_wait(reader, &reads[i]), BL_OK);
    used = 0;
    for (int i = 0; i < N_RANGES; i++) {
        assert_untouched(memory + used, dst[i]);
        assert_bytes(dst[i], ranges[i].file, ranges[i].offset_bytes, (size_t)ranges[i].n_bytes);
        used = (size_t)(dst[i] - memory) + (size_t)ranges[i].n_bytes;
    }
    assert_untouched(memory + used, memory + memory_bytes);
}

static void test_reads(void **state)
{
    (void)state;
    size_t memory_bytes = 64 << 20;
    char *memory =
        mmap(NULL, memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    for (size_t k = 0; k < 2 * BL_COUNT(kinds); k++) {
        setup kind = kinds[k / 2];
        if (k % 2) { /* registered */
            kind.options.memory = memory;
            kind.options.memory_bytes = memory_bytes / 2;
        }
        setup s = open_setup(&kind, NULL, NULL);
        check_reads(s.reader, memory, memory_bytes);
        close_setup(&s);
    }
    munmap(memory, memory_bytes);
}

/* ---- faults ---- */

/* The result of each attempt: the whole, a part (mostly not a multiple of the alignment), or a
 * signal. */
typedef struct fault {
    atomic_uint n_calls;
    /* The attempt that covers this offset of the large file fails with fail_errno. */
    int64_t fail_offset;
    int fail_errno;
    bool shorten;
    long delay_ns;
} fault;

static int64_t inject(void *arg, const bl_io_completion *c)
{
    fault *f = arg;
    unsigned call = atomic_fetch_add(&f->n_calls, 1);

    if (f->delay_ns) nanosleep(&(struct timespec){0, f->delay_ns}, NULL);
    if (f->fail_errno && strcmp(c->path, path[4]) == 0 && f->fail_offset >= c->offset_bytes &&
        f->fail_offset < c->offset_bytes + (int64_t)c->n_bytes)
        return -f->fail_errno;
    if (!f->shorten || c->result <= 0) return c->result;
    switch (call % 5) {
    case 0:
        return -EINTR;
    case 1:
        return c->result / 2 + 1;
    case 2:
        return -EAGAIN;
    case 3:
        return call % 2 ? 1 : c->result;
    default:
        return c->result;
    }
}

static void test_short_reads(void **state)
{
    (void)state;
    bl_io_range ranges[N_RANGES];

    make_ranges(ranges);
    for (size_t k = 0; k < BL_COUNT(kinds); k++) {
        fault f = {.shorten = true};
        size_t memory_bytes = 64 << 20;
        char *memory = malloc(memory_bytes);
        setup s = open_setup(&kinds[k], inject, &f);
        check_stream(s.reader, ranges, N_RANGES);
        check_reads(s.reader, memory, memory_bytes);
        close_setup(&s);
        assert_true(f.n_calls > 2 * N_RANGES);
        free(memory);
    }
}

static void assert_error_names(const char *file, long long offset, const char *reason)
{
    char number[32];
    snprintf(number, sizeof number, "%lld", offset);
    if (!strstr(bl_error_text(), file) || !strstr(bl_error_text(), number) ||
        !strstr(bl_error_text(), reason))
        fail_msg("\"%s\" names not all of %s, %lld, %s", bl_error_text(), file, offset, reason);
}

static void test_errors(void **state)
{
    (void)state;
    static const struct {
        int number;
        bl_status status;
        const char *reason;
    } errors[] = {{EIO, BL_EIO, "Input/output error"},
                  {ENOMEM, BL_ENOMEM, "Cannot allocate memory"},
                  {EINTR, BL_EIO, "Interrupted"}};
    const bl_io_range ranges[] = {{4, 0, 8 * CHUNK}, {4, 16 * CHUNK, CHUNK}};
    static char memory[8 * CHUNK];

    for (size_t k = 0; k < BL_COUNT(kinds); k++)
        for (size_t e = 0; e < BL_COUNT(errors); e++) {
            if (errors[e].number == EINTR && k > 0) continue; /* it takes a second to give up */
            fault f = {.fail_offset = 5 * CHUNK + 100, .fail_errno = errors[e].number};
            setup s = open_setup(&kinds[k], inject, &f);
            bl_io_chunk chunk;
            bl_status st = bl_reader_stream(s.reader, ranges, 2);
            int n = 0;
            while (st == BL_OK && (st = bl_reader_next(s.reader, &chunk)) == BL_OK) n++;
            assert_int_equal(st, errors[e].status);
            assert_int_equal(n, 5); /* what came before the fault is delivered */
            assert_error_names(path[4], 5 * CHUNK, errors[e].reason);
            assert_int_equal(bl_reader_next(s.reader, &chunk),
                             errors[e].status); /* it stays failed */
            bl_reader_stream_end(s.reader);

            bl_io_read good = {.file = 4, .n_bytes = CHUNK, .dst = memory};
            bl_io_read bad = {.file = 4, .n_bytes = sizeof memory, .dst = memory};
            assert_int_equal(bl_reader_submit(s.reader, &bad), BL_OK);
            assert_int_equal(bl_reader_wait(s.reader, &bad), errors[e].status);
            assert_error_names(path[4], 5 * CHUNK, errors[e].reason);
            assert_int_equal(bl_reader_submit(s.reader, &good), BL_OK);
            assert_int_equal(bl_reader_wait(s.reader, &good), BL_OK);
            assert_bytes(memory, 4, 0, CHUNK);
            close_setup(&s);
        }
}

/* A file system that takes O_DIRECT when the file is opened and refuses the reads. */
static int64_t refuse_direct(void *arg, const bl_io_completion *c)
{
    const setup *s = arg;
    (void)c;
    return s->direct && atomic_fetch_add((atomic_int *)s->options.hook_arg, 1) < DEPTH ? -EINVAL
                                                                                       : c->result;
}

static void test_direct_refused(void **state)
{
    (void)state;
    bl_io_range ranges[N_RANGES];

    make_ranges(ranges);
    for (size_t k = 0; k < BL_COUNT(kinds); k++) {
        atomic_int n_refused = 0;
        setup arg = {.direct = kinds[k].direct, .options = {.hook_arg = &n_refused}};
        setup s = open_setup(&kinds[k], refuse_direct, &arg);
        check_stream(s.reader, ranges, N_RANGES);
        close_setup(&s);
    }
}

static void test_end_of_file(void **state)
{
    (void)state;
    char memory[8192];

    for (size_t k = 0; k < BL_COUNT(kinds); k++) {
        setup s = open_setup(&kinds[k], NULL, NULL);
        bl_io_read reads[] = {{.file = 3, .offset_bytes = 4000, .n_bytes = 98, .dst = memory},
                              {.file = 3, .offset_bytes = 1 << 20, .n_bytes = 1, .dst = memory}};
        for (size_t i = 0; i < BL_COUNT(reads); i++) {
            assert_int_equal(bl_reader_submit(s.reader, &reads[i]), BL_OK);
            assert_int_equal(bl_reader_wait(s.reader, &reads[i]), BL_EIO);
            assert_non_null(strstr(bl_error_text(), path[3]));
            assert_non_null(strstr(bl_error_text(), "ends at offset"));
        }
        close_setup(&s);
    }
}

static void test_misuse(void **state)
{
    (void)state;
    const bl_io_range range = {0, 0, 1},
                      bad[] = {
                          {N_FILES, 0, 1}, {-1, 0, 1}, {0, -1, 1}, {0, 0, -1}, {0, INT64_MAX, 1}};
    const char *none[] = {"/tmp/there-is-no-such-file"}, *dir[] = {"/tmp"};
    char memory[1];
    bl_io_files *files;
    setup s = open_setup(&kinds[2], NULL, NULL);
    bl_io_read read = {.file = 0, .n_bytes = 1, .dst = memory};

    for (size_t i = 0; i < BL_COUNT(bad); i++)
        assert_int_equal(bl_reader_stream(s.reader, &bad[i], 1), BL_EINTERNAL);
    assert_int_equal(bl_reader_stream(s.reader, &range, 1), BL_OK);
    assert_int_equal(bl_reader_submit(s.reader, &read), BL_EINTERNAL);
    assert_int_equal(bl_reader_stream(s.reader, &range, 1), BL_EINTERNAL);
    bl_reader_stream_end(s.reader);
    bl_reader_stream_end(s.reader);
    assert_int_equal(bl_reader_submit(s.reader, &read), BL_OK);
    assert_int_equal(bl_reader_stream(s.reader, &range, 1), BL_EINTERNAL);
    assert_int_equal(bl_reader_wait(s.reader, &read), BL_OK);
    close_setup(&s);
    assert_int_equal(bl_io_files_open(none, 1, true, &files), BL_EINPUT);
    assert_int_equal(bl_io_files_open(dir, 1, true, &files), BL_EINPUT);
    bl_reader_destroy(NULL);
    bl_io_files_close(NULL);
}

/* ---- teardown ---- */

static void test_teardown(void **state)
{
    (void)state;
    static char memory[16][CHUNK];
    const bl_io_range ranges[] = {{4, 3, 5 << 20}};
    bl_io_read reads[16];
    bl_io_chunk chunk;

    for (size_t k = 0; k < BL_COUNT(kinds); k++) {
        fault f = {.delay_ns = 2000000};
        setup s = open_setup(&kinds[k], inject, &f);
        for (int i = 0; i < 16; i++) {
            reads[i] = (bl_io_read){
                .file = 4, .offset_bytes = i * CHUNK + (i & 1), .n_bytes = CHUNK, .dst = memory[i]};
            assert_int_equal(bl_reader_submit(s.reader, &reads[i]), BL_OK);
        }
        close_setup(&s);
        memset(memory, 0, sizeof memory); /* no read writes there any more */

        s = open_setup(&kinds[k], inject, &f);
        assert_int_equal(bl_reader_stream(s.reader, ranges, 1), BL_OK);
        for (int i = 0; i < 3; i++) assert_int_equal(bl_reader_next(s.reader, &chunk), BL_OK);
        bl_reader_stream_end(s.reader);
        assert_int_equal(bl_reader_stream(s.reader, ranges, 1), BL_OK);
        assert_int_equal(bl_reader_next(s.reader, &chunk), BL_OK);
        assert_int_equal(chunk.offset_bytes, 0);
        close_setup(&s); /* with a stream open and a chunk in hand */

        s = open_setup(&kinds[k], NULL, NULL);
        close_setup(&s); /* without anything */
    }
}

/* ---- refusals: in a child, whose limits are its own ---- */

enum { CHILD_OK = 0, CHILD_CANNOT = 10, CHILD_ENGINE, CHILD_BYTES };

/* Streams file 4; a second reader of the same files says nothing again. */
static int read_as_child(bl_io_engine engine, const char *expected_engine)
{
    const bl_io_range range = {4, 77, 5 << 20};
    const bl_reader_options options = {
        .engine = engine, .queue_depth = DEPTH, .chunk_bytes = CHUNK};
    bl_io_files *files;
    bl_reader *reader, *other;
    bl_io_chunk chunk;

    if (bl_io_files_open(paths, N_FILES, true, &files) != BL_OK ||
        bl_reader_create(&options, files, &reader) != BL_OK ||
        bl_reader_create(&options, files, &other) != BL_OK ||
        bl_reader_stream(reader, &range, 1) != BL_OK)
        return CHILD_CANNOT;
    int rc = strcmp(bl_reader_engine_name(reader), expected_engine) == 0 ? CHILD_OK : CHILD_ENGINE;
    while (bl_reader_next(reader, &chunk) == BL_OK && chunk.bytes)
        for (size_t i = 0; i < chunk.n_bytes; i++)
            if (((const unsigned char *)chunk.bytes)[i] !=
                expected_byte(4, 77 + chunk.offset_bytes + (int64_t)i))
                rc = CHILD_BYTES;
    bl_reader_destroy(other);
    bl_reader_destroy(reader);
    bl_io_files_close(files);
    return rc;
}

/* Runs in a child with its stderr in `text`; returns its exit code. */
static int run_child(int (*fn)(int), int arg, char text[4096])
{
    int ends[2], status;
    size_t used = 0;
    ssize_t n;

    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        _exit(fn(arg));
    }
    close(ends[1]);
    while (used < 4095 && (n = read(ends[0], text + used, 4095 - used)) > 0) used += (size_t)n;
    text[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* A negative error refuses the use of a ring that can be made. */
static int child_refused(int error)
{
    alarm(120);
    bool refused =
        refuse_system_call(error > 0 ? SYS_io_uring_setup : SYS_io_uring_enter, abs(error));
    return refused ? read_as_child(BL_IO_AUTO, "pread") : CHILD_CANNOT;
}

static void test_uring_refused(void **state)
{
    (void)state;
    static const int errors[] = {EPERM, ENOSYS, ENOMEM, -EPERM, -ENOSYS, -ENOMEM};
    char text[4096];

    if (!uring_is_here()) TEST_SKIP("no io_uring here");
    for (size_t i = 0; i < BL_COUNT(errors); i++) {
        int rc = run_child(child_refused, errors[i], text);
        if (rc == CHILD_CANNOT) TEST_SKIP("no seccomp here");
        assert_int_equal(rc, CHILD_OK);
        assert_non_null(
            strstr(text, "warning: io_uring is not used, files are read with pread: io_uring_"));
        assert_non_null(strstr(text, errors[i] < 0 ? "io_uring_enter: " : "io_uring_setup: "));
        assert_non_null(strstr(text, strerror(abs(errors[i]))));
        assert_null(strstr(strchr(text, '\n') + 1, "\n")); /* one line */
    }
}

static int child_memlock(int n_bytes)
{
    return refuse_locked_memory((size_t)n_bytes) ? read_as_child(BL_IO_URING, "uring")
                                                 : CHILD_CANNOT;
}

static void test_memlock(void **state)
{
    (void)state;
    char text[4096], need[64];

    if (!uring_is_here()) TEST_SKIP("no io_uring here");
    int rc = run_child(child_memlock, 65536, text);
    if (rc == CHILD_CANNOT) TEST_SKIP("this process may not lower RLIMIT_MEMLOCK");
    assert_int_equal(rc, CHILD_OK);
    snprintf(need, sizeof need, "needs %d ", DEPTH * (CHUNK + 2 * BL_IO_ALIGN_BYTES));
    assert_non_null(strstr(text, "warning: RLIMIT_MEMLOCK is 65536 bytes"));
    assert_non_null(strstr(text, need));
    assert_null(strstr(strchr(text, '\n') + 1, "\n"));
    rc = run_child(child_memlock, 1 << 20, text); /* enough */
    assert_int_equal(rc, CHILD_OK);
    assert_string_equal(text, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_uring_is_used), cmocka_unit_test(test_stream),
        cmocka_unit_test(test_reads),         cmocka_unit_test(test_short_reads),
        cmocka_unit_test(test_errors),        cmocka_unit_test(test_direct_refused),
        cmocka_unit_test(test_end_of_file),   cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_teardown),      cmocka_unit_test(test_uring_refused),
        cmocka_unit_test(test_memlock),
    };
    return cmocka_run_group_tests(tests, make_files, remove_files);
}
