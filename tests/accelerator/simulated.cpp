// A device whose memory is the host's: every operation runs on the CPU, and what would wait for a device is told.
// Without torch's headers for Python, which take most of a build; simulated.py calls it through ctypes.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <string>

using Told = void (*)(const char*);
static Told told = nullptr;
static thread_local int inside = 0;  // an operation of the device itself
static std::atomic<long> launches{0};

static void wait_for(const char* what) {
  if (told && !inside) told(what);
}

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

constexpr auto kDevice = at::DeviceType::PrivateUse1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return kDevice; }
  at::Device exchangeDevice(at::Device device) const override { return device; }
  at::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::Stream getStream(at::Device device) const override {
    return at::Stream(at::Stream::DEFAULT, device);
  }
  at::Stream exchangeStream(at::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::detail::createCPUGenerator(7);
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  bool isPinnedPtr(const void*) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
};
static Hooks hooks;

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* data = size ? malloc(size) : nullptr;
    return {data, data, &free, {kDevice, 0}};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
static Memory memory;

static at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

static at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!non_blocking && from.numel() && from.device() != to.device())
    wait_for(to.device().is_cpu() ? "download" : "upload");
  if (!inside) ++launches;
  Inside mark;
  on_host(to).copy_(on_host(from));
  return to;
}

static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

static at::Scalar item(const at::Tensor& tensor) {
  wait_for("item");
  Inside mark;
  return on_host(tensor).item();
}

static at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                             std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, sizes, strides, offset);
}

static at::Tensor& set(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides) {
  return at::cpu::set_(tensor, storage, offset, sizes, strides);
}

static void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  static const char* waiting[] = {"aten::nonzero",     "aten::equal",    "aten::masked_select",
                                  "aten::_unique2",    "aten::bincount", "aten::repeat_interleave.Tensor",
                                  "aten::unique_dim"};
  const std::string& name = operation.schema().name();
  for (auto each : waiting)
    if (name == each) wait_for(each);
  if (!inside) ++launches;
  Inside mark;
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("resize_", &at::native::resize_);
}

// Each of these is launched once, however many tensors there are; elsewhere torch takes them one by one.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (auto name : {"_foreach_add.Scalar", "_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_addcdiv.ScalarList",
                    "_foreach_copy_", "_foreach_mul.ScalarList", "_foreach_mul_.Scalar", "_foreach_mul_.ScalarList",
                    "_foreach_mul_.Tensor", "_foreach_norm.Scalar", "_foreach_sub.List", "_foreach_zero_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

// As on a GPU, a few operations of those that matter; all others take what they are given.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

static at::Tensor generator_state() { return hooks.getDefaultGenerator(0).get_state(); }

static void set_generator_state(const at::Tensor& state) {
  at::Generator generator = hooks.getDefaultGenerator(0);
  generator.set_state(state);
}

TORCH_LIBRARY(simulated, library) {
  library.def("generator_state() -> Tensor", &generator_state);
  library.def("set_generator_state(Tensor state) -> ()", &set_generator_state);
}

extern "C" void start() { at::RegisterPrivateUse1HooksInterface(&hooks); }
extern "C" void tell(Told function) { told = function; }
extern "C" long launched() { return launches; }
