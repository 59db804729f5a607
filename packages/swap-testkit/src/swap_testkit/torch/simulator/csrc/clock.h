// SPDX-License-Identifier: Apache-2.0
// Vector clocks: what has happened before what, whatever the schedule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace swap_simulator {

using Tick = uint64_t;

// For each stream, by its index, the last tick that is known to have happened. A tick is one
// operation of one stream; a stream that is not mentioned is at tick 0.
class Clock {
 public:
  Tick of(size_t stream) const {
    return stream < ticks_.size() ? ticks_[stream] : 0;
  }

  void advance(size_t stream, Tick tick) {
    if (ticks_.size() <= stream) {
      ticks_.resize(stream + 1, 0);
    }
    ticks_[stream] = std::max(ticks_[stream], tick);
  }

  void merge(const Clock& other) {
    if (ticks_.size() < other.ticks_.size()) {
      ticks_.resize(other.ticks_.size(), 0);
    }
    for (size_t i = 0; i < other.ticks_.size(); ++i) {
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
    }
  }

 private:
  std::vector<Tick> ticks_;
};

} // namespace swap_simulator
