#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the polynomial of bl_normal_of (src/ops/element_internal.h): P with z P(z) = exp(u^2 / 2) erfc(|u| / sqrt(2)) / 2,
z = 1 / (1 + 0.3 |u|), smallest largest relative error for |u| < 15 (Lawson's reweighted least squares). Needs numpy and mpmath.
"""
import mpmath
import numpy

SLOPE, DEGREE, NODES = 0.3, 9, 400

z = numpy.cos(numpy.pi * (numpy.arange(NODES) + 0.5) / NODES) / 2 + 0.5
u = (1 / z - 1) / SLOPE
z, u = z[u < 15], u[u < 15]
want = numpy.array([float(mpmath.exp(mpmath.mpf(a) ** 2 / 2) * mpmath.erfc(mpmath.mpf(a) / mpmath.sqrt(2)) / 2 / b)
                    for a, b in zip(u, z)])
powers, weight = numpy.vander(z, DEGREE + 1, increasing=True), numpy.ones(len(z))
for _ in range(200):
    row = numpy.sqrt(weight) / want
    c = numpy.linalg.lstsq(powers * row[:, None], want * row, rcond=None)[0]
    error = abs(powers @ c / want - 1)
    weight *= error
    weight /= weight.sum()
rounded = numpy.float32(c).astype(float)
print('coefficients, of z^0 first:', ', '.join(f'{v:.9g}f' for v in rounded))
print(f'largest relative error {abs(powers @ rounded / want - 1).max():.3g}')
