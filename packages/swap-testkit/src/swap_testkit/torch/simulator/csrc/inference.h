// SPDX-License-Identifier: Apache-2.0
// The shapes of an operator's results, without running it.
#pragma once

#include "operator_info.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace swap_simulator {

struct Inferred {
  torch::jit::Stack results; // on the meta device
  std::vector<at::Tensor> outs; // what OperatorInfo::outs would become; undefined for none
};

// Null if they cannot be known: the operator has no meta kernel, or that refuses these arguments.
// Remembered for arguments that look alike, since many meta kernels are written in Python.
std::shared_ptr<const Inferred> infer(
    const c10::OperatorHandle& handle, OperatorInfo& info, const std::vector<c10::IValue>& arguments);

} // namespace swap_simulator
