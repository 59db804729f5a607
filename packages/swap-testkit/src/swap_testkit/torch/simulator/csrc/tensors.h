// SPDX-License-Identifier: Apache-2.0
// Tensors of the device, the CPU tensors over their memory that kernels get, and their bytes.
#pragma once

#include "device_allocator.h"
#include "host_allocator.h"

#include <ATen/core/Tensor.h>

namespace swap_simulator {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

at::Tensor empty_strided_on(
    c10::DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);

// A CPU tensor over the same memory. It does not keep device memory alive, as a kernel's argument
// does not; host memory it does.
at::Tensor cpu_alias(const at::Tensor& tensor);
// A tensor of the same geometry without memory.
at::Tensor meta_like(const at::Tensor& tensor);

// The bytes from a tensor's first element to its last, in its storage.
struct Extent {
  size_t begin = 0;
  size_t end = 0;
};
Extent extent_of(const at::Tensor& tensor);

Access access_of(const at::Tensor& tensor, bool writes);
// A host tensor's bytes, if they are pinned; else an access of nothing.
Access pinned_access_of(const at::Tensor& tensor, bool writes);

} // namespace swap_simulator
