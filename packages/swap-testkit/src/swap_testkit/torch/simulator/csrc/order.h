// SPDX-License-Identifier: Apache-2.0
// What orders things: operations of streams, events, and waits of the host.
#pragma once

#include "checker.h"
#include "schedule.h"

#include <memory>

namespace swap_simulator {

// Queue `run` as an operation of `stream` that touches memory.
void submit(
    Stream* stream,
    const std::string* operation,
    const std::vector<Access>& accesses,
    std::function<void()> run);

// The same for an operation that cannot be queued (no shapes are known before it ran): wait for the
// stream and run it in its place. The checker is not told that the host waited: on a device it
// would not.
void run_in_step(
    Stream* stream,
    const std::string* operation,
    const std::vector<Access>& accesses,
    const std::function<void()>& run);

// One recording of an event.
struct Recorded {
  Position position;
  Clock clock;
  std::shared_ptr<std::atomic<int64_t>> nanoseconds; // when it happened; 0 before
};

Recorded record_event(Stream* stream);
void wait_event(Stream* stream, const Recorded& event);
bool query_event(const Recorded& event);

// Block the host, and raise errors of tasks. Afterwards the host knows what has happened.
void host_wait(const Recorded& event);
void host_wait(Stream* stream);
void host_wait_device(c10::DeviceIndex device);

} // namespace swap_simulator
