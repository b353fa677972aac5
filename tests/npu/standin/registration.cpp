// Registration of host memory: what makes memory of others page-locked for the device.
#include <sys/mman.h>

#include "standin.h"

namespace standin {
namespace {

constexpr uintptr_t kPage = 4096;
constexpr uint32_t kFlags =
    ACL_HOST_REG_MAPPED | ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY | ACL_HOST_REG_PINNED;

bool is_mapped(void* start, size_t bytes) { return msync(start, bytes, MS_ASYNC) == 0; }

aclError check_arguments(void* start, uint64_t bytes, uint32_t flags) {
  if (start == nullptr || bytes == 0) return ACL_ERROR_RT_PARAM_INVALID;
  if (flags == 0 || (flags & ~kFlags) != 0) return ACL_ERROR_RT_PARAM_INVALID;
  if (reinterpret_cast<uintptr_t>(start) % kPage != 0) return ACL_ERROR_RT_PARAM_INVALID;
  return ACL_SUCCESS;
}

// The codes are guesses, but for the one of a registration that is too large: users report it.
aclError check_limits(uint64_t bytes) {
  if (setting(Setting::kRegisterIsSupported) == 0) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  const int64_t most = setting(Setting::kRegisterCallMax);
  if (most > 0 && bytes > static_cast<uint64_t>(most)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  const int64_t total = setting(Setting::kRegisterTotalMax);
  const int64_t after = counted(Counter::kRegisteredBytes) + static_cast<int64_t>(bytes);
  if (total > 0 && after > total) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  return registration_faults().next();
}

aclError register_host(void* start, uint64_t bytes, uint32_t flags) {
  if (const aclError error = check_arguments(start, bytes, flags)) return error;
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  if (const aclError error = check_capture("aclrtHostRegisterV2")) return error;
  gate_of_registrations().pass();
  const int64_t us = setting(Setting::kRegisterDelayUs);
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  if (const aclError error = check_limits(bytes)) return error;
  if (!is_mapped(start, bytes)) return ACL_ERROR_RT_PARAM_INVALID;
  if (!add_registered(static_cast<char*>(start), bytes)) {
    return ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

// That a capture forbids these two is a guess; that it forbids aclrtMemcpy is documented.
STANDIN_API aclError aclrtHostRegisterV2(void* start, uint64_t bytes, uint32_t flags) {
  const aclError error = register_host(start, bytes, flags);
  count(error == ACL_SUCCESS ? Counter::kRegistrations : Counter::kRefusedRegistrations);
  return error;
}

STANDIN_API aclError aclrtHostUnregister(void* start) {
  if (start == nullptr) return ACL_ERROR_RT_PARAM_INVALID;
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  if (const aclError error = check_capture("aclrtHostUnregister")) return error;
  size_t bytes = 0;
  if (!remove_registered(static_cast<char*>(start), &bytes)) {
    return ACL_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  count(Counter::kUnregistrations);
  if (is_in_flight(start, bytes)) violate("host memory was unregistered under a copy");
  return ACL_SUCCESS;
}
