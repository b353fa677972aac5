// A stand-in for the few calls of CUDA that TierKV makes itself: host memory plays the device.
// Prototypes are those of cuda.h and cuda_runtime_api.h; the structs are written out from there.
// Each call is written down for the test to read.
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

struct Location {
  int type;
  int id;
};
struct Attributes {
  int order;
  Location source, target;
  unsigned flags;
};
static_assert(sizeof(Attributes) == 24, "as in cuda.h");

static std::string calls;
static int next_code = 0;

static int note(const std::string& call) {
  calls += call + "\n";
  int code = next_code;
  next_code = 0;
  return code;
}

extern "C" {
const char* standin_calls() { return calls.c_str(); }
void standin_fail_next(int code) { next_code = code; }

int cudaHostRegister(void* address, size_t size, unsigned flags) {
  return note("register " + std::to_string((uintptr_t)address) + " " + std::to_string(size) + " " +
              std::to_string(flags));
}
int cudaHostUnregister(void* address) {
  return note("unregister " + std::to_string((uintptr_t)address));
}
int cudaMemcpyAsync(void* target, const void* source, size_t size, int kind, void* stream) {
  int code = note("async " + std::to_string(kind) + " " + std::to_string((uintptr_t)stream));
  if (code == 0) std::memcpy(target, source, size);
  return code;
}
int cudaMemcpy(void* target, const void* source, size_t size, int kind) {
  int code = note("blocking " + std::to_string(kind));
  if (code == 0) std::memcpy(target, source, size);
  return code;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  static int mine = 0;
  std::swap(mine, *mode);
  return note("capture mode " + std::to_string(mine));
}
int cudaGetLastError() { return note("last error"); }

#ifdef WITH_BATCH
int cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                       Attributes* attributes, size_t* firsts, size_t attribute_count,
                       size_t* failed, void* stream) {
  int code = note("batch " + std::to_string(count) + " " + std::to_string(attributes->order) + " " +
                  std::to_string(attributes->flags) + " " + std::to_string(firsts[0]) + " " +
                  std::to_string(attribute_count) + " " + std::to_string((uintptr_t)stream));
  if (code != 0) {
    *failed = 0;
    return code;
  }
  for (size_t i = 0; i < count; i++)
    std::memcpy((void*)targets[i], (void*)sources[i], sizes[i]);
  return 0;
}
#endif
}
