// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace swap_simulator {

// From now on, CPU operators that touch pinned memory are checked.
void watch_host_operators();

} // namespace swap_simulator
