// A device of torch that is none of those it knows: two of them, in host memory, by the dispatch key PrivateUse1. What
// is not here runs on the CPU, as backends of other vendors do it that do not have an operator yet.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceType kind = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kind; }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before(kind, current);
        current = device.index();
        return before;
    }
    c10::Device getDevice() const override { return c10::Device(kind, current); }
    void setDevice(c10::Device device) const override { current = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
    c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = c10::alloc_cpu(bytes);
        return {data, data, &c10::free_cpu, c10::Device(kind, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

c10::Device place(std::optional<c10::Device> device) {
    return c10::Device(kind, device.has_value() && device->has_index() ? device->index() : current);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    current = place(device).index();
    return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    current = place(device).index();
    return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             at::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor host(const at::Tensor& tensor) {
    auto options = tensor.options().device(c10::DeviceType::CPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    at::Tensor source = from.device().type() == kind ? host(from) : from;
    at::Tensor target = to.device().type() == kind ? host(to) : to;
    target.copy_(source);
    return to;
}

at::Tensor reshape_alias(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::as_strided_tensorimpl(tensor, sizes, strides, tensor.storage_offset());
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
    at::Tensor grown = empty(sizes, tensor.scalar_type(), {}, tensor.device(), {}, {});
    auto* inner = tensor.unsafeGetTensorImpl();
    inner->set_storage_keep_dtype(grown.storage());
    inner->set_sizes_contiguous(sizes);
    inner->set_storage_offset(0);
    return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    return copy_from(from, from.sizes() == to.sizes() ? to : resize(to, from.sizes(), {}), false);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    m.impl("resize_", &resize);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
