// SPDX-License-Identifier: Apache-2.0
// Streams: queues of tasks. An operation, a copy, an event and the filling of memory that is used
// again are tasks; a schedule (schedule.h) decides when each runs.
#pragma once

#include "clock.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

namespace swap_simulator {

constexpr auto kSimulated = c10::DeviceType::PrivateUse1;

struct Stream;

// A place in a stream: after its first `count` tasks.
struct Position {
  Stream* stream = nullptr;
  uint64_t count = 0;
};

// Work of the device, or, with `after`, a wait for a place in another stream.
struct Task {
  std::function<void()> run;
  Position after;
  const std::string* operation = nullptr; // for errors
};

// A stream lives as long as the process.
struct Stream {
  size_t index; // in clocks, over all devices
  c10::DeviceIndex device;
  int64_t id; // for torch; 0 is the device's default stream
  std::deque<Task> tasks;
  uint64_t queued = 0;
  uint64_t done = 0;
  Clock clock; // what has happened before the next task
  bool has_worker = false; // a thread runs it (schedule "threads")
  std::condition_variable changed; // a task was queued or has run

  Tick tick() const {
    return clock.of(index);
  }
  std::string name() const;
};

// Guards streams, clocks, blocks and counters. Held for bookkeeping only: never while a task runs
// or is destroyed, since either may need Python's lock.
using Lock = std::unique_lock<std::mutex>;
std::mutex& book();

void set_device_count(int64_t count);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Returns the previous one; a negative index changes nothing.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// The next of the device's 32 side streams: like CUDA and NPU, the pool wraps around.
Stream* pool_stream(c10::DeviceIndex device);
Stream* default_stream(c10::DeviceIndex device);
Stream* current_stream(c10::DeviceIndex device);
Stream* exchange_stream(Stream* stream);
std::vector<Stream*> all_streams(const Lock&);

c10::Stream to_torch(const Stream* stream);
Stream* from_torch(const c10::Stream& stream);

// What the host knows to have happened. All host threads count as one.
Clock& host_clock();

// Begin an operation of `stream`: everything that the host knows has happened before it.
void begin_operation(const Lock&, Stream* stream);

// Errors of tasks are kept for the next synchronisation, as a device does.
void keep_late_error(c10::DeviceIndex device, const std::string& what);
void raise_late_error(c10::DeviceIndex device);

} // namespace swap_simulator
