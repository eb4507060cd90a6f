// Convolutions of float32 and bfloat16 arrays through oneDNN, as XLA custom calls: forward, and the gradients of input
// and weight.
//
// Arrays are row-major, as XLA hands them over: N x C x features and c_out x C/groups x kernel, or with channels last
// N x features x C and kernel x C/groups x c_out. oneDNN is given their logical shapes, which are the same for both, and
// their strides. Where it computes in an order of its own, operands are brought into that first. The memory for this is
// a second result of each call: XLA allocates it, counts it and uses it again.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_debug.h"
#include "xla/ffi/api/ffi.h"

#if DNNL_VERSION_MAJOR < 3
#error "oneDNN 3 or newer is needed"
#endif

namespace {

namespace ffi = xla::ffi;
using dnnl::memory;
using Dims = memory::dims;
using Ints = ffi::Span<const int64_t>;
using Type = memory::data_type;
using Bytes = ffi::Buffer<ffi::U8>;

enum Direction : int64_t { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT };

// In which order activations are in memory while oneDNN computes: its own choice, as they are, or channels last.
enum Order : int64_t { CHOSEN, AS_THEY_ARE, CHANNELS_LAST };

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::stream& stream() {
  thread_local dnnl::stream own(engine());
  return own;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// An array whose dimensions follow each other in memory as in `axes`, the last one fastest.
memory::desc strided(const Dims& shape, Type type, const Dims& axes) {
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t i = axes.size(); i-- > 0; stride *= shape[axes[i]]) strides[axes[i]] = stride;
  return memory::desc(shape, type, strides);
}

// Data of the logical shape N x C x features.
memory::desc activations(const Dims& shape, Type type, bool channels_last) {
  Dims axes(shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (channels_last) std::rotate(axes.begin() + 1, axes.begin() + 2, axes.end());
  return strided(shape, type, axes);
}

// A kernel of the logical shape [groups x] c_out x C x taps, of one group each. With channels last it is
// taps x C x [groups x] c_out in memory.
memory::desc weights(const Dims& shape, Type type, bool channels_last, bool has_groups) {
  Dims axes(shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (channels_last) {
    const auto c_in = axes.begin() + (has_groups ? 2 : 1);
    std::rotate(axes.begin(), c_in, c_in + 1);        // C [x groups] x c_out x taps
    std::rotate(axes.begin(), c_in + 1, axes.end());  // the taps first
  }
  return strided(shape, type, axes);
}

// How many threads a call uses; oneDNN's OpenMP asks each calling thread.
int threads = 1;

void limit_threads() {
  using Set = void (*)(int);
  static const Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set) set(threads);
}

// An operand: as XLA has it, as the primitive wants it, and what brings it from the one to the other, if they differ.
struct Operand {
  int argument = 0;
  memory::desc given, wanted;
  dnnl::reorder reorder;
  bool is_moved = false;
  size_t offset = 0;
};

// Two operands, the result, oneDNN's scratchpad, and where they are in the memory that a call is given.
struct Plan {
  dnnl::primitive primitive;
  std::array<Operand, 3> operands;
  memory::desc scratchpad;
  size_t scratchpad_offset = 0, bytes = 0;
  std::string implementation;

  // Number 2 is the result, which is brought back.
  void add(int i, int argument, const memory::desc& given, const memory::desc& wanted) {
    Operand& operand = operands[i];
    operand.argument = argument, operand.given = given, operand.wanted = wanted;
    operand.is_moved = given != wanted;
    if (!operand.is_moved) return;
    const memory::desc &from = i == 2 ? wanted : given, &to = i == 2 ? given : wanted;
    operand.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(engine(), from, engine(), to));
    operand.offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  void add_scratchpad(const memory::desc& wanted) {
    scratchpad = wanted, scratchpad_offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  void run(const std::array<void*, 3>& data, char* own) const {
    std::unordered_map<int, memory> arguments;
    for (int i = 0; i < 3; ++i) {
      const Operand& operand = operands[i];
      memory given(operand.given, engine(), data[i]), wanted = given;
      if (operand.is_moved) wanted = memory(operand.wanted, engine(), own + operand.offset);
      if (operand.is_moved && i < 2) operand.reorder.execute(stream(), given, wanted);
      arguments.emplace(operand.argument, wanted);
    }
    arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(scratchpad, engine(), own + scratchpad_offset));
    primitive.execute(stream(), arguments);
    if (const Operand& result = operands[2]; result.is_moved) {
      memory given(result.given, engine(), data[2]);
      result.reorder.execute(stream(), arguments.at(result.argument), given);
    }
    stream().wait();
  }
};

// What is computed: the logical shapes, and how the kernel lies on x. `dilation` is 1 where taps are neighbours.
struct Problem {
  Direction direction;
  Type type;
  bool channels_last, fast_math;
  Order order;
  int64_t groups;
  Dims x, weight, y, stride, dilation, low, high;

  std::vector<int64_t> key() const {
    std::vector<int64_t> all{direction, int64_t(type), channels_last, fast_math, order, groups};
    for (const Dims* dims : {&x, &weight, &y, &stride, &dilation, &low, &high})
      all.insert(all.end(), dims->begin(), dims->end());
    return all;
  }

  memory::desc given(const Dims& shape) const { return activations(shape, type, channels_last); }

  memory::desc wanted(const Dims& shape, Type multiplied) const {
    if (order == CHOSEN) return memory::desc(shape, multiplied, memory::format_tag::any);
    return activations(shape, multiplied, channels_last || order == CHANNELS_LAST);
  }
};

// Take what oneDNN has chosen, but for its reference loops, which take hundreds of times as long.
template <class Primitive>
void choose(Plan& plan, const typename Primitive::primitive_desc& description) {
  plan.implementation = description.impl_info_str();
  if (plan.implementation.rfind("ref", 0) == 0)
    throw std::runtime_error("oneDNN has nothing but its reference loops for it");
  plan.primitive = Primitive(description);
}

std::shared_ptr<const Plan> planned(const Problem& problem) {
  Dims kernel = problem.weight, gaps = problem.dilation;
  for (int64_t& gap : gaps) --gap;
  if (problem.groups > 1) {
    kernel[0] /= problem.groups;
    kernel.insert(kernel.begin(), problem.groups);
  }
  // Operands may be rounded to bfloat16 on their way in; sums are of float32, and a result is rounded once.
  const Type read = problem.fast_math ? Type::bf16 : problem.type;
  const memory::desc x = problem.wanted(problem.x, read), y = problem.wanted(problem.y, read);
  const memory::desc dx = problem.wanted(problem.x, problem.type), given_x = problem.given(problem.x);
  const memory::desc result = problem.wanted(problem.y, problem.type), given_y = problem.given(problem.y);
  const memory::desc weight(kernel, read, memory::format_tag::any), dweight(kernel, Type::f32, memory::format_tag::any);
  const memory::desc given_weight = weights(kernel, problem.type, problem.channels_last, problem.groups > 1);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto direct = dnnl::algorithm::convolution_direct;
  const bool is_forward = problem.direction == FORWARD;
  const dnnl::convolution_forward::primitive_desc forward(
      engine(), is_forward ? dnnl::prop_kind::forward_inference : dnnl::prop_kind::forward_training, direct, x, weight,
      is_forward ? result : y, problem.stride, gaps, problem.low, problem.high, attributes);
  auto plan = std::make_shared<Plan>();
  if (is_forward) {
    choose<dnnl::convolution_forward>(*plan, forward);
    plan->add(0, DNNL_ARG_SRC, given_x, forward.src_desc());
    plan->add(1, DNNL_ARG_WEIGHTS, given_weight, forward.weights_desc());
    plan->add(2, DNNL_ARG_DST, given_y, forward.dst_desc());
    plan->add_scratchpad(forward.scratchpad_desc());
  } else if (problem.direction == INPUT_GRADIENT) {
    const dnnl::convolution_backward_data::primitive_desc gradient(
        engine(), direct, dx, weight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    choose<dnnl::convolution_backward_data>(*plan, gradient);
    plan->add(0, DNNL_ARG_WEIGHTS, given_weight, gradient.weights_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, given_y, gradient.diff_dst_desc());
    plan->add(2, DNNL_ARG_DIFF_SRC, given_x, gradient.diff_src_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  } else {
    const dnnl::convolution_backward_weights::primitive_desc gradient(
        engine(), direct, x, dweight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    choose<dnnl::convolution_backward_weights>(*plan, gradient);
    plan->add(0, DNNL_ARG_SRC, given_x, gradient.src_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, given_y, gradient.diff_dst_desc());
    plan->add(2, DNNL_ARG_DIFF_WEIGHTS, given_weight, gradient.diff_weights_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  }
  return plan;
}

// The plans that were used last: each holds compiled code, so their number is bounded.
class Plans {
 public:
  std::shared_ptr<const Plan> operator()(const Problem& problem) {
    auto key = problem.key();
    std::lock_guard<std::mutex> held(lock_);
    if (auto found = places_.find(key); found != places_.end()) {
      used_.splice(used_.begin(), used_, found->second);
      return used_.front().second;
    }
    auto plan = planned(problem);
    used_.emplace_front(key, plan);
    places_[std::move(key)] = used_.begin();
    if (used_.size() > most_) {
      places_.erase(used_.back().first);
      used_.pop_back();
    }
    return plan;
  }

 private:
  using Used = std::list<std::pair<std::vector<int64_t>, std::shared_ptr<const Plan>>>;
  static constexpr size_t most_ = 512;
  std::mutex lock_;
  Used used_;
  std::map<std::vector<int64_t>, Used::iterator> places_;
};

Plans& plans() {
  static Plans all;
  return all;
}

// The logical shapes of arrays as XLA has them.
Dims activations_shape(const ffi::AnyBuffer& buffer, bool channels_last) {
  Dims shape(buffer.dimensions().begin(), buffer.dimensions().end());
  if (channels_last) std::rotate(shape.begin() + 1, shape.end() - 1, shape.end());
  return shape;
}

Dims weight_shape(const ffi::AnyBuffer& buffer, bool channels_last) {
  Dims shape(buffer.dimensions().begin(), buffer.dimensions().end());
  if (channels_last) {
    std::rotate(shape.begin(), shape.end() - 2, shape.end());
    std::swap(shape[0], shape[1]);
  }
  return shape;
}

Type common_type(const ffi::AnyBuffer& one, const ffi::AnyBuffer& other, const ffi::AnyBuffer& result) {
  const ffi::DataType type = one.element_type();
  if (type == other.element_type() && type == result.element_type()) {
    if (type == ffi::F32) return Type::f32;
    if (type == ffi::BF16) return Type::bf16;
  }
  std::ostringstream text;
  text << "operands and result must all be F32 or all be BF16, but are " << type << ", " << other.element_type()
       << " and " << result.element_type();
  throw std::runtime_error(text.str());
}

Dims dims(Ints ints) { return Dims(ints.begin(), ints.end()); }

// Forward of x and the weight, the input's gradient of the weight and dy, the weight's of x and dy.
template <Direction direction>
ffi::Error run(ffi::AnyBuffer one, ffi::AnyBuffer other, ffi::Result<ffi::AnyBuffer> result, ffi::Result<Bytes> own,
               Ints stride, Ints dilation, Ints low, Ints high, int64_t groups, int64_t order, bool channels_last,
               bool fast_math) {
  const ffi::AnyBuffer &x = direction == INPUT_GRADIENT ? *result : one,
                       &weight = direction == INPUT_GRADIENT ? one : direction == FORWARD ? other : *result,
                       &y = direction == FORWARD ? *result : other;
  try {
    const Problem problem{direction,
                          common_type(one, other, *result),
                          channels_last,
                          fast_math,
                          Order(order),
                          groups,
                          activations_shape(x, channels_last),
                          weight_shape(weight, channels_last),
                          activations_shape(y, channels_last),
                          dims(stride),
                          dims(dilation),
                          dims(low),
                          dims(high)};
    limit_threads();
    const auto plan = plans()(problem);
    if (plan->bytes > own->element_count())
      throw std::runtime_error("this program was compiled on a processor where oneDNN needs less memory");
    plan->run({one.untyped_data(), other.untyped_data(), result->untyped_data()},
              reinterpret_cast<char*>(own->typed_data()));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("A convolution by oneDNN failed: ") + error.what());
  }
  return ffi::Error::Success();
}

auto call() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<Bytes>()
      .Attr<Ints>("stride")
      .Attr<Ints>("dilation")
      .Attr<Ints>("low")
      .Attr<Ints>("high")
      .Attr<int64_t>("groups")
      .Attr<int64_t>("order")
      .Attr<bool>("channels_last")
      .Attr<bool>("fast_math");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_forward, run<FORWARD>, call());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_input_gradient, run<INPUT_GRADIENT>, call());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_weight_gradient, run<WEIGHT_GRADIENT>, call());

extern "C" {

// What this file was compiled for: DISTDL_JAX_MADE_FOR names its own text and jaxlib.
const char* convolution_made_for() { return DISTDL_JAX_MADE_FOR; }

// oneDNN's version, as loaded: 30200 for 3.2.0.
int64_t convolution_onednn_version() {
  const dnnl_version_t* told = dnnl_version();
  return told->major * 10000 + told->minor * 100 + told->patch;
}

void convolution_set_threads(int64_t count) { threads = int(count); }

// The instruction set for which oneDNN compiles: "cpu_isa_avx2", for instance.
const char* convolution_instruction_set() { return dnnl_cpu_isa2str(dnnl_get_effective_cpu_isa()); }

// Whether the processor multiplies bfloat16: by avx512_bf16, or AMX, whose bits include it.
int64_t convolution_multiplies_bfloat16() {
  const int64_t needed = dnnl_cpu_isa_avx512_core_bf16;
  return (dnnl_get_effective_cpu_isa() & needed) == needed;
}

// How many bytes a call needs beside its operands and its result; -1 where oneDNN has nothing fast to compute it.
// The name of its implementation is written into `name`, which has room for `size` bytes.
// `all`: direction, 1 for bfloat16 and 0 for float32, channels_last, fast_math, order, groups, and the rank of x, weight
// and y; then these shapes, and stride, dilation, low and high, of two entries less.
int64_t convolution_bytes_needed(const int64_t* all, char* name, size_t size) {
  Problem problem{Direction(all[0]), all[1] ? Type::bf16 : Type::f32, all[2] != 0, all[3] != 0, Order(all[4]), all[5]};
  const int64_t rank = all[6];
  all += 7;
  for (Dims* shape : {&problem.x, &problem.weight, &problem.y}) shape->assign(all, all + rank), all += rank;
  for (Dims* each : {&problem.stride, &problem.dilation, &problem.low, &problem.high})
    each->assign(all, all + rank - 2), all += rank - 2;
  try {
    limit_threads();
    const auto plan = plans()(problem);
    name[plan->implementation.copy(name, size - 1)] = 0;
    return int64_t(plan->bytes);
  } catch (const std::exception&) {
    return -1;
  }
}
}
