// SPDX-License-Identifier: Apache-2.0
#include "checker.h"

#include <c10/util/Exception.h>

#include <unordered_set>

namespace swap_simulator {
namespace {

constexpr size_t kReportsKept = 1000;

std::vector<std::string>& reports() {
  static auto* instance = new std::vector<std::string>();
  return *instance;
}

int64_t reports_made = 0;
bool raises = false;
thread_local std::string news;

const char* verb(bool writes) {
  return writes ? "writes" : "reads";
}

struct Report {
  std::string operation;
  std::string where;
  std::string access;
  std::string edge;
};

void report(const Report& later, const Memory& memory, const Record& earlier) {
  ++reports_made;
  auto bytes = std::to_string(earlier.begin) + ":" + std::to_string(earlier.end);
  const std::string fields[] = {
      later.operation, later.where, later.access, memory.name(), bytes, *earlier.operation,
      earlier.stream->name(), verb(earlier.writes), later.edge};
  std::string joined;
  for (const auto& field : fields) {
    joined += (joined.empty() ? "" : "\x1f") + field;
  }
  if (news.empty()) {
    news = later.operation + " on " + later.where + " " + later.access + " " + memory.name() +
        ", bytes " + bytes + ", which " + *earlier.operation + " on " + earlier.stream->name() +
        " " + verb(earlier.writes) + ": " + later.edge;
  }
  if (reports().size() < kReportsKept) {
    reports().push_back(joined);
  }
}

bool conflict(const Record& record, const Access& access) {
  return (access.writes || record.writes) && record.begin < access.end &&
      access.begin < record.end;
}

// Report the records that an access is not ordered after, and forget them: once is enough.
template <typename Known, typename Describe>
void report_unordered(Memory& memory, const Access& access, Known known, Describe describe) {
  auto unordered = [&](const Record& record) {
    if (!conflict(record, access) || known(record.stream) >= record.tick) {
      return false;
    }
    report(describe(record), memory, record);
    return true;
  };
  auto& records = memory.records;
  records.erase(std::remove_if(records.begin(), records.end(), unordered), records.end());
}

// Replace what the new access makes unnecessary to remember: accesses of the same bytes that it is
// ordered after. What comes later is ordered after it, or reported against it.
void remember(Memory& memory, const Record& fresh, const Clock& clock) {
  auto covered = [&](const Record& old) {
    return fresh.begin <= old.begin && old.end <= fresh.end && (fresh.writes || !old.writes) &&
        clock.of(old.stream->index) >= old.tick;
  };
  auto& records = memory.records;
  records.erase(std::remove_if(records.begin(), records.end(), covered), records.end());
  records.push_back(fresh);
}

} // namespace

std::string Memory::name() const {
  return std::string(on_device ? "device" : "pinned") + " block " + std::to_string(number) + " (" +
      std::to_string(bytes) + " bytes)";
}

const std::string* interned(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>();
  static auto* guard = new std::mutex();
  std::lock_guard<std::mutex> lock(*guard);
  return &*names->insert(name).first;
}

uint64_t next_memory_number(const Lock&) {
  static uint64_t count = 0;
  return ++count;
}

void check_access(
    const Lock&, const Stream* stream, const std::string* operation, const Access& access) {
  if (access.memory == nullptr || access.begin >= access.end) {
    return;
  }
  auto known = [&](const Stream* other) { return stream->clock.of(other->index); };
  report_unordered(*access.memory, access, known, [&](const Record& earlier) {
    auto edge = stream->name() + " does not wait for " + earlier.stream->name() + " after " +
        *earlier.operation + " (record an event there and wait for it)";
    return Report{*operation, stream->name(), verb(access.writes), edge};
  });
  Record fresh{access.begin, access.end, stream, stream->tick(), access.writes, operation};
  remember(*access.memory, fresh, stream->clock);
}

void check_host_access(const Lock&, const std::string* operation, const Access& access) {
  auto known = [](const Stream* other) { return host_clock().of(other->index); };
  report_unordered(*access.memory, access, known, [&](const Record& earlier) {
    auto edge = "the host does not wait for " + earlier.stream->name() + " after " +
        *earlier.operation + " (synchronize an event that is recorded there)";
    return Report{*operation, "the host", verb(access.writes), edge};
  });
}

void check_free(
    const Lock&, const Stream* owner, const Memory& memory, const std::set<const Stream*>& excused) {
  for (const auto& record : memory.records) {
    auto known = std::max(
        owner->clock.of(record.stream->index), host_clock().of(record.stream->index));
    if (record.stream != owner && known < record.tick && excused.count(record.stream) == 0) {
      auto edge = owner->name() + ", whose memory it is, does not wait for " +
          record.stream->name() + " after " + *record.operation +
          " before the memory is freed (wait for an event, or use record_stream)";
      report({"free", owner->name(), "frees", edge}, memory, record);
    }
  }
}

std::vector<std::string> races(bool clear) {
  Lock lock(book());
  auto found = reports();
  if (clear) {
    reports().clear();
    reports_made = 0;
  }
  return found;
}

int64_t race_count() {
  Lock lock(book());
  return reports_made;
}

void set_raise_on_race(bool on) {
  Lock lock(book());
  raises = on;
}

void raise_new_race() {
  if (news.empty()) {
    return;
  }
  std::string what;
  std::swap(what, news);
  bool raise = false;
  {
    Lock lock(book());
    raise = raises;
  }
  TORCH_CHECK(!raise, "simulator: a race: ", what);
}

} // namespace swap_simulator
