/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA's own library through the table, where it is installed: no GPU is needed for that. The
 * fake one is test_comm_nccl's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <string.h>

#include "comm/nccl/library.h"
#include "skip.h"

static void test_real_library(void **state)
{
    comm_nccl_library library;

    (void)state;
    if (comm_nccl_load(&library) != BL_OK) TEST_SKIP("%s", bl_error_text());
    print_message("NCCL %d\n", library.version);
    assert_false(library.is_process);
    assert_true(library.version >= COMM_NCCL_VERSION_MIN);
    if (library.version >= COMM_NCCL_VERSION_WINDOWS) {
        assert_non_null(library.ncclCommWindowRegister);
        assert_non_null(library.ncclCommWindowDeregister);
    }
    assert_int_equal(comm_nccl_check(&library, ncclSuccess, "call", "what"), BL_OK);
    assert_int_equal(comm_nccl_check(&library, ncclRemoteError, "call", "what"), BL_ERANK);
    assert_non_null(strstr(bl_error_text(), library.ncclGetErrorString(ncclRemoteError)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_real_library)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
