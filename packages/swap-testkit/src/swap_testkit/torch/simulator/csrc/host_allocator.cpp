// SPDX-License-Identifier: Apache-2.0
#include "host_allocator.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace swap_simulator {
namespace {

constexpr size_t kPage = 4096;

struct PinnedBlock final : Memory {
  size_t taken = 0;
};

std::map<const char*, PinnedBlock*>& blocks() {
  static auto* instance = new std::map<const char*, PinnedBlock*>();
  return *instance;
}

at::HostStats& stats() {
  static auto* instance = new at::HostStats();
  return *instance;
}

std::atomic<int64_t> block_count{0};

size_t taken_for(size_t bytes) {
  if (!pinned_rules().power_of_two) {
    return bytes;
  }
  size_t power = 1;
  while (power < bytes) {
    power *= 2;
  }
  return power;
}

void free_pinned(void* data) {
  if (data == nullptr) {
    return;
  }
  Lock lock(book());
  auto found = blocks().find(static_cast<const char*>(data));
  auto* block = found->second;
  blocks().erase(found);
  --block_count;
  stats().allocated_bytes.decrease(block->taken);
  stats().active_bytes.decrease(block->taken);
  stats().allocations.decrease(1);
  stats().active_requests.decrease(1);
  ++stats().num_host_free;
  std::free(data);
  delete block;
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_pinned, at::kCPU};
    }
    Lock lock(book());
    auto taken = taken_for(bytes);
    check_limit(taken);
    auto room = (taken + kPage - 1) / kPage * kPage;
    auto* block = new PinnedBlock();
    block->data = static_cast<char*>(std::aligned_alloc(kPage, room));
    TORCH_CHECK(block->data != nullptr, "simulator: this machine has no ", room, " bytes left");
    std::memset(block->data, kPoison, taken);
    block->bytes = bytes;
    block->taken = taken;
    block->on_device = false;
    block->number = next_memory_number(lock);
    blocks().emplace(block->data, block);
    ++block_count;
    stats().allocated_bytes.increase(taken);
    stats().active_bytes.increase(taken);
    stats().allocations.increase(1);
    stats().active_requests.increase(1);
    ++stats().num_host_alloc;
    return {block->data, block->data, &free_pinned, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  // A copy keeps its host memory alive until it ran.
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    Lock lock(book());
    return stats();
  }

  void reset_accumulated_stats() override {
    Lock lock(book());
    stats().allocated_bytes.reset_accumulated();
    stats().active_bytes.reset_accumulated();
  }

  void reset_peak_stats() override {
    reset_pinned_peak();
  }

 private:
  void check_limit(size_t taken) {
    auto& limit = pinned_rules().limit;
    auto now = stats().allocated_bytes.current;
    TORCH_CHECK(
        !limit.has_value() || now + static_cast<int64_t>(taken) <= *limit,
        "simulator: pinning ", taken, " bytes of host memory failed: ", now,
        " are pinned, the limit is ", limit.value_or(0), ".");
  }
};

} // namespace

PinnedRules& pinned_rules() {
  static auto* instance = new PinnedRules();
  return *instance;
}

at::HostAllocator& host_allocator() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

Pinned pinned_at(const Lock&, const void* pointer) {
  auto* address = static_cast<const char*>(pointer);
  auto next = blocks().upper_bound(address);
  if (next == blocks().begin()) {
    return {};
  }
  auto* block = std::prev(next)->second;
  if (address >= block->data + block->bytes) {
    return {};
  }
  return {block, static_cast<size_t>(address - block->data)};
}

bool is_pinned(const void* pointer) {
  if (!any_pinned()) {
    return false;
  }
  Lock lock(book());
  return pinned_at(lock, pointer).memory != nullptr;
}

bool any_pinned() {
  return block_count > 0;
}

void host_access(const std::string* operation, const void* pointer, size_t bytes, bool writes) {
  {
    Lock lock(book());
    auto pinned = pinned_at(lock, pointer);
    if (pinned.memory == nullptr) {
      return;
    }
    check_host_access(
        lock, operation, {pinned.memory, pinned.offset, pinned.offset + bytes, writes});
  }
  raise_new_race();
}

int64_t pinned_bytes() {
  Lock lock(book());
  return stats().allocated_bytes.current;
}

int64_t pinned_peak_bytes() {
  Lock lock(book());
  return stats().allocated_bytes.peak;
}

void reset_pinned_peak() {
  Lock lock(book());
  stats().allocated_bytes.reset_peak();
  stats().active_bytes.reset_peak();
}

} // namespace swap_simulator
