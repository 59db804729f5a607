// SPDX-License-Identifier: Apache-2.0
#include "operator_info.h"

#include "checker.h"

#include <memory>
#include <unordered_map>

namespace swap_simulator {
namespace {

bool is_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::ListType) {
    return type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
  }
  return type.kind() == c10::TypeKind::TensorType;
}

void read_arguments(const c10::FunctionSchema& schema, OperatorInfo& info) {
  const auto& arguments = schema.arguments();
  info.arguments = arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto* alias = argument.alias_info();
    info.writes.push_back(alias != nullptr && alias->isWrite());
    info.views.push_back(alias != nullptr && !alias->isWrite());
    if (argument.is_out()) {
      info.outs.push_back(i);
    }
    if (argument.type()->str().find("Generator") != std::string::npos) {
      info.generator = static_cast<int>(i);
    }
    if (argument.name() == "grad_scale") {
      info.scaler_arguments[0] = static_cast<int>(i);
    }
    if (argument.name() == "found_inf") {
      info.scaler_arguments[1] = static_cast<int>(i);
    }
  }
}

int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && *other == alias) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void read_results(const c10::FunctionSchema& schema, OperatorInfo& info) {
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    bool is_argument = alias != nullptr && alias->isWrite();
    info.aliases.push_back(is_argument ? aliased_argument(schema, *alias) : -1);
    info.in_place = info.in_place && is_argument;
    info.returns_view = info.returns_view || (alias != nullptr && !is_argument);
    info.returns_tensors = info.returns_tensors && is_tensors(*result.type());
  }
}

std::unique_ptr<OperatorInfo> read(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  auto info = std::make_unique<OperatorInfo>();
  info->name = interned(schema.operator_name().name.substr(schema.operator_name().name.rfind(':') + 1));
  read_arguments(schema, *info);
  read_results(schema, *info);
  info->draws = info->generator >= 0 || handle.hasTag(at::Tag::nondeterministic_seeded);
  info->host_waits = !info->returns_tensors || handle.hasTag(at::Tag::dynamic_output_shape) ||
      handle.hasTag(at::Tag::data_dependent_output);
  info->has_meta = !info->host_waits &&
      handle.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  return info;
}

} // namespace

OperatorInfo& info_of(const c10::OperatorHandle& handle) {
  static auto* known = new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorInfo>>();
  static auto* guard = new std::mutex();
  std::lock_guard<std::mutex> lock(*guard);
  auto& info = (*known)[handle.operator_name()];
  if (info == nullptr) {
    info = read(handle);
  }
  return *info;
}

} // namespace swap_simulator
