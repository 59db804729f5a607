// SPDX-License-Identifier: Apache-2.0
// The device's own random generators: a seed and an offset, as of a counter-based generator.
#pragma once

#include <ATen/core/Generator.h>

namespace swap_simulator {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Reserve the random numbers of one operation. The same state gives the same numbers, whenever the
// operation runs.
uint64_t reserve_random(const at::Generator& generator);
// A generator of the CPU that draws them.
at::Generator cpu_generator(uint64_t reserved);

} // namespace swap_simulator
