// SPDX-License-Identifier: Apache-2.0
// Device memory: exact counts, a limit, poison, blocks that belong to streams.
#pragma once

#include "order.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <optional>

namespace swap_simulator {

struct Block final : Memory {
  size_t taken = 0; // bytes after rounding
  Stream* owner = nullptr;
  std::set<const Stream*> used_by; // record_stream()
  size_t itemsize = 1; // of the dtype with which the storage was made
  bool private_format = false;
};

// How device memory behaves; set before it is used, or at any time between operations.
struct MemoryRules {
  bool npu_rounding = false; // (size + 32) up to a multiple of 512
  bool strict_free = false; // judge a free when it happens, and not when the memory is used again
  bool resize_checks = false; // torch_npu's, which come after the contents are gone
};

MemoryRules& memory_rules();

c10::DeviceAllocator& device_allocator();
// Device memory for `bytes` of the current device and stream.
at::DataPtr allocate_device(size_t bytes);
// The block of a storage of this device; null if it is another's.
Block* block_of(const c10::Storage& storage);

void set_memory_limit(c10::DeviceIndex device, std::optional<int64_t> bytes);
// What a device is said to have without a limit.
constexpr int64_t kMemoryWithoutLimit = 64LL << 30;

// `storage.resize_`: always a new block; the contents up to the smaller size are copied.
void resize_storage(const c10::Storage& storage, size_t bytes);

} // namespace swap_simulator
