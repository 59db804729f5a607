// SPDX-License-Identifier: Apache-2.0
// Copies between host and device, and within the device.
#pragma once

#include "tensors.h"

namespace swap_simulator {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);
// The value of a tensor of one element; the host waits for it.
at::Scalar local_scalar(const at::Tensor& tensor);

} // namespace swap_simulator
