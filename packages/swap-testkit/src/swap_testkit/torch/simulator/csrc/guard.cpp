// SPDX-License-Identifier: Apache-2.0
// Devices, streams and events as torch's generic interfaces see them.
#include "device_allocator.h"
#include "generator.h"
#include "host_allocator.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace swap_simulator {
namespace {

using c10::Device;
using c10::DeviceIndex;

// What torch's event object points to. An event that was never recorded has no stream.
struct EventBox {
  Recorded recorded;
  bool takes_time = false;
};

EventBox* recorded_event(void* event) {
  auto* box = static_cast<EventBox*>(event);
  return box != nullptr && box->recorded.position.stream != nullptr ? box : nullptr;
}

DeviceIndex index_of(const Device& device) {
  return device.has_index() ? device.index() : current_device();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kSimulated;
  }

  Device exchangeDevice(Device device) const override {
    return {kSimulated, exchange_device(device.index())};
  }

  Device getDevice() const override {
    return {kSimulated, current_device()};
  }

  void setDevice(Device device) const override {
    exchange_device(device.index());
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() < device_count()) {
      exchange_device(device.index());
    }
  }

  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(Device device) const override {
    return to_torch(current_stream(index_of(device)));
  }

  c10::Stream getDefaultStream(Device device) const override {
    return to_torch(default_stream(index_of(device)));
  }

  c10::Stream getNewStream(Device device, int) const override {
    return to_torch(pool_stream(index_of(device)));
  }

  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return to_torch(pool_stream(index_of(device)));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(exchange_stream(from_torch(stream)));
  }

  bool queryStream(const c10::Stream& stream) const override {
    return poll(end_of(from_torch(stream)));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(from_torch(stream));
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    host_wait_device(device < 0 ? current_device() : device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag flag)
      const override {
    if (*event == nullptr) {
      *event = new EventBox();
    }
    auto* box = static_cast<EventBox*>(*event);
    box->takes_time = flag == c10::EventFlag::BACKEND_DEFAULT;
    box->recorded = record_event(from_torch(stream));
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (auto* box = recorded_event(event)) {
      wait_event(from_torch(stream), box->recorded);
    }
  }

  bool queryEvent(void* event) const override {
    auto* box = recorded_event(event);
    return box == nullptr || query_event(box->recorded);
  }

  void synchronizeEvent(void* event) const override {
    if (auto* box = recorded_event(event)) {
      host_wait(box->recorded);
    }
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventBox*>(event);
  }

  // Milliseconds.
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto* first = recorded_event(start);
    auto* last = recorded_event(end);
    TORCH_CHECK(
        first != nullptr && last != nullptr,
        "simulator: elapsed_time needs two events that were recorded");
    TORCH_CHECK(
        first->takes_time && last->takes_time,
        "simulator: elapsed_time needs events that were made with enable_timing=True");
    int64_t from = *first->recorded.nanoseconds;
    int64_t to = *last->recorded.nanoseconds;
    TORCH_CHECK(
        from != 0 && to != 0,
        "simulator: elapsed_time needs two events that have happened; synchronize them first");
    return static_cast<double>(to - from) / 1e6;
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return device_count() > 0;
  }

  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }

  DeviceIndex deviceCount() const override {
    return device_count();
  }

  void setCurrentDevice(DeviceIndex device) const override {
    exchange_device(device);
  }

  DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return &host_allocator();
  }

  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }

  Device getDeviceFromPtr(void*) const override {
    return {kSimulated, current_device()};
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

} // namespace

void register_device() {
  c10::impl::registerDeviceGuard(kSimulated, new Guard());
  c10::SetAllocator(kSimulated, &device_allocator());
  at::setHostAllocator(kSimulated, &host_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

} // namespace swap_simulator
