// SPDX-License-Identifier: Apache-2.0
// What the simulator needs to know of an operator, from its schema, once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>

namespace swap_simulator {

struct OperatorInfo {
  const std::string* name;
  size_t arguments = 0;
  std::vector<bool> writes; // for each argument
  std::vector<bool> views; // for each argument: it is only looked at through a result
  std::vector<size_t> outs; // arguments that receive results
  std::vector<int> aliases; // for each result, the argument that it is; -1: none
  bool in_place = true; // every result is an argument
  bool returns_tensors = true; // and lists of them
  bool returns_view = false;
  bool draws = false; // random numbers
  bool host_waits = false; // the shapes of the results depend on values
  int generator = -1; // the argument
  int scaler_arguments[2] = {-1, -1}; // grad_scale and found_inf
  std::atomic<bool> has_meta{false}; // shapes can be had without running it
};

OperatorInfo& info_of(const c10::OperatorHandle& handle);

} // namespace swap_simulator
