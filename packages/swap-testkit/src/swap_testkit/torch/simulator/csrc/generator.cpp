// SPDX-License-Identifier: Apache-2.0
#include "generator.h"

#include "stream.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <random>

namespace swap_simulator {
namespace {

// Seed and offset, eight bytes each.
constexpr size_t kStateBytes = 16;

class SimulatedGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimulatedGenerator(c10::DeviceIndex device)
      : GeneratorImpl(
            c10::Device(kSimulated, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() {
    return kSimulated;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  uint64_t current_seed() const override {
    return seed_;
  }

  uint64_t seed() override {
    set_current_seed(std::random_device()());
    return seed_;
  }

  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }

  uint64_t get_offset() const override {
    return offset_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
            state.numel() == static_cast<int64_t>(kStateBytes) &&
            state.device().is_cpu() && state.is_contiguous(),
        "simulator: the state of a generator is ", kStateBytes,
        " contiguous bytes on the CPU (seed and offset)");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;

  GeneratorImpl* clone_impl() const override {
    auto* clone = new SimulatedGenerator(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }
};

// Spreads nearby seeds and offsets (the finalizer of MurmurHash3).
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimulatedGenerator>(device < 0 ? current_device() : device);
}

uint64_t reserve_random(const at::Generator& generator) {
  auto* state = generator.unsafeGetGeneratorImpl();
  std::lock_guard<std::mutex> lock(state->mutex_);
  auto offset = state->get_offset();
  state->set_offset(offset + 4);
  return mixed(state->current_seed() ^ mixed(offset));
}

at::Generator cpu_generator(uint64_t reserved) {
  return at::make_generator<at::CPUGeneratorImpl>(reserved);
}

} // namespace swap_simulator
