// SPDX-License-Identifier: Apache-2.0
// What Python calls: torch.ops.swap_simulator.*
#include "generator.h"
#include "host_access.h"
#include "operators.h"
#include "tensors.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace swap_simulator {

void register_device(); // guard.cpp

namespace {

using at::Tensor;

void start(int64_t devices) {
  set_device_count(devices);
  register_device();
  watch_host_operators();
}

std::optional<int64_t> limit_from(int64_t bytes) {
  return bytes < 0 ? std::nullopt : std::optional<int64_t>(bytes);
}

c10::List<std::string> list_of(const std::vector<std::string>& strings) {
  c10::List<std::string> list;
  for (const auto& string : strings) {
    list.push_back(string);
  }
  return list;
}

c10::Dict<std::string, int64_t> fallback_table() {
  c10::Dict<std::string, int64_t> table;
  for (const auto& [name, count] : fallbacks()) {
    table.insert(name, count);
  }
  return table;
}

void set_quirks(bool npu_rounding, bool resize_checks, bool pinned_power_of_two, bool fused) {
  memory_rules().npu_rounding = npu_rounding;
  memory_rules().resize_checks = resize_checks;
  pinned_rules().power_of_two = pinned_power_of_two;
  set_fused_ignores_scaler(fused);
}

void set_private_format(const Tensor& tensor, bool on) {
  block_of(tensor.storage())->private_format = on;
}

void mark_host_access(const Tensor& tensor, bool writes) {
  static const auto* reads = interned("host_read");
  static const auto* write = interned("host_write");
  TORCH_CHECK(
      tensor.device().is_cpu(), "simulator: host_read and host_write take tensors of the CPU, not ",
      tensor.device());
  auto extent = extent_of(tensor);
  host_access(
      writes ? write : reads, tensor.const_data_ptr(), extent.end - extent.begin, writes);
}

// CPU tensors over the memory of device tensors, for a collective that runs now in the place of an
// operation of the current stream.
std::vector<Tensor> begin_collective(
    const std::vector<Tensor>& reads, const std::vector<Tensor>& writes, const std::string& name) {
  const auto& any = reads.empty() ? writes : reads;
  auto* stream = current_stream(any.empty() ? current_device() : any.front().device().index());
  std::vector<Access> accesses;
  std::vector<Tensor> views;
  for (const auto* tensors : {&reads, &writes}) {
    for (const auto& tensor : *tensors) {
      accesses.push_back(access_of(tensor, tensors == &writes));
      views.push_back(cpu_alias(tensor));
    }
  }
  run_in_step(stream, interned(name), accesses, [] {});
  return views;
}

c10::DeviceIndex device_index(int64_t device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "simulator: there is no device ", device,
      "; there are ", static_cast<int>(device_count()), ", counted from 0");
  return static_cast<c10::DeviceIndex>(device);
}

Tensor rng_state(int64_t device) {
  return default_generator(device_index(device)).get_state();
}

void set_rng_state(int64_t device, const Tensor& state) {
  auto generator = default_generator(device_index(device));
  generator.set_state(state);
}

void set_seed(int64_t device, int64_t seed) {
  auto generator = default_generator(device_index(device));
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

TORCH_LIBRARY(swap_simulator, m) {
  m.def("start(int devices) -> ()", start);
  m.def("stop() -> ()", stop);
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("set_schedule(int kind, int seed) -> ()", [](int64_t kind, int64_t seed) {
    set_schedule(static_cast<ScheduleKind>(kind), static_cast<uint64_t>(seed));
  });
  m.def("set_link(float into, float out, float latency) -> ()", set_link);
  m.def("set_memory_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    set_memory_limit(device_index(device), limit_from(bytes));
  });
  m.def("set_pinned_limit(int bytes) -> ()", [](int64_t bytes) {
    pinned_rules().limit = limit_from(bytes);
  });
  m.def(
      "set_quirks(bool npu_rounding, bool resize_checks, bool pinned_power_of_two, bool fused) "
      "-> ()",
      set_quirks);
  m.def("set_private_format(Tensor tensor, bool on) -> ()");
  m.def("set_strict_free(bool on) -> ()", [](bool on) { memory_rules().strict_free = on; });
  m.def("set_raise_on_race(bool on) -> ()", set_raise_on_race);
  m.def("races(bool clear) -> str[]", [](bool clear) { return list_of(races(clear)); });
  m.def("race_count() -> int", race_count);
  m.def("fallbacks() -> Dict(str, int)", fallback_table);
  m.def("queued_operations() -> int", queued_operations);
  m.def("pinned_bytes() -> int", pinned_bytes);
  m.def("pinned_peak_bytes() -> int", pinned_peak_bytes);
  m.def("reset_pinned_peak() -> ()", reset_pinned_peak);
  m.def("rng_state(int device) -> Tensor", rng_state);
  m.def("set_rng_state(int device, Tensor state) -> ()");
  m.def("set_seed(int device, int seed) -> ()", set_seed);
  m.def("host_access(Tensor tensor, bool writes) -> ()");
  m.def("begin_collective(Tensor[] reads, Tensor[] writes, str name) -> Tensor[]");
}

// Not through a backend's key: the tensors may be of the CPU.
TORCH_LIBRARY_IMPL(swap_simulator, CompositeExplicitAutograd, m) {
  m.impl("set_private_format", set_private_format);
  m.impl("set_rng_state", set_rng_state);
  m.impl("host_access", mark_host_access);
  m.impl("begin_collective", begin_collective);
}

} // namespace
} // namespace swap_simulator
