// SPDX-License-Identifier: Apache-2.0
#include "copies.h"

#include <c10/core/DeviceGuard.h>

namespace swap_simulator {
namespace {

// Keeps host memory alive until the copy ran, as the event that torch records on a pinned block
// does. The storage and not the tensor: it has less of Python about it.
c10::Storage kept_alive(const at::Tensor& host) {
  return host.storage();
}

at::Tensor copy_to_or_from_host(
    const at::Tensor& source, const at::Tensor& target, bool to_device, bool non_blocking) {
  const auto& host = to_device ? source : target;
  const auto& device = to_device ? target : source;
  TORCH_CHECK(
      host.device().is_cpu(), "simulator: copies between ", host.device(), " and ",
      device.device(), " are not supported");
  c10::DeviceGuard guard(device.device());
  auto* stream = current_stream(device.device().index());
  static const auto* in = interned("copy_ (host to device)");
  static const auto* out = interned("copy_ (device to host)");
  auto pinned = pinned_access_of(host, !to_device);
  std::vector<Access> accesses{access_of(device, to_device)};
  if (pinned.memory != nullptr) {
    accesses.push_back(pinned);
  }
  auto from = cpu_alias(source);
  auto to = cpu_alias(target);
  auto bytes = static_cast<double>(host.numel() * host.element_size());
  auto copy = [from, to, to_device, bytes, kept = kept_alive(host)] {
    transfer_over_link(to_device, bytes);
    to.copy_(from);
  };
  submit(stream, to_device ? in : out, accesses, copy);
  // Pageable memory cannot be copied behind the host's back.
  if (!non_blocking || pinned.memory == nullptr) {
    host_wait(stream);
  }
  return target;
}

at::Tensor copy_within_devices(const at::Tensor& source, const at::Tensor& target) {
  auto* stream = current_stream(source.device().index());
  auto* receiving = current_stream(target.device().index());
  static const auto* operation = interned("copy_ (device to device)");
  auto from = cpu_alias(source);
  auto to = cpu_alias(target);
  if (receiving != stream) {
    wait_event(stream, record_event(receiving));
  }
  submit(stream, operation, {access_of(source, false), access_of(target, true)}, [from, to] {
    to.copy_(from);
  });
  if (receiving != stream) {
    wait_event(receiving, record_event(stream));
  }
  return target;
}

} // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (on_device(source) && on_device(target)) {
    return copy_within_devices(source, target);
  }
  return copy_to_or_from_host(source, target, on_device(target), non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  auto* stream = current_stream(tensor.device().index());
  static const auto* operation = interned("item");
  at::Scalar value;
  auto alias = cpu_alias(tensor);
  run_in_step(stream, operation, {access_of(tensor, false)}, [&] { value = alias.item(); });
  host_wait(stream);
  return value;
}

} // namespace swap_simulator
