// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

namespace swap_simulator {
namespace {

// Geometry and what else a kernel looks at.
void copy_metadata(const at::Tensor& from, const at::Tensor& to) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (from.is_conj()) {
    to._set_conj(true);
  }
  if (from.is_neg()) {
    to._set_neg(true);
  }
}

void check_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  auto held = tensor.storage().nbytes();
  TORCH_CHECK(
      held > 0,
      "simulator: a tensor of shape ", tensor.sizes(), " is used while its storage is freed "
      "(resized to 0 bytes)");
  auto needed = extent_of(tensor).end;
  TORCH_CHECK(
      needed <= held,
      "simulator: a tensor of shape ", tensor.sizes(), " needs ", needed, " bytes of a storage "
      "that has ", held);
}

} // namespace

at::Tensor empty_strided_on(
    c10::DeviceIndex device,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    at::ScalarType type) {
  c10::DeviceGuard guard(c10::Device(kSimulated, device));
  at::Tensor made = at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  block_of(made.storage())->itemsize = made.element_size();
  return made;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor;
  }
  check_memory(tensor);
  auto& storage = tensor.storage();
  c10::Storage over(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), at::kCPU), nullptr, /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(over), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  copy_metadata(tensor, alias);
  return alias;
}

at::Tensor meta_like(const at::Tensor& tensor) {
  auto meta = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(nullptr, at::kMeta), c10::GetAllocator(at::kMeta), /*resizable=*/true),
      c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  copy_metadata(tensor, meta);
  return meta;
}

Extent extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {};
  }
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  size_t first = tensor.storage_offset();
  return {first * tensor.element_size(), (first + last + 1) * tensor.element_size()};
}

Access access_of(const at::Tensor& tensor, bool writes) {
  auto extent = extent_of(tensor);
  return {block_of(tensor.storage()), extent.begin, extent.end, writes};
}

Access pinned_access_of(const at::Tensor& tensor, bool writes) {
  auto extent = extent_of(tensor);
  Lock lock(book());
  auto pinned = pinned_at(lock, tensor.const_data_ptr());
  return {pinned.memory, pinned.offset, pinned.offset + (extent.end - extent.begin), writes};
}

} // namespace swap_simulator
