// SPDX-License-Identifier: Apache-2.0
// The boxed fallback: an operator runs the CPU's kernel on the memory of the device, as a task.
// The shapes of its results come from its meta kernel, so that the host need not wait for it.
#include "operators.h"

#include "generator.h"
#include "inference.h"
#include "tensors.h"
#include "values.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>

namespace swap_simulator {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

std::atomic<int64_t> queued{0};
std::atomic<bool> fused_ignores_scaler{false};

std::map<std::string, int64_t>& fallback_counts() {
  static auto* instance = new std::map<std::string, int64_t>();
  return *instance;
}

// CPU tensors that may be among an operator's arguments: scalars in the form of a tensor, and
// indices.
bool takes_cpu_tensors(const std::string& name) {
  return name.rfind("index", 0) == 0 || name.rfind("_index", 0) == 0 ||
      name.rfind("_unsafe_index", 0) == 0;
}

Tensor as_it_is_now(const Tensor& host) {
  auto copy = host.detach().clone();
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& handle, Stack* stack)
      : handle_(handle),
        info_(info_of(handle)),
        stack_(stack),
        arguments_(stack->end() - static_cast<int64_t>(info_.arguments), stack->end()),
        device_(find_device()) {}

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !info_.returns_view, "simulator: the view operator ", *info_.name, " is not supported");
    c10::DeviceGuard guard(c10::Device(kSimulated, device_));
    stream_ = current_stream(device_);
    check_devices();
    if (info_.draws) {
      reserve_numbers();
    }
    if (fused_ignores_scaler && *info_.name == "_fused_adamw_") {
      forget_scaler();
    }
    std::shared_ptr<const Inferred> inferred;
    if (!seeds_globally()) {
      inferred = infer(handle_, info_, arguments_);
    }
    if (inferred != nullptr) {
      resize_outs(*inferred);
    }
    if (info_.in_place && !seeds_globally() && (inferred != nullptr || needs_no_shapes())) {
      queue_in_place();
    } else if (inferred != nullptr) {
      queue_with_results(inferred->results);
    } else {
      run_now();
    }
  }

 private:
  const c10::OperatorHandle& handle_;
  OperatorInfo& info_;
  Stack* stack_;
  std::vector<IValue> arguments_;
  c10::DeviceIndex device_;
  Stream* stream_ = nullptr;
  uint64_t random_ = 0;
  std::vector<IValue> outs_; // what a kernel that runs in step wrote to

  c10::DeviceIndex find_device() const {
    c10::DeviceIndex found = -1;
    for (const auto& argument : arguments_) {
      each_tensor(argument, [&](const Tensor& tensor) {
        if (found < 0 && on_device(tensor)) {
          found = tensor.device().index();
        }
      });
      if (found < 0 && argument.isDevice() && argument.toDevice().type() == kSimulated) {
        found = argument.toDevice().index();
      }
    }
    return found < 0 ? current_device() : found;
  }

  void check_devices() const {
    for (const auto& argument : arguments_) {
      each_tensor(argument, [&](const Tensor& tensor) {
        bool scalar = tensor.device().is_cpu() &&
            (tensor.dim() == 0 || takes_cpu_tensors(*info_.name));
        TORCH_CHECK(
            scalar || tensor.device() == c10::Device(kSimulated, device_),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            c10::Device(kSimulated, device_), " and ", tensor.device(), "! (when checking ",
            *info_.name, ")");
      });
    }
  }

  void reserve_numbers() {
    auto generator = default_generator(device_);
    if (info_.generator >= 0 && !arguments_[info_.generator].isNone()) {
      generator = arguments_[info_.generator].toGenerator();
      TORCH_CHECK(
          generator.device().type() == kSimulated, "Expected a '",
          c10::DeviceTypeName(kSimulated, true), "' device type for generator but found '",
          generator.device().type(), "'");
    }
    random_ = reserve_random(generator);
  }

  void forget_scaler() {
    for (auto index : info_.scaler_arguments) {
      if (index >= 0) {
        arguments_[index] = IValue();
      }
    }
  }

  // A kernel that only writes into its arguments needs no shapes.
  bool needs_no_shapes() const {
    return info_.in_place && info_.outs.empty() && !info_.host_waits && !info_.has_meta;
  }

  // A kernel that draws and takes no generator draws from the CPU's own.
  bool seeds_globally() const {
    return info_.draws && info_.generator < 0;
  }

  void resize_outs(const Inferred& inferred) {
    for (size_t i = 0; i < info_.outs.size(); ++i) {
      if (inferred.outs[i].defined()) {
        const auto& out = arguments_[info_.outs[i]].toTensor();
        if (out.sizes() != inferred.outs[i].sizes()) {
          out.resize_(inferred.outs[i].sizes());
        }
      }
    }
  }

  // What the kernel gets: aliases, and host values as they are now.
  Stack kernel_arguments() const {
    Stack kernel;
    for (const auto& argument : arguments_) {
      if (argument.isDevice()) {
        kernel.push_back(c10::Device(at::kCPU));
      } else {
        kernel.push_back(changed(argument, [](const Tensor& tensor) {
          return tensor.defined() && tensor.device().is_cpu() ? as_it_is_now(tensor)
                                                               : cpu_alias(tensor);
        }));
      }
    }
    if (info_.generator >= 0) {
      kernel[info_.generator] = cpu_generator(random_);
    }
    return kernel;
  }

  std::vector<Access> accesses(const std::vector<Tensor>& results) const {
    std::vector<Access> found;
    for (const auto& result : results) {
      found.push_back(access_of(result, true));
    }
    // Writes first: of memory that is read and written, that it is written says more.
    for (bool writes : {true, false}) {
      for (size_t i = 0; i < arguments_.size(); ++i) {
        if (info_.writes[i] == writes) {
          each_tensor(arguments_[i], [&](const Tensor& tensor) {
            if (on_device(tensor)) {
              found.push_back(access_of(tensor, writes));
            }
          });
        }
      }
    }
    return found;
  }

  void answer(Stack results) {
    torch::jit::drop(*stack_, info_.arguments);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  Stack arguments_as_results() const {
    Stack results;
    for (auto index : info_.aliases) {
      results.push_back(arguments_[index]);
    }
    return results;
  }

  void queue_in_place() {
    ++queued;
    submit(
        stream_, info_.name, accesses({}),
        [handle = handle_, kernel = kernel_arguments()]() mutable { handle.callBoxed(kernel); });
    answer(arguments_as_results());
  }

  void queue_with_results(const Stack& shapes) {
    ++queued;
    std::vector<Tensor> made;
    Stack results;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (info_.aliases[i] >= 0) {
        results.push_back(arguments_[info_.aliases[i]]);
        continue;
      }
      results.push_back(changed(shapes[i], [&](const Tensor& shape) {
        if (!shape.defined()) {
          return shape;
        }
        made.push_back(
            empty_strided_on(device_, shape.sizes(), shape.strides(), shape.scalar_type()));
        return made.back();
      }));
    }
    std::vector<Tensor> targets;
    for (const auto& result : made) {
      targets.push_back(cpu_alias(result));
    }
    auto run = [handle = handle_, kernel = kernel_arguments(), aliases = info_.aliases,
                targets = std::move(targets)]() mutable {
      handle.callBoxed(kernel);
      size_t next = 0;
      for (size_t i = 0; i < kernel.size(); ++i) {
        if (aliases[i] < 0) {
          each_tensor(kernel[i], [&](const Tensor& result) { targets[next++].copy_(result); });
        }
      }
    };
    submit(stream_, info_.name, accesses(made), std::move(run));
    answer(std::move(results));
  }

  // In step with the host.
  void run_now() {
    auto kernel = kernel_arguments();
    make_outs_resizable(kernel);
    run_in_step(stream_, info_.name, accesses({}), [&] { call_with_seed(kernel); });
    {
      Lock lock(book());
      ++fallback_counts()[*info_.name];
    }
    if (info_.host_waits) {
      host_wait(stream_);
    }
    answer(moved_to_device(kernel));
  }

  // Outs whose shape is not known are written to memory of the CPU first.
  void make_outs_resizable(Stack& kernel) const {
    for (auto index : info_.outs) {
      if (kernel[index].isTensor()) {
        kernel[index] = kernel[index].toTensor().new_empty({0});
      }
    }
  }

  void call_with_seed(Stack& kernel) {
    outs_.clear();
    for (auto index : info_.outs) {
      outs_.push_back(kernel[index]);
    }
    if (!seeds_globally()) {
      handle_.callBoxed(kernel);
      return;
    }
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    auto before = generator.get_state();
    generator.set_current_seed(random_);
    try {
      handle_.callBoxed(kernel);
    } catch (...) {
      generator.set_state(before);
      throw;
    }
    generator.set_state(before);
  }

  Stack moved_to_device(const Stack& kernel) {
    for (size_t i = 0; i < info_.outs.size(); ++i) {
      const auto& out = arguments_[info_.outs[i]];
      if (out.isTensor()) {
        out.toTensor().resize_(outs_[i].toTensor().sizes());
        out.toTensor().copy_(outs_[i].toTensor());
      }
    }
    Stack results;
    for (size_t i = 0; i < kernel.size(); ++i) {
      if (info_.aliases[i] >= 0) {
        results.push_back(arguments_[info_.aliases[i]]);
        continue;
      }
      results.push_back(changed(kernel[i], [&](const Tensor& result) {
        return result.defined() ? received(result) : result;
      }));
    }
    return results;
  }

  Tensor received(const Tensor& result) const {
    auto made =
        empty_strided_on(device_, result.sizes(), result.strides(), result.scalar_type());
    submit(
        stream_, info_.name, {access_of(made, true)},
        [to = cpu_alias(made), result] { to.copy_(result); });
    return made;
  }
};

void fallback(const c10::OperatorHandle& handle, Stack* stack) {
  Call(handle, stack).run();
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch's convolution asks other devices than its own for operators of this name.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto* handle = new c10::OperatorHandle(operator_named("aten::convolution"));
  Call(*handle, stack).run();
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto* handle = new c10::OperatorHandle(operator_named("aten::convolution_backward"));
  constexpr int64_t kArguments = 10;
  auto first = stack->end() - kArguments;
  auto bias_sizes = c10::List<int64_t>({first->toTensor().size(1)});
  stack->insert(first + 3, IValue(bias_sizes));
  Call(*handle, stack).run();
}

} // namespace

std::map<std::string, int64_t> fallbacks() {
  Lock lock(book());
  return fallback_counts();
}

int64_t queued_operations() {
  return queued;
}

void set_fused_ignores_scaler(bool on) {
  fused_ignores_scaler = on;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// These are composed of other operators by default, with statistics of another type than the CPU's
// backward kernels take.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace swap_simulator
