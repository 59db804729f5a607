// SPDX-License-Identifier: Apache-2.0
#include "order.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace swap_simulator {
namespace {

void begin(
    const Lock& lock,
    Stream* stream,
    const std::string* operation,
    const std::vector<Access>& accesses) {
  begin_operation(lock, stream);
  for (const auto& access : accesses) {
    check_access(lock, stream, operation, access);
  }
}

void host_learns(Position position, const Clock& clock) {
  run_until(position);
  {
    Lock lock(book());
    host_clock().merge(clock);
  }
  raise_late_error(position.stream->device);
}

} // namespace

void submit(
    Stream* stream,
    const std::string* operation,
    const std::vector<Access>& accesses,
    std::function<void()> run) {
  {
    Lock lock(book());
    begin(lock, stream, operation, accesses);
    push(lock, stream, {std::move(run), {}, operation});
  }
  run_eager(stream);
  raise_new_race();
}

void run_in_step(
    Stream* stream,
    const std::string* operation,
    const std::vector<Access>& accesses,
    const std::function<void()>& run) {
  {
    Lock lock(book());
    begin(lock, stream, operation, accesses);
  }
  run_until(end_of(stream));
  Sandbox sandbox(run);
  raise_new_race();
}

Recorded record_event(Stream* stream) {
  Recorded event;
  event.nanoseconds = std::make_shared<std::atomic<int64_t>>(0);
  {
    Lock lock(book());
    begin_operation(lock, stream);
    event.clock = stream->clock;
    auto happen = [when = event.nanoseconds] {
      using namespace std::chrono;
      *when = duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
    };
    event.position = push(lock, stream, {happen, {}, nullptr});
  }
  run_eager(stream);
  return event;
}

void wait_event(Stream* stream, const Recorded& event) {
  {
    Lock lock(book());
    begin_operation(lock, stream);
    stream->clock.merge(event.clock);
    push(lock, stream, {nullptr, event.position, nullptr});
  }
  run_eager(stream);
}

bool query_event(const Recorded& event) {
  if (!poll(event.position)) {
    return false;
  }
  Lock lock(book());
  host_clock().merge(event.clock);
  return true;
}

void host_wait(const Recorded& event) {
  host_learns(event.position, event.clock);
}

void host_wait(Stream* stream) {
  Position position;
  Clock clock;
  {
    Lock lock(book());
    position = {stream, stream->queued};
    clock = stream->clock;
  }
  host_learns(position, clock);
}

void host_wait_device(c10::DeviceIndex device) {
  std::vector<Stream*> streams;
  {
    Lock lock(book());
    streams = all_streams(lock);
  }
  for (auto* stream : streams) {
    if (stream->device == device) {
      host_wait(stream);
    }
  }
}

} // namespace swap_simulator
