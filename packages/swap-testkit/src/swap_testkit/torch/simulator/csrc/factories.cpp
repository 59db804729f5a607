// SPDX-License-Identifier: Apache-2.0
// What makes tensors, views of them, and storages of another size: needs no kernel to run.
#include "copies.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace swap_simulator {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using OptionalType = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;
using OptionalFormat = std::optional<at::MemoryFormat>;

c10::DeviceIndex index_or_current(const OptionalDevice& device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

void check_options(const OptionalLayout& layout, const std::optional<bool>& pinned) {
  TORCH_CHECK(
      layout.value_or(at::kStrided) == at::kStrided,
      "simulator: tensors of layout ", *layout, " are not supported; only strided ones are");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(
    IntArrayRef sizes,
    OptionalType type,
    OptionalLayout layout,
    OptionalDevice device,
    std::optional<bool> pinned,
    OptionalFormat format) {
  check_options(layout, pinned);
  c10::DeviceGuard guard(at::Device(kSimulated, index_or_current(device)));
  Tensor made = at::detail::empty_generic(
      sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
  block_of(made.storage())->itemsize = made.element_size();
  return made;
}

Tensor empty_strided(
    IntArrayRef sizes,
    IntArrayRef strides,
    OptionalType type,
    OptionalLayout layout,
    OptionalDevice device,
    std::optional<bool> pinned) {
  check_options(layout, pinned);
  return empty_strided_on(index_or_current(device), sizes, strides, c10::dtype_or_default(type));
}

void grow_storage(const Tensor& tensor) {
  auto needed = extent_of(tensor).end;
  if (needed > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), needed);
  }
}

const Tensor& resize(const Tensor& tensor, IntArrayRef sizes, OptionalFormat format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    grow_storage(tensor);
  }
  if (format.has_value()) {
    TORCH_CHECK(
        *format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  return tensor;
}

Tensor& set_storage(
    Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  TORCH_CHECK(
      storage.device() == tensor.device(), "Attempted to set the storage of a tensor on device \"",
      tensor.device(), "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() != nullptr) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  grow_storage(tensor);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  if (!tensor.is_same(source)) {
    set_storage(
        tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  }
  return tensor;
}

Tensor as_strided(
    const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

// The CPU's kernel draws from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::empty_like(input, at::kBool).fill_(true)};
  }
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - probability);
  auto scale = probability == 1 ? 0.0 : 1 / (1 - probability);
  return {input.mul(mask).mul_(scale), mask};
}

Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  return gradient.mul(mask).mul_(scale);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

// Lazy conjugation and negation: the fallbacks would resolve them by a copy, which is this operator.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace swap_simulator
