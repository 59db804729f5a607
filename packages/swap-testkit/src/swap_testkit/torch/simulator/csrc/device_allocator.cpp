// SPDX-License-Identifier: Apache-2.0
#include "device_allocator.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace swap_simulator {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kNpuPadding = 32;

struct DeviceMemory {
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::optional<int64_t> limit;
};

// A block that record_stream() keeps from being used again until the host knows that the named
// streams are past the place where it was freed.
struct Kept {
  Block* block;
  std::vector<Recorded> until;
};

size_t rounded(size_t bytes) {
  if (memory_rules().npu_rounding) {
    bytes += kNpuPadding;
  }
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool host_knows(const Recorded& event) {
  auto* stream = event.position.stream;
  return host_clock().of(stream->index) >= event.clock.of(stream->index);
}

class PoolAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override {
    return true;
  }

  at::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    auto* stream = current_stream(device);
    auto* block = bytes == 0 ? new Block() : take(bytes, device, stream);
    return {block->data, block, &give_back, c10::Device(kSimulated, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      host_wait_device(device);
    }
    Lock lock(book());
    collect_kept(lock);
    for (auto& [key, block] : cache_) {
      auto& stats = of(block->owner->device).stats;
      stats.reserved_bytes[0].decrease(block->taken);
      stats.segment[0].decrease(1);
      ++stats.num_device_free;
      std::free(block->data);
      delete block;
    }
    cache_.clear();
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* user = from_torch(stream);
    Lock lock(book());
    auto* block = static_cast<Block*>(pointer.get_context());
    if (block != nullptr && block->owner != nullptr && user != block->owner) {
      block->used_by.insert(user);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(book());
    return of(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(book());
    for (auto* stat : stats_of(device)) {
      (*stat)[0].reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(book());
    for (auto* stat : stats_of(device)) {
      (*stat)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(book());
    auto total = of(device).limit.value_or(kMemoryWithoutLimit);
    return {total - in_use(device), total};
  }

  void set_limit(c10::DeviceIndex device, std::optional<int64_t> bytes) {
    Lock lock(book());
    of(device).limit = bytes;
  }

 private:
  std::map<c10::DeviceIndex, DeviceMemory> devices_;
  std::multimap<std::pair<const Stream*, size_t>, Block*> cache_;
  std::vector<Kept> kept_;

  DeviceMemory& of(c10::DeviceIndex device) {
    return devices_[device];
  }

  std::vector<c10::CachingAllocator::StatArray*> stats_of(c10::DeviceIndex device) {
    auto& stats = of(device).stats;
    return {
        &stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes};
  }

  // Bytes that nobody else can have: allocated, or kept by record_stream().
  int64_t in_use(c10::DeviceIndex device) {
    return of(device).stats.active_bytes[0].current;
  }

  Block* take(size_t bytes, c10::DeviceIndex device, Stream* stream) {
    auto wanted = static_cast<int64_t>(rounded(bytes));
    make_room(wanted, bytes, device);
    Block* block = nullptr;
    {
      Lock lock(book());
      block = take_cached(wanted, stream);
      bool fresh = block == nullptr;
      if (fresh) {
        block = take_fresh(wanted, device, stream);
      }
      block->bytes = bytes;
      block->number = next_memory_number(lock);
      count(*block, 1);
      if (fresh) {
        return block;
      }
    }
    static const auto* operation = interned("memory is used again");
    submit(stream, operation, {{block, 0, block->taken, true}}, [block] {
      std::memset(block->data, kPoison, block->taken);
    });
    return block;
  }

  Block* take_cached(size_t wanted, const Stream* stream) {
    auto found = cache_.find({stream, wanted});
    if (found == cache_.end()) {
      return nullptr;
    }
    auto* block = found->second;
    cache_.erase(found);
    block->itemsize = 1;
    block->private_format = false;
    return block;
  }

  Block* take_fresh(size_t wanted, c10::DeviceIndex device, Stream* stream) {
    auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, wanted));
    TORCH_CHECK(data != nullptr, "simulator: this machine has no ", wanted, " bytes left");
    std::memset(data, kPoison, wanted);
    auto* block = new Block();
    block->data = data;
    block->taken = wanted;
    block->owner = stream;
    auto& stats = of(device).stats;
    stats.reserved_bytes[0].increase(wanted);
    stats.segment[0].increase(1);
    ++stats.num_device_alloc;
    return block;
  }

  void count(const Block& block, int sign) {
    auto& stats = of(block.owner->device).stats;
    auto change = [sign](c10::CachingAllocator::StatArray& stat, size_t amount) {
      sign > 0 ? stat[0].increase(amount) : stat[0].decrease(amount);
    };
    change(stats.allocation, 1);
    change(stats.allocated_bytes, block.taken);
    change(stats.requested_bytes, block.bytes);
    if (sign > 0) {
      change(stats.active, 1);
      change(stats.active_bytes, block.taken);
    }
  }

  void no_longer_active(const Lock&, const Block& block) {
    auto& stats = of(block.owner->device).stats;
    stats.active[0].decrease(1);
    stats.active_bytes[0].decrease(block.taken);
  }

  // As a real allocator does before it gives up: wait for the streams that keep memory.
  void make_room(int64_t wanted, size_t bytes, c10::DeviceIndex device) {
    std::vector<Recorded> blocking;
    {
      Lock lock(book());
      collect_kept(lock);
      if (!lacks(wanted, device)) {
        return;
      }
      for (auto& kept : kept_) {
        blocking.insert(blocking.end(), kept.until.begin(), kept.until.end());
      }
    }
    for (auto& event : blocking) {
      host_wait(event);
    }
    Lock lock(book());
    collect_kept(lock);
    if (lacks(wanted, device)) {
      ++of(device).stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false,
          "simulator: device ", static_cast<int>(device), " is out of memory: ", bytes,
          " bytes (", wanted, " with rounding) were asked for, ", in_use(device),
          " are in use, the limit is ", *of(device).limit, ".");
    }
  }

  bool lacks(int64_t wanted, c10::DeviceIndex device) {
    auto& limit = of(device).limit;
    return limit.has_value() && in_use(device) + wanted > *limit;
  }

  void collect_kept(const Lock& lock) {
    auto free_now = [&](const Kept& kept) {
      if (!std::all_of(kept.until.begin(), kept.until.end(), host_knows)) {
        return false;
      }
      cache(lock, kept.block);
      return true;
    };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), free_now), kept_.end());
  }

  void cache(const Lock& lock, Block* block) {
    no_longer_active(lock, *block);
    cache_.insert({{block->owner, block->taken}, block});
  }

  static void give_back(void* context);

  void free(Block* block) {
    std::vector<Recorded> until;
    for (auto* stream : block->used_by) {
      until.push_back(record_event(const_cast<Stream*>(stream)));
    }
    Lock lock(book());
    if (memory_rules().strict_free) {
      check_free(lock, block->owner, *block, block->used_by);
    }
    count(*block, -1);
    block->used_by.clear();
    if (until.empty()) {
      cache(lock, block);
    } else {
      // The streams named are done with it when it is used again.
      block->records.clear();
      kept_.push_back({block, std::move(until)});
    }
  }
};

PoolAllocator& the_allocator() {
  static auto* instance = new PoolAllocator();
  return *instance;
}

void PoolAllocator::give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) {
    return;
  }
  if (block->data == nullptr) {
    delete block;
  } else {
    the_allocator().free(block);
  }
}

void check_resizable(const c10::Storage& storage, const Block* block) {
  TORCH_CHECK(
      storage.unsafeGetStorageImpl()->resizable(), "Trying to resize storage that is not resizable");
  TORCH_CHECK(
      !memory_rules().resize_checks || !block->private_format,
      "Cannot resize storage without base format: the tensor is in a private format of the "
      "device; cast it to a base format first");
}

} // namespace

MemoryRules& memory_rules() {
  static auto* instance = new MemoryRules();
  return *instance;
}

c10::DeviceAllocator& device_allocator() {
  return the_allocator();
}

at::DataPtr allocate_device(size_t bytes) {
  return the_allocator().allocate(bytes);
}

Block* block_of(const c10::Storage& storage) {
  if (!storage || storage.device_type() != kSimulated) {
    return nullptr;
  }
  return static_cast<Block*>(storage.data_ptr().get_context());
}

void set_memory_limit(c10::DeviceIndex device, std::optional<int64_t> bytes) {
  the_allocator().set_limit(device, bytes);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto* old = block_of(storage);
  check_resizable(storage, old);
  c10::DeviceGuard guard(storage.device());
  auto itemsize = old == nullptr ? 1 : old->itemsize;
  auto fresh = allocate_device(bytes);
  auto* block = static_cast<Block*>(fresh.get_context());
  block->itemsize = itemsize;
  auto kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    static const auto* operation = interned("storage.resize_");
    auto* stream = current_stream(current_device());
    submit(
        stream, operation, {{old, 0, kept, false}, {block, 0, kept, true}},
        [to = block->data, from = old->data, kept] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh)); // frees the old block
  impl->set_nbytes(bytes);
  TORCH_CHECK(
      !memory_rules().resize_checks || bytes % itemsize == 0,
      "simulator: a storage of items of ", itemsize, " bytes was resized to ", bytes,
      " bytes, which is no multiple. As with torch_npu, its contents are lost.");
}

} // namespace swap_simulator
