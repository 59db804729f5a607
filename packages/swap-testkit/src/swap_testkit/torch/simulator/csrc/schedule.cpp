// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include "gil.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

namespace swap_simulator {
namespace {

std::atomic<ScheduleKind> the_kind{ScheduleKind::kEarliest};
std::mt19937_64 the_random; // guarded by running()
thread_local int tasks_on_this_thread = 0;

// Guarded by book().
std::vector<std::thread>& workers() {
  static auto* instance = new std::vector<std::thread>();
  return *instance;
}

// Held by the one host thread that runs tasks, in the schedules without threads. Recursive: a task
// may free an object of Python, whose finalizer may use the device.
std::recursive_mutex& running() {
  static auto* instance = new std::recursive_mutex();
  return *instance;
}

class Running {
 public:
  Running() {
    if (!running().try_lock()) {
      WithoutGil without_gil; // whoever runs tasks may need it
      running().lock();
    }
  }
  ~Running() {
    running().unlock();
  }
};

void execute(const Stream* stream, Task& task) {
  if (!task.run) {
    return;
  }
  auto keep = [&](const std::string& what) {
    auto where = task.operation == nullptr ? "" : *task.operation + " on " + stream->name() + ": ";
    keep_late_error(stream->device, where + what);
  };
  try {
    Sandbox sandbox(task.run);
  } catch (const c10::Error& error) {
    keep(error.what_without_backtrace());
  } catch (const std::exception& error) {
    keep(error.what());
  }
}

bool reached(const Lock&, const Position& position) {
  return position.stream == nullptr || position.stream->done >= position.count;
}

bool head_can_run(const Lock& lock, const Stream* stream) {
  return !stream->tasks.empty() && reached(lock, stream->tasks.front().after);
}

// Run the first task of a stream; what it waits for has run.
void run_head(Stream* stream) {
  Task task;
  {
    Lock lock(book());
    task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
  }
  execute(stream, task);
  Lock lock(book());
  ++stream->done;
}

Position blocker_of_head(Stream* stream) {
  Lock lock(book());
  TORCH_CHECK(!stream->tasks.empty(), "simulator: a task waits for its own stream");
  return head_can_run(lock, stream) ? Position() : stream->tasks.front().after;
}

// Run `stream` up to a place, and of other streams no more than that needs.
void run_in_order(Position position) {
  while (!has_run(position)) {
    auto blocker = blocker_of_head(position.stream);
    if (blocker.stream != nullptr) {
      run_in_order(blocker);
    }
    run_head(position.stream);
  }
}

bool run_any() {
  std::vector<Stream*> ready;
  {
    Lock lock(book());
    for (auto* stream : all_streams(lock)) {
      if (head_can_run(lock, stream)) {
        ready.push_back(stream);
      }
    }
  }
  if (ready.empty()) {
    return false;
  }
  run_head(ready[the_random() % ready.size()]);
  return true;
}

// Run the tasks of a stream while the schedule is that of threads.
void work(Stream* stream) {
  Lock lock(book());
  while (the_kind == ScheduleKind::kThreads) {
    if (!head_can_run(lock, stream)) {
      auto* awaited = stream->tasks.empty() ? stream : stream->tasks.front().after.stream;
      awaited->changed.wait(lock);
      continue;
    }
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    lock.unlock();
    execute(stream, task);
    task = Task(); // before it counts as done: it may hold host memory
    lock.lock();
    ++stream->done;
    stream->changed.notify_all();
  }
  stream->has_worker = false;
}

// After the schedule is another one.
void end_workers() {
  std::vector<std::thread> ending;
  {
    Lock lock(book());
    std::swap(ending, workers());
    for (auto* stream : all_streams(lock)) {
      stream->changed.notify_all();
    }
  }
  WithoutGil without_gil; // what a worker destroys may need it
  for (auto& worker : ending) {
    worker.join();
  }
}

} // namespace

Sandbox::Sandbox(const std::function<void()>& run) {
  using namespace c10;
  auto excluded = autograd_dispatch_keyset | autocast_dispatch_keyset |
      DispatchKeySet(DispatchKey::ADInplaceOrView);
  impl::ForceDispatchKeyGuard keys(DispatchKeySet(DispatchKey::BackendSelect), excluded);
  ++tasks_on_this_thread;
  try {
    run();
  } catch (...) {
    --tasks_on_this_thread;
    throw;
  }
  --tasks_on_this_thread;
}

bool in_task() {
  return tasks_on_this_thread > 0;
}

ScheduleKind schedule_kind() {
  return the_kind;
}

void set_schedule(ScheduleKind kind, uint64_t seed) {
  run_everything();
  Running running;
  {
    Lock lock(book());
    the_kind = kind;
  }
  if (kind != ScheduleKind::kThreads) {
    end_workers();
  }
  the_random.seed(seed);
}

Position push(const Lock&, Stream* stream, Task task) {
  stream->tasks.push_back(std::move(task));
  ++stream->queued;
  if (the_kind == ScheduleKind::kThreads) {
    if (!stream->has_worker) {
      stream->has_worker = true;
      workers().emplace_back(work, stream);
    }
    stream->changed.notify_all();
  }
  return {stream, stream->queued};
}

void run_eager(Stream* stream) {
  auto kind = schedule_kind();
  if (kind == ScheduleKind::kThreads || kind == ScheduleKind::kLatest) {
    return;
  }
  if (kind == ScheduleKind::kSideFirst && stream->id == 0) {
    return;
  }
  Running running;
  if (kind == ScheduleKind::kRandom) {
    while (the_random() % 2 == 0 && run_any()) {
    }
  } else {
    run_in_order(end_of(stream));
  }
}

Position end_of(Stream* stream) {
  Lock lock(book());
  return {stream, stream->queued};
}

bool has_run(Position position) {
  Lock lock(book());
  return reached(lock, position);
}

void run_until(Position position) {
  if (has_run(position)) {
    return;
  }
  if (schedule_kind() == ScheduleKind::kThreads) {
    WithoutGil without_gil;
    Lock lock(book());
    position.stream->changed.wait(lock, [&] { return reached(lock, position); });
    return;
  }
  Running running;
  if (schedule_kind() == ScheduleKind::kRandom) {
    while (!has_run(position)) {
      run_any();
    }
  } else {
    run_in_order(position);
  }
}

bool poll(Position position) {
  if (has_run(position)) {
    return true;
  }
  if (schedule_kind() != ScheduleKind::kThreads) {
    Running running;
    auto* stream = position.stream;
    for (auto blocker = blocker_of_head(stream); blocker.stream != nullptr;
         blocker = blocker_of_head(stream)) {
      stream = blocker.stream;
    }
    run_head(stream);
  }
  return false;
}

void run_everything() {
  std::vector<Stream*> streams;
  {
    Lock lock(book());
    streams = all_streams(lock);
  }
  for (auto* stream : streams) {
    run_until(end_of(stream));
  }
}

// The link.

namespace {

struct Link {
  std::mutex busy;
  std::atomic<double> bytes_per_second{0};
};

Link& link_of(bool to_device) {
  static auto* links = new Link[2];
  return links[to_device ? 1 : 0];
}

std::atomic<double> link_latency{0};

} // namespace

void set_link(double in_bytes_per_second, double out_bytes_per_second, double latency) {
  run_everything();
  link_of(true).bytes_per_second = in_bytes_per_second;
  link_of(false).bytes_per_second = out_bytes_per_second;
  link_latency = latency;
}

void transfer_over_link(bool to_device, double bytes) {
  if (schedule_kind() != ScheduleKind::kThreads) {
    return;
  }
  auto& link = link_of(to_device);
  std::lock_guard<std::mutex> one_at_a_time(link.busy);
  double speed = link.bytes_per_second; // now: while this transfer queued, the process may end
  double seconds = link_latency + (speed > 0 ? bytes / speed : 0);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void stop() {
  for (bool to_device : {true, false}) {
    link_of(to_device).bytes_per_second = 0;
  }
  link_latency = 0;
  set_schedule(ScheduleKind::kEarliest, 0);
}

} // namespace swap_simulator
