// SPDX-License-Identifier: Apache-2.0
// Every operator that has no kernel of its own here.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace swap_simulator {

// Operators that ran in step with the host, and how often: no shapes were known before they ran.
std::map<std::string, int64_t> fallbacks();
int64_t queued_operations();
// As torch_npu's kernel: fused AdamW ignores grad_scale and found_inf.
void set_fused_ignores_scaler(bool on);

} // namespace swap_simulator
