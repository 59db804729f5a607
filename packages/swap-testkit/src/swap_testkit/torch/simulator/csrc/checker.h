// SPDX-License-Identifier: Apache-2.0
// The happens-before checker. It judges what was queued, not what happened to run when, so it finds
// the same in every schedule.
#pragma once

#include "stream.h"

#include <set>

namespace swap_simulator {

// One access that a later one may have to be ordered after.
struct Record {
  size_t begin; // bytes within the memory
  size_t end;
  const Stream* stream;
  Tick tick;
  bool writes;
  const std::string* operation;
};

// What memory holds before it is written: a byte that, repeated, is NaN in every floating point type
// and a bad index in integers.
constexpr int kPoison = 0xFF;

// A block of device memory, or of pinned host memory.
struct Memory {
  char* data = nullptr;
  size_t bytes = 0; // as requested
  uint64_t number = 0; // in order of allocation, for reports
  bool on_device = true;
  std::vector<Record> records;

  std::string name() const;
};

// Bytes of a memory that an operation touches. A tensor with gaps counts as all bytes between its
// first and its last element.
struct Access {
  Memory* memory;
  size_t begin;
  size_t end;
  bool writes;
};

// Names of operations live as long as the process.
const std::string* interned(const std::string& name);

uint64_t next_memory_number(const Lock&);

// The operation that `stream` has just begun touches memory.
void check_access(
    const Lock&, const Stream* stream, const std::string* operation, const Access& access);
// The host itself touches memory, now.
void check_host_access(const Lock&, const std::string* operation, const Access& access);
// Memory goes back to the pool of `owner` while others may still use it. `excused`: streams that
// record_stream() named.
void check_free(
    const Lock&, const Stream* owner, const Memory& memory, const std::set<const Stream*>& excused);

// Reports: fields operation, where, access, memory, bytes, earlier operation, earlier where, earlier
// access, missing edge; joined by the ASCII unit separator.
std::vector<std::string> races(bool clear);
int64_t race_count();

// Off: keep reports. On: also raise, from the call that queued the later operation.
void set_raise_on_race(bool on);
// Without a lock, after the checks of an operation.
void raise_new_race();

} // namespace swap_simulator
