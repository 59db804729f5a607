// SPDX-License-Identifier: Apache-2.0
// Pinned host memory: exact counts, and the rounding of torch's and torch_npu's allocators.
#pragma once

#include "order.h"

#include <ATen/core/CachingHostAllocator.h>

#include <optional>

namespace swap_simulator {

struct PinnedRules {
  bool power_of_two = false; // round each request up to a power of two
  std::optional<int64_t> limit; // more bytes cannot be pinned
};

PinnedRules& pinned_rules();

at::HostAllocator& host_allocator();
bool is_pinned(const void* pointer);

// The pinned block that an address is in, and the address's offset there; null if none.
struct Pinned {
  Memory* memory = nullptr;
  size_t offset = 0;
};
Pinned pinned_at(const Lock&, const void* pointer);
bool any_pinned();

// The host reads or writes bytes, now. Memory that is not pinned is of no interest.
void host_access(const std::string* operation, const void* pointer, size_t bytes, bool writes);

// Bytes now and at most: as the allocator took them.
int64_t pinned_bytes();
int64_t pinned_peak_bytes();
void reset_pinned_peak();

} // namespace swap_simulator
