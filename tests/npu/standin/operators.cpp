// The two operators of libopapi that tests need: zero (torch.zeros) and copy (copy_ on the device,
// strided copies). Any other operator is missing, and torch_npu says so.
#include <cstring>

#include "standin.h"

namespace {

using standin::locate;
using standin::push_operator;

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  int64_t offset;
  char* storage;
  aclDataType type;
  size_t element_bytes;

  size_t bytes() const {
    size_t all = element_bytes;
    for (const int64_t length : shape) all *= static_cast<size_t>(length);
    return all;
  }
};

// Addresses of all elements in order, where a thread may touch them.
std::vector<char*> elements(const Tensor& tensor) {
  std::vector<char*> found;
  if (tensor.bytes() == 0) return found;
  char* first = locate(tensor.storage, 0)->dma + tensor.offset * int64_t(tensor.element_bytes);
  std::vector<int64_t> at(tensor.shape.size(), 0);
  for (;;) {
    int64_t where = 0;
    for (size_t i = 0; i < at.size(); ++i) where += at[i] * tensor.strides[i];
    found.push_back(first + where * int64_t(tensor.element_bytes));
    size_t axis = at.size();
    while (axis > 0 && ++at[axis - 1] == tensor.shape[axis - 1]) at[--axis] = 0;
    if (axis == 0) return found;
  }
}

void zero(const Tensor& target) {
  for (char* element : elements(target)) std::memset(element, 0, target.element_bytes);
}

void copy(const Tensor& target, const Tensor& source) {
  const auto to = elements(target);
  const auto from = elements(source);
  std::vector<char> staged(target.bytes());  // the two may share memory
  const size_t unit = target.element_bytes;
  for (size_t i = 0; i < to.size(); ++i) std::memcpy(&staged[i * unit], from[i], unit);
  for (size_t i = 0; i < to.size(); ++i) std::memcpy(to[i], &staged[i * unit], unit);
}

// What the first call of an operator prepares and the second one runs.
struct Executor {
  size_t bytes;
  std::function<void()> work;
};

int run(Executor* executor, aclrtStream stream) {
  push_operator(stream, executor->bytes, std::move(executor->work));
  delete executor;
  return ACL_SUCCESS;
}

constexpr int kInvalidArgument = 161002;  // of the aclnn interface

}  // namespace

STANDIN_API void* aclCreateTensor(const int64_t* shape, uint64_t axes, aclDataType type,
                                  const int64_t* strides, int64_t offset, aclFormat,
                                  const int64_t*, uint64_t, void* storage) {
  return new Tensor{{shape, shape + axes},
                    {strides, strides + axes},
                    offset,
                    static_cast<char*>(storage),
                    type,
                    aclDataTypeSize(type)};
}

STANDIN_API int aclDestroyTensor(const void* tensor) {
  delete static_cast<const Tensor*>(tensor);
  return ACL_SUCCESS;
}

STANDIN_API int aclnnInplaceZeroGetWorkspaceSize(const Tensor* target, uint64_t* workspace,
                                                 Executor** executor) {
  *workspace = 0;
  *executor = new Executor{target->bytes(), [target = *target] { zero(target); }};
  return ACL_SUCCESS;
}

STANDIN_API int aclnnInplaceZero(void*, uint64_t, Executor* executor, aclrtStream stream) {
  return run(executor, stream);
}

STANDIN_API int aclnnInplaceCopyGetWorkspaceSize(const Tensor* target, const Tensor* source,
                                                 uint64_t* workspace, Executor** executor) {
  *workspace = 0;
  const bool fits = target->type == source->type && target->shape == source->shape;
  if (!fits) return kInvalidArgument;
  *executor = new Executor{
      target->bytes(), [target = *target, source = *source] { copy(target, source); }};
  return ACL_SUCCESS;
}

STANDIN_API int aclnnInplaceCopy(void*, uint64_t, Executor* executor, aclrtStream stream) {
  return run(executor, stream);
}
