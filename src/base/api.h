/* SPDX-License-Identifier: Apache-2.0 */
/* api.h -- the mark of a public function: libballast.so exports it. All others are hidden: in a
 * header of ballast.h or ballast_ops.h, those without it serve the modules of Ballast. */
#ifndef BALLAST_BASE_API_H
#define BALLAST_BASE_API_H

#if defined(__GNUC__)
#define BL_API __attribute__((visibility("default")))
#else
#define BL_API
#endif

#endif
