// Versions, and what torch_npu asks on its way and needs an answer to.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace {

std::string from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

struct Versions {
  std::mutex mutex;
  // torch_npu looks at registered memory from driver 25.5.0 and runtime 8.5.0 on. It asks once.
  std::string driver = from_environment("STANDIN_DRIVER_VERSION", "25.5.0");
  std::string runtime = from_environment("STANDIN_RUNTIME_VERSION", "9.1.0");
};

Versions& versions() {
  static Versions& all = *new Versions;
  return all;
}

std::string version_of(bool is_driver) {
  std::lock_guard<std::mutex> hold(versions().mutex);
  return is_driver ? versions().driver : versions().runtime;
}

void put(char* target, const std::string& text) {
  std::snprintf(target, ACL_PKG_VERSION_MAX_SIZE, "%s", text.c_str());
}

constexpr int kOptions = 64;
std::atomic<int64_t> g_options[kOptions];

aclError get_option(aclSysParamOpt which, int64_t* value) {
  *value = g_options[static_cast<int>(which) % kOptions];
  return ACL_SUCCESS;
}

aclError set_option(aclSysParamOpt which, int64_t value) {
  g_options[static_cast<int>(which) % kOptions] = value;
  return ACL_SUCCESS;
}

}  // namespace

// Before torch_npu's first use of memory; later it remembers what it was told.
STANDIN_API void standin_set_driver_version(const char* version) {
  std::lock_guard<std::mutex> hold(versions().mutex);
  versions().driver = version;
}

STANDIN_API void standin_set_runtime_version(const char* version) {
  std::lock_guard<std::mutex> hold(versions().mutex);
  versions().runtime = version;
}

STANDIN_API aclError aclsysGetCANNVersion(aclCANNPackageName package,
                                          aclCANNPackageVersion* found) {
  const std::string text = version_of(package == ACL_PKG_NAME_DRIVER);
  int major = 0;
  int minor = 0;
  int release = 0;
  std::sscanf(text.c_str(), "%d.%d.%d", &major, &minor, &release);
  std::memset(found, 0, sizeof *found);
  put(found->version, text);
  put(found->majorVersion, std::to_string(major));
  put(found->minorVersion, std::to_string(minor));
  put(found->releaseVersion, std::to_string(release));
  return ACL_SUCCESS;
}

STANDIN_API aclError aclsysGetVersionStr(char* package, char* found) {
  put(found, version_of(std::strstr(package, "driver") != nullptr));
  return ACL_SUCCESS;
}

STANDIN_API const char* aclrtGetSocName() { return "Ascend910B3"; }

STANDIN_API aclError aclInit(const char*) { return ACL_SUCCESS; }
STANDIN_API aclError aclFinalize() { return ACL_SUCCESS; }
STANDIN_API const char* aclGetRecentErrMsg() { return "the stand-in has no more to say"; }
STANDIN_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// torch_npu sets these when a device is first used, and each concerns what computes only.
STANDIN_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
STANDIN_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
STANDIN_API aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

STANDIN_API aclError aclrtGetSysParamOpt(aclSysParamOpt which, int64_t* value) {
  return get_option(which, value);
}
STANDIN_API aclError aclrtSetSysParamOpt(aclSysParamOpt which, int64_t value) {
  return set_option(which, value);
}
STANDIN_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt which, int64_t* value) {
  return get_option(which, value);
}
STANDIN_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt which, int64_t value) {
  return set_option(which, value);
}

STANDIN_API size_t aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
      return 1;
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_FLOAT16:
    case ACL_BF16:
      return 2;
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_FLOAT:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      std::fprintf(stderr, "stand-in: no size for data type %d\n", static_cast<int>(type));
      std::abort();
  }
}
