// Streams, events, and the gates at which tests hold copies.
#include <algorithm>
#include <set>

#include "standin.h"

namespace standin {
namespace {

using Clock = std::chrono::steady_clock;

// One recording of an event. Who waits for an event waits for the recording that was the latest
// when it asked; a later one changes nothing for it.
class Mark {
 public:
  void reach() {
    std::lock_guard<std::mutex> hold(mutex_);
    time_ = Clock::now();
    is_reached_ = true;
    reached_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> hold(mutex_);
    reached_.wait(hold, [this] { return is_reached_; });
  }

  bool is_reached() {
    std::lock_guard<std::mutex> hold(mutex_);
    return is_reached_;
  }

  Clock::time_point time() {
    std::lock_guard<std::mutex> hold(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool is_reached_ = false;
  Clock::time_point time_;
};

// An event, and the stream of its latest recording, whose failures a test may want to see here.
class Event {
 public:
  std::shared_ptr<Mark> record(Stream* stream) {
    auto mark = std::make_shared<Mark>();
    std::lock_guard<std::mutex> hold(mutex_);
    latest_ = mark;
    stream_ = stream;
    return mark;
  }

  // Nothing if the event was never recorded; such an event counts as reached.
  std::shared_ptr<Mark> latest() {
    std::lock_guard<std::mutex> hold(mutex_);
    return latest_;
  }

  aclError error() {
    std::lock_guard<std::mutex> hold(mutex_);
    const bool shows = setting(Setting::kErrorsShowInQueries) != 0 && stream_ != nullptr;
    return shows ? stream_->error() : ACL_SUCCESS;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> latest_;
  Stream* stream_ = nullptr;
};

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  Stream* defaults[kDevices] = {};
};

Streams& streams() {
  static Streams& known = *new Streams;
  return known;
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> hold(streams().mutex);
  std::vector<Stream*> found;
  for (Stream* stream : streams().all) {
    if (device < 0 || stream->device == device) found.push_back(stream);
  }
  return found;
}

Stream* add_stream(int device) {
  auto* stream = new Stream(device);
  std::lock_guard<std::mutex> hold(streams().mutex);
  streams().all.insert(stream);
  return stream;
}

Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

}  // namespace

// ---- gates ------------------------------------------------------------------------------------

void Gate::close() {
  std::lock_guard<std::mutex> hold(mutex_);
  is_closed_ = true;
  permits_ = 0;
}

void Gate::open() {
  std::lock_guard<std::mutex> hold(mutex_);
  is_closed_ = false;
  changed_.notify_all();
}

void Gate::let_pass(int64_t how_many) {
  std::lock_guard<std::mutex> hold(mutex_);
  permits_ += how_many;
  changed_.notify_all();
}

void Gate::pass() {
  std::unique_lock<std::mutex> hold(mutex_);
  if (!is_closed_) return;
  if (permits_ == 0) {
    count(Counter::kWaitingAtGates);
    changed_.wait(hold, [this] { return !is_closed_ || permits_ > 0; });
    count(Counter::kWaitingAtGates, -1);
  }
  if (is_closed_) --permits_;
}

Gate& gate_of(Way way) {
  static Gate* gates = new Gate[kWays];
  return gates[static_cast<int>(way)];
}

Gate& gate_of_registrations() {
  static Gate& gate = *new Gate;
  return gate;
}

// ---- streams ----------------------------------------------------------------------------------

Stream::Stream(int device) : device(device), thread_([this] { work(); }) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Stream::work() {
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [this] { return !queue_.empty() || is_ending_; });
    if (queue_.empty()) return;
    auto next = std::move(queue_.front());
    queue_.pop_front();
    hold.unlock();
    next();
    hold.lock();
    ++ended_;
    changed_.notify_all();
  }
}

void Stream::push(std::function<void()> work) {
  std::lock_guard<std::mutex> hold(mutex_);
  queue_.push_back(std::move(work));
  ++pushed_;
  changed_.notify_all();
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> hold(mutex_);
  return ended_ == pushed_;
}

aclError Stream::synchronize(int32_t timeout_ms) {
  std::unique_lock<std::mutex> hold(mutex_);
  const uint64_t last = pushed_;
  const auto is_over = [this, last] { return ended_ >= last; };
  // Counted only now: what a test pushes once it sees the count is not waited for.
  count(Counter::kWaitingForStreams);
  bool is_in_time = true;
  if (timeout_ms < 0) {
    changed_.wait(hold, is_over);
  } else {
    is_in_time = changed_.wait_for(hold, std::chrono::milliseconds(timeout_ms), is_over);
  }
  count(Counter::kWaitingForStreams, -1);
  if (!is_in_time) return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
  return std::exchange(error_, ACL_SUCCESS);
}

void Stream::fail(aclError error) {
  std::lock_guard<std::mutex> hold(mutex_);
  if (error_ == ACL_SUCCESS) error_ = error;
}

aclError Stream::error() {
  std::lock_guard<std::mutex> hold(mutex_);
  return error_;
}

Stream& stream_of(aclrtStream handle) {
  if (handle != nullptr) return *static_cast<Stream*>(handle);
  const int device = std::max(current_device(), 0);
  {
    std::lock_guard<std::mutex> hold(streams().mutex);
    if (streams().defaults[device] != nullptr) return *streams().defaults[device];
  }
  Stream* made = add_stream(device);
  std::lock_guard<std::mutex> hold(streams().mutex);
  if (streams().defaults[device] == nullptr) streams().defaults[device] = made;
  return *streams().defaults[device];
}

void drain_streams() {
  for (int way = 0; way < kWays; ++way) gate_of(static_cast<Way>(way)).open();
  gate_of_registrations().open();
  const auto all = streams_of(-1);
  for (Stream* stream : all) stream->gate.open();
  for (Stream* stream : all) stream->synchronize();
}

}  // namespace standin

using namespace standin;

// ---- what tests do with gates -----------------------------------------------------------------

namespace {

constexpr int kRegistrations = kWays;  // the gate after those of the ways

Gate& gate_numbered(int which) {
  return which == kRegistrations ? gate_of_registrations() : gate_of(static_cast<Way>(which));
}

}  // namespace

// which: a Way, or 3 for registrations.
STANDIN_API void standin_close_gate(int which) { gate_numbered(which).close(); }
STANDIN_API void standin_open_gate(int which) { gate_numbered(which).open(); }
STANDIN_API void standin_let_pass(int which, int64_t how_many) {
  gate_numbered(which).let_pass(how_many);
}

STANDIN_API void standin_close_stream(aclrtStream stream) { stream_of(stream).gate.close(); }
STANDIN_API void standin_open_stream(aclrtStream stream) { stream_of(stream).gate.open(); }

// ---- the runtime's streams --------------------------------------------------------------------

STANDIN_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *stream = add_stream(current_device());
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtCreateStream(aclrtStream* stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}

STANDIN_API aclError aclrtDestroyStream(aclrtStream stream) {
  auto* known = static_cast<Stream*>(stream);
  {
    std::lock_guard<std::mutex> hold(streams().mutex);
    if (streams().all.erase(known) == 0) return ACL_ERROR_RT_PARAM_INVALID;
  }
  delete known;
  return ACL_SUCCESS;
}

// torch_npu forces its streams away when the process ends; by then nobody needs them.
STANDIN_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  std::lock_guard<std::mutex> hold(streams().mutex);
  const bool was_known = streams().all.erase(static_cast<Stream*>(stream)) == 1;
  return was_known ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
}

STANDIN_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  count_wait(Counter::kStreamSynchronizations);
  return stream_of(stream).synchronize(timeout_ms);
}

STANDIN_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  return aclrtSynchronizeStreamWithTimeout(stream, -1);
}

// As in the real runtime, a query does not tell of failed copies.
STANDIN_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  Stream& known = stream_of(stream);
  *status = known.is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return setting(Setting::kErrorsShowInQueries) != 0 ? known.error() : ACL_SUCCESS;
}

STANDIN_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  count_wait(Counter::kDeviceSynchronizations);
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  aclError first = ACL_SUCCESS;
  for (Stream* stream : streams_of(current_device())) {
    const aclError error = stream->synchronize(timeout_ms);
    if (first == ACL_SUCCESS) first = error;
  }
  return first;
}

STANDIN_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

// ---- the runtime's events ---------------------------------------------------------------------

STANDIN_API aclError aclrtCreateEvent(aclrtEvent* event) {
  *event = new Event;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  return aclrtCreateEvent(event);
}

STANDIN_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  return aclrtCreateEvent(event);
}

STANDIN_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete &event_of(event);
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

STANDIN_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  Stream& known = stream_of(stream);
  const auto mark = event_of(event).record(&known);
  known.push([mark] { mark->reach(); });
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto mark = event_of(event).latest();
  if (mark == nullptr) return ACL_SUCCESS;
  stream_of(stream).push([mark] {
    count(Counter::kWaitingForEvents);
    mark->wait();
    count(Counter::kWaitingForEvents, -1);
  });
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  count_wait(Counter::kEventSynchronizations);
  const auto mark = event_of(event).latest();
  if (mark != nullptr) mark->wait();
  return event_of(event).error();
}

// As in the real runtime, an event behind a failed copy is reached like any other.
STANDIN_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto mark = event_of(event).latest();
  const bool is_over = mark == nullptr || mark->is_reached();
  *status = is_over ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return event_of(event).error();
}

STANDIN_API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  const auto first = event_of(start).latest();
  const auto last = event_of(end).latest();
  const bool are_over =
      first != nullptr && last != nullptr && first->is_reached() && last->is_reached();
  if (!are_over) return ACL_ERROR_RT_EVENT_NOT_COMPLETE;
  *ms = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  return ACL_SUCCESS;
}
