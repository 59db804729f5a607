// SPDX-License-Identifier: Apache-2.0
// Python's lock. The three functions come with the interpreter that loads this library, so that no
// Python headers are needed.
#pragma once

extern "C" {
int PyGILState_Check(void);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
}

namespace swap_simulator {

// Let other Python threads run while this one blocks, whether or not the caller holds the lock: a
// task that this thread waits for may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_;
};

} // namespace swap_simulator
