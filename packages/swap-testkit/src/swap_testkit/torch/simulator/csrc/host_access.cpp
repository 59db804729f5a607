// SPDX-License-Identifier: Apache-2.0
// Operators of the CPU that read or write pinned memory, for the checker: torch tells of every
// operator that is dispatched.
#include "host_access.h"

#include "operator_info.h"
#include "tensors.h"
#include "values.h"

#include <ATen/record_function.h>

#include <unordered_set>

namespace swap_simulator {
namespace {

using at::Tensor;

// They look at a tensor's geometry only, which their schemas do not tell.
bool looks_at_no_values(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
      "randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
      "is_pinned", "is_same_size", "is_set_to", "requires_grad_", "retain_grad", "record_stream",
      "set_", "set_data", "detach_", "size", "stride", "numel", "sym_size", "sym_stride",
      "sym_numel", "sym_storage_offset", "is_complex", "is_floating_point", "is_contiguous",
      "output_nr", "_version", "is_leaf", "_has_compatible_shallow_copy_type",
      "_has_same_storage_numel", "resolve_conj", "resolve_neg", "result_type", "can_cast"};
  return names->count(name) > 0;
}

struct HostOperator {
  const OperatorInfo* info;
  bool reads_or_writes;
};

HostOperator describe(const c10::OperatorName& name) {
  auto handle = c10::Dispatcher::singleton().findSchema(name);
  bool ours = name.name.rfind("swap_simulator::", 0) == 0;
  if (ours || !handle.has_value()) {
    return {nullptr, false};
  }
  const auto& info = info_of(*handle);
  // What is composed of other operators is seen when they are called.
  bool composed =
      handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  bool geometry = handle->hasTag(at::Tag::inplace_view) || looks_at_no_values(*info.name);
  return {&info, !composed && !geometry};
}

bool is_plain_host_tensor(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
      tensor.has_storage() && tensor.numel() > 0;
}

bool concerns_pinned_memory(c10::ArrayRef<const c10::IValue> inputs) {
  bool pinned = false;
  bool device = false;
  for (const auto& input : inputs) {
    each_tensor(input, [&](const Tensor& tensor) {
      device = device || on_device(tensor);
      pinned = pinned || (is_plain_host_tensor(tensor) && is_pinned(tensor.const_data_ptr()));
    });
  }
  // What a device operator does with host memory is checked where it is queued.
  return pinned && !device;
}

void check_inputs(const OperatorInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  for (size_t i = 0; i < inputs.size() && i < info.arguments; ++i) {
    if (info.views[i]) {
      continue;
    }
    each_tensor(inputs[i], [&](const Tensor& tensor) {
      if (is_plain_host_tensor(tensor)) {
        auto extent = extent_of(tensor);
        host_access(
            info.name, tensor.const_data_ptr(), extent.end - extent.begin, info.writes[i]);
      }
    });
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (in_task() || !any_pinned() || !concerns_pinned_memory(function.inputs())) {
    return nullptr;
  }
  auto name = function.operator_name();
  if (name.has_value()) {
    auto host = describe(*name);
    if (host.reads_or_writes) {
      check_inputs(*host.info, function.inputs());
    }
  }
  return nullptr;
}

} // namespace

void watch_host_operators() {
  at::addGlobalCallback(at::RecordFunctionCallback(before_operator)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

} // namespace swap_simulator
