// SPDX-License-Identifier: Apache-2.0
#include "inference.h"

#include "tensors.h"
#include "values.h"

#include <unordered_map>

namespace swap_simulator {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr size_t kRemembered = 1 << 14;

// Everything about arguments that shapes and dtypes can depend on.
class Signature {
 public:
  Signature(const OperatorInfo& info, const std::vector<IValue>& arguments) {
    number(reinterpret_cast<intptr_t>(&info));
    bool has_tensors = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      bool out = std::find(info.outs.begin(), info.outs.end(), i) != info.outs.end();
      each_tensor(arguments[i], [&](const Tensor&) { has_tensors = has_tensors || !out; });
    }
    for (const auto& argument : arguments) {
      add(argument, has_tensors);
    }
  }

  bool complete() const {
    return complete_;
  }

  std::string text;

 private:
  bool complete_ = true;

  void number(int64_t value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void number(double value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void kind(char mark) {
    text.push_back(mark);
  }

  void add(const Tensor& tensor) {
    kind('t');
    if (!tensor.defined()) {
      return;
    }
    kind(on_device(tensor) ? 'd' : 'c');
    kind(static_cast<char>(tensor.scalar_type()));
    kind(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : '-');
    kind(static_cast<char>(tensor.is_conj() * 2 + tensor.is_neg()));
    number(tensor.dim());
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      number(tensor.size(i));
      number(tensor.stride(i));
    }
  }

  void add(const IValue& value, bool has_tensors) {
    kind(';');
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      kind(value.isTensor() ? 'T' : 'L');
      if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          add(tensor.value_or(Tensor()));
        }
      } else {
        each_tensor(value, [&](const Tensor& tensor) { add(tensor); });
      }
    } else if (value.isNone() || value.isGenerator()) {
      kind('n');
    } else if (value.isBool()) {
      kind(value.toBool() ? 'y' : 'x');
    } else if (value.isInt()) {
      kind('i');
      number(value.toInt());
    } else if (value.isDouble()) {
      kind('f');
      // A learning rate is another in every step, and changes no shape. The end of a range does.
      if (!has_tensors) {
        number(value.toDouble());
      }
    } else if (value.isIntList()) {
      kind('I');
      for (auto item : value.toIntVector()) {
        number(item);
      }
    } else if (value.isDoubleList()) {
      kind('F');
      for (auto item : value.toDoubleVector()) {
        number(item);
      }
    } else if (value.isBoolList()) {
      kind('B');
      for (bool item : value.toBoolList()) {
        kind(item ? 'y' : 'x');
      }
    } else if (value.isString()) {
      kind('s');
      text += value.toStringRef();
    } else if (value.isDevice()) {
      kind('D');
    } else {
      complete_ = false;
    }
  }
};

IValue as_meta(const IValue& argument) {
  if (argument.isDevice()) {
    return c10::Device(at::kMeta);
  }
  if (argument.isGenerator()) {
    return IValue();
  }
  return changed(argument, [](const Tensor& tensor) {
    return on_device(tensor) ? meta_like(tensor) : tensor;
  });
}

// The statistics of a norm have the type of its weight on the CPU, which meta kernels do not know.
void correct_statistics(const std::string& name, const std::vector<IValue>& arguments, Stack& results) {
  size_t weight = 0;
  if (name == "native_layer_norm") {
    weight = 2;
  } else if (name == "native_group_norm") {
    weight = 1;
  } else {
    return;
  }
  bool has_weight = arguments[weight].isTensor() && arguments[weight].toTensor().defined();
  auto type = arguments[has_weight ? weight : 0].toTensor().scalar_type();
  for (size_t i = 1; i < results.size(); ++i) {
    results[i] = results[i].toTensor().to(type);
  }
}

std::shared_ptr<const Inferred> ask(
    const c10::OperatorHandle& handle, OperatorInfo& info, const std::vector<IValue>& arguments) {
  auto found = std::make_shared<Inferred>();
  for (const auto& argument : arguments) {
    found->results.push_back(as_meta(argument));
  }
  for (auto index : info.outs) {
    const auto& out = found->results[index];
    found->outs.push_back(out.isTensor() ? out.toTensor() : Tensor());
  }
  try {
    Sandbox sandbox([&] { handle.callBoxed(found->results); });
  } catch (const c10::NotImplementedError&) {
    info.has_meta = false;
    return nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
  correct_statistics(*info.name, arguments, found->results);
  return found;
}

} // namespace

std::shared_ptr<const Inferred> infer(
    const c10::OperatorHandle& handle, OperatorInfo& info, const std::vector<IValue>& arguments) {
  static auto* known =
      new std::unordered_map<std::string, std::shared_ptr<const Inferred>>();
  static auto* guard = new std::mutex();
  if (!info.has_meta) {
    return nullptr;
  }
  Signature signature(info, arguments);
  if (signature.complete()) {
    std::lock_guard<std::mutex> lock(*guard);
    auto found = known->find(signature.text);
    if (found != known->end()) {
      return found->second;
    }
  }
  auto inferred = ask(handle, info, arguments);
  if (inferred != nullptr && signature.complete()) {
    std::lock_guard<std::mutex> lock(*guard);
    if (known->size() >= kRemembered) {
      known->clear();
    }
    known->emplace(std::move(signature.text), inferred);
  }
  return inferred;
}

} // namespace swap_simulator
