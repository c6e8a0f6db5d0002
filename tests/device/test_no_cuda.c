/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA says so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "device/device.h"

static void test_a_gpu_is_refused(void **state)
{
    bl_device *device = (bl_device *)state;
    bl_stream *stream = (bl_stream *)state;
    assert_int_equal(bl_device_create_cuda(0, &device), BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), "no CUDA"));
    assert_null(device);
    assert_int_equal(bl_stream_wrap_cuda(NULL, NULL, &stream), BL_ELIMIT);
    assert_null(stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_gpu_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
