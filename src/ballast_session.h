/* SPDX-License-Identifier: Apache-2.0 */
/* ballast_session.h -- libballast_session: training under the caller's own loop.
 *
 *   session        train/session.h      adapters over a loaded base; forward_backward, optim_step
 *
 * A library apart from libballast: it has the parts of the trainer, and links what they need. */
#ifndef BALLAST_SESSION_H
#define BALLAST_SESSION_H

#include "base/status.h"
#include "base/version.h"
#include "train/session.h"

#endif
