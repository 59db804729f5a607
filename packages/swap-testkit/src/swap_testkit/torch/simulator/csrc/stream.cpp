// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <c10/util/Exception.h>

#include <array>
#include <memory>

namespace swap_simulator {
namespace {

constexpr int64_t kPoolSize = 32;

struct DeviceStreams {
  std::vector<Stream*> streams; // the default stream, then the pool as far as it was used
  int64_t handed_out = 0;
  std::string late_error;
};

// Never destroyed: threads and tensors may outlive static objects.
std::vector<DeviceStreams>& devices() {
  static auto* instance = new std::vector<DeviceStreams>();
  return *instance;
}

std::vector<Stream*>& every_stream() {
  static auto* instance = new std::vector<Stream*>();
  return *instance;
}

thread_local c10::DeviceIndex this_thread_device = 0;
thread_local std::vector<Stream*> this_thread_streams;

Stream* new_stream(c10::DeviceIndex device) {
  auto& mine = devices().at(device).streams;
  auto* stream = new Stream();
  stream->index = every_stream().size();
  stream->device = device;
  stream->id = static_cast<int64_t>(mine.size());
  mine.push_back(stream);
  every_stream().push_back(stream);
  return stream;
}

Stream*& current_slot(c10::DeviceIndex device) {
  auto& slots = this_thread_streams;
  if (slots.size() <= static_cast<size_t>(device)) {
    slots.resize(device_count(), nullptr);
  }
  auto& slot = slots.at(device);
  if (slot == nullptr) {
    slot = default_stream(device);
  }
  return slot;
}

} // namespace

std::string Stream::name() const {
  auto device_name = std::to_string(static_cast<int>(device));
  return id == 0 ? "the default stream of device " + device_name
                 : "stream " + std::to_string(id) + " of device " + device_name;
}

std::mutex& book() {
  static auto* instance = new std::mutex();
  return *instance;
}

void set_device_count(int64_t count) {
  Lock lock(book());
  TORCH_CHECK(devices().empty(), "simulator: the number of devices is set once");
  devices().resize(count);
  for (int64_t i = 0; i < count; ++i) {
    new_stream(static_cast<c10::DeviceIndex>(i));
  }
}

c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(devices().size());
}

c10::DeviceIndex current_device() {
  return this_thread_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(
      device < device_count(),
      "simulator: there is no device ", static_cast<int>(device), "; there are ",
      static_cast<int>(device_count()), ", counted from 0");
  auto previous = this_thread_device;
  if (device >= 0) {
    this_thread_device = device;
  }
  return previous;
}

Stream* pool_stream(c10::DeviceIndex device) {
  Lock lock(book());
  auto& mine = devices().at(device);
  auto id = 1 + mine.handed_out++ % kPoolSize;
  return id < static_cast<int64_t>(mine.streams.size()) ? mine.streams[id] : new_stream(device);
}

Stream* default_stream(c10::DeviceIndex device) {
  return devices().at(device).streams.front();
}

Stream* current_stream(c10::DeviceIndex device) {
  return current_slot(device);
}

Stream* exchange_stream(Stream* stream) {
  auto& slot = current_slot(stream->device);
  auto* previous = slot;
  slot = stream;
  return previous;
}

std::vector<Stream*> all_streams(const Lock&) {
  return every_stream();
}

c10::Stream to_torch(const Stream* stream) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kSimulated, stream->device), stream->id);
}

Stream* from_torch(const c10::Stream& stream) {
  Lock lock(book());
  return devices().at(stream.device_index()).streams.at(stream.id());
}

Clock& host_clock() {
  static auto* instance = new Clock();
  return *instance;
}

void begin_operation(const Lock&, Stream* stream) {
  stream->clock.merge(host_clock());
  stream->clock.advance(stream->index, stream->tick() + 1);
}

void keep_late_error(c10::DeviceIndex device, const std::string& what) {
  Lock lock(book());
  auto& kept = devices().at(device).late_error;
  if (kept.empty()) {
    kept = what;
  }
}

void raise_late_error(c10::DeviceIndex device) {
  std::string what;
  {
    Lock lock(book());
    std::swap(what, devices().at(device).late_error);
  }
  TORCH_CHECK(
      what.empty(),
      "simulator: an operation that was queued earlier failed: ", what);
}

} // namespace swap_simulator
