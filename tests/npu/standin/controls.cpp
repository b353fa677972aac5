// What tests may set, what is counted, and which failures they ordered.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace standin {
namespace {

struct Named {
  const char* name;
  int64_t initial;
};

constexpr Named kSettings[] = {
    {"latency_to_device_us", 0},
    {"latency_to_host_us", 0},
    {"latency_on_device_us", 0},
    {"bytes_per_us_to_device", 0},
    {"bytes_per_us_to_host", 0},
    {"bytes_per_us_on_device", 0},
    {"device_bytes", int64_t{4} << 30},
    {"batch_is_supported", 1},
    {"batch_descriptors_max", 0},
    // Early is what the public runtime does: it goes through the arrays inside the call. torch_npu
    // relies on it, its arrays end with the call. Late is stricter and finds arrays used again.
    {"batch_reads_late", 0},
    {"register_is_supported", 1},
    {"register_call_max", 0},
    {"register_total_max", 0},
    {"register_delay_us", 0},
    {"errors_show_in_queries", 0},
    {"graph_is_captured", 0},
};
static_assert(sizeof kSettings / sizeof kSettings[0] == static_cast<size_t>(Setting::kCount));

constexpr const char* kCounters[] = {
    "async_copies",
    "batch_copies",
    "descriptors",
    "blocking_copies",
    "copies_to_device",
    "copies_to_host",
    "copies_on_device",
    "bytes_to_device",
    "bytes_to_host",
    "failed_copies",
    "stream_synchronizations",
    "event_synchronizations",
    "device_synchronizations",
    "main_thread_waits",
    "registrations",
    "unregistrations",
    "refused_registrations",
    "violations",
    "device_allocations",
    "device_bytes_in_use",
    "host_bytes_in_use",
    "registered_ranges",
    "registered_bytes",
    "waiting_at_gates",
    "waiting_for_events",
    "waiting_for_streams",
};
static_assert(sizeof kCounters / sizeof kCounters[0] == static_cast<size_t>(Counter::kCount));

// Threads of streams run until the process is gone, so nothing they use is ever destroyed.
struct Values {
  std::atomic<int64_t> settings[static_cast<size_t>(Setting::kCount)];
  std::atomic<int64_t> counters[static_cast<size_t>(Counter::kCount)];
  std::mutex mutex;
  std::string violation;

  Values() {
    for (auto& counter : counters) counter = 0;
    restore_settings();
  }

  void restore_settings() {
    for (size_t i = 0; i < static_cast<size_t>(Setting::kCount); ++i) {
      settings[i] = kSettings[i].initial;
    }
  }
};

Values& values() {
  static Values& all = *new Values;
  return all;
}

int index_of_setting(const char* name) {
  for (int i = 0; i < static_cast<int>(Setting::kCount); ++i) {
    if (std::strcmp(kSettings[i].name, name) == 0) return i;
  }
  return -1;
}

}  // namespace

int64_t setting(Setting which) { return values().settings[static_cast<size_t>(which)]; }

void count(Counter which, int64_t by) { values().counters[static_cast<size_t>(which)] += by; }

void count_wait(Counter which) {
  count(which);
  if (syscall(SYS_gettid) == getpid()) count(Counter::kMainThreadWaits);
}

int64_t counted(Counter which) { return values().counters[static_cast<size_t>(which)]; }

void violate(const std::string& text) {
  std::fprintf(stderr, "stand-in: %s\n", text.c_str());
  {
    std::lock_guard<std::mutex> hold(values().mutex);
    values().violation = text;
  }
  count(Counter::kViolations);
}

void Faults::arm(int way, int64_t after, int64_t times, aclError error) {
  std::lock_guard<std::mutex> hold(mutex_);
  way_ = way;
  after_ = after;
  times_ = times;
  error_ = error;
}

aclError Faults::next(int way) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (times_ == 0 || (way_ >= 0 && way_ != way)) return 0;
  if (after_ > 0) {
    --after_;
    return 0;
  }
  --times_;
  return error_;
}

Faults& submission_faults() {
  static Faults& faults = *new Faults;
  return faults;
}

Faults& copy_faults() {
  static Faults& faults = *new Faults;
  return faults;
}

Faults& registration_faults() {
  static Faults& faults = *new Faults;
  return faults;
}

}  // namespace standin

using namespace standin;

// Returns -1 for a name that does not exist.
STANDIN_API int standin_set(const char* name, int64_t value) {
  const int index = index_of_setting(name);
  if (index < 0) return -1;
  values().settings[index] = value;
  return 0;
}

// Returns -1 for a name that does not exist.
STANDIN_API int64_t standin_count(const char* name) {
  for (int i = 0; i < static_cast<int>(Counter::kCount); ++i) {
    if (std::strcmp(kCounters[i], name) == 0) return values().counters[i];
  }
  return -1;
}

// The text of the last violation, valid in this thread until it asks again.
STANDIN_API const char* standin_last_violation() {
  thread_local std::string copy;
  std::lock_guard<std::mutex> hold(values().mutex);
  copy = values().violation;
  return copy.c_str();
}

// way: a Way, or -1 for any. See Faults::arm.
STANDIN_API void standin_fail_submissions(int way, int64_t after, int64_t times, int error) {
  submission_faults().arm(way, after, times, error);
}

STANDIN_API void standin_fail_copies(int way, int64_t after, int64_t times, int error) {
  copy_faults().arm(way, after, times, error);
}

STANDIN_API void standin_fail_registrations(int64_t after, int64_t times, int error) {
  registration_faults().arm(-1, after, times, error);
}

// Opens all gates, waits for all streams, and puts settings, failures and counters back to their
// beginning. Memory and registrations stay.
STANDIN_API void standin_reset() {
  submission_faults().disarm();
  copy_faults().disarm();
  registration_faults().disarm();
  drain_streams();
  values().restore_settings();
  for (int i = 0; i < static_cast<int>(kFirstState); ++i) values().counters[i] = 0;
  std::lock_guard<std::mutex> hold(values().mutex);
  values().violation.clear();
}

// What the generated symbols call: torch_npu went where this stand-in does not reach.
STANDIN_API void standin_missing(const char* name) {
  std::fprintf(stderr, "stand-in: %s is not simulated\n", name);
  std::fflush(stderr);
  std::abort();
}
