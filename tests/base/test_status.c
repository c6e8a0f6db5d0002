/* SPDX-License-Identifier: Apache-2.0 */
/* test_status.c -- error texts: out of memory is named, long texts are cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "base/sizes.h"
#include "base/status.h"

/* Memory that ran out is said, whatever the text names; no other failure's text is touched. */
static void test_out_of_memory_is_said(void **state)
{
    static const struct {
        bl_status status;
        const char *text, *expected;
    } cases[] = {
        {BL_ENOMEM, "a loader", "out of memory: loader"},
        {BL_ENOMEM, "the list of tensors", "out of memory: list of tensors"},
        {BL_ENOMEM, "scales of x", "out of memory: scales of x"},
        {BL_ENOMEM, "and 3 more", "out of memory: and 3 more"},
        {BL_ENOMEM, "x: takes 5 bytes of memory", "x: takes 5 bytes of memory"},
        {BL_EINPUT, "a file", "a file"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(BL_FAIL(cases[i].status, "%s", cases[i].text), cases[i].status);
        assert_string_equal(bl_error_text(), cases[i].expected);
    }
}

static void test_a_long_text_is_cut(void **state)
{
    char text[BL_ERROR_TEXT_BYTES + 100];

    (void)state;
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    assert_int_equal(BL_FAIL(BL_ENOMEM, "%s", text), BL_ENOMEM);
    assert_int_equal(strlen(bl_error_text()), BL_ERROR_TEXT_BYTES - 1);
    assert_int_equal(strncmp(bl_error_text(), "out of memory: xxx", 18), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_out_of_memory_is_said),
        cmocka_unit_test(test_a_long_text_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
