/* SPDX-License-Identifier: Apache-2.0 */
/* A model that the ranks of a host open together: one embedding, the same bytes and checksum as of
 * a process alone; the rank that reads a bad row reports it. Ranks are threads, each of which maps
 * one memory file separately. */
#include "ops_test.h"
#include "test_ranks.h"
#include "tmp_dir.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "model/weights.h"
#include "store/safetensors.h"

enum { MAX_RANKS = 4 };

static const char *const files[] = {"config.json", "model.safetensors"};

typedef struct shared_case {
    const char *dir;
    int fd;
    const bl_model *alone; /* NULL: not compared */
} shared_case;

/* The demo's model, in the scratch folder. */
static const char *copy_model(void)
{
    const char *dir = tmp_subdir("model");

    for (size_t i = 0; i < BL_COUNT(files); i++) {
        char from[64], to[64];
        void *bytes;
        size_t n_bytes;
        snprintf(from, sizeof from, "demo/base/%s", files[i]);
        snprintf(to, sizeof to, "model/%s", files[i]);
        assert_int_equal(bl_file_read_all(from, 1 << 30, &bytes, &n_bytes), BL_OK);
        put_bytes(to, bytes, n_bytes);
        free(bytes);
    }
    return dir;
}

static bl_status open_together(test_rank *self)
{
    shared_case *c = self->arg;
    bl_host_memory *host;
    bl_model *model = NULL;

    BL_TRY(bl_host_memory_open(c->fd, self->comm, &host));
    bl_status st = bl_model_open_shared(c->dir, BL_BASE_AUTO, 16, host, 1, &model);
    if (st == BL_OK && c->alone) {
        const bl_model *alone = c->alone;
        TEST_CHECK_GOTO(st, done, model->embedding_checksum == alone->embedding_checksum);
        TEST_CHECK_GOTO(st, done, model->embedding_bytes == alone->embedding_bytes);
        TEST_CHECK_GOTO(st, done,
                        memcmp(model->embedding, alone->embedding, alone->embedding_bytes) == 0);
        TEST_CHECK_GOTO(st, done,
                        bl_host_memory_bytes(host) >= (int64_t)alone->embedding_bytes ||
                            self->n_ranks == 1);
    }
done:
    bl_model_close(model);
    bl_host_memory_close(host);
    return st;
}

static void test_one_embedding(void **state)
{
    shared_case c = {.dir = copy_model()};
    bl_model *alone;
    struct stat info;

    (void)state;
    assert_int_equal(bl_model_open(c.dir, BL_BASE_AUTO, 16, &alone), BL_OK);
    c.alone = alone;
    for (int n = 1; n <= MAX_RANKS; n++) {
        c.fd = memfd_create("test_model_shared", MFD_CLOEXEC);
        if (test_ranks_run(n, 1, 60, open_together, &c, NULL) != BL_OK)
            fail_msg("%d ranks: %s", n, bl_error_text());
        assert_int_equal(fstat(c.fd, &info), 0);
        int64_t once = bl_round_up((int64_t)alone->embedding_bytes, 4096) + 4096;
        assert_int_equal(info.st_size, n == 1 ? 0 : once);
        close(c.fd);
    }
    bl_model_close(alone);
}

/* A NaN in a row of the embedding: whichever rank reads it, the text is the one of a process alone,
 * the row the file's. */
static void test_bad_embedding(void **state)
{
    static const uint32_t nan_bits = 0x7fc07fc0; /* in fp32, and twice in bf16 */
    shared_case c = {.dir = copy_model()};
    bl_model *alone;
    int64_t offset = 0, n_rows = 0, row_bytes = 0;
    char expected[BL_ERROR_TEXT_BYTES];

    (void)state;
    assert_int_equal(bl_model_open(c.dir, BL_BASE_AUTO, 16, &alone), BL_OK);
    const bl_stored_tensor *t = bl_hf_find(alone->files, "model.embed_tokens.weight");
    assert_non_null(t);
    n_rows = t->shape[0];
    row_bytes = t->n_bytes / n_rows;
    offset = t->offset_bytes;
    bl_model_close(alone);
    for (int i = 0; i < 3; i++) {
        int64_t row = i == 0 ? 0 : i == 1 ? n_rows / 2 : n_rows - 1;
        c.dir = copy_model();
        int fd = open(tmp_path("model/model.safetensors"), O_WRONLY);
        assert_int_equal(pwrite(fd, &nan_bits, 4, offset + row * row_bytes), 4);
        close(fd);
        assert_int_equal(bl_model_open(c.dir, BL_BASE_AUTO, 16, &alone), BL_EINPUT);
        snprintf(expected, sizeof expected, "%s", bl_error_text());
        for (int n = 2; n <= MAX_RANKS; n++) {
            bl_error errors[MAX_RANKS];
            int n_told = 0;
            c.fd = memfd_create("test_model_shared", MFD_CLOEXEC);
            assert_int_equal(test_ranks_run(n, 1, 60, open_together, &c, errors), BL_EINPUT);
            for (int r = 0; r < n; r++) {
                n_told += errors[r].status == BL_EINPUT;
                if (errors[r].status == BL_EINPUT) assert_string_equal(errors[r].text, expected);
            }
            assert_int_equal(n_told, 1); /* one rank has read it, the others received the error */
            close(c.fd);
        }
    }
}

/* Descriptors of this process that have a file of that path open, with O_DIRECT or without. */
static int count_open(const char *path, bool direct)
{
    char own[PATH_MAX], name[64];
    int n = 0;

    assert_non_null(realpath(path, own));
    for (int fd = 0; fd < 256; fd++) {
        char link[PATH_MAX];
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(name, link, sizeof link - 1);
        if (length < 0) continue;
        link[length] = '\0';
        if (strcmp(link, own) == 0 && ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) == direct) n++;
    }
    return n;
}

/* Replicas of one host read the same rows: through the page cache, which a disk fills once. One
 * alone reads past it. */
static void test_replicas_read_through_the_page_cache(void **state)
{
    const char *dir = copy_model(), *path = tmp_path("model/model.safetensors");
    int fd = open(path, O_RDONLY | O_DIRECT);
    bool has_direct = fd >= 0;
    bl_model *model;

    (void)state;
    if (fd >= 0) close(fd);
    assert_int_equal(bl_model_open_shared(dir, BL_BASE_AUTO, 16, NULL, 1, &model), BL_OK);
    assert_int_equal(count_open(path, true), has_direct ? 1 : 0);
    bl_model_close(model);
    assert_int_equal(bl_model_open_shared(dir, BL_BASE_AUTO, 16, NULL, 2, &model), BL_OK);
    assert_int_equal(count_open(path, true), 0);
    assert_true(count_open(path, false) > 0);
    bl_model_close(model);
    assert_int_equal(count_open(path, false) + count_open(path, true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_embedding),
        cmocka_unit_test(test_bad_embedding),
        cmocka_unit_test(test_replicas_read_through_the_page_cache),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
