// A stand-in for the Ascend runtime, libascendcl: the real torch_npu runs on it where no NPU is.
//
// It simulates what code that copies can get wrong, and nothing that computes.
//
// Rule 1: a stream is a thread. What is handed to it has not happened when the call returns, and
//         only a wait (a stream's, an event's) tells that it has.
// Rule 2: device memory has an address that the host cannot touch. Only copies reach it.
// Rule 3: where the behaviour of the real runtime is known, from its documentation or its public
//         source, it is followed, awkward parts included. Where it is a guess, a comment says so.
// Rule 4: what is not simulated ends the process and names itself (build.py makes those symbols).
//
// Tests change its behaviour and ask for its counters through the functions named standin_*.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr int kDevices = 2;

// ---- controls.cpp: what tests may set, and what is counted ------------------------------------

// Which way the bytes of a copy go. Work of operators counts as "on device".
enum class Way : int { kToDevice, kToHost, kOnDevice };
constexpr int kWays = 3;

// Zero means "no limit" or "no delay" unless a line says otherwise. Same order as their names in
// controls.cpp.
enum class Setting : int {
  kLatencyToDeviceUs,  // of each single copy
  kLatencyToHostUs,
  kLatencyOnDeviceUs,
  kBytesPerUsToDevice,
  kBytesPerUsToHost,
  kBytesPerUsOnDevice,
  kDeviceBytes,           // memory of each device
  kBatchIsSupported,      // 0: aclrtMemcpyBatchAsync says that it is not
  kBatchDescriptorsMax,   // per call
  kBatchReadsLate,        // 1: descriptor arrays are read when the batch runs
  kRegisterIsSupported,   // 0: as under a kernel that cannot pin the memory of others
  kRegisterCallMax,       // bytes that one registration may have
  kRegisterTotalMax,      // bytes that may be registered at a time
  kRegisterDelayUs,       // what a registration takes
  kErrorsShowInQueries,   // 1: failed copies show in queries and event waits, too
  kGraphIsCaptured,       // 1: as while some thread of this process captures a graph
  kCount,
};

int64_t setting(Setting which);

// Same order as their names in controls.cpp.
enum class Counter : int {
  kAsyncCopies,     // single copies that a stream took
  kBatchCopies,     // batches that a stream took, whole or in part
  kDescriptors,     // copies of those batches
  kBlockingCopies,  // copies that were over when the call returned
  kCopiesToDevice,  // copies that ran, blocking ones included
  kCopiesToHost,
  kCopiesOnDevice,
  kBytesToDevice,
  kBytesToHost,
  kFailedCopies,  // copies that failed when they ran
  kStreamSynchronizations,
  kEventSynchronizations,
  kDeviceSynchronizations,
  kMainThreadWaits,  // of these and of blocking copies, those that the main thread made
  kRegistrations,
  kUnregistrations,
  kRefusedRegistrations,
  kViolations,  // what no program may do, such as unregistering memory under a copy
  kDeviceAllocations,
  // From here on the present state, which standin_reset leaves alone.
  kDeviceBytesInUse,
  kHostBytesInUse,  // of aclrtMallocHost
  kRegisteredRanges,
  kRegisteredBytes,
  kWaitingAtGates,
  kWaitingForEvents,  // streams that stand before an event
  kWaitingForStreams,  // threads of the host that stand in a stream's synchronisation
  kCount,
};
constexpr Counter kFirstState = Counter::kDeviceBytesInUse;

void count(Counter which, int64_t by = 1);
int64_t counted(Counter which);

// Counts a call in which the host waits for the device, whether or not there is anything to wait
// for, and whether the main thread makes it.
void count_wait(Counter which);

// Counts a violation and keeps its text.
void violate(const std::string& text);

// The next failures of one kind, as a test ordered them.
class Faults {
 public:
  // After `after` events of this way (-1: of any) the next `times` fail with `error`.
  void arm(int way, int64_t after, int64_t times, aclError error);
  void disarm() { arm(-1, 0, 0, 0); }
  // The error with which this event fails, or 0.
  aclError next(int way = -1);
  aclError next(Way way) { return next(static_cast<int>(way)); }

 private:
  std::mutex mutex_;
  int way_ = -1;
  int64_t after_ = 0;
  int64_t times_ = 0;
  aclError error_ = 0;
};

Faults& submission_faults();  // of a copy when it is handed to a stream
Faults& copy_faults();        // of a copy when it runs
Faults& registration_faults();

// ---- devices.cpp: devices and memory ----------------------------------------------------------

// The device of this thread, or -1: a new thread has none until it sets one.
int current_device();

enum class Place { kPageable, kPinned, kDevice };

struct Location {
  Place place;
  int device;  // -1 on the host
  char* dma;   // where a copying thread reads and writes it
};

// Where a range of bytes lies. Nothing if it begins in known memory and ends outside.
std::optional<Location> locate(const void* address, size_t bytes);

// The error of a call that a graph capture does not allow in this thread now, or 0. Such a call also
// spoils the capture, so it counts as a violation.
aclError check_capture(const char* call);

// Both return false if the range overlaps a known one, or is not known as registered.
bool add_registered(char* start, size_t bytes);
bool remove_registered(char* start, size_t* bytes);

// ---- streams.cpp: streams, events and gates ---------------------------------------------------

// Holds those who come to pass while it is closed.
class Gate {
 public:
  void close();
  void open();
  void let_pass(int64_t how_many);
  void pass();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_closed_ = false;
  int64_t permits_ = 0;
};

Gate& gate_of(Way way);
Gate& gate_of_registrations();

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();  // runs what is queued first

  const int device;
  Gate gate;  // for the copies of this stream

  void push(std::function<void()> work);
  bool is_idle();

  // Waits for all that was pushed before. Returns the first error since the last call and forgets
  // it: a stream goes on after a failed copy, and nothing else tells of the failure.
  aclError synchronize(int32_t timeout_ms = -1);

  void fail(aclError error);
  aclError error();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t pushed_ = 0;
  uint64_t ended_ = 0;
  bool is_ending_ = false;
  aclError error_ = 0;
  std::thread thread_;  // last: it uses all of the above
};

// The stream behind a handle; the default stream of this thread's device behind nullptr.
Stream& stream_of(aclrtStream handle);

// Waits until no stream has anything left, and forgets their errors.
void drain_streams();

// ---- copies.cpp -------------------------------------------------------------------------------

// Runs work of an operator on a stream, as slow as a copy on the device of so many bytes.
void push_operator(aclrtStream stream, size_t bytes, std::function<void()> work);

// Whether a copy that has not ended yet uses some of these bytes, at their host or device address.
bool is_in_flight(const void* start, size_t bytes);

}  // namespace standin
