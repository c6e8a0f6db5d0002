/* SPDX-License-Identifier: Apache-2.0 */
/* The list of the files that a program wrote: only listed files may be replaced. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file_list.h"
#include "base/files.h"

static char dir[] = "/tmp/ballast-list-XXXXXX";

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return bl_tree_remove(dir) == BL_OK ? 0 : -1;
}

/* Valid until 16 further calls. */
static const char *in_dir(const char *name)
{
    static char slots[16][256];
    static size_t turn;
    char *slot = slots[turn++ % 16];
    snprintf(slot, sizeof slots[0], "%s/%s", dir, name);
    return slot;
}

static void put_text(const char *name, const char *text)
{
    assert_int_equal(bl_file_write_atomic(in_dir(name), text, strlen(text)), BL_OK);
}

static void list_file(bl_file_list *list, const char *path)
{
    assert_int_equal(bl_file_list_add(list, &path, 1), BL_OK);
}

static void test_file_list(void **state)
{
    const char *mine = in_dir("sub/mine"), *late = in_dir("late"), *theirs = in_dir("theirs"),
               *text = in_dir(".ballast-files");
    bl_file_list *list;

    (void)state;
    assert_int_equal(bl_dir_create(in_dir("sub")), BL_OK);
    put_text("theirs", "x");
    assert_int_equal(bl_file_list_open(dir, &list), BL_OK);
    assert_false(bl_file_list_was_there(list));
    assert_int_equal(bl_file_list_check(list, theirs), BL_EUSAGE);
    assert_int_equal(bl_file_list_add(list, &theirs, 1), BL_EUSAGE);
    assert_false(bl_file_exists(text));
    assert_int_equal(bl_file_list_check(list, mine), BL_OK);
    assert_int_equal(bl_file_list_adopt(list, "/tmp/elsewhere"), BL_EINTERNAL);
    list_file(list, mine);
    put_text("sub/mine", "x");
    list_file(list, late);
    put_text("late.tmp", "x");
    bl_file_list_close(list);

    assert_int_equal(bl_file_list_open(dir, &list), BL_OK);
    assert_true(bl_file_list_was_there(list));
    assert_true(bl_file_list_has(list, mine) && bl_file_list_has(list, late));
    assert_false(bl_file_list_has(list, theirs));
    assert_int_equal(bl_file_list_check(list, late), BL_OK);
    /* Another program may make a file that is gone: its name is dropped. */
    assert_int_equal(unlink(in_dir("late.tmp")), 0);
    list_file(list, mine);
    assert_false(bl_file_list_has(list, late));
    /* A reserved name stays without its file, until the list is closed. */
    assert_int_equal(bl_file_list_reserve(list, late), BL_OK);
    assert_false(bl_file_list_has(list, late));
    list_file(list, late);
    list_file(list, mine);
    assert_true(bl_file_list_has(list, late));
    bl_file_list_close(list);
    assert_int_equal(bl_file_list_open(dir, &list), BL_OK);
    list_file(list, mine);
    assert_false(bl_file_list_has(list, late));
    bl_file_list_close(list);

    static const char outside[] = "# Files that Ballast wrote here. It replaces and deletes only "
                                  "these.\n../precious\n";
    static const char *const broken[] = {"mine\n", "", outside};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        put_text(".ballast-files", broken[i]);
        assert_int_equal(bl_file_list_open(dir, &list), BL_EUSAGE);
        assert_null(list);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_file_list)};
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
