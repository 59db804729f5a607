// SPDX-License-Identifier: Apache-2.0
// When queued tasks run. Each schedule is one of those that streams, events and host waits allow.
#pragma once

#include "stream.h"

namespace swap_simulator {

enum class ScheduleKind : int64_t {
  kThreads = 0, // a thread for each stream that is used, from its first task on
  kEarliest = 1, // at once
  kLatest = 2, // when somebody waits for it
  kSideFirst = 3, // default streams as late as possible, others at once
  kRandom = 4, // in an order drawn from a seed, of those that are legal
};

// Runs everything that is queued first. The threads end with the schedule that they are for.
void set_schedule(ScheduleKind kind, uint64_t seed);
ScheduleKind schedule_kind();

// Add a task at the end of `stream`; afterwards, without the lock, call `run_eager`.
Position push(const Lock&, Stream* stream, Task task);
void run_eager(Stream* stream);

// Block until a place is reached. Tells the checker nothing; see `host_wait` in order.h.
void run_until(Position position);
bool has_run(Position position);
// As the host polls, time passes: a late schedule runs one more task towards `position`.
bool poll(Position position);

Position end_of(Stream* stream);
void run_everything();
// The process ends: run what is queued, with no regard to the link. What is queued later runs at once.
void stop();

// Whether this thread is running a task, or an operation in the place of one.
bool in_task();

// Run a kernel as a device would: no autograd, no modes of the calling thread.
class Sandbox {
 public:
  explicit Sandbox(const std::function<void()>& run);
};

// A model of the host link, for the schedule "threads": bytes per second in each direction (0: no
// limit) and seconds before each transfer. One transfer at a time in each direction.
void set_link(double in_bytes_per_second, double out_bytes_per_second, double latency);
void transfer_over_link(bool to_device, double bytes);

} // namespace swap_simulator
