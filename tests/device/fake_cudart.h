/* SPDX-License-Identifier: Apache-2.0 */
/* fake_cudart.h -- what a test can do to the runtime of fake_cudart.c. */
#ifndef BALLAST_TESTS_FAKE_CUDART_H
#define BALLAST_TESTS_FAKE_CUDART_H

#include <stdbool.h>

void fake_cuda_break(void); /* from now on every call fails, and no host function runs */
void fake_cuda_mend(void);
void fake_cuda_set_machine(int driver_version, int n_devices);
int fake_cuda_registrations(void); /* of host memory, alive */
/* Said in a stream's order: what was queued before took so much longer. */
void fake_cuda_pretend_ms(int ms);

#endif
