// Devices, their memory, and page-locked host memory.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "standin.h"

namespace standin {
namespace {

constexpr size_t kDeviceAlignment = size_t{2} << 20;
constexpr size_t kPage = 4096;
constexpr size_t kRuntimeRoom = 32;  // the real runtime allocates this much more, too
constexpr int kUninitialised = 0xAB;

thread_local int t_device = -1;
thread_local aclmdlRICaptureMode t_capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

// A context is no more than the device it belongs to.
struct Context {
  int device;
};
Context g_contexts[kDevices] = {{0}, {1}};

struct DeviceRange {
  size_t bytes;
  int device;
  char* alias;        // the same memory where a copying thread may touch it
  char* reserved;     // what to unmap: the address space around the aligned start
  size_t reserved_bytes;
};

struct HostRange {
  size_t bytes;
  bool is_registered;  // by its owner; else allocated by us
};

struct Memory {
  std::mutex mutex;
  std::map<char*, DeviceRange> device;
  std::map<char*, HostRange> host;
  size_t used[kDevices] = {};
};

Memory& memory() {
  static Memory& all = *new Memory;
  return all;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The range that an address lies in, or the end.
template <typename Range>
typename std::map<char*, Range>::iterator find_range(std::map<char*, Range>& ranges,
                                                     const char* address) {
  auto next = ranges.upper_bound(const_cast<char*>(address));
  if (next == ranges.begin()) return ranges.end();
  auto found = std::prev(next);
  return address < found->first + found->second.bytes ? found : ranges.end();
}

bool overlaps_host(Memory& all, char* start, size_t bytes) {
  if (find_range(all.host, start) != all.host.end()) return true;
  auto next = all.host.lower_bound(start);
  return next != all.host.end() && next->first < start + bytes;
}

// Memory behind an address that the host cannot touch, and the same memory behind one it can.
bool map_device(size_t bytes, char** start, DeviceRange* range) {
  range->reserved_bytes = bytes + kDeviceAlignment;
  void* reserved = mmap(nullptr, range->reserved_bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* alias = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED || alias == MAP_FAILED) return false;
  range->bytes = bytes;
  range->reserved = static_cast<char*>(reserved);
  range->alias = static_cast<char*>(alias);
  std::memset(alias, kUninitialised, bytes);
  *start = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(reserved),
                                            kDeviceAlignment));
  return true;
}

}  // namespace

int current_device() { return t_device; }

aclError check_capture(const char* call) {
  if (setting(Setting::kGraphIsCaptured) == 0) return ACL_SUCCESS;
  if (t_capture_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
  violate(std::string(call) + " during a graph capture");
  return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
}

std::optional<Location> locate(const void* address, size_t bytes) {
  auto* first = static_cast<char*>(const_cast<void*>(address));
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  auto device = find_range(all.device, first);
  if (device != all.device.end()) {
    const size_t offset = static_cast<size_t>(first - device->first);
    if (offset + bytes > device->second.bytes) return std::nullopt;
    return Location{Place::kDevice, device->second.device, device->second.alias + offset};
  }
  auto host = find_range(all.host, first);
  if (host == all.host.end()) return Location{Place::kPageable, -1, first};
  // A copy across two registrations is refused as well, even if they are neighbours. That is a
  // guess: the real driver may take it, but nothing promises so.
  if (first + bytes > host->first + host->second.bytes) return std::nullopt;
  return Location{Place::kPinned, -1, first};
}

bool add_registered(char* start, size_t bytes) {
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (overlaps_host(all, start, bytes)) return false;
  all.host[start] = HostRange{bytes, true};
  count(Counter::kRegisteredRanges);
  count(Counter::kRegisteredBytes, static_cast<int64_t>(bytes));
  return true;
}

bool remove_registered(char* start, size_t* bytes) {
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  auto found = all.host.find(start);
  if (found == all.host.end() || !found->second.is_registered) return false;
  *bytes = found->second.bytes;
  all.host.erase(found);
  count(Counter::kRegisteredRanges, -1);
  count(Counter::kRegisteredBytes, -static_cast<int64_t>(*bytes));
  return true;
}

}  // namespace standin

using namespace standin;

// ---- devices ----------------------------------------------------------------------------------

STANDIN_API aclError aclrtGetDeviceCount(uint32_t* devices) {
  *devices = kDevices;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= kDevices) return ACL_ERROR_RT_INVALID_DEVICEID;
  t_device = device;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtGetDevice(int32_t* device) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = t_device;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

STANDIN_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(t_capture_mode, *mode);
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* is_active) {
  if (flags != nullptr) *flags = 0;
  *is_active = 1;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &g_contexts[t_device];
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtSetCurrentContext(aclrtContext context) {
  t_device = static_cast<Context*>(context)->device;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  *total = static_cast<size_t>(setting(Setting::kDeviceBytes));
  *free = *total - std::min(*total, all.used[t_device]);
  return ACL_SUCCESS;
}

// ---- device memory ----------------------------------------------------------------------------

STANDIN_API aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  const size_t bytes = round_up(size + kRuntimeRoom, kPage);
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.used[t_device] + bytes > static_cast<size_t>(setting(Setting::kDeviceBytes))) {
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  char* start = nullptr;
  DeviceRange range{};
  if (!map_device(bytes, &start, &range)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  range.device = t_device;
  all.device[start] = range;
  all.used[t_device] += bytes;
  count(Counter::kDeviceAllocations);
  count(Counter::kDeviceBytesInUse, static_cast<int64_t>(bytes));
  *address = start;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtMallocAlign32(void** address, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, size, policy);
}

STANDIN_API aclError aclrtFree(void* address) {
  Memory& all = memory();
  DeviceRange range{};
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    auto found = all.device.find(static_cast<char*>(address));
    if (found == all.device.end()) return ACL_ERROR_RT_PARAM_INVALID;
    range = found->second;
    all.device.erase(found);
    all.used[range.device] -= range.bytes;
  }
  count(Counter::kDeviceBytesInUse, -static_cast<int64_t>(range.bytes));
  if (is_in_flight(address, range.bytes)) {
    violate("device memory was freed under a copy");
    return ACL_SUCCESS;  // and stays mapped, or the copy would end this process
  }
  munmap(range.alias, range.bytes);
  munmap(range.reserved, range.reserved_bytes);
  return ACL_SUCCESS;
}

// ---- host memory ------------------------------------------------------------------------------

STANDIN_API aclError aclrtMallocHost(void** address, size_t size) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  const size_t bytes = round_up(size, kPage);
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  Memory& all = memory();
  std::lock_guard<std::mutex> hold(all.mutex);
  all.host[static_cast<char*>(start)] = HostRange{bytes, false};
  count(Counter::kHostBytesInUse, static_cast<int64_t>(bytes));
  *address = start;
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtMallocHostWithCfg(void** address, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(address, size);
}

STANDIN_API aclError aclrtFreeHost(void* address) {
  Memory& all = memory();
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> hold(all.mutex);
    auto found = all.host.find(static_cast<char*>(address));
    if (found == all.host.end() || found->second.is_registered) return ACL_ERROR_RT_PARAM_INVALID;
    bytes = found->second.bytes;
    all.host.erase(found);
  }
  count(Counter::kHostBytesInUse, -static_cast<int64_t>(bytes));
  if (is_in_flight(address, bytes)) {
    violate("page-locked memory was freed under a copy");
    return ACL_SUCCESS;
  }
  munmap(address, bytes);
  return ACL_SUCCESS;
}

STANDIN_API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* found) {
  std::memset(found, 0, sizeof *found);
  const auto location = locate(address, 0);
  switch (location->place) {
    case Place::kDevice:
      found->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
      found->location.id = static_cast<uint32_t>(location->device);
      break;
    case Place::kPinned:
      found->location.type = ACL_MEM_LOCATION_TYPE_HOST;
      break;
    case Place::kPageable:
      found->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
      break;
  }
  return ACL_SUCCESS;
}
