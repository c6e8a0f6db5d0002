/* SPDX-License-Identifier: Apache-2.0 */
/* skip.h -- how a cmocka test skips: with its reason. Include it after cmocka.h. */
#ifndef BALLAST_TESTS_SKIP_H
#define BALLAST_TESTS_SKIP_H

/* Prints "skipped: " and the reason (a printf format, a literal), the line that scripts/test
 * repeats, and leaves the test. A part of a test that a machine cannot run is a separate test. */
#define TEST_SKIP(...)                                                                             \
    do {                                                                                           \
        print_message("skipped: " __VA_ARGS__);                                                    \
        print_message("\n");                                                                       \
        skip();                                                                                    \
    } while (0)

/* For what needs the real models and data sets. */
#define TEST_SKIP_WITHOUT_DATA(data)                                                               \
    do {                                                                                           \
        if (!(data)) TEST_SKIP("BALLAST_TEST_DATA is not set");                                    \
    } while (0)

#endif
