// Copies between host and device.
//
// The runtime's rules for host memory: page-locked memory (its own, or registered) is copied by the
// stream; with any other memory the call waits for the stream and copies before it returns.
// A batch is a loop: its copies are handed to the stream one by one. If one is refused, the call
// fails and those before it are on their way all the same.
#include <cstdio>
#include <cstring>
#include <list>

#include "standin.h"

namespace standin {
namespace {

struct Copy {
  Way way;
  char* target;  // where a copying thread writes, and reads
  const char* source;
  size_t bytes;
  bool is_pageable;
  const void* used[2];  // the addresses that the program gave
};

// ---- copies that have not ended ----

struct Range {
  const char* start;
  size_t bytes;
};

struct InFlight {
  std::mutex mutex;
  std::list<Range> ranges;
};

InFlight& in_flight() {
  static InFlight& all = *new InFlight;
  return all;
}

using Ticket = std::list<Range>::iterator;

Ticket enter(const void* start, size_t bytes) {
  std::lock_guard<std::mutex> hold(in_flight().mutex);
  auto& ranges = in_flight().ranges;
  return ranges.insert(ranges.end(), Range{static_cast<const char*>(start), bytes});
}

void leave(const std::vector<Ticket>& tickets) {
  std::lock_guard<std::mutex> hold(in_flight().mutex);
  for (const Ticket ticket : tickets) in_flight().ranges.erase(ticket);
}

// ---- planning ----

bool kind_fits(aclrtMemcpyKind kind, Way way) {
  switch (kind) {
    case ACL_MEMCPY_DEFAULT:
      return true;
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      return way == Way::kToDevice;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return way == Way::kToHost;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
      return way == Way::kOnDevice;
    default:
      return false;
  }
}

// Fills in a copy, or says why it cannot be: bad sizes, memory that ends too early, or both ends on
// the host.
aclError plan(void* target, size_t room, const void* source, size_t bytes, Copy* copy) {
  if (target == nullptr || source == nullptr || bytes == 0 || bytes > room) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  const auto to = locate(target, bytes);
  const auto from = locate(source, bytes);
  if (!to || !from) {
    std::fprintf(stderr, "stand-in: a copy of %zu bytes leaves its memory\n", bytes);
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  const bool is_to_device = to->place == Place::kDevice;
  const bool is_from_device = from->place == Place::kDevice;
  if (!is_to_device && !is_from_device) return ACL_ERROR_RT_PARAM_INVALID;
  copy->way = !is_from_device ? Way::kToDevice : is_to_device ? Way::kOnDevice : Way::kToHost;
  copy->target = to->dma;
  copy->source = from->dma;
  copy->bytes = bytes;
  copy->is_pageable = to->place == Place::kPageable || from->place == Place::kPageable;
  copy->used[0] = target;
  copy->used[1] = source;
  return ACL_SUCCESS;
}

// ---- running ----

void delay(Way way, size_t bytes) {
  const int index = static_cast<int>(way);
  const auto at = [index](Setting first) {
    return setting(static_cast<Setting>(static_cast<int>(first) + index));
  };
  int64_t us = at(Setting::kLatencyToDeviceUs);
  const int64_t rate = at(Setting::kBytesPerUsToDevice);
  if (rate > 0) us += static_cast<int64_t>(bytes) / rate;
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void count_copy(const Copy& copy) {
  const auto bytes = static_cast<int64_t>(copy.bytes);
  switch (copy.way) {
    case Way::kToDevice:
      count(Counter::kCopiesToDevice);
      count(Counter::kBytesToDevice, bytes);
      break;
    case Way::kToHost:
      count(Counter::kCopiesToHost);
      count(Counter::kBytesToHost, bytes);
      break;
    case Way::kOnDevice:
      count(Counter::kCopiesOnDevice);
      break;
  }
}

// Moves the bytes, unless a test ordered that this copy fails.
aclError move_bytes(const Copy& copy) {
  if (const aclError error = copy_faults().next(copy.way)) {
    count(Counter::kFailedCopies);
    return error;
  }
  delay(copy.way, copy.bytes);
  std::memmove(copy.target, copy.source, copy.bytes);
  count_copy(copy);
  return ACL_SUCCESS;
}

void run_in_stream(Stream& stream, const Copy& copy) {
  stream.gate.pass();
  gate_of(copy.way).pass();
  if (const aclError error = move_bytes(copy)) stream.fail(error);
}

// Hands a planned copy to a stream, or carries it out if it cannot be asynchronous.
aclError submit(Stream& stream, const Copy& copy) {
  if (const aclError error = submission_faults().next(copy.way)) return error;
  if (copy.is_pageable) {
    count_wait(Counter::kBlockingCopies);
    if (const aclError error = stream.synchronize()) return error;
    return move_bytes(copy);
  }
  const std::vector<Ticket> tickets = {enter(copy.used[0], copy.bytes),
                                       enter(copy.used[1], copy.bytes)};
  stream.push([&stream, copy, tickets] {
    run_in_stream(stream, copy);
    leave(tickets);
  });
  return ACL_SUCCESS;
}

// ---- batches ----

struct Batch {
  void** targets;
  size_t* rooms;
  void** sources;
  size_t* sizes;
  size_t copies;
  std::vector<aclrtMemcpyBatchAttr> attributes;  // of each copy
};

bool is_at(const aclrtMemLocation& told, const void* address) {
  const auto found = locate(address, 1);
  if (!found) return false;
  if (told.type == ACL_MEM_LOCATION_TYPE_DEVICE) {
    return found->place == Place::kDevice && found->device == static_cast<int>(told.id);
  }
  return told.type != ACL_MEM_LOCATION_TYPE_UNREGISTERED && found->place != Place::kDevice;
}

// A batch knows two directions only, and each address must be where its attribute tells.
aclError plan_in_batch(const Batch& batch, size_t index, Copy* copy) {
  const auto& told = batch.attributes[index];
  void* target = batch.targets[index];
  void* source = batch.sources[index];
  if (!is_at(told.dstLoc, target) || !is_at(told.srcLoc, source)) return ACL_ERROR_RT_PARAM_INVALID;
  const aclError error = plan(target, batch.rooms[index], source, batch.sizes[index], copy);
  if (error != ACL_SUCCESS) return error;
  return copy->way == Way::kOnDevice ? ACL_ERROR_RT_PARAM_INVALID : ACL_SUCCESS;
}

// Attribute k holds for the copies from indexes[k] to the one before indexes[k + 1].
std::vector<aclrtMemcpyBatchAttr> spread(const aclrtMemcpyBatchAttr* attributes,
                                         const size_t* indexes, size_t how_many, size_t copies) {
  std::vector<aclrtMemcpyBatchAttr> found;
  size_t at = 0;
  for (size_t i = 0; i < copies; ++i) {
    if (at + 1 < how_many && i >= indexes[at + 1]) ++at;
    found.push_back(attributes[at]);
  }
  return found;
}

aclError submit_one_by_one(Stream& stream, const Batch& batch, size_t* failed) {
  for (size_t i = 0; i < batch.copies; ++i) {
    Copy copy{};
    if (const aclError error = plan_in_batch(batch, i, &copy)) {
      *failed = i;
      return error;
    }
    if (const aclError error = submit(stream, copy)) return error;
    if (i == 0) count(Counter::kBatchCopies);
    count(Counter::kDescriptors);
  }
  return ACL_SUCCESS;
}

void run_late(Stream& stream, const Batch& batch, size_t index) {
  // Held before the arrays are read: a test changes them while the gate is closed.
  stream.gate.pass();
  const bool is_load = batch.attributes[index].dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
  gate_of(is_load ? Way::kToDevice : Way::kToHost).pass();
  Copy copy{};
  const aclError spoilt = plan_in_batch(batch, index, &copy);
  if (spoilt != ACL_SUCCESS) count(Counter::kFailedCopies);
  const aclError error = spoilt != ACL_SUCCESS ? spoilt : move_bytes(copy);
  if (error != ACL_SUCCESS) stream.fail(error);
}

// The batch as one piece of work that looks into the arrays when its turn comes. What lies there by
// then is what is copied; what cannot be copied any more is an error of the stream.
void submit_to_read_late(Stream& stream, const Batch& batch) {
  count(Counter::kBatchCopies);
  count(Counter::kDescriptors, static_cast<int64_t>(batch.copies));
  std::vector<Ticket> tickets;
  for (size_t i = 0; i < batch.copies; ++i) {
    tickets.push_back(enter(batch.targets[i], batch.sizes[i]));
    tickets.push_back(enter(batch.sources[i], batch.sizes[i]));
  }
  stream.push([&stream, batch, tickets] {
    for (size_t i = 0; i < batch.copies; ++i) run_late(stream, batch, i);
    leave(tickets);
  });
}

// Whether the arguments of a batch make sense at all; the runtime looks at these first and leaves
// the index of the failure alone.
aclError check_batch(const Batch& batch, const aclrtMemcpyBatchAttr* attributes, size_t how_many) {
  for (size_t i = 0; i < batch.copies; ++i) {
    if (batch.rooms[i] < batch.sizes[i]) return ACL_ERROR_INVALID_PARAM;
  }
  for (size_t i = 0; i < how_many; ++i) {
    for (const uint8_t byte : attributes[i].rsv) {
      if (byte != 0) return ACL_ERROR_INVALID_PARAM;
    }
  }
  return ACL_SUCCESS;
}

aclError check_support(size_t copies) {
  if (setting(Setting::kBatchIsSupported) == 0) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  const int64_t most = setting(Setting::kBatchDescriptorsMax);
  // Which code the driver gives is a guess; that there is a limit (2048 on some) is known.
  if (most > 0 && copies > static_cast<size_t>(most)) return ACL_ERROR_RT_PARAM_INVALID;
  return ACL_SUCCESS;
}

// All copies planned and nothing submitted: whether a batch that is read late may begin.
aclError check_each(const Batch& batch, size_t* failed) {
  for (size_t i = 0; i < batch.copies; ++i) {
    Copy copy{};
    aclError error = plan_in_batch(batch, i, &copy);
    if (error != ACL_SUCCESS) {
      *failed = i;
      return error;
    }
    error = submission_faults().next(copy.way);
    if (error != ACL_SUCCESS) return error;
  }
  return ACL_SUCCESS;
}

bool has_pageable(const Batch& batch) {
  for (size_t i = 0; i < batch.copies; ++i) {
    Copy copy{};
    if (plan_in_batch(batch, i, &copy) == ACL_SUCCESS && copy.is_pageable) return true;
  }
  return false;
}

}  // namespace

bool is_in_flight(const void* start, size_t bytes) {
  const auto* first = static_cast<const char*>(start);
  std::lock_guard<std::mutex> hold(in_flight().mutex);
  for (const Range& range : in_flight().ranges) {
    if (first < range.start + range.bytes && range.start < first + bytes) return true;
  }
  return false;
}

void push_operator(aclrtStream handle, size_t bytes, std::function<void()> work) {
  Stream& stream = stream_of(handle);
  stream.push([&stream, bytes, work = std::move(work)] {
    stream.gate.pass();
    gate_of(Way::kOnDevice).pass();
    delay(Way::kOnDevice, bytes);
    work();
    count(Counter::kCopiesOnDevice);
  });
}

}  // namespace standin

using namespace standin;

STANDIN_API aclError aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes,
                                      aclrtMemcpyKind kind, aclrtStream handle) {
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  Copy copy{};
  if (const aclError error = plan(target, room, source, bytes, &copy)) return error;
  if (!kind_fits(kind, copy.way)) return ACL_ERROR_RT_PARAM_INVALID;
  const aclError error = submit(stream_of(handle), copy);
  if (error == ACL_SUCCESS && !copy.is_pageable) count(Counter::kAsyncCopies);
  return error;
}

// "With condition" is what torch_npu calls from device to host: asynchronous where the memory lets
// it, which is what aclrtMemcpyAsync does here anyway.
STANDIN_API aclError aclrtMemcpyAsyncWithCondition(void* target, size_t room, const void* source,
                                                   size_t bytes, aclrtMemcpyKind kind,
                                                   aclrtStream handle) {
  return aclrtMemcpyAsync(target, room, source, bytes, kind, handle);
}

// Waits for no stream and passes no gate: a test can look at memory while copies are held.
STANDIN_API aclError aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes,
                                 aclrtMemcpyKind kind) {
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  Copy copy{};
  if (const aclError error = plan(target, room, source, bytes, &copy)) return error;
  if (!kind_fits(kind, copy.way)) return ACL_ERROR_RT_PARAM_INVALID;
  if (const aclError error = check_capture("aclrtMemcpy")) return error;
  count_wait(Counter::kBlockingCopies);
  return move_bytes(copy);
}

STANDIN_API aclError aclrtMemset(void* target, size_t room, int32_t value, size_t bytes) {
  const auto found = locate(target, bytes);
  if (!found || bytes > room) return ACL_ERROR_RT_PARAM_INVALID;
  std::memset(found->dma, value, bytes);
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtMemsetAsync(void* target, size_t room, int32_t value, size_t bytes,
                                      aclrtStream handle) {
  const auto found = locate(target, bytes);
  if (!found || bytes > room) return ACL_ERROR_RT_PARAM_INVALID;
  push_operator(handle, bytes, [=] { std::memset(found->dma, value, bytes); });
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtMemcpyBatchAsync(void** targets, size_t* rooms, void** sources,
                                           size_t* sizes, size_t copies,
                                           aclrtMemcpyBatchAttr* attributes, size_t* indexes,
                                           size_t how_many, size_t* failed, aclrtStream handle) {
  if (failed == nullptr) return ACL_ERROR_INVALID_PARAM;
  const void* needed[] = {targets, rooms, sources, sizes, attributes, indexes};
  for (const void* array : needed) {
    if (array == nullptr) return ACL_ERROR_INVALID_PARAM;
  }
  if (copies == 0 || how_many == 0) return ACL_ERROR_INVALID_PARAM;
  Batch batch{targets, rooms, sources, sizes, copies, {}};
  if (const aclError error = check_batch(batch, attributes, how_many)) return error;
  *failed = SIZE_MAX;
  if (const aclError error = check_support(copies)) return error;
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  batch.attributes = spread(attributes, indexes, how_many, copies);
  Stream& stream = stream_of(handle);
  if (setting(Setting::kBatchReadsLate) == 0 || has_pageable(batch)) {
    return submit_one_by_one(stream, batch, failed);
  }
  if (const aclError error = check_each(batch, failed)) return error;
  submit_to_read_late(stream, batch);
  return ACL_SUCCESS;
}
