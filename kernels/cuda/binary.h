// Parts of the binary kernels that live in files of their own, to keep each file quick to compile.
#pragma once

#include "kernels/elementwise.h"

namespace mixtape::kernels::cuda {

void comparison(const Stream& stream, BinaryOp op, Dtype compute, const View& out, const Operand& a,
                const Operand& b);
void binary_backward_a(const Stream& stream, BinaryOp op, Dtype compute, const View& dx,
                       const View& dy, const Operand& a, const Operand& b);
void binary_backward_b(const Stream& stream, BinaryOp op, Dtype compute, const View& dx,
                       const View& dy, const Operand& a, const Operand& b);

/// n where b is the number 2, 3 or 4, else 0.
int small_exponent(const Operand& b);
/// out = x^n and dx = dy n x^(n-1), for n of small_exponent.
void integer_power(const Stream& stream, Dtype compute, const View& out, const View& x, int n);
void integer_power_backward(const Stream& stream, Dtype compute, const View& dx, const View& dy,
                            const View& x, int n);

}  // namespace mixtape::kernels::cuda
